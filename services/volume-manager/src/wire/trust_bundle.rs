//! `clusterTrustBundle` sources as messages.

use keelson_pod_reconciler::wire::MissingField;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_volume_manager_core::payload::{Bundles, LabelSelector, TrustBundleFile};

use super::{WireError, owner};

/// Converts the source of a `clusterTrustBundle` file.
pub(super) fn from_wire(message: pb::ClusterTrustBundle) -> Result<TrustBundleFile, WireError> {
    let pb::ClusterTrustBundle { name, signer_name, label_selector_json, optional, path, mode, owner_uid } =
        message;
    let bundles = match (name.is_empty(), signer_name.is_empty()) {
        (false, _) => Bundles::Name(name),
        (true, true) => return Err(MissingField("pod.volumes.files.sources.trust_bundle.signer_name").into()),
        (true, false) => Bundles::Signer { signer: signer_name, labels: selector(label_selector_json)? },
    };
    let owner = owner("pod.volumes.files.sources.trust_bundle.owner_uid", owner_uid)?;
    Ok(TrustBundleFile { bundles, optional, path, mode, owner })
}

fn selector(json: Option<Vec<u8>>) -> Result<Option<LabelSelector>, WireError> {
    let Some(json) = json else { return Ok(None) };
    serde_json::from_slice(&json).map_err(|_| WireError::UnknownValue {
        field: "pod.volumes.files.sources.trust_bundle.label_selector_json",
        value: String::from_utf8_lossy(&json).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(selector: Option<&str>) -> pb::ClusterTrustBundle {
        pb::ClusterTrustBundle {
            signer_name: "x/y".into(),
            label_selector_json: selector.map(|json| json.as_bytes().to_vec()),
            ..Default::default()
        }
    }

    #[test]
    fn a_name_counts_more_than_a_signer_and_an_absent_selector_is_not_an_empty_one() {
        let named = pb::ClusterTrustBundle { name: "ca".into(), ..signed(None) };
        assert_eq!(from_wire(named).unwrap().bundles, Bundles::Name("ca".into()));
        let of = |labels| Bundles::Signer { signer: "x/y".into(), labels };
        for (selector, labels) in
            [(None, None), (Some("null"), None), (Some("{}"), Some(LabelSelector::default()))]
        {
            assert_eq!(from_wire(signed(selector)).unwrap().bundles, of(labels), "{selector:?}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        let no_source = pb::ClusterTrustBundle::default();
        let no_owner = pb::ClusterTrustBundle { owner_uid: Some(-1), ..signed(None) };
        for (message, field) in [
            (no_source, "signer_name"),
            (no_owner, "owner_uid"),
            (signed(Some("[1]")), "label_selector_json"),
        ] {
            let text = from_wire(message).unwrap_err().to_string();
            assert!(text.contains(&format!("trust_bundle.{field}")), "{text}");
        }
    }
}
