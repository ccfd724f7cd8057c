//! Keys of pods and the requests that they sign. A key exists in memory only, until it is written to the tmpfs of its volume.

use getrandom::SysRng;
use keelson_volume_manager_core::pod_certificate::KeyType;
use p521::elliptic_curve::Generate as _;
use p521::pkcs8::{EncodePrivateKey as _, EncodePublicKey as _, LineEnding};
use rcgen::{KeyPair, PublicKeyData as _, SigningKey as _};
use rsa::signature::{SignatureEncoding as _, Signer as _};
use zeroize::{Zeroize as _, Zeroizing};

/// The algorithms of signatures in DER (RFC 5758 §3.2, RFC 8410 §3, RFC 4055 §5).
const ECDSA_SHA256: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const ECDSA_SHA384: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3];
const ECDSA_SHA512: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 4];
const ED25519: &[u8] = &[0x30, 5, 6, 3, 0x2b, 0x65, 0x70];
const RSA_SHA256: &[u8] = &[0x30, 13, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 13, 1, 1, 11, 5, 0];

/// The start of an Ed25519 key in PKCS #8 before its 32 bytes, in version 1 (RFC 8410 §7).
const ED25519_KEY: &[u8] = &[0x30, 46, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 34, 4, 32];
/// The length of an Ed25519 key.
const ED25519_LENGTH: usize = 32;

/// Why there is no key. Its text never has anything of a key.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a key of the type {kind:?}: {why}")]
pub(super) struct KeyError {
    kind: KeyType,
    why: String,
}

/// A new key.
pub(super) struct NewKey {
    /// In PKCS #8, as PEM.
    pub(super) pem: Zeroizing<String>,
    /// A PKCS #10 request with an empty subject, in DER, that the key has signed.
    pub(super) request: Vec<u8>,
}

/// Makes a key. Blocks, for seconds if it is an RSA key.
pub(super) fn generate(kind: KeyType) -> Result<NewKey, KeyError> {
    match kind {
        KeyType::EcdsaP256 => with_ring(&rcgen::PKCS_ECDSA_P256_SHA256, ECDSA_SHA256),
        KeyType::EcdsaP384 => with_ring(&rcgen::PKCS_ECDSA_P384_SHA384, ECDSA_SHA384),
        KeyType::Ed25519 => with_ring(&rcgen::PKCS_ED25519, ED25519),
        KeyType::EcdsaP521 => p521(),
        KeyType::Rsa3072 => rsa(3072),
        KeyType::Rsa4096 => rsa(4096),
    }
    .map_err(|why| KeyError { kind, why })
}

fn with_ring(algorithm: &'static rcgen::SignatureAlgorithm, signature: &[u8]) -> Result<NewKey, String> {
    let mut key = KeyPair::generate_for(algorithm).map_err(|error| error.to_string())?;
    let pem = if signature == ED25519 {
        ed25519_pem(&Zeroizing::new(key.serialize_der()))?
    } else {
        Zeroizing::new(key.serialize_pem())
    };
    let sign = |message: &[u8]| key.sign(message).map_err(|error| error.to_string());
    let request = signed_request(&key.subject_public_key_info(), signature, sign);
    key.zeroize();
    Ok(NewKey { pem, request: request? })
}

/// An Ed25519 key in version 1 of PKCS #8. ring writes version 2, which has the public key, too, and which OpenSSL does not read.
fn ed25519_pem(ring: &[u8]) -> Result<Zeroizing<String>, String> {
    // Everything before the key has the same length in both versions.
    let seed = ring.get(ED25519_KEY.len()..ED25519_KEY.len() + ED25519_LENGTH);
    let is_known = ring.get(7..ED25519_KEY.len()) == ED25519_KEY.get(7..);
    let seed = seed.filter(|_| is_known).ok_or("its encoding is not known")?;
    let der = Zeroizing::new([ED25519_KEY, seed].concat());
    let key = p521::pkcs8::PrivateKeyInfoRef::try_from(der.as_slice()).map_err(|error| error.to_string())?;
    key.to_pkcs8_pem(LineEnding::LF).map_err(|error| error.to_string())
}

fn p521() -> Result<NewKey, String> {
    let key = p521::SecretKey::try_generate_from_rng(&mut SysRng).map_err(|error| error.to_string())?;
    let pem = key.to_pkcs8_pem(LineEnding::LF).map_err(|error| error.to_string())?;
    let public = key.public_key().to_public_key_der().map_err(|error| error.to_string())?;
    let signer = p521::ecdsa::SigningKey::from(&key);
    let request = signed_request(public.as_bytes(), ECDSA_SHA512, |message| {
        let signature: p521::ecdsa::DerSignature =
            signer.try_sign(message).map_err(|error| error.to_string())?;
        Ok(signature.to_vec())
    })?;
    Ok(NewKey { pem, request })
}

