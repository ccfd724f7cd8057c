//! `--node-ip`: the addresses of the node (node-and-api.md §9.2).

use std::net::IpAddr;

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};

const FLAG: &str = "node-ip";

/// Applies the flag, and whether a cloud controller manages the addresses.
pub(super) fn resolve(out: &mut Outcome<'_>) {
    let flags = out.flags;
    let others = &flags.others;
    let cloud =
        Sourced { value: true, origin: "--cloud-provider".to_owned(), field: "--cloud-provider".to_owned() };
    let cloud = flags.has_external_cloud_provider().then_some(cloud);
    out.set("nodeStatus.externalCloud", cloud, |c, v| c.node_status.external_cloud = v);
    let Some(text) = others.get(FLAG).filter(|text| !text.trim().is_empty()) else { return };
    let given = Sourced { value: text.clone(), origin: format!("--{FLAG}"), field: format!("--{FLAG}") };
    let (addresses, invalid) = parse(text);
    for part in invalid {
        // A kubelet ignores them too.
        out.note(Level::Warn, format!("--{FLAG}: {part:?} is not an IP address and is ignored"));
    }
    match check(&addresses) {
        Ok(()) => {
            out.set("nodeStatus.nodeIps", Some(given.map(|_| addresses)), |c, v| {
                c.node_status.node_ips = v;
            });
        }
        Err(why) => out.refuse(&given, format!("bad --node-ip {text:?}: {why}")),
    }
}

/// The addresses, and the parts that are not addresses.
fn parse(text: &str) -> (Vec<IpAddr>, Vec<&str>) {
    let (mut addresses, mut invalid) = (Vec::new(), Vec::new());
    for part in text.split(',').map(str::trim) {
        match part.parse() {
            Ok(address) => addresses.push(address),
            Err(_) => invalid.push(part),
        }
    }
    (addresses, invalid)
}

fn check(addresses: &[IpAddr]) -> Result<(), &'static str> {
    match addresses {
        [] | [_] => Ok(()),
        [one, other] if one.is_ipv4() == other.is_ipv4() => {
            Err("must contain either a single IP or a dual-stack pair of IPs")
        }
        [one, other] if one.is_unspecified() || other.is_unspecified() => {
            Err("dual-stack node IP cannot include '0.0.0.0' or '::'")
        }
        [_, _] => Ok(()),
        _ => Err("must contain either a single IP or a dual-stack pair of IPs"),
    }
}

#[cfg(test)]
mod tests {
    use crate::inputs::Flags;
    use crate::outcome::WITHOUT_EFFECT;
    use crate::resolve::Resolved;
    use crate::testing::{host, run};

    fn with(text: &str) -> Result<Resolved, Vec<String>> {
        let others = [("node-ip", text.to_owned())].into();
        run(&Flags { others, ..Flags::default() }, None, None, &host())
    }

    #[test]
    fn node_ip_takes_one_address_or_a_dual_stack_pair() {
        for (text, expected) in [
            ("", &[][..]),
            ("  ", &[]),
            ("10.0.0.1", &["10.0.0.1"]),
            (" fd00::1 , 10.0.0.1 ", &["fd00::1", "10.0.0.1"]),
            ("::", &["::"]),
            ("10.0.0.1,edge-1", &["10.0.0.1"]),
            ("edge-1", &[]),
        ] {
            let resolved = with(text).unwrap();
            let found: Vec<String> =
                resolved.config.node_status.node_ips.iter().map(ToString::to_string).collect();
            assert_eq!(found, expected, "{text}");
            let warned =
                resolved.notes.iter().any(|note| note.text.contains("\"edge-1\" is not an IP address"));
            assert_eq!(warned, text.contains("edge-1"), "{:?}", resolved.notes);
            assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{text}");
        }
    }

    #[test]
    fn invalid_node_ip_pairs_are_refused() {
        for (text, why) in [
            ("10.0.0.1,10.0.0.2", "must contain either a single IP or a dual-stack pair of IPs"),
            ("10.0.0.1,fd00::1,fd00::2", "must contain either a single IP or a dual-stack pair of IPs"),
            ("10.0.0.1,::", "dual-stack node IP cannot include '0.0.0.0' or '::'"),
            ("0.0.0.0,fd00::1", "dual-stack node IP cannot include '0.0.0.0' or '::'"),
        ] {
            let errors = with(text).unwrap_err();
            assert!(errors[0].contains(&format!("bad --node-ip {text:?}: {why}")), "{errors:?}");
        }
    }

    #[test]
    fn an_external_cloud_provider_is_recorded() {
        let others = [("cloud-provider", "external".to_owned())].into();
        let resolved = run(&Flags { others, ..Flags::default() }, None, None, &host()).unwrap();
        assert!(resolved.config.node_status.external_cloud);
        assert!(!with("10.0.0.1").unwrap().config.node_status.external_cloud);
    }
}
