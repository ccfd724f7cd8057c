//! TLS versions, cipher suites and key exchanges of the kubelet API (node-and-api.md §2.5, §6.2).

use keelson_config::{CipherSuite, KeyExchange};
use serde_json::Value;

use super::known_tls::is_suite;
use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::reader::Reader;

const TLS12: &str = "VersionTLS12";
pub(super) const TLS13: &str = "VersionTLS13";

/// A list; [`super::known_tls::check`] reports a value that is not one.
pub(super) fn list<T>(
    reader: &mut Reader<'_>,
    field: &str,
    of: impl Fn(&Value) -> Option<T>,
) -> Option<Sourced<Vec<T>>> {
    let value = reader.get(field)?.as_array()?.iter().map(of).collect::<Option<Vec<T>>>()?;
    Some(Sourced { value, origin: reader.origin(field), field: field.to_owned() })
}

/// Refuses an unsupported minimum version of TLS (node-and-api.md §2.5): a node that asks for it has clients that could not
/// connect.
pub(super) fn refuse_old_version(out: &mut Outcome<'_>, version: Option<&Sourced<String>>) {
    let is_old =
        |version: &&Sourced<String>| ["VersionTLS10", "VersionTLS11"].contains(&version.value.as_str());
    if let Some(version) = version.filter(is_old) {
        out.refuse(
            version,
            format!("TLS 1.0 and 1.1 are not supported; write {TLS12}, which is the default, or {TLS13}"),
        );
    }
}

/// The enabled cipher suites. Refuses a suite that a kubelet supports and the agent does not, and lists the supported ones:
/// if it were ignored, clients that have no other suite could not connect.
pub(super) fn supported_suites(
    out: &mut Outcome<'_>,
    names: Option<Sourced<Vec<String>>>,
) -> Option<Sourced<Vec<CipherSuite>>> {
    let names = names?;
    let is_refused = |name: &&str| CipherSuite::named(name).is_none() && is_suite(name);
    let refused: Vec<&str> = names.value.iter().map(String::as_str).filter(is_refused).collect();
    if refused.is_empty() {
        return Some(names.map(|names| names.iter().filter_map(|name| CipherSuite::named(name)).collect()));
    }
    let possible = CipherSuite::ALL.map(CipherSuite::name).join(", ");
    let remedy = format!("{} are not supported; supported are {possible}", refused.join(", "));
    out.refuse(&names, remedy);
    None
}

/// The enabled key exchanges; unsupported ones are refused as [`supported_suites`] does.
pub(super) fn supported_key_exchanges(
    out: &mut Outcome<'_>,
    numbers: Option<Sourced<Vec<i64>>>,
) -> Option<Sourced<Vec<KeyExchange>>> {
    let numbers = numbers?;
    let name = |number: &i64| match number {
        25 => Some("P-521 (25)"),
        4588 => Some("X25519MLKEM768 (4588)"),
        _ => None,
    };
    let refused: Vec<&str> = numbers.value.iter().filter_map(name).collect();
    if refused.is_empty() {
        let known = |numbers: Vec<i64>| numbers.into_iter().filter_map(KeyExchange::numbered).collect();
        return Some(numbers.map(known));
    }
    let possible = KeyExchange::ALL.map(|known| format!("{} ({})", known.number(), known.name())).join(", ");
    let remedy = format!("{} are not supported; supported are {possible}", refused.join(", "));
    out.refuse(&numbers, remedy);
    None
}

/// Warns if no suite of TLS 1.2 works with the self-signed certificate, which has an ECDSA key.
pub(super) fn warn_about_rsa_only_suites(out: &mut Outcome<'_>, suites: &Sourced<Vec<CipherSuite>>) {
    let (tls12, ecdsa) =
        (suites.value.iter().any(|s| !s.is_tls13()), suites.value.iter().any(|s| s.is_ecdsa()));
    if tls12 && !ecdsa {
        out.note(
            Level::Warn,
            format!(
                "tlsCipherSuites ({}) has only suites for RSA certificates for TLS 1.2, and the self-signed certificate of \
                 the agent has an ECDSA key: clients that use TLS 1.2 cannot connect; name a suite \
                 with ECDSA, or set tlsCertFile",
                suites.origin
            ),
        );
    }
}
