//! Certificates as bytes: reading one, creating a key with a request, and checking whether an issued certificate matches its
//! request.

use std::net::IpAddr;

use keelson_config::CertificateKind;
use keelson_kube_model::base64;
use keelson_node_status_core::certificates::{HeldCertificate, Subject};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData as _, SanType};
use serde_json::Value;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::x509::AttributeTypeAndValue;

/// What is wrong with a certificate or a key.
#[derive(Debug, thiserror::Error)]
pub(super) enum X509Error {
    #[error("the answer is not PEM with certificates")]
    NoCertificates,
    #[error("the issued certificate is for another key")]
    WrongKey,
    #[error("the issued certificate is not for the requested use, but for {uses}")]
    WrongUsage { uses: String },
    #[error("the issued certificate is for {common_name}, and lacks a requested name")]
    WrongSubject { common_name: String },
    #[error("the issued certificate has expired")]
    Expired,
    #[error("cannot create a key and a request")]
    Make(#[from] rcgen::Error),
}

/// Creates a new key (ECDSA P-256), as PEM.
pub(super) fn new_key() -> Result<String, X509Error> {
    Ok(KeyPair::generate()?.serialize_pem())
}

/// The certificate request for a key in PEM, as PEM.
pub(super) fn request(key: &str, subject: &Subject) -> Result<String, X509Error> {
    let key = KeyPair::from_pem(key)?;
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    for organization in &subject.organizations {
        name.push(DnType::OrganizationName, organization.as_str());
    }
    name.push(DnType::CommonName, subject.common_name.as_str());
    params.distinguished_name = name;
    for name in &subject.dns_names {
        params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into()?));
    }
    params.subject_alt_names.extend(subject.addresses.iter().copied().map(SanType::IpAddress));
    Ok(params.serialize_request(&key)?.pem()?)
}

/// Whether a request, as an object of the API has it (base64 of PEM), is for a key in PEM.
pub(super) fn is_for_key(request: &Value, key: &str) -> bool {
    let pem = request.as_str().and_then(base64::decode).unwrap_or_default();
    let Some(Ok(block)) = Pem::iter_from_buffer(&pem).next() else { return false };
    let Ok((_, request)) = X509CertificationRequest::from_der(&block.contents) else { return false };
    KeyPair::from_pem(key).is_ok_and(|key| {
        request.certification_request_info.subject_pki.raw == key.subject_public_key_info().as_slice()
    })
}

/// Reads a PEM chain, the node's own certificate first; `None`: it cannot be read.
pub(super) fn read_chain(pem: &[u8], is_managed: bool) -> Option<HeldCertificate> {
    let chain = chain(pem)?;
    let mut found: Option<HeldCertificate> = None;
    for block in &chain {
        let (_, certificate) = X509Certificate::from_der(&block.contents).ok()?;
        let not_after = certificate.validity().not_after.timestamp();
        match &mut found {
            Some(held) => held.not_after = held.not_after.min(not_after),
            None => {
                let not_before = certificate.validity().not_before.timestamp();
                found = Some(HeldCertificate {
                    subject: subject(&certificate),
                    not_before,
                    not_after,
                    is_managed,
                });
            }
        }
    }
    found
}

/// Checks an issued certificate against its key, subject and usage, and reads it.
pub(super) fn check(
    kind: CertificateKind,
    pem: &[u8],
    key: &str,
    wanted: &Subject,
    now: i64,
) -> Result<HeldCertificate, X509Error> {
    let held = read_chain(pem, true).ok_or(X509Error::NoCertificates)?;
    let chain = chain(pem).ok_or(X509Error::NoCertificates)?;
    let own = chain.first().ok_or(X509Error::NoCertificates)?;
    let (_, own) = X509Certificate::from_der(&own.contents).map_err(|_| X509Error::NoCertificates)?;
    if own.public_key().raw != KeyPair::from_pem(key)?.subject_public_key_info() {
        return Err(X509Error::WrongKey);
    }
    let uses = own.extended_key_usage().ok().flatten().map(|usage| usage.value);
    let is_good = uses.is_some_and(|uses| match kind {
        CertificateKind::Client => uses.client_auth || uses.any,
        CertificateKind::Serving => uses.server_auth || uses.any,
    });
    if !is_good {
        let uses = uses.map_or_else(|| "none".to_owned(), |uses| format!("{uses:?}"));
        return Err(X509Error::WrongUsage { uses });
    }
    if !held.subject.covers(wanted) {
        return Err(X509Error::WrongSubject { common_name: held.subject.common_name });
    }
    if held.not_after < now { Err(X509Error::Expired) } else { Ok(held) }
}

