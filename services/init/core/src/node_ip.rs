//! `--node-ip`: the addresses of the node (node-and-api.md §9.2).

use std::net::IpAddr;

use crate::document::Sourced;
use crate::resolve::{Flags, Level, Resolver};

pub(crate) const FLAG: &str = "node-ip";
const CLOUD: &str = "cloud-provider";

/// Takes the flag, and whether a controller of a cloud sees to the addresses.
pub(crate) fn resolve(resolver: &mut Resolver<'_>) {
    let flags = resolver.flags;
    let others = &flags.others;
    let cloud = Sourced { value: true, origin: format!("--{CLOUD}"), field: format!("--{CLOUD}") };
    let cloud = is_in_a_cloud(flags).then_some(cloud);
    resolver.set("nodeStatus.externalCloud", cloud, |c, v| c.node_status.external_cloud = v);
    let Some(text) = others.get(FLAG).filter(|text| !text.trim().is_empty()) else { return };
    let given = Sourced { value: text.clone(), origin: format!("--{FLAG}"), field: format!("--{FLAG}") };
    let (addresses, strange) = parse(text);
    for part in strange {
        // As a kubelet does.
        resolver.note(Level::Warn, format!("--{FLAG}: {part:?} is no address; it is ignored"));
    }
    match check(&addresses) {
        Ok(()) => {
            resolver.set("nodeStatus.nodeIps", Some(given.map(|_| addresses)), |c, v| {
                c.node_status.node_ips = v;
            });
        }
        Err(why) => resolver.refuse(&given, format!("bad --node-ip {text:?}: {why}")),
    }
}

/// Whether a controller of a cloud sees to the node (`--cloud-provider=external`).
pub(crate) fn is_in_a_cloud(flags: &Flags) -> bool {
    flags.others.get(CLOUD).is_some_and(|name| name == "external")
}

/// The addresses, and what is none.
fn parse(text: &str) -> (Vec<IpAddr>, Vec<&str>) {
    let (mut addresses, mut strange) = (Vec::new(), Vec::new());
    for part in text.split(',').map(str::trim) {
        match part.parse() {
            Ok(address) => addresses.push(address),
            Err(_) => strange.push(part),
        }
    }
    (addresses, strange)
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
    use crate::resolve::tests::{host, run};
    use crate::resolve::{Flags, Resolved};

    fn with(text: &str) -> Result<Resolved, Vec<String>> {
        let others = [("node-ip", text.to_owned())].into();
        run(&Flags { others, ..Flags::default() }, None, None, &host())
    }

    #[test]
    fn one_address_or_one_of_each_family_in_their_order() {
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
            let told = resolved.notes.iter().any(|note| note.text.contains("\"edge-1\" is no address"));
            assert_eq!(told, text.contains("edge-1"), "{:?}", resolved.notes);
            assert!(resolved.notes.iter().all(|note| !note.text.contains("not acted on")), "{text}");
        }
    }

    #[test]
    fn three_two_of_one_family_and_a_pair_with_any_address_are_refused() {
        for (text, why) in [
            ("10.0.0.1,10.0.0.2", "must contain either a single IP or a dual-stack pair of IPs"),
            ("10.0.0.1,fd00::1,fd00::2", "must contain either a single IP or a dual-stack pair of IPs"),
            ("10.0.0.1,::", "dual-stack node IP cannot include '0.0.0.0' or '::'"),
            ("0.0.0.0,fd00::1", "dual-stack node IP cannot include '0.0.0.0' or '::'"),
        ] {
            let problems = with(text).unwrap_err();
            assert!(problems[0].contains(&format!("bad --node-ip {text:?}: {why}")), "{problems:?}");
        }
    }

    #[test]
    fn a_cloud_that_sees_to_the_node_is_known() {
        let others = [("cloud-provider", "external".to_owned())].into();
        let resolved = run(&Flags { others, ..Flags::default() }, None, None, &host()).unwrap();
        assert!(resolved.config.node_status.external_cloud);
        assert!(!with("10.0.0.1").unwrap().config.node_status.external_cloud);
    }
}
