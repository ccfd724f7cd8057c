//! Rules for lists and maps with their own format.

use std::collections::BTreeSet;

use keelson_kube_model::Quantity;
use serde_json::Value;

use super::list_entry;
use crate::document::Reader;

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

pub(super) fn check(reader: &mut Reader<'_>) {
    cipher_suites(reader);
    curves(reader);
    reserved_memory(reader);
    qos_reserved(reader);
    by_priority(reader);
    vmodule(reader);
    allowlist(reader);
}

/// Checks each value of a list; reports a field that is not a list.
fn each(reader: &mut Reader<'_>, path: &str, check_entry: impl Fn(&Value) -> Result<(), String>) {
    let Some(value) = reader.peek(path) else { return };
    let Some(list) = value.as_array() else {
        reader.report(path, value, "this must be a list".to_owned());
        return;
    };
    for (index, value) in list.iter().enumerate() {
        if let Err(remedy) = check_entry(value) {
            let one = list_entry(reader, path, index, value);
            reader.report_entry(&one, remedy);
        }
    }
}

/// Whether Go knows a cipher suite of this name.
pub(crate) fn is_suite(name: &str) -> bool {
    CIPHER_SUITES.contains(&name)
}

fn cipher_suites(reader: &mut Reader<'_>) {
    each(reader, "tlsCipherSuites", |suite| match suite.as_str() {
        Some(name) if is_suite(name) => Ok(()),
        _ => Err("there is no such cipher suite; the names are those of Go, such as TLS_AES_128_GCM_SHA256"
            .to_owned()),
    });
}

fn curves(reader: &mut Reader<'_>) {
    const FIELD: &str = "tlsCurvePreferences";
    each(reader, FIELD, |curve| match curve.as_i64() {
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

fn reserved_memory(reader: &mut Reader<'_>) {
    const FIELD: &str = "reservedMemory";
    each(reader, FIELD, |node| {
        let limits = node.get("limits").and_then(Value::as_object).filter(|limits| !limits.is_empty());
        if node.get("numaNode").and_then(Value::as_i64).is_none_or(|node| node < 0) {
            return Err("numaNode must be the number of a NUMA node, from 0".to_owned());
        }
        let Some(limits) = limits else {
            return Err("limits must name memory or hugepages-<size>".to_owned());
        };
        for (kind, amount) in limits {
            let is_kind =
                kind == "memory" || kind.strip_prefix("hugepages-").is_some_and(|size| !size.is_empty());
            if !is_kind {
                return Err(format!(
                    "{kind} cannot be reserved; limits must name memory or hugepages-<size>"
                ));
            }
            let amount = amount.as_str().and_then(|text| Quantity::parse(text).ok());
            if amount.is_none_or(|amount| amount.is_zero() || amount.is_negative()) {
                return Err(format!("{kind} must be a quantity above 0, such as 1Gi"));
            }
        }
        Ok(())
    });
    let mut seen = BTreeSet::new();
    let nodes = reader.peek(FIELD).and_then(Value::as_array).cloned().unwrap_or_default();
    for (index, node) in nodes.iter().enumerate() {
        let number = node.get("numaNode").and_then(Value::as_i64);
        let kinds =
            node.get("limits").and_then(Value::as_object).into_iter().flat_map(|limits| limits.keys());
        for kind in kinds {
            if !seen.insert((number, kind.clone())) {
                let one = list_entry(reader, FIELD, index, node);
                reader.report_entry(&one, format!("{kind} of this node is listed twice"));
            }
        }
    }
}

/// `qosReserved`: the percentage of a QoS class's requests that lower classes cannot use.
fn qos_reserved(reader: &mut Reader<'_>) {
    let Some(map) = reader.map("qosReserved") else { return };
    for (key, text) in &map.value {
        let one = crate::reserved::entry(&map, key, text);
        let percent = text.strip_suffix('%').and_then(|text| text.parse::<u8>().ok());
        if key != "memory" {
            reader.refuse(&one, "only memory can be reserved by QoS class");
        } else if percent.is_none_or(|percent| percent > 100) {
            reader.refuse(&one, "this must be from 0% to 100%");
        }
    }
}

fn by_priority(reader: &mut Reader<'_>) {
    each(reader, "shutdownGracePeriodByPodPriority", |entry| {
        let number = |field: &str| entry.get(field).map_or(Some(0), Value::as_i64);
        match (number("priority"), number("shutdownGracePeriodSeconds")) {
            (Some(_), Some(seconds)) if seconds >= 0 => Ok(()),
            _ => Err("priority and shutdownGracePeriodSeconds must be whole numbers, the latter at least 0"
                .to_owned()),
        }
    });
}

fn vmodule(reader: &mut Reader<'_>) {
    const FIELD: &str = "logging.vmodule";
    each(reader, FIELD, |entry| {
        let pattern = entry.get("filePattern").and_then(Value::as_str).unwrap_or_default();
        let verbosity = entry.get("verbosity").map_or(Some(0), Value::as_i64);
        if pattern.is_empty() || pattern.contains(['=', ',']) {
            return Err("filePattern must be text without '=' and ','".to_owned());
        }
        match verbosity {
            Some(0..=super::I32_MAX) => Ok(()),
            _ => Err(format!("verbosity must be a whole number from 0 to {}", super::I32_MAX)),
        }
    });
    let is_json = reader.peek("logging.format").is_some_and(|format| format == "json");
    let entries = reader.peek(FIELD).filter(|list| list.as_array().is_some_and(|list| !list.is_empty()));
    if let Some(value) = entries.filter(|_| is_json) {
        reader.report(
            FIELD,
            value,
            "this applies to text only; remove it if logging.format is json".to_owned(),
        );
    }
}

/// `preloadedImagesVerificationAllowlist`: image names without tag and digest; `*` only as the last part.
fn allowlist(reader: &mut Reader<'_>) {
    let path = "preloadedImagesVerificationAllowlist";
    if reader.peek(path).is_some_and(|list| !list.is_array()) {
        // The reader of the field reports this.
        return;
    }
    each(reader, path, |pattern| {
        let Some(text) = pattern.as_str() else { return Ok(()) };
        let name = text.strip_suffix("/*").unwrap_or(text);
        let last = name.rsplit('/').next().unwrap_or_default();
        let is_tagged = name.contains('@') || (last.contains(':') && (name != last || text == name));
        if name.is_empty() || text.trim() != text || name.contains('*') || is_tagged {
            return Err(
                "this must be an image name without tag and digest, or one that ends in /*".to_owned()
            );
        }
        Ok(())
    });
}
