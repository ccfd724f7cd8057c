//! Which pods may use an image that is present (runtime-and-resources.md §6.5): records of pulls in the kubelet's own
//! format, so that a node can move from a kubelet to Keelson and back.
//!
//! A record holds no credential, only its origin and its SHA-256.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::keyring::{Credential, Origin, sha256_hex};

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const RECORD_KIND: &str = "ImagePulledRecord";
const INTENT_KIND: &str = "ImagePullIntent";
/// Secrets kept for one repository of a record; beyond that the oldest are removed.
const MAX_SECRETS: usize = 100;

/// The file name for an image, in both folders.
pub fn file_name(image: &str) -> String {
    format!("sha256-{}", sha256_hex(image.as_bytes()))
}

/// The file that is written before a pull and removed after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullIntent {
    kind: String,
    api_version: String,
    /// The image as requested.
    pub image: String,
}

impl ImagePullIntent {
    /// The intent of a pull that is about to begin.
    pub fn new(image: &str) -> Self {
        Self { kind: INTENT_KIND.into(), api_version: API_VERSION.into(), image: image.to_owned() }
    }

    /// Parses a file; `None` if it is not an intent of this version.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let intent: Self = serde_json::from_slice(text).ok()?;
        (intent.kind == INTENT_KIND && intent.api_version == API_VERSION).then_some(intent)
    }
}

/// The record of the pulls of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePulledRecord {
    kind: String,
    api_version: String,
    /// RFC 3339.
    pub last_updated_time: String,
    /// The runtime's id of the image.
    pub image_ref: String,
    /// By repository: `host/path`, without tag and digest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_mapping: BTreeMap<String, ImagePullCredentials>,
}

/// The credentials with which the image was pulled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullCredentials {
    /// Every pod may use the image: it was pulled without credentials or with the node's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
    /// Pods with one of these Secrets may use the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<ImagePullSecret>,
    /// Pods of one of these service accounts may use the image; kept as found in the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<serde_json::Value>,
}

/// A Secret that an image was pulled with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullSecret {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// SHA-256 of the credential.
    pub credential_hash: String,
}

impl ImagePulledRecord {
    /// A record without credentials.
    pub fn new(image_ref: &str, now: &str) -> Self {
        Self {
            kind: RECORD_KIND.into(),
            api_version: API_VERSION.into(),
            last_updated_time: now.to_owned(),
            image_ref: image_ref.to_owned(),
            credential_mapping: BTreeMap::new(),
        }
    }

    /// Parses a file; `None` if it is not a record of this version.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(text).ok()?;
        (record.kind == RECORD_KIND && record.api_version == API_VERSION).then_some(record)
    }

    /// Records that `repository` was pulled with this credential, or without one if `used` is `None`. Returns whether the
    /// record has changed.
    pub fn add(&mut self, repository: &str, used: Option<&(Credential, Origin)>, now: &str) -> bool {
        let allowed = self.credential_mapping.entry(repository.to_owned()).or_default();
        if allowed.node_pods_accessible {
            return false;
        }
        match used {
            Some((credential, Origin::Secret { uid, namespace, name })) => {
                let secret = ImagePullSecret {
                    uid: uid.clone(),
                    namespace: namespace.clone(),
                    name: name.clone(),
                    credential_hash: credential.hash(),
                };
                if allowed.kubernetes_secrets.contains(&secret) {
                    return false;
                }
                // A Secret whose content has changed is listed once.
                allowed.kubernetes_secrets.retain(|s| !same_secret(s, &secret));
                allowed.kubernetes_secrets.push(secret);
                let excess = allowed.kubernetes_secrets.len().saturating_sub(MAX_SECRETS);
                allowed.kubernetes_secrets.drain(..excess);
            }
            Some((_, Origin::Node)) | None => {
                *allowed =
                    ImagePullCredentials { node_pods_accessible: true, ..ImagePullCredentials::default() };
            }
        }
        now.clone_into(&mut self.last_updated_time);
        true
    }
}

fn same_secret(a: &ImagePullSecret, b: &ImagePullSecret) -> bool {
    (&a.uid, &a.namespace, &a.name) == (&b.uid, &b.namespace, &b.name)
}

/// `imagePullCredentialsVerificationPolicy`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum VerificationPolicy {
    /// Every pod may use every image that is present.
    Never,
    /// Every pod may use images that the agent did not pull.
    #[default]
    NeverPreloaded,
    /// Every pod may use images of these repositories. A trailing `/*` includes all repositories below.
    NeverAllowlisted(Vec<String>),
    /// Every image is verified.
    Always,
}

impl VerificationPolicy {
    /// The policy by its name in the KubeletConfiguration; an unknown name is the strictest policy.
    pub fn parse(name: &str, allowlist: &[String]) -> Self {
        match name {
            "NeverVerify" => Self::Never,
            "" | "NeverVerifyPreloadedImages" => Self::NeverPreloaded,
            "NeverVerifyAllowlistedImages" => Self::NeverAllowlisted(allowlist.to_vec()),
            _ => Self::Always,
        }
    }

