//! `podCertificate` sources as messages.

use keelson_pod_reconciler::wire::MissingField;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_volume_manager_core::pod_certificate::{
    CertificateFiles, CertificateName, CertificateRequest, KeyType,
};

use super::{WireError, owner};

/// Converts the source of a certificate's files.
pub(super) fn from_wire(
    name: CertificateName,
    message: pb::PodCertificate,
) -> Result<CertificateFiles, WireError> {
    if message.signer_name.is_empty() {
        return Err(MissingField("pod.volumes.files.sources.pod_certificate.signer_name").into());
    }
    let key_type = KeyType::parse(&message.key_type).ok_or(WireError::UnknownValue {
        field: "pod.volumes.files.sources.pod_certificate.key_type",
        value: message.key_type,
    })?;
    Ok(CertificateFiles {
        name,
        request: CertificateRequest {
            signer: message.signer_name,
            key_type,
            max_expiration_seconds: message.max_expiration_seconds,
            user_annotations: message.user_annotations.into_iter().collect(),
        },
        bundle_path: message.credential_bundle_path,
        key_path: message.key_path,
        chain_path: message.certificate_chain_path,
        mode: message.mode,
        owner: owner("pod.volumes.files.sources.pod_certificate.owner_uid", message.owner_uid)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_certificate_source_names_its_field() {
        let valid = || pb::PodCertificate {
            signer_name: "x/y".into(),
            key_type: "ED25519".into(),
            ..Default::default()
        };
        let name = || CertificateName { volume: "tls".to_owned(), source: 0 };
        assert_eq!(from_wire(name(), valid()).unwrap().request.key_type, KeyType::Ed25519);
        for (field, message) in [
            ("signer_name", pb::PodCertificate { signer_name: String::new(), ..valid() }),
            ("key_type", pb::PodCertificate { key_type: "RSA2048".into(), ..valid() }),
            ("owner_uid", pb::PodCertificate { owner_uid: Some(-1), ..valid() }),
        ] {
            let text = from_wire(name(), message).unwrap_err().to_string();
            assert!(text.contains(&format!("pod_certificate.{field}")), "{text}");
        }
    }
}
