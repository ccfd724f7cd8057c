//! Portals: addresses at which a target is reached (volumes.md §10.4).

/// The port of a portal that does not name one.
const DEFAULT_PORT: &str = ":3260";

/// The portal with its port. An IPv6 address has to be in brackets; without them its last group would be taken for the
/// port, so it stays as it is.
///
/// Parity: the kubelet adds no port to an IPv6 address in brackets, and then never finds its session.
pub fn with_port(portal: &str) -> String {
    if portal.contains(':') && !portal.ends_with(']') {
        portal.to_owned()
    } else {
        format!("{portal}{DEFAULT_PORT}")
    }
}

/// Every portal of a target with its port, the first one first, each once. Empty ones are dropped.
pub fn all<'p>(portals: impl IntoIterator<Item = &'p str>) -> Vec<String> {
    let mut all = Vec::new();
    for portal in portals.into_iter().filter(|portal| !portal.is_empty()) {
        let portal = with_port(portal);
        if !all.contains(&portal) {
            all.push(portal);
        }
    }
    all
}

/// How sysfs and udev may write a portal: as it is, or without the brackets of an IPv6 address.
pub fn kernel_spellings(portal: &str) -> Vec<String> {
    let mut spellings = vec![portal.to_owned()];
    if let Some((address, rest)) = portal.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        spellings.push(format!("{address}{rest}"));
    }
    spellings
}

/// How an API object may write a portal that has its port: as it is, or without the default port.
pub fn api_spellings(portal: &str) -> Vec<String> {
    let mut spellings = vec![portal.to_owned()];
    if let Some(short) = portal.strip_suffix(DEFAULT_PORT).filter(|short| with_port(short) == portal) {
        spellings.push(short.to_owned());
    }
    spellings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_portal_without_a_port_gets_the_default_one() {
        for (portal, expected) in [
            ("10.0.0.1", "10.0.0.1:3260"),
            ("10.0.0.1:3261", "10.0.0.1:3261"),
            ("san.example.com", "san.example.com:3260"),
            ("[fd00::1]", "[fd00::1]:3260"),
            ("[fd00::1]:860", "[fd00::1]:860"),
            ("fd00::1", "fd00::1"),
        ] {
            assert_eq!(with_port(portal), expected);
        }
    }

    #[test]
    fn portals_keep_their_order_and_lose_duplicates_and_empty_ones() {
        let portals = all(["10.0.0.2", "", "10.0.0.1", "10.0.0.2:3260", "10.0.0.1:1"]);
        assert_eq!(portals, ["10.0.0.2:3260", "10.0.0.1:3260", "10.0.0.1:1"]);
        assert!(all(["", ""]).is_empty());
    }

    #[test]
    fn the_kernel_may_write_an_ipv6_portal_without_brackets() {
        assert_eq!(kernel_spellings("10.0.0.1:3260"), ["10.0.0.1:3260"]);
        assert_eq!(kernel_spellings("[fd00::1]:3260"), ["[fd00::1]:3260", "fd00::1:3260"]);
    }

    #[test]
    fn an_api_object_may_leave_out_only_the_default_port() {
        assert_eq!(api_spellings("10.0.0.1:3260"), ["10.0.0.1:3260", "10.0.0.1"]);
        assert_eq!(api_spellings("[fd00::1]:3260"), ["[fd00::1]:3260", "[fd00::1]"]);
        assert_eq!(api_spellings("10.0.0.1:860"), ["10.0.0.1:860"]);
        assert_eq!(api_spellings("fd00::3260"), ["fd00::3260"]);
    }
}
