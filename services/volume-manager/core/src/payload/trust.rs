//! The trust anchors of ClusterTrustBundles, as a projected volume has them (volumes.md §9.6).

use std::collections::BTreeSet;

use serde::Deserialize;

use super::object::ObjectData;
use crate::objects::{Strings, or_default};
use crate::pem::{blocks, certificate};

/// The longest text of a label selector, in bytes.
const MAX_SELECTOR: usize = 100 * 1024;

/// The trust anchors of ClusterTrustBundles that are written as a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustBundleFile {
    /// The bundles.
    pub bundles: Bundles,
    /// Without a bundle the file is empty, and not an error.
    pub optional: bool,
    /// The file, relative to the volume.
    pub path: String,
    /// The file's permission bits; `defaultMode` if unset.
    pub mode: Option<u32>,
    /// The file's owner; root if unset.
    pub owner: Option<u32>,
}

/// Which ClusterTrustBundles are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bundles {
    /// The one with this name.
    Name(String),
    /// Those of a signer with certain labels.
    Signer {
        /// `spec.signerName` of the bundles.
        signer: String,
        /// What their labels have to match; `None` matches nothing.
        labels: Option<LabelSelector>,
    },
}

/// A selector of labels. An empty one matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Labels that an object must have, with these values.
    #[serde(deserialize_with = "or_default")]
    pub match_labels: Strings,
    /// Requirements of which each has to hold.
    #[serde(deserialize_with = "or_default")]
    pub match_expressions: Vec<LabelRequirement>,
}

/// A requirement of a label.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct LabelRequirement {
    /// The label.
    #[serde(deserialize_with = "or_default")]
    pub key: String,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    #[serde(deserialize_with = "or_default")]
    pub operator: String,
    /// The values that the operator compares with.
    #[serde(deserialize_with = "or_default")]
    pub values: Vec<String>,
}

/// What is read of a ClusterTrustBundle.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Bundle {
    #[serde(deserialize_with = "or_default")]
    metadata: BundleMetadata,
    #[serde(deserialize_with = "or_default")]
    spec: BundleSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BundleMetadata {
    #[serde(deserialize_with = "or_default")]
    labels: Strings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BundleSpec {
    #[serde(deserialize_with = "or_default")]
    signer_name: String,
    #[serde(deserialize_with = "or_default")]
    trust_bundle: String,
}

impl TrustBundleFile {
    /// The content of the file: each trust anchor once, in PEM. `found`: the JSON of each bundle by name; empty if there is none.
    ///
    /// # Errors
    /// The kubelet's message: the selector is not valid, or no bundle is selected and the file is not optional.
    pub(super) fn content(&self, found: &ObjectData) -> Result<Vec<u8>, String> {
        let mut anchors = BTreeSet::new();
        let mut is_any_selected = false;
        self.bundles.check()?;
        for (name, json) in found {
            let bundle: Bundle = serde_json::from_slice(json)
                .map_err(|error| format!("ClusterTrustBundle {name:?} cannot be read: {error}"))?;
            if self.bundles.selects(name, &bundle) {
                is_any_selected = true;
                anchors.extend(blocks(&bundle.spec.trust_bundle));
            }
        }
        if !is_any_selected && !self.optional {
            return Err(self.bundles.missing());
        }
        Ok(anchors.iter().flat_map(|der| certificate(der).into_bytes()).collect())
    }
}

impl Bundles {
    /// Checks the selector, also if there is nothing to select from.
    fn check(&self) -> Result<(), String> {
        let Self::Signer { labels: Some(labels), .. } = self else { return Ok(()) };
        labels.check().map_err(|why| format!("while parsing label selector: {why}"))?;
        let length = labels.text_length();
        if length > MAX_SELECTOR {
            return Err(format!("label selector length ({length}) is larger than {MAX_SELECTOR}"));
        }
        Ok(())
    }

    fn selects(&self, name: &str, bundle: &Bundle) -> bool {
        match self {
            Self::Name(wanted) => wanted == name,
            Self::Signer { signer, labels } => {
                let matches = |labels: &LabelSelector| labels.matches(&bundle.metadata.labels);
                *signer == bundle.spec.signer_name && labels.as_ref().is_some_and(matches)
            }
        }
    }

    /// The kubelet's message without a bundle.
    fn missing(&self) -> String {
        match self {
            Self::Name(name) => format!(
                "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io {name:?} not found"
            ),
            Self::Signer { .. } => {
                "combination of signerName and labelSelector matched zero ClusterTrustBundles".to_owned()
            }
        }
    }
}

impl LabelSelector {
    fn check(&self) -> Result<(), String> {
        for LabelRequirement { key, operator, values } in &self.match_expressions {
            match operator.as_str() {
                "In" | "NotIn" if values.is_empty() => {
                    return Err(format!("the operator {operator} of {key:?} needs values"));
                }
                "Exists" | "DoesNotExist" if !values.is_empty() => {
                    return Err(format!("the operator {operator} of {key:?} takes no values"));
                }
                "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
                _ => return Err(format!("{operator:?} is not a valid label selector operator")),
            }
        }
        Ok(())
    }

    /// Whether the selector matches these labels.
    fn matches(&self, labels: &Strings) -> bool {
        let holds = |requirement: &LabelRequirement| {
            let value = labels.get(&requirement.key);
            let is_listed = value.is_some_and(|value| requirement.values.contains(value));
            match requirement.operator.as_str() {
                "In" => is_listed,
                "NotIn" => !is_listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        };
        self.match_labels.iter().all(|(key, expected)| labels.get(key) == Some(expected))
            && self.match_expressions.iter().all(holds)
    }

    /// The length of the selector as text, such as `a=b,c in (d,e),!f`, in bytes.
    fn text_length(&self) -> usize {
        let of_expression = |requirement: &LabelRequirement| {
            let values: usize = requirement.values.iter().map(|value| value.len() + 1).sum();
            requirement.key.len()
                + match requirement.operator.as_str() {
                    "In" => " in (".len() + values,
                    "NotIn" => " notin (".len() + values,
                    "DoesNotExist" => 1,
                    _ => 0,
                }
        };
        let labels = self.match_labels.iter().map(|(key, value)| key.len() + 1 + value.len());
        let parts: Vec<usize> = labels.chain(self.match_expressions.iter().map(of_expression)).collect();
        parts.iter().sum::<usize>() + parts.len().saturating_sub(1)
    }
}

#[cfg(test)]
#[path = "trust_tests.rs"]
mod tests;
