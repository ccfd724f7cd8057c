//! A PEM key pair: checks that the key belongs to the certificate, and reads the validity.

use keelson_init_core::Validity;
use pem::{EncodeConfig, LineEnding};
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, SubjectPublicKeyInfo, X509Certificate};
use x509_parser::public_key::PublicKey;

/// A chain of certificates, the node's own first, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    /// PEM.
    pub(crate) certificates: String,
    /// PEM.
    pub(crate) key: String,
    pub(crate) validity: Validity,
}

/// An invalid pair.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum PairError {
    #[error("it is not PEM")]
    NoPem,
    #[error("it has no certificate")]
    NoCertificate,
    #[error("a certificate in it cannot be read")]
    Certificate,
    #[error("it has no readable private key")]
    NoKey,
    #[error("its key does not match its certificate")]
    KeyMismatch,
}

impl Pair {
    /// Reads a pair from one PEM file, or from two that are concatenated.
    pub(crate) fn read(pem: &[u8]) -> Result<Self, PairError> {
        let (mut certificates, mut key) = (Vec::new(), None);
        for block in Pem::iter_from_buffer(pem) {
            let block = block.map_err(|_| PairError::NoPem)?;
            if block.label == "CERTIFICATE" {
                certificates.push(block);
            } else if block.label.ends_with("PRIVATE KEY") && key.is_none() {
                key = Some(block);
            }
        }
        let validity = validity_of(certificates.iter().map(|block| block.contents.as_slice()))?;
        let own_certificate = certificates.first().ok_or(PairError::NoCertificate)?;
        let key = key.ok_or(PairError::NoKey)?;
        let (_, own_certificate) =
            X509Certificate::from_der(&own_certificate.contents).map_err(|_| PairError::Certificate)?;
        check_key(&own_certificate, &key)?;
        Ok(Self { certificates: certificates.iter().map(to_pem).collect(), key: to_pem(&key), validity })
    }

    /// The format of stored pairs: the certificates, then the key.
    pub(crate) fn pem(&self) -> String {
        format!("{}{}", self.certificates, self.key)
    }
}

/// The validity of PEM certificates.
pub(crate) fn validity(pem: &[u8]) -> Result<Validity, PairError> {
    let blocks: Vec<Pem> =
        Pem::iter_from_buffer(pem).collect::<Result<_, _>>().map_err(|_| PairError::NoPem)?;
    validity_of(
        blocks.iter().filter(|block| block.label == "CERTIFICATE").map(|block| block.contents.as_slice()),
    )
}

fn validity_of<'a>(chain: impl Iterator<Item = &'a [u8]>) -> Result<Validity, PairError> {
    let mut found: Option<Validity> = None;
    for der in chain {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|_| PairError::Certificate)?;
        let (from, until) = {
            let validity = certificate.validity();
            (validity.not_before.timestamp(), validity.not_after.timestamp())
        };
        let validity = found.get_or_insert(Validity { not_before: from, not_after: until });
        validity.not_after = validity.not_after.min(until);
    }
    found.ok_or(PairError::NoCertificate)
}

/// Encodes a block as PEM (RFC 7468).
fn to_pem(block: &Pem) -> String {
    let block = pem::Pem::new(block.label.as_str(), block.contents.as_slice());
    pem::encode_config(&block, EncodeConfig::new().set_line_ending(LineEnding::LF))
}

/// The algorithm of Ed25519 keys (RFC 8410).
const ED25519: &str = "1.3.101.112";

/// Checks that a private key belongs to a certificate, by its algorithm and by the public key that it contains. A key without a
/// public key is accepted if the algorithm is that of the certificate; the first connection shows whether it matches.
fn check_key(certificate: &X509Certificate<'_>, key: &Pem) -> Result<(), PairError> {
    let subject = certificate.public_key();
    let matches = match key.label.as_str() {
        "PRIVATE KEY" => pkcs8_key_matches(&key.contents, subject),
        "EC PRIVATE KEY" => ec_key_matches(&key.contents, None, subject),
        "RSA PRIVATE KEY" => rsa_key_matches(&key.contents, subject),
        _ => None,
    };
    if matches.ok_or(PairError::NoKey)? { Ok(()) } else { Err(PairError::KeyMismatch) }
}

/// Whether a PrivateKeyInfo (RFC 5208, RFC 5958) belongs to `subject`; `None`: it cannot be read.
fn pkcs8_key_matches(der: &[u8], subject: &SubjectPublicKeyInfo<'_>) -> Option<bool> {
    let info = pkcs8::PrivateKeyInfoRef::try_from(der).ok()?;
    let content = info.private_key.as_bytes();
    let public = info.public_key.map(|bits| bits.raw_bytes());
    if info.algorithm.oid == sec1::ALGORITHM_OID {
        return ec_key_matches(content, public, subject);
    }
    if info.algorithm.oid == pkcs1::ALGORITHM_OID {
        return rsa_key_matches(content, subject);
    }
    // No other algorithm can be used for TLS here, such as RSASSA-PSS.
    let is_usable = info.algorithm.oid.to_string() == ED25519 && is_of(subject, ED25519);
    Some(is_usable && public.is_none_or(|public| public == subject.subject_public_key.data.as_ref()))
}

