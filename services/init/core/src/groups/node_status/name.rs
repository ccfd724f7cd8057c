//! The name and the labels of the node (node-and-api.md §1.4, §1.5).

use super::labels::parse_node_labels;
use crate::document::Sourced;
use crate::inputs::given;
use crate::names::is_subdomain;
use crate::outcome::Outcome;

/// Applies the name and the labels of the node.
pub(super) fn resolve(out: &mut Outcome<'_>) {
    let from_host =
        || Sourced { value: out.host.hostname.clone(), origin: String::new(), field: "host name".to_owned() };
    let name = given("--hostname-override", out.flags.hostname_override.as_ref())
        .filter(|name| !name.value.is_empty())
        .unwrap_or_else(from_host)
        .map(|name| name.trim().to_lowercase());
    if !is_subdomain(&name.value) {
        out.refuse(
            &name,
            "a node name has only lower-case letters, digits, '-' and '.'; set one with --hostname-override",
        );
    }
    out.set("nodeName", Some(name), |c, v| c.node_name = v);
    match parse_node_labels(&out.flags.node_labels) {
        Ok(labels) if labels.is_empty() => {}
        Ok(labels) => {
            let labels = Sourced { value: labels, origin: "--node-labels".into(), field: String::new() };
            out.set("resources.nodeLabels", Some(labels), |c, v| c.resources.node_labels = v);
        }
        Err(errors) => {
            let given = Sourced {
                value: out.flags.node_labels.join(","),
                origin: "command line".into(),
                field: "--node-labels".into(),
            };
            out.errors.extend(errors.into_iter().map(|error| given.error(error)));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::inputs::Flags;
    use crate::testing::{host, run};

    #[test]
    fn node_name_is_trimmed_and_lowercased_and_defaults_to_the_host_name() {
        for (given, name) in [(None, "edge-1"), (Some(""), "edge-1"), (Some(" Node-A\n"), "node-a")] {
            let flags = Flags { hostname_override: given.map(ToOwned::to_owned), ..Flags::default() };
            let config = run(&flags, None, None, &host()).unwrap().config;
            assert_eq!(config.node_name, name, "{given:?}");
            assert_eq!(config.provenance.contains_key("nodeName"), name == "node-a");
        }
    }
}