fn rsa(bits: usize) -> Result<NewKey, String> {
    let key = rsa::PrivateKey::new(&mut SysRng, bits).map_err(|error| error.to_string())?;
    let pem = key.to_pkcs8_pem(LineEnding::LF).map_err(|error| error.to_string())?;
    let public = key.to_public_key().to_public_key_der().map_err(|error| error.to_string())?;
    let signer = rsa::pkcs1v15::SigningKey::<rsa::sha2::Sha256>::new(key);
    let request = signed_request(public.as_bytes(), RSA_SHA256, |message| {
        Ok(signer.try_sign(message).map_err(|error| error.to_string())?.to_vec())
    })?;
    Ok(NewKey { pem, request })
}

/// A request without subject and attributes (RFC 2986 §4) for a public key in DER.
fn signed_request(
    public_key: &[u8],
    algorithm: &[u8],
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, String>,
) -> Result<Vec<u8>, String> {
    let (version, subject, attributes) = (der(2, &[0]), der(0x30, &[]), der(0xa0, &[]));
    let info = der(0x30, &[&version, &subject, public_key, &attributes].concat());
    // A bit string begins with the number of unused bits.
    let signature = der(3, &[&[0], sign(&info)?.as_slice()].concat());
    Ok(der(0x30, &[&info, algorithm, &signature].concat()))
}

/// An element of DER (X.690 §8.1).
fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let significant = &length[length.iter().position(|byte| *byte != 0).unwrap_or(length.len() - 1)..];
    let mut element = vec![tag];
    match significant {
        [short @ 0..0x80] => element.push(*short),
        // At most eight bytes.
        long => {
            element.push(0x80 | u8::try_from(long.len()).unwrap_or(8));
            element.extend_from_slice(long);
        }
    }
    element.extend_from_slice(content);
    element
}

#[cfg(test)]
mod tests {
    use p521::ecdsa::signature::Verifier as _;
    use p521::pkcs8::{DecodePrivateKey as _, DecodePublicKey as _};
    use x509_parser::prelude::{FromDer as _, X509CertificationRequest};

    use super::*;

    #[test]
    fn every_key_signs_its_request_and_its_pem_is_of_the_same_key() {
        for (kind, algorithm) in [
            (KeyType::EcdsaP256, Some(&rcgen::PKCS_ECDSA_P256_SHA256)),
            (KeyType::EcdsaP384, Some(&rcgen::PKCS_ECDSA_P384_SHA384)),
            (KeyType::Ed25519, None),
            (KeyType::EcdsaP521, None),
            (KeyType::Rsa3072, Some(&rcgen::PKCS_RSA_SHA256)),
        ] {
            let key = generate(kind).unwrap();
            assert!(key.pem.starts_with("-----BEGIN PRIVATE KEY-----\n"), "{kind:?}");
            assert!(key.pem.ends_with("-----END PRIVATE KEY-----\n"), "{kind:?}");
            let (rest, request) = X509CertificationRequest::from_der(&key.request).unwrap();
            assert!(rest.is_empty());
            let info = &request.certification_request_info;
            assert_eq!((info.subject.iter().count(), info.attributes().len()), (0, 0), "{kind:?}");
            let public = info.subject_pki.raw;
            if kind == KeyType::EcdsaP521 {
                // ring does not know the curve.
                let read = p521::SecretKey::from_pkcs8_pem(&key.pem).unwrap().public_key();
                assert_eq!(read.to_public_key_der().unwrap().as_bytes(), public);
                let verifier = p521::ecdsa::VerifyingKey::from_public_key_der(public).unwrap();
                let signature = p521::ecdsa::DerSignature::try_from(&*request.signature_value.data).unwrap();
                verifier.verify(info.raw, &signature).unwrap();
                continue;
            }
            request.verify_signature().unwrap();
            if let Some(algorithm) = algorithm {
                let read = KeyPair::from_pkcs8_pem_and_sign_algo(&key.pem, algorithm).unwrap();
                assert_eq!(read.subject_public_key_info(), public, "{kind:?}");
            }
        }
    }

    #[test]
    fn an_ed25519_key_is_written_in_the_version_that_openssl_reads() {
        let ring = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let pem = ed25519_pem(ring.serialized_der()).unwrap();
        let text: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
        let der = keelson_kube_model::base64::decode(&text).unwrap();
        assert_eq!((der.len(), &der[..ED25519_KEY.len()]), (48, ED25519_KEY));
        assert_eq!(der[16..], ring.serialized_der()[16..48]);
        assert!(ed25519_pem(&[0; 48]).is_err());
    }

    #[test]
    fn lengths_are_encoded_in_the_shortest_form() {
        for (length, head) in [
            (0, vec![4, 0]),
            (127, vec![4, 127]),
            (128, vec![4, 0x81, 128]),
            (256, vec![4, 0x82, 1, 0]),
            (65_536, vec![4, 0x83, 1, 0, 0]),
        ] {
            assert_eq!(der(4, &vec![0; length])[..head.len()], head, "{length}");
        }
    }
}
