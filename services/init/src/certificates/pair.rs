//! Certificates and the key of the first, PEM: whether they belong together, and how long they hold.

use keelson_init_core::Validity;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::public_key::PublicKey;

/// Certificates, the node's own first, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    /// PEM.
    pub(crate) certificates: String,
    /// PEM.
    pub(crate) key: String,
    pub(crate) validity: Validity,
}

/// What is wrong with a pair.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum PairProblem {
    #[error("it is no PEM")]
    NoPem,
    #[error("it has no certificate")]
    NoCertificate,
    #[error("a certificate in it cannot be read")]
    Certificate,
    #[error("it has no private key that could be read")]
    NoKey,
    #[error("its key is not that of its certificate")]
    OfAnother,
}

impl Pair {
    /// Reads a pair from one file, or from two that stand one after the other.
    pub(crate) fn read(pem: &[u8]) -> Result<Self, PairProblem> {
        let (mut certificates, mut key) = (Vec::new(), None);
        for block in Pem::iter_from_buffer(pem) {
            let block = block.map_err(|_| PairProblem::NoPem)?;
            if block.label == "CERTIFICATE" {
                certificates.push(block);
            } else if block.label.ends_with("PRIVATE KEY") && key.is_none() {
                key = Some(block);
            }
        }
        let validity = validity_of(certificates.iter().map(|block| block.contents.as_slice()))?;
        let own = certificates.first().ok_or(PairProblem::NoCertificate)?;
        let key = key.ok_or(PairProblem::NoKey)?;
        let (_, own) = X509Certificate::from_der(&own.contents).map_err(|_| PairProblem::Certificate)?;
        belongs(&own, &key)?;
        Ok(Self { certificates: certificates.iter().map(text_of).collect(), key: text_of(&key), validity })
    }

    /// As it is kept: certificates, then the key.
    pub(crate) fn pem(&self) -> String {
        format!("{}{}", self.certificates, self.key)
    }
}

/// How long certificates hold that are given as PEM.
pub(crate) fn validity(pem: &[u8]) -> Result<Validity, PairProblem> {
    let blocks: Vec<Pem> =
        Pem::iter_from_buffer(pem).collect::<Result<_, _>>().map_err(|_| PairProblem::NoPem)?;
    validity_of(
        blocks.iter().filter(|block| block.label == "CERTIFICATE").map(|block| block.contents.as_slice()),
    )
}

fn validity_of<'a>(chain: impl Iterator<Item = &'a [u8]>) -> Result<Validity, PairProblem> {
    let mut found: Option<Validity> = None;
    for der in chain {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|_| PairProblem::Certificate)?;
        let (from, until) = {
            let validity = certificate.validity();
            (validity.not_before.timestamp(), validity.not_after.timestamp())
        };
        let validity = found.get_or_insert(Validity { not_before: from, not_after: until });
        validity.not_after = validity.not_after.min(until);
    }
    found.ok_or(PairProblem::NoCertificate)
}

/// PEM of a block (RFC 7468).
fn text_of(block: &Pem) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(&block.contents);
    let lines: String =
        text.as_bytes().chunks(64).map(|line| format!("{}\n", String::from_utf8_lossy(line))).collect();
    format!("-----BEGIN {0}-----\n{lines}-----END {0}-----\n", block.label)
}

/// Whether a private key is that of a certificate, by what it says of its public part. One that says nothing of it is taken:
/// the first connection shows.
fn belongs(certificate: &X509Certificate<'_>, key: &Pem) -> Result<(), PairProblem> {
    let public = certificate.public_key();
    let said = match key.label.as_str() {
        "PRIVATE KEY" => of_pkcs8(&key.contents),
        "EC PRIVATE KEY" => of_ec(&key.contents),
        "RSA PRIVATE KEY" => of_rsa(&key.contents),
        _ => None,
    };
    let Said { public: said, is_rsa } = said.ok_or(PairProblem::NoKey)?;
    let Some(said) = said else { return Ok(()) };
    let theirs = match public.parsed() {
        Ok(PublicKey::RSA(rsa)) if is_rsa => rsa.modulus,
        _ if is_rsa => return Err(PairProblem::OfAnother),
        _ => public.subject_public_key.data.as_ref(),
    };
    let trimmed = |bytes: &[u8]| -> Vec<u8> {
        let zeros = if is_rsa { bytes.iter().take_while(|byte| **byte == 0).count() } else { 0 };
        bytes[zeros..].to_vec()
    };
    if trimmed(said) == trimmed(theirs) { Ok(()) } else { Err(PairProblem::OfAnother) }
}

