//! The cipher suites and key exchanges that a kubelet knows, and the check of their fields.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::reader::Reader;

/// The cipher suites that Go knows, including the insecure ones; two also have an older name.
const CIPHER_SUITES: &[&str] = &[
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];
/// P-256, P-384, P-521, X25519 and X25519MLKEM768 (the IANA TLS registry).
const CURVES: &[i64] = &[23, 24, 25, 29, 4588];

/// Checks `tlsCipherSuites` and `tlsCurvePreferences`.
pub(super) fn check(reader: &mut Reader<'_>) {
    cipher_suites(reader);
    curves(reader);
}

/// Whether Go knows a cipher suite of this name.
pub(super) fn is_suite(name: &str) -> bool {
    CIPHER_SUITES.contains(&name)
}

fn cipher_suites(reader: &mut Reader<'_>) {
    reader.check_entries("tlsCipherSuites", |suite| match suite.as_str() {
        Some(name) if is_suite(name) => Ok(()),
        _ => Err("there is no such cipher suite; the names are those of Go, such as TLS_AES_128_GCM_SHA256"
            .to_owned()),
    });
}

fn curves(reader: &mut Reader<'_>) {
    const FIELD: &str = "tlsCurvePreferences";
    reader.check_entries(FIELD, |curve| match curve.as_i64() {
        Some(id) if CURVES.contains(&id) => Ok(()),
        _ => Err(format!("this must be the number of a known curve: {CURVES:?}")),
    });
    let all: Vec<i64> = reader
        .peek(FIELD)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_i64)
        .collect();
    if all.iter().collect::<BTreeSet<_>>().len() < all.len()
        && let Some(value) = reader.peek(FIELD)
    {
        reader.report(FIELD, value, "each curve may be listed only once".to_owned());
    }
}
