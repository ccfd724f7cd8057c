//! The self-signed serving certificate of a node without a configured one (node-and-api.md §6.1).
//!
//! No client can verify it with an authority, but clients can compare it with the one that the node reports to its control plane.
//! Unlike the kubelet's, it contains the addresses of the node, has its key in the same file and is renewed before it expires.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_files::Replacement;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rcgen::{KeyUsagePurpose, date_time_ymd};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The file in the service's state folder: certificate, authority, key.
const FILE: &str = "serving.pem";
/// The file has a key, so only this service may read it.
const PRIVATE: Replacement<'_> = Replacement::new().mode(0o600);
const DAY: i64 = 24 * 3600;
/// The lifetime of a certificate in seconds, as a kubelet's.
const LIFETIME: i64 = 365 * DAY;
/// A certificate is renewed this many seconds before it expires.
const RENEW_BEFORE: i64 = 30 * DAY;
/// The validity of a new certificate begins this many seconds ago, since clocks differ.
const BACKDATE: i64 = 3600;

/// A certificate chain, the node's certificate first, and its key.
#[derive(Debug)]
pub(crate) struct CertificateAndKey {
    pub(crate) certificates: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

/// Why there is no self-signed certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelfSignedError {
    /// The certificate could not be created.
    #[error("cannot create a self-signed certificate for this node")]
    Create(#[from] rcgen::Error),
    /// The file could not be written.
    #[error("cannot write the self-signed certificate of this node to {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The file contains no certificate and key.
    #[error("{} contains no certificate and key; remove it to have new ones created", path.display())]
    Unreadable { path: PathBuf },
}

/// Loads the certificate in `folder`, or creates one for `names` (host names and addresses) if there is none, if it expires
/// within thirty days of `now` (seconds since 1970), or if it lacks one of the names.
pub(crate) fn load_or_create(
    folder: &Path,
    names: &[String],
    now: i64,
) -> Result<CertificateAndKey, SelfSignedError> {
    let path = folder.join(FILE);
    let loaded = fs::read(&path).ok().and_then(|pem| parse(&pem)).filter(|pair| is_usable(pair, names, now));
    if let Some(pair) = loaded {
        return Ok(pair);
    }
    let pem = create(names, now)?;
    PRIVATE
        .write(&path, pem.as_bytes())
        .map_err(|source| SelfSignedError::Write { path: path.clone(), source })?;
    tracing::info!(file = %path.display(), ?names, "created a self-signed certificate for the kubelet API");
    parse(pem.as_bytes()).ok_or(SelfSignedError::Unreadable { path })
}

/// Parses certificates and a key from PEM.
fn parse(pem: &[u8]) -> Option<CertificateAndKey> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().ok()?;
    let key = PrivateKeyDer::from_pem_slice(pem).ok()?;
    (!certificates.is_empty()).then_some(CertificateAndKey { certificates, key })
}

fn is_usable(pair: &CertificateAndKey, names: &[String], now: i64) -> bool {
    let Some(Ok((_, certificate))) = pair.certificates.first().map(|der| X509Certificate::from_der(der))
    else {
        return false;
    };
    let Ok(Some(alternative_names)) = certificate.subject_alternative_name() else { return false };
    let known: Vec<String> = alternative_names.value.general_names.iter().filter_map(text_of).collect();
    let validity = certificate.validity();
    validity.not_before.timestamp() <= now
        && validity.not_after.timestamp() - RENEW_BEFORE > now
        && names.iter().all(|name| known.contains(name))
}

fn text_of(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => Some(std::net::IpAddr::from(<[u8; 4]>::try_from(*bytes).ok()?).to_string()),
            _ => Some(std::net::IpAddr::from(<[u8; 16]>::try_from(*bytes).ok()?).to_string()),
        },
        _ => None,
    }
}

fn create(names: &[String], now: i64) -> Result<String, SelfSignedError> {
    let host = names.first().map_or("node", String::as_str);
    let moment = |seconds: i64| {
        date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds.max(0).unsigned_abs())
    };
    let (from, until) = (moment(now - BACKDATE), moment(now + LIFETIME));
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    authority.distinguished_name.push(DnType::CommonName, format!("{host}-ca@{now}"));
    (authority.not_before, authority.not_after) = (from, until);
    // The key of the authority is not stored: it signs nothing else.
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut leaf = CertificateParams::new(names.to_vec())?;
    leaf.distinguished_name.push(DnType::CommonName, format!("{host}@{now}"));
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (leaf.not_before, leaf.not_after) = (from, until);
    let key = KeyPair::generate()?;
    let certificate = leaf.signed_by(&key, &authority)?;
    Ok(format!("{}{}{}", certificate.pem(), authority.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn self_signed_certificate_is_renewed_before_expiry_or_for_a_new_name() {
        let dir = tempfile::tempdir().unwrap();
        let load = |list: &[&str], now| {
            load_or_create(dir.path(), &names(list), now).unwrap().certificates[0].clone()
        };
        let first = load(&["n1", "10.0.0.7", "fd00::1"], NOW);
        assert_eq!(fs::metadata(dir.path().join(FILE)).unwrap().mode() & 0o777, 0o600);
        assert_eq!(load(&["n1", "10.0.0.7"], NOW), first, "further names do not matter");
        assert_eq!(load(&["fd00::1"], NOW + LIFETIME - RENEW_BEFORE - 1), first);
        assert_ne!(load(&["n1", "10.0.0.8"], NOW), first, "another address");
        let second = load(&["n1"], NOW);
        assert_ne!(load(&["n1"], NOW + LIFETIME - RENEW_BEFORE + 1), second, "it expires soon");
        assert_ne!(load(&["n1"], NOW - DAY), second, "it is not valid yet");
    }

    #[test]
    fn unreadable_self_signed_certificate_is_recreated() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "no certificate").unwrap();
        load_or_create(dir.path(), &names(&["n1"]), NOW).unwrap();
        let gone = load_or_create(&dir.path().join("gone"), &names(&["n1"]), NOW).unwrap_err();
        assert!(gone.to_string().contains("gone/serving.pem"), "{gone}");
    }
}
