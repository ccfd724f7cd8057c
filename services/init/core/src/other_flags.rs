//! The flags without a field in the KubeletConfiguration: checks, the node name and the node labels (node-and-api.md §1.4,
//! §1.5).

use crate::document::Sourced;
use crate::labels::{is_subdomain, parse_node_labels};
use crate::own_processes::{BOOT_ID, MACHINE_ID, VERSION};
use crate::resolve::{Level, Resolver, flag};

impl Resolver<'_> {
    /// Checks the flags without a field, and reports those that are not supported.
    pub(crate) fn check_other_flags(&mut self) {
        let mut unsupported_fields = Vec::new();
        for (name, text) in self.flags.others.iter().filter(|(_, text)| !text.is_empty()) {
            let given = Sourced {
                value: text.clone(),
                origin: "command line".to_owned(),
                field: format!("--{name}"),
            };
            match (*name, text.as_str()) {
                // These are handled elsewhere.
                ("kubeconfig" | "bootstrap-kubeconfig" | "cert-dir" | crate::node_ip::FLAG, _) => {}
                (VERSION | MACHINE_ID | BOOT_ID | "experimental-allocatable-ignore-eviction", _) => {}
                ("cloud-provider", "external") | ("lock-file" | "exit-on-lock-contention", _) => {}
                ("cloud-provider", name) => self.errors.push(given.error(format!(
                    "cloud provider {name:?} was specified, but built-in cloud providers are disabled. Please set \
                     --cloud-provider=external and migrate to an external cloud provider"
                ))),
                _ => unsupported_fields.push(format!("--{name}")),
            }
        }
        if !unsupported_fields.is_empty() {
            self.note(
                Level::Info,
                format!("these flags have no effect yet: {}", unsupported_fields.join(", ")),
            );
        }
        if self.flags.is_on("exit-on-lock-contention")
            && self.flags.others.get("lock-file").is_none_or(String::is_empty)
        {
            let given = Sourced {
                value: true,
                origin: "command line".to_owned(),
                field: "--exit-on-lock-contention".to_owned(),
            };
            self.errors.push(given.error(
                "cannot exit on lock file contention: no lock file specified; set one with --lock-file",
            ));
        }
    }

    /// Applies the name and the labels of the node.
    pub(crate) fn node_name_and_labels(&mut self) {
        let from_host = || Sourced {
            value: self.host.hostname.clone(),
            origin: String::new(),
            field: "host name".to_owned(),
        };
        let name = flag("--hostname-override", self.flags.hostname_override.as_ref())
            .filter(|name| !name.value.is_empty())
            .unwrap_or_else(from_host)
            .map(|name| name.trim().to_lowercase());
        if !is_subdomain(&name.value) {
            self.refuse(
                &name,
                "a node name has only lower-case letters, digits, '-' and '.'; set one with --hostname-override",
            );
        }
        self.set("nodeName", Some(name), |c, v| c.node_name = v);
        match parse_node_labels(&self.flags.node_labels) {
            Ok(labels) if labels.is_empty() => {}
            Ok(labels) => {
                let labels = Sourced { value: labels, origin: "--node-labels".into(), field: String::new() };
                self.set("resources.nodeLabels", Some(labels), |c, v| c.resources.node_labels = v);
            }
            Err(errors) => {
                let given = Sourced {
                    value: self.flags.node_labels.join(","),
                    origin: "command line".into(),
                    field: "--node-labels".into(),
                };
                self.errors.extend(errors.into_iter().map(|error| given.error(error)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::resolve::Flags;
    use crate::resolve::tests::{host, run};

    #[test]
    fn unsupported_flags_are_reported_and_invalid_ones_refused() {
        let with = |others: &[(&'static str, &str)]| {
            let others = others.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
            run(&Flags { others, ..Flags::default() }, None, None, &host())
        };
        let unheard = "housekeeping-interval";
        let notes =
            with(&[("cert-dir", "/pki"), (unheard, "5s"), ("cloud-provider", "external")]).unwrap().notes;
        assert!(with(&[("cloud-provider", "")]).is_ok());
        let locked = with(&[("lock-file", "/l"), ("exit-on-lock-contention", "true")]).unwrap().notes;
        assert!(locked.iter().all(|note| !note.text.contains("no effect yet")), "{locked:?}");
        assert!(with(&[("exit-on-lock-contention", "false")]).is_ok());
        assert!(with(&[("exit-on-lock-contention", "0,1")]).is_err());
        assert!(
            notes.iter().any(|note| note.text == format!("these flags have no effect yet: --{unheard}")),
            "{notes:?}"
        );
        for (others, expected) in [
            (
                &[("cloud-provider", "aws")][..],
                "cloud provider \"aws\" was specified, but built-in cloud providers are disabled. Please set \
                 --cloud-provider=external and migrate to an external cloud provider",
            ),
            (
                &[("exit-on-lock-contention", "true")],
                "cannot exit on lock file contention: no lock file specified",
            ),
        ] {
            let errors = with(others).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(expected), "{errors:?}");
        }
    }

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