fn chain(pem: &[u8]) -> Option<Vec<Pem>> {
    let blocks: Vec<Pem> = Pem::iter_from_buffer(pem).collect::<Result<_, _>>().ok()?;
    let chain: Vec<Pem> = blocks.into_iter().filter(|block| block.label == "CERTIFICATE").collect();
    (!chain.is_empty()).then_some(chain)
}

fn subject(certificate: &X509Certificate<'_>) -> Subject {
    let text = |value: &AttributeTypeAndValue<'_>| value.as_str().unwrap_or_default().to_owned();
    let name = certificate.subject();
    let mut subject = Subject {
        common_name: name.iter_common_name().map(text).next().unwrap_or_default(),
        organizations: name.iter_organization().map(text).collect(),
        ..Subject::default()
    };
    let names = certificate.subject_alternative_name().ok().flatten();
    for name in names.iter().flat_map(|names| &names.value.general_names) {
        match name {
            GeneralName::DNSName(name) => {
                subject.dns_names.insert((*name).to_owned());
            }
            GeneralName::IPAddress(bytes) => subject.addresses.extend(address(bytes)),
            _ => {}
        }
    }
    subject
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use keelson_node_status_core::certificates::{client_subject, serving_subject};
    use rcgen::{CertificateSigningRequestParams, ExtendedKeyUsagePurpose, date_time_ymd};
    use serde_json::json;

    use super::*;

    /// Signs a request with a new authority.
    pub(crate) fn sign(request: &str, uses: &[ExtendedKeyUsagePurpose], from: i64, until: i64) -> String {
        let mut authority = CertificateParams::default();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = rcgen::CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let mut request = CertificateSigningRequestParams::from_pem(request).unwrap();
        let moment =
            |seconds: i64| date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds.unsigned_abs());
        request.params.not_before = moment(from);
        request.params.not_after = moment(until);
        request.params.extended_key_usages = uses.to_vec();
        format!("{}{}", request.signed_by(&authority).unwrap().pem(), authority.pem())
    }

    #[test]
    fn an_issued_certificate_has_the_requested_subject() {
        let addresses = json!([{"type": "InternalIP", "address": "10.0.0.7"}, {"type": "InternalIP", "address": "fd00::7"},
            {"type": "Hostname", "address": "edge-1"}]);
        let wanted = serving_subject("n1", &addresses, false).unwrap();
        let key = new_key().unwrap();
        let pem =
            sign(&request(&key, &wanted).unwrap(), &[ExtendedKeyUsagePurpose::ServerAuth], 1_000, 2_000);
        let held = check(CertificateKind::Serving, pem.as_bytes(), &key, &wanted, 1_500).unwrap();
        assert_eq!(
            held,
            HeldCertificate { subject: wanted, not_before: 1_000, not_after: 2_000, is_managed: true }
        );
        assert!(super::read_chain(b"no certificate", true).is_none());
    }

    #[test]
    fn an_issued_certificate_that_does_not_match_the_request_is_refused() {
        let wanted = client_subject("n1");
        let (key, other) = (new_key().unwrap(), new_key().unwrap());
        let client = [ExtendedKeyUsagePurpose::ClientAuth];
        let signed = |key: &str, subject: &Subject, uses: &[ExtendedKeyUsagePurpose]| {
            sign(&request(key, subject).unwrap(), uses, 1_000, 2_000)
        };
        for (pem, now, expected) in [
            (signed(&other, &wanted, &client), 1_500, "another key"),
            (
                signed(&key, &wanted, &[ExtendedKeyUsagePurpose::ServerAuth]),
                1_500,
                "not for the requested use",
            ),
            (signed(&key, &wanted, &[]), 1_500, "not for the requested use"),
            (signed(&key, &client_subject("n2"), &client), 1_500, "is for system:node:n2"),
            (signed(&key, &wanted, &client), 2_001, "has expired"),
            ("nothing".to_owned(), 1_500, "not PEM with certificates"),
        ] {
            let error =
                check(CertificateKind::Client, pem.as_bytes(), &key, &wanted, now).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        check(CertificateKind::Client, signed(&key, &wanted, &client).as_bytes(), &key, &wanted, 1_500)
            .unwrap();
        let submitted = Value::from(base64::encode(request(&key, &wanted).unwrap().as_bytes()));
        assert!(
            is_for_key(&submitted, &key)
                && !is_for_key(&submitted, &other)
                && !is_for_key(&Value::Null, &key)
        );
    }
}