/// Whether an ECPrivateKey (RFC 5915) belongs to `subject`; `None`: it cannot be read. `public` is the public key that is next
/// to it; the one in it is preferred.
fn ec_key_matches(der: &[u8], public: Option<&[u8]>, subject: &SubjectPublicKeyInfo<'_>) -> Option<bool> {
    let key = sec1::EcPrivateKey::try_from(der).ok()?;
    let public = key.public_key.or(public);
    let is_ec = is_of(subject, &sec1::ALGORITHM_OID.to_string());
    Some(is_ec && public.is_none_or(|public| public == subject.subject_public_key.data.as_ref()))
}

fn is_of(subject: &SubjectPublicKeyInfo<'_>, algorithm: &str) -> bool {
    subject.algorithm.algorithm.to_id_string() == algorithm
}

/// Whether an RSAPrivateKey (RFC 8017) belongs to `subject`; `None`: it cannot be read.
fn rsa_key_matches(der: &[u8], subject: &SubjectPublicKeyInfo<'_>) -> Option<bool> {
    let key = pkcs1::RsaPrivateKeyRef::try_from(der).ok()?;
    let Ok(PublicKey::RSA(public)) = subject.parsed() else { return Some(false) };
    // The parser leaves the sign byte of the modulus in place.
    Some(pkcs1::UintRef::new(public.modulus).is_ok_and(|modulus| modulus == key.modulus))
}

#[cfg(test)]
pub(super) mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    /// A self-signed pair with this validity; certificate and key separately.
    pub(crate) fn make_pair(name: &str, from: i64, until: i64) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let moment =
            |seconds: i64| date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds.unsigned_abs());
        (params.not_before, params.not_after) = (moment(from), moment(until));
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn a_pair_round_trips_with_its_validity() {
        let (own_pair, key) = make_pair("n", 1_000, 9_000);
        let (authority, _) = make_pair("ca", 500, 8_000);
        let pair = Pair::read(format!("{own_pair}{authority}{key}").as_bytes()).unwrap();
        assert_eq!(
            pair.validity,
            Validity { not_before: 1_000, not_after: 8_000 },
            "the earliest expiry of the chain"
        );
        assert_eq!(Pair::read(pair.pem().as_bytes()).unwrap(), pair);
        assert_eq!(Pair::read(format!("{key}{own_pair}").as_bytes()).unwrap().validity.not_after, 9_000);
        assert_eq!(validity(own_pair.as_bytes()).unwrap().not_after, 9_000);
    }

    #[test]
    fn mismatched_and_incomplete_pairs_are_refused() {
        let ((own_pair, key), (other, other_key)) = (make_pair("n", 0, 9_000), make_pair("n", 0, 9_000));
        let broken = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
        for (pem, error) in [
            (format!("{own_pair}{other_key}"), PairError::KeyMismatch),
            (format!("{other}{own_pair}{key}"), PairError::KeyMismatch),
            (own_pair.clone(), PairError::NoKey),
            (key.clone(), PairError::NoCertificate),
            (String::new(), PairError::NoCertificate),
            (format!("{broken}{key}"), PairError::Certificate),
            (format!("{own_pair}{}", broken.replace("CERTIFICATE", "PRIVATE KEY")), PairError::NoKey),
            ("-----BEGIN CERTIFICATE-----\n%%\n-----END CERTIFICATE-----\n".to_owned(), PairError::NoPem),
        ] {
            assert_eq!(Pair::read(pem.as_bytes()), Err(error), "{pem}");
        }
    }

    /// Formats that other programs write: SEC 1, PKCS #1 and PKCS #8. The files were created for this test.
    #[test]
    fn keys_in_sec1_pkcs1_and_pkcs8_format_match_their_certificates() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pairs");
        let (_, stranger) = make_pair("n", 0, 1);
        for (name, label) in [
            ("ec.pem", "EC PRIVATE KEY"),
            ("rsa.pem", "RSA PRIVATE KEY"),
            ("rsa-pkcs8.pem", "PRIVATE KEY"),
            ("ed25519.pem", "PRIVATE KEY"),
        ] {
            let pem = std::fs::read_to_string(folder.join(name)).unwrap();
            let pair = Pair::read(pem.as_bytes()).unwrap();
            assert!(pair.key.contains(&format!("BEGIN {label}-")), "{name}");
            let mixed = Pair::read(format!("{}{stranger}", pair.certificates).as_bytes());
            assert_eq!(mixed, Err(PairError::KeyMismatch), "{name}");
            let mismatched = Pair::read(format!("{}{}", make_pair("n", 0, 1).0, pair.key).as_bytes());
            // An Ed25519 key does not contain its public key, but names its algorithm.
            assert_eq!(mismatched, Err(PairError::KeyMismatch), "{name}");
        }
    }
}