/// What a private key says of its public part: the point of a curve, or the modulus of RSA.
struct Said<'a> {
    public: Option<&'a [u8]>,
    is_rsa: bool,
}

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const SEQUENCE: u8 = 0x30;
/// `[1]`, around the public key in RFC 5915 and, without the tag of its content, in RFC 5958.
const PUBLIC: u8 = 0xa1;
const PUBLIC_IMPLICIT: u8 = 0x81;

/// PrivateKeyInfo (RFC 5208, RFC 5958).
fn of_pkcs8(der: &[u8]) -> Option<Said<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (SEQUENCE, _, rest) = element(rest)? else { return None };
    let (OCTET_STRING, inner, mut rest) = element(rest)? else { return None };
    while !rest.is_empty() {
        let (tag, content, further) = element(rest)?;
        if tag == PUBLIC_IMPLICIT {
            return Some(Said { public: content.get(1..), is_rsa: false });
        }
        rest = further;
    }
    // Whatever is no sequence is a key of another kind, such as Ed25519's.
    of_ec(inner).or_else(|| of_rsa(inner)).or(Some(Said { public: None, is_rsa: false }))
}

/// ECPrivateKey (RFC 5915).
fn of_ec(der: &[u8]) -> Option<Said<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (OCTET_STRING, _, mut rest) = element(rest)? else { return None };
    while !rest.is_empty() {
        let (tag, content, further) = element(rest)?;
        if tag == PUBLIC {
            let (BIT_STRING, bits, _) = element(content)? else { return None };
            return Some(Said { public: bits.get(1..), is_rsa: false });
        }
        rest = further;
    }
    Some(Said { public: None, is_rsa: false })
}

/// RSAPrivateKey (RFC 8017).
fn of_rsa(der: &[u8]) -> Option<Said<'_>> {
    let (SEQUENCE, body, _) = element(der)? else { return None };
    let (INTEGER, _, rest) = element(body)? else { return None };
    let (INTEGER, modulus, _) = element(rest)? else { return None };
    Some(Said { public: Some(modulus), is_rsa: true })
}

/// The first element of DER: its tag, its content, and what follows it (X.690).
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

    /// A pair that holds between two moments, certificate and key apart.
    pub(crate) fn made(name: &str, from: i64, until: i64) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let moment =
            |seconds: i64| date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds.unsigned_abs());
        (params.not_before, params.not_after) = (moment(from), moment(until));
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn a_pair_is_read_with_its_validity_and_written_as_it_is_kept() {
        let (own, key) = made("n", 1_000, 9_000);
        let (authority, _) = made("ca", 500, 8_000);
        let pair = Pair::read(format!("{own}{authority}{key}").as_bytes()).unwrap();
        assert_eq!(
            pair.validity,
            Validity { not_before: 1_000, not_after: 8_000 },
            "the first that ends counts"
        );
        assert_eq!(Pair::read(pair.pem().as_bytes()).unwrap(), pair);
        assert_eq!(Pair::read(format!("{key}{own}").as_bytes()).unwrap().validity.not_after, 9_000);
        assert_eq!(validity(own.as_bytes()).unwrap().not_after, 9_000);
    }

    #[test]
    fn what_does_not_belong_together_or_is_no_pair_is_refused() {
        let ((own, key), (other, other_key)) = (made("n", 0, 9_000), made("n", 0, 9_000));
        let broken = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
        for (pem, problem) in [
            (format!("{own}{other_key}"), PairProblem::OfAnother),
            (format!("{other}{own}{key}"), PairProblem::OfAnother),
            (own.clone(), PairProblem::NoKey),
            (key.clone(), PairProblem::NoCertificate),
            (String::new(), PairProblem::NoCertificate),
            (format!("{broken}{key}"), PairProblem::Certificate),
            (format!("{own}{}", broken.replace("CERTIFICATE", "PRIVATE KEY")), PairProblem::NoKey),
            ("-----BEGIN CERTIFICATE-----\n%%\n-----END CERTIFICATE-----\n".to_owned(), PairProblem::NoPem),
        ] {
            assert_eq!(Pair::read(pem.as_bytes()), Err(problem), "{pem}");
        }
    }

    /// As other programs write them: SEC 1, PKCS #1 and PKCS #8. Made for this test.
    #[test]
    fn keys_in_the_forms_of_other_programs_are_known_as_their_certificates_own() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pairs");
        let (_, stranger) = made("n", 0, 1);
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
            assert_eq!(mixed, Err(PairProblem::OfAnother), "{name}");
            let of_another = Pair::read(format!("{}{}", made("n", 0, 1).0, pair.key).as_bytes());
            // A key of Ed25519 says nothing of its public part.
            let expected = if name == "ed25519.pem" { Ok(()) } else { Err(PairProblem::OfAnother) };
            assert_eq!(of_another.map(drop), expected, "{name}");
        }
    }
}
