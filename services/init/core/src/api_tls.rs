//! Which versions, suites and ways to agree on keys the kubelet API speaks over TLS (node-and-api.md §2.5, §6.2).

use keelson_config::{CipherSuite, KeyExchange};
use serde_json::Value;

use crate::document::{Reader, Sourced};
use crate::resolve::{Level, Resolver};
use crate::rules;

const TLS12: &str = "VersionTLS12";
pub(crate) const TLS13: &str = "VersionTLS13";

/// `tlsMinVersion`; empty text is the default, and what is no version is told with the other rules.
pub(crate) fn min_version(reader: &mut Reader<'_>) -> Option<Sourced<String>> {
    const FIELD: &str = "tlsMinVersion";
    let value = reader.get(FIELD)?.as_str().filter(|version| !version.is_empty())?.to_owned();
    Some(Sourced { value, origin: reader.origin(FIELD), field: FIELD.to_owned() })
}

/// A list; what is none is told with the rules of lists.
pub(crate) fn list<T>(
    reader: &mut Reader<'_>,
    field: &str,
    of: impl Fn(&Value) -> Option<T>,
) -> Option<Sourced<Vec<T>>> {
    let value = reader.get(field)?.as_array()?.iter().map(of).collect::<Option<Vec<T>>>()?;
    Some(Sourced { value, origin: reader.origin(field), field: field.to_owned() })
}

/// Refuses a lowest version of TLS that is not spoken (node-and-api.md §2.5): who asks for it has clients that could not
/// connect.
pub(crate) fn refuse_old_version(resolver: &mut Resolver<'_>, version: Option<&Sourced<String>>) {
    let is_old =
        |version: &&Sourced<String>| ["VersionTLS10", "VersionTLS11"].contains(&version.value.as_str());
    if let Some(version) = version.filter(is_old) {
        resolver.refuse(
            version,
            format!("TLS 1.0 and 1.1 are not spoken here; write {TLS12}, which is the default, or {TLS13}"),
        );
    }
}

/// The suites that may be spoken. One that a kubelet knows and that is not spoken here is refused with those that are: left out in
/// silence it would be missed by the clients that have no other.
pub(crate) fn spoken_suites(
    resolver: &mut Resolver<'_>,
    names: Option<Sourced<Vec<String>>>,
) -> Option<Sourced<Vec<CipherSuite>>> {
    let names = names?;
    let is_refused = |name: &&str| CipherSuite::named(name).is_none() && rules::is_suite(name);
    let refused: Vec<&str> = names.value.iter().map(String::as_str).filter(is_refused).collect();
    if refused.is_empty() {
        return Some(names.map(|names| names.iter().filter_map(|name| CipherSuite::named(name)).collect()));
    }
    let possible = CipherSuite::ALL.map(CipherSuite::name).join(", ");
    let way_out = format!("{} cannot be spoken here; possible are {possible}", refused.join(", "));
    resolver.refuse(&names, way_out);
    None
}

/// The ways in which keys may be agreed on, in the same manner.
pub(crate) fn spoken_curves(
    resolver: &mut Resolver<'_>,
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
    let way_out = format!("{} cannot be spoken here; possible are {possible}", refused.join(", "));
    resolver.refuse(&numbers, way_out);
    None
}

/// The certificate that the agent signs itself goes with none of the suites of RSA.
pub(crate) fn warn_of_suites(resolver: &mut Resolver<'_>, suites: &Sourced<Vec<CipherSuite>>) {
    let (tls12, ecdsa) =
        (suites.value.iter().any(|s| !s.is_tls13()), suites.value.iter().any(|s| s.is_ecdsa()));
    if tls12 && !ecdsa {
        resolver.note(
            Level::Warn,
            format!(
                "tlsCipherSuites ({}) has suites of TLS 1.2 for RSA certificates alone, and the certificate that \
                 the agent signs itself has an elliptic curve: clients of TLS 1.2 cannot connect; name a suite \
                 with ECDSA, or set tlsCertFile",
                suites.origin
            ),
        );
    }
}
