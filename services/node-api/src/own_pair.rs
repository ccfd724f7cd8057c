//! A certificate that we sign ourselves, for a node to which none was given (node-and-api.md §6.1).
//!
//! Nobody can check it against an authority; who knows it, as from the Node that this node reports to its control plane, can
//! compare. Unlike the kubelet's it names the addresses of the node, has its key in the same file and is made anew before it
//! expires.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rcgen::{KeyUsagePurpose, date_time_ymd};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The name of the file in the service's state folder: certificate, authority, key.
const FILE: &str = "serving.pem";
const DAY: i64 = 24 * 3600;
/// How long a pair is good, as a kubelet's.
const LASTS: i64 = 365 * DAY;
/// One that ends sooner is made anew.
const RENEWED_BEFORE: i64 = 30 * DAY;
/// Clocks differ.
const BEGAN_BEFORE: i64 = 3600;

/// Certificates, the node's own first, and its key.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) certificates: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

/// Why there is no pair.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PairError {
    /// It could not be made.
    #[error("cannot make a certificate for this node")]
    Make(#[from] rcgen::Error),
    /// It could not be kept.
    #[error("cannot keep the certificate of this node in {}", path.display())]
    Keep { path: PathBuf, source: io::Error },
    /// It was kept and cannot be read.
    #[error("{} has no certificate and key; remove it, and new ones are made", path.display())]
    Kept { path: PathBuf },
}

/// The pair in `folder`, for who is to be reached as `names` (host names and addresses); a new one when there is none, when
/// it ends within thirty days of `now` (seconds since 1970), or lacks a name.
pub(crate) fn own(folder: &Path, names: &[String], now: i64) -> Result<Pair, PairError> {
    let path = folder.join(FILE);
    let kept = fs::read(&path).ok().and_then(|pem| parse(&pem)).filter(|pair| will_do(pair, names, now));
    if let Some(pair) = kept {
        return Ok(pair);
    }
    let pem = make(names, now)?;
    write(&path, pem.as_bytes()).map_err(|source| PairError::Keep { path: path.clone(), source })?;
    tracing::info!(file = %path.display(), ?names, "made a new certificate for the kubelet API");
    parse(pem.as_bytes()).ok_or(PairError::Kept { path })
}

/// Certificates and a key from PEM.
fn parse(pem: &[u8]) -> Option<Pair> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().ok()?;
    let key = PrivateKeyDer::from_pem_slice(pem).ok()?;
    (!certificates.is_empty()).then_some(Pair { certificates, key })
}

fn will_do(pair: &Pair, names: &[String], now: i64) -> bool {
    let Some(Ok((_, certificate))) = pair.certificates.first().map(|der| X509Certificate::from_der(der))
    else {
        return false;
    };
    let Ok(Some(known)) = certificate.subject_alternative_name() else { return false };
    let known: Vec<String> = known.value.general_names.iter().filter_map(text_of).collect();
    let validity = certificate.validity();
    validity.not_before.timestamp() <= now
        && validity.not_after.timestamp() - RENEWED_BEFORE > now
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

fn make(names: &[String], now: i64) -> Result<String, PairError> {
    let host = names.first().map_or("node", String::as_str);
    let moment = |seconds: i64| {
        date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds.max(0).unsigned_abs())
    };
    let (from, until) = (moment(now - BEGAN_BEFORE), moment(now + LASTS));
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    authority.distinguished_name.push(DnType::CommonName, format!("{host}-ca@{now}"));
    (authority.not_before, authority.not_after) = (from, until);
    // Its key is forgotten with it: it signs nothing else.
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

/// Replaces the file by rename; nobody else may read it.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    fs::rename(temporary, path)
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
    fn a_pair_is_kept_until_it_ends_soon_or_lacks_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let own = |list: &[&str], now| own(dir.path(), &names(list), now).unwrap().certificates[0].clone();
        let first = own(&["n1", "10.0.0.7", "fd00::1"], NOW);
        assert_eq!(fs::metadata(dir.path().join(FILE)).unwrap().mode() & 0o777, 0o600);
        assert_eq!(own(&["n1", "10.0.0.7"], NOW), first, "it may have more names");
        assert_eq!(own(&["fd00::1"], NOW + LASTS - RENEWED_BEFORE - 1), first);
        assert_ne!(own(&["n1", "10.0.0.8"], NOW), first, "another address");
        let second = own(&["n1"], NOW);
        assert_ne!(own(&["n1"], NOW + LASTS - RENEWED_BEFORE + 1), second, "it ends soon");
        assert_ne!(own(&["n1"], NOW - DAY), second, "it has not begun");
    }

    #[test]
    fn what_is_kept_and_cannot_be_read_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "no certificate").unwrap();
        own(dir.path(), &names(&["n1"]), NOW).unwrap();
        let gone = own(&dir.path().join("gone"), &names(&["n1"]), NOW).unwrap_err();
        assert!(gone.to_string().contains("gone/serving.pem"), "{gone}");
    }
}
