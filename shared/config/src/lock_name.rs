//! The name of the lock that says which agent uses a container runtime.

use std::fmt::Write as _;

/// The file name of the lock of a runtime endpoint, for example `keelson-run-containerd-containerd.sock.lock`.
///
/// Different endpoints have different names: `/` becomes `-`, and a byte that would be mistaken for one or
/// does not belong into a file name becomes `%` and two digits.
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
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_name_can_be_read_by_people() {
        assert_eq!(
            endpoint_lock_name("unix:///run/containerd/containerd.sock"),
            "keelson-run-containerd-containerd.sock.lock"
        );
    }

    proptest! {
        #[test]
        fn different_endpoints_have_different_locks(a in "/[a-c/%-]{1,8}x", b in "/[a-c/%-]{1,8}x") {
            let plain = |s: &str| s.trim_start_matches('/').to_owned();
            prop_assert_eq!(plain(&a) == plain(&b), endpoint_lock_name(&a) == endpoint_lock_name(&b));
        }
    }
}