    fn exempts(&self, repository: &str, pulled_here: bool) -> bool {
        match self {
            Self::Never => true,
            Self::NeverPreloaded => !pulled_here,
            Self::NeverAllowlisted(list) => list.iter().any(|allowed| {
                let below = allowed.strip_suffix("/*");
                below.map_or(allowed == repository, |folder| {
                    repository.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
                })
            }),
            Self::Always => false,
        }
    }
}

/// Whether a pod may use an image that is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// No verification is needed.
    Open,
    /// The pod has a credential with which the image was pulled.
    Verified {
        /// A credential to add to the record, if the record lacks it.
        to_record: Option<(Credential, Origin)>,
    },
    /// Only a pull can verify it.
    Unknown,
}

/// Decides whether a pod with `credentials` may use the present image of `repository`.
///
/// `record` is the image's; `pull_intended` says that a pull of it is in progress or was interrupted by a crash.
pub fn access(
    policy: &VerificationPolicy,
    repository: &str,
    record: Option<&ImagePulledRecord>,
    pull_intended: bool,
    credentials: &[(Credential, Origin)],
) -> Access {
    if policy.exempts(repository, record.is_some() || pull_intended) {
        return Access::Open;
    }
    let Some(allowed) = record.and_then(|record| record.credential_mapping.get(repository)) else {
        return Access::Unknown;
    };
    if allowed.node_pods_accessible {
        return Access::Verified { to_record: None };
    }
    let known = |place: &dyn Fn(&ImagePullSecret) -> bool| allowed.kubernetes_secrets.iter().any(place);
    for found @ (credential, origin) in credentials {
        let Origin::Secret { uid, namespace, name } = origin else { continue };
        // Without a UID, as from a manifest, another Secret may have the same name: only the content counts.
        let is_same = |s: &ImagePullSecret| {
            !uid.is_empty() && (&s.uid, &s.namespace, &s.name) == (uid, namespace, name)
        };
        if known(&is_same) {
            return Access::Verified { to_record: None };
        }
        let hash = credential.hash();
        if known(&|s: &ImagePullSecret| s.credential_hash == hash) {
            return Access::Verified { to_record: Some(found.clone()) };
        }
    }
    Access::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPO: &str = "r.example/team/a";

    fn credential(password: &str) -> Credential {
        Credential { username: "u".into(), password: password.into(), ..Credential::default() }
    }

    fn secret(name: &str, password: &str) -> (Credential, Origin) {
        let origin =
            Origin::Secret { uid: format!("uid-{name}"), namespace: "default".into(), name: name.into() };
        (credential(password), origin)
    }

    fn record(used: Option<&(Credential, Origin)>) -> ImagePulledRecord {
        let mut record = ImagePulledRecord::new("sha256:1", "then");
        assert!(record.add(REPO, used, "now"));
        record
    }

    fn access_with(
        policy: &VerificationPolicy,
        record: Option<&ImagePulledRecord>,
        credentials: &[(Credential, Origin)],
    ) -> Access {
        access(policy, REPO, record, false, credentials)
    }

    #[test]
    fn preloaded_image_is_open_unless_the_policy_verifies_it() {
        let list = |entry: &str| VerificationPolicy::NeverAllowlisted(vec![entry.into()]);
        for (policy, expected) in [
            (VerificationPolicy::Never, Access::Open),
            (VerificationPolicy::NeverPreloaded, Access::Open),
            (list(REPO), Access::Open),
            (list("r.example/team/*"), Access::Open),
            (list("r.example/*"), Access::Open),
            (list("r.example/te*"), Access::Unknown),
            (list("r.example/team"), Access::Unknown),
            (VerificationPolicy::Always, Access::Unknown),
        ] {
            assert_eq!(access_with(&policy, None, &[]), expected, "{policy:?}");
        }
        assert_eq!(access(&VerificationPolicy::NeverPreloaded, REPO, None, true, &[]), Access::Unknown);
    }

    #[test]
    fn image_pulled_without_or_with_node_credentials_is_open_to_all_pods() {
        for used in [None, Some(&(credential("p"), Origin::Node))] {
            let record = record(used);
            for policy in [VerificationPolicy::NeverPreloaded, VerificationPolicy::Always] {
                assert_eq!(access_with(&policy, Some(&record), &[]), Access::Verified { to_record: None });
            }
        }
    }

    #[test]
    fn image_pulled_with_a_secret_needs_that_secret_by_uid_or_content() {
        let used = secret("a", "p");
        let record = record(Some(&used));
        let verified = Access::Verified { to_record: None };
        assert_eq!(access_with(&VerificationPolicy::NeverPreloaded, Some(&record), &[]), Access::Unknown);
        assert_eq!(access_with(&VerificationPolicy::Never, Some(&record), &[]), Access::Open);
        assert_eq!(
            access_with(&VerificationPolicy::Always, Some(&record), &[secret("b", "q")]),
            Access::Unknown
        );
        assert_eq!(
            access_with(
                &VerificationPolicy::Always,
                Some(&record),
                &[secret("b", "q"), secret("a", "changed")]
            ),
            verified
        );
        let same = secret("b", "p");
        let expected = Access::Verified { to_record: Some(same.clone()) };
        assert_eq!(
            access_with(&VerificationPolicy::Always, Some(&record), std::slice::from_ref(&same)),
            expected
        );
        let nameless = |password: &str| {
            let origin = Origin::Secret { uid: String::new(), namespace: "default".into(), name: "a".into() };
            (credential(password), origin)
        };
        let of_manifest = self::record(Some(&nameless("p")));
        assert_eq!(
            access_with(&VerificationPolicy::Always, Some(&of_manifest), &[nameless("changed")]),
            Access::Unknown
        );
        let shown = access_with(&VerificationPolicy::Always, Some(&of_manifest), &[nameless("p")]);
        assert!(matches!(shown, Access::Verified { .. }));
        // The node's credentials do not belong to a pod.
        let node = (credential("p"), Origin::Node);
        assert_eq!(access_with(&VerificationPolicy::Always, Some(&record), &[node]), Access::Unknown);
        // A pull from another repository has to be verified separately, even with the same content.
        let other = access(&VerificationPolicy::Always, "r.example/other", Some(&record), false, &[used]);
        assert_eq!(other, Access::Unknown);
    }

    #[test]
    fn pull_record_has_the_kubelets_format_and_no_credential() {
        let record = record(Some(&secret("a", "hunter2")));
        let text = serde_json::to_string(&record).unwrap();
        let hash = credential("hunter2").hash();
        let expected = format!(
            "{{\"kind\":\"ImagePulledRecord\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"lastUpdatedTime\":\"now\",\
             \"imageRef\":\"sha256:1\",\"credentialMapping\":{{\"{REPO}\":{{\"kubernetesSecrets\":[{{\"uid\":\"uid-a\",\
             \"namespace\":\"default\",\"name\":\"a\",\"credentialHash\":\"{hash}\"}}]}}}}}}"
        );
        assert_eq!(text, expected);
        assert_eq!(ImagePulledRecord::parse(text.as_bytes()), Some(record));
        assert_eq!(ImagePulledRecord::parse(text.replace("v1beta1", "v9").as_bytes()), None);
        assert_eq!(ImagePulledRecord::parse(text.replace("ImagePulledRecord", "Other").as_bytes()), None);
        let intent = serde_json::to_string(&ImagePullIntent::new("a:1")).unwrap();
        let expected =
            r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"a:1"}"#;
        assert_eq!(intent, expected);
        assert_eq!(ImagePullIntent::parse(intent.as_bytes()), Some(ImagePullIntent::new("a:1")));
        assert_eq!(ImagePulledRecord::parse(intent.as_bytes()), None);
        assert_eq!(ImagePullIntent::parse(b"{"), None);
        assert_eq!(ImagePullIntent::parse(intent.replace("v1beta1", "v9").as_bytes()), None);
        let open = "sha256-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(file_name(""), open);
    }

    #[test]
    fn service_accounts_in_a_pull_record_are_kept() {
        let text = r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","lastUpdatedTime":"t","imageRef":"r","credentialMapping":{"r.example/team/a":{"kubernetesServiceAccounts":[{"uid":"1","namespace":"n","name":"s"}]}}}"#;
        let mut record = ImagePulledRecord::parse(text.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert!(record.add(REPO, Some(&secret("a", "p")), "now"));
        assert!(
            serde_json::to_string(&record).unwrap().contains(r#"{"uid":"1","namespace":"n","name":"s"}"#)
        );
    }

    #[test]
    fn pull_record_lists_each_secret_once_and_drops_the_oldest() {
        let mut record = record(Some(&secret("a", "p")));
        assert!(!record.add(REPO, Some(&secret("a", "p")), "later"));
        assert_eq!(record.last_updated_time, "now");
        assert!(record.add(REPO, Some(&secret("a", "q")), "later"));
        assert_eq!(record.credential_mapping[REPO].kubernetes_secrets.len(), 1);
        for n in 0..100 {
            assert!(record.add(REPO, Some(&secret(&format!("s{n}"), "p")), "later"));
        }
        let names = &record.credential_mapping[REPO].kubernetes_secrets;
        assert_eq!((names.len(), names[0].name.as_str()), (100, "s0"));
        assert!(record.add(REPO, None, "later"));
        assert!(record.credential_mapping[REPO].kubernetes_secrets.is_empty());
        assert!(!record.add(REPO, Some(&secret("a", "p")), "later"));
    }

    #[test]
    fn unknown_verification_policy_verifies_always() {
        let list = ["r.example/*".to_owned()];
        for (name, policy) in [
            ("", VerificationPolicy::NeverPreloaded),
            ("NeverVerify", VerificationPolicy::Never),
            ("NeverVerifyPreloadedImages", VerificationPolicy::NeverPreloaded),
            ("NeverVerifyAllowlistedImages", VerificationPolicy::NeverAllowlisted(list.to_vec())),
            ("AlwaysVerify", VerificationPolicy::Always),
            ("?", VerificationPolicy::Always),
        ] {
            assert_eq!(VerificationPolicy::parse(name, &list), policy, "{name:?}");
        }
    }
}
