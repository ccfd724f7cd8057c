//! A PEM key pair: checks that the key belongs to the certificate, and reads the validity.

use keelson_init_core::Validity;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};
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
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(&block.contents);
    let lines: String =
        text.as_bytes().chunks(64).map(|line| format!("{}\n", String::from_utf8_lossy(line))).collect();
    format!("-----BEGIN {0}-----\n{lines}-----END {0}-----\n", block.label)
}

/// Checks that a private key belongs to a certificate, by the public key that it contains. A key without one is accepted; the
/// first connection shows whether it matches.
fn check_key(certificate: &X509Certificate<'_>, key: &Pem) -> Result<(), PairError> {
    let subject = certificate.public_key();
    let found = match key.label.as_str() {
        "PRIVATE KEY" => parse_pkcs8(&key.contents),
        "EC PRIVATE KEY" => parse_ec(&key.contents),
        "RSA PRIVATE KEY" => parse_rsa(&key.contents),
        _ => None,
    };
    let EmbeddedPublicKey { public, is_rsa } = found.ok_or(PairError::NoKey)?;
    let Some(embedded) = public else { return Ok(()) };
    let theirs = match subject.parsed() {
        Ok(PublicKey::RSA(rsa)) if is_rsa => rsa.modulus,
        _ if is_rsa => return Err(PairError::KeyMismatch),
        _ => subject.subject_public_key.data.as_ref(),
    };
    let trimmed = |bytes: &[u8]| -> Vec<u8> {
        let zeros = if is_rsa { bytes.iter().take_while(|byte| **byte == 0).count() } else { 0 };
        bytes[zeros..].to_vec()
    };
    if trimmed(embedded) == trimmed(theirs) { Ok(()) } else { Err(PairError::KeyMismatch) }
}

/// The public key in a private key: the point of a curve, or the modulus of RSA.
struct EmbeddedPublicKey<'a> {
    public: Option<&'a [u8]>,
    is_rsa: bool,
}

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const SEQUENCE: u8 = 0x30;
/// `[1]`: the public key in RFC 5915; RFC 5958 omits the tag of its content.
const PUBLIC: u8 = 0xa1;
const PUBLIC_IMPLICIT: u8 = 0x81;

/// PrivateKeyInfo (RFC 5208, RFC 5958).
fn parse_pkcs8(der: &[u8]) -> Option<EmbeddedPublicKey<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (SEQUENCE, _, rest) = element(rest)? else { return None };
    let (OCTET_STRING, inner, mut rest) = element(rest)? else { return None };
    while !rest.is_empty() {
        let (tag, content, further) = element(rest)?;
        if tag == PUBLIC_IMPLICIT {
            return Some(EmbeddedPublicKey { public: content.get(1..), is_rsa: false });
        }
        rest = further;
    }
    // Other content is a key of another kind, such as Ed25519.
    parse_ec(inner).or_else(|| parse_rsa(inner)).or(Some(EmbeddedPublicKey { public: None, is_rsa: false }))
}

/// ECPrivateKey (RFC 5915).
fn parse_ec(der: &[u8]) -> Option<EmbeddedPublicKey<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (OCTET_STRING, _, mut rest) = element(rest)? else { return None };
    while !rest.is_empty() {
        let (tag, content, further) = element(rest)?;
        if tag == PUBLIC {
            let (BIT_STRING, bits, _) = element(content)? else { return None };
            return Some(EmbeddedPublicKey { public: bits.get(1..), is_rsa: false });
        }
        rest = further;
    }
    Some(EmbeddedPublicKey { public: None, is_rsa: false })
}

/// RSAPrivateKey (RFC 8017).
fn parse_rsa(der: &[u8]) -> Option<EmbeddedPublicKey<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (INTEGER, modulus, _) = element(rest)? else { return None };
    Some(EmbeddedPublicKey { public: Some(modulus), is_rsa: true })
}

/// The first DER element: its tag, its content, and the rest of the input (X.690).
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let count = usize::from(first & 0x7f);
        let bytes = rest.get(..count).filter(|_| (1..=4).contains(&count))?;
        (bytes.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte)), rest.get(count..)?)
    };
    Some((tag, rest.get(..length)?, rest.get(length..)?))
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
            // An Ed25519 key does not contain its public key.
            let expected = if name == "ed25519.pem" { Ok(()) } else { Err(PairError::KeyMismatch) };
            assert_eq!(mismatched.map(drop), expected, "{name}");
        }
    }
}
