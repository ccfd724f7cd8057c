//! The name of the lock that ensures that one agent uses a container runtime.

use std::fmt::Write as _;

/// The file name of the lock of a runtime endpoint, for example `keelson-run-containerd-containerd.sock.lock`.
///
/// Different endpoints have different names: `/` becomes `-`, and a byte that would be ambiguous or is not allowed in a
/// file name becomes `%` and two hex digits.
pub fn endpoint_lock_name(endpoint: &str) -> String {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint).trim_start_matches('/');
    let mut name = String::from("keelson-");
    for byte in path.bytes() {
        match byte {
            b'/' => name.push('-'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' => name.push(char::from(byte)),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(name, "%{byte:02x}");
            }
        }
    }
    name.push_str(".lock");
    name
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_name_can_be_read_by_people() {
        assert_eq!(
            endpoint_lock_name("unix:///run/containerd/containerd.sock"),
            "keelson-run-containerd-containerd.sock.lock"
        );
    }

    #[test]
    fn different_endpoints_have_different_locks() {
        let reached = &Reached::default();
        let path = "/[a-c/%-]{1,8}x";
        proptest!(ProptestConfig::with_cases(1024), |(a in path, other in path, kin in 0..4)| {
            // Two paths of chance are hardly ever alike.
            let b = match kin {
                0 => format!("/{a}"),
                1 => format!("/{}", a[1..].replace('/', "-")),
                2 => a.replace('-', "%2d"),
                _ => other,
            };
            let plain = |s: &str| s.trim_start_matches('/').to_owned();
            let same = plain(&a) == plain(&b);
            prop_assert_eq!(same, endpoint_lock_name(&a) == endpoint_lock_name(&b));
            reached.case([
                ("the same endpoint", same),
                ("a hyphen for a slash", kin == 1 && !same),
                ("an escape for a hyphen", kin == 2 && !same),
                ("others", kin == 3 && !same),
            ]);
        });
        // The rarest: "a hyphen for a slash", in one case of 6.
        reached.assert_each();
    }
}
