//! The flags that no field of the KubeletConfiguration has: what is only checked, and what the node is called
//! (node-and-api.md §1.4, §1.5).

use crate::document::Sourced;
use crate::labels::{is_subdomain, parse_node_labels};
use crate::own_processes::{BOOT_ID, MACHINE_ID, VERSION};
use crate::resolve::{Level, Resolver, flag};

impl Resolver<'_> {
    /// The flags that no field has and that nothing else looks at.
    pub(crate) fn own_flags(&mut self) {
        let mut idle = Vec::new();
        for (name, text) in self.flags.others.iter().filter(|(_, text)| !text.is_empty()) {
            let given = Sourced {
                value: text.clone(),
                origin: "command line".to_owned(),
                field: format!("--{name}"),
            };
            match (*name, text.as_str()) {
                // The control plane is told of with the rest of it.
                ("kubeconfig" | "bootstrap-kubeconfig" | "cert-dir" | crate::node_ip::FLAG, _) => {}
                (VERSION | MACHINE_ID | BOOT_ID | "experimental-allocatable-ignore-eviction", _) => {}
                ("cloud-provider", "external") | ("lock-file" | "exit-on-lock-contention", _) => {}
                ("cloud-provider", name) => self.problems.push(given.problem(format!(
                    "cloud provider {name:?} was specified, but built-in cloud providers are disabled. Please set \
                     --cloud-provider=external and migrate to an external cloud provider"
                ))),
                _ => idle.push(format!("--{name}")),
            }
        }
        if !idle.is_empty() {
            self.note(Level::Info, format!("these flags are not acted on yet: {}", idle.join(", ")));
        }
        if self.flags.is_on("exit-on-lock-contention")
            && self.flags.others.get("lock-file").is_none_or(String::is_empty)
        {
            let given = Sourced {
                value: true,
                origin: "command line".to_owned(),
                field: "--exit-on-lock-contention".to_owned(),
            };
            self.problems.push(given.problem(
                "cannot exit on lock file contention: no lock file specified; name one with --lock-file",
            ));
        }
    }

    /// What the node is called, and the labels that it gives itself.
    pub(crate) fn node(&mut self) {
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
                "the name of a node is made of lower-case letters, digits, '-' and '.'; set one with --hostname-override",
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
                self.problems.extend(errors.into_iter().map(|error| given.problem(error)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::resolve::Flags;
    use crate::resolve::tests::{host, run};

    #[test]
    fn flags_that_nothing_acts_on_are_told_and_those_that_cannot_be_are_refused() {
        let with = |others: &[(&'static str, &str)]| {
            let others = others.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
            run(&Flags { others, ..Flags::default() }, None, None, &host())
        };
        let unheard = "housekeeping-interval";
        let notes =
            with(&[("cert-dir", "/pki"), (unheard, "5s"), ("cloud-provider", "external")]).unwrap().notes;
        assert!(with(&[("cloud-provider", "")]).is_ok());
        let locked = with(&[("lock-file", "/l"), ("exit-on-lock-contention", "true")]).unwrap().notes;
        assert!(locked.iter().all(|note| !note.text.contains("not acted on")), "{locked:?}");
        assert!(with(&[("exit-on-lock-contention", "false")]).is_ok());
        assert!(with(&[("exit-on-lock-contention", "0,1")]).is_err());
        assert!(
            notes.iter().any(|note| note.text == format!("these flags are not acted on yet: --{unheard}")),
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
    fn a_name_of_the_node_is_trimmed_and_lowered_and_an_empty_one_is_the_machines() {
        for (given, name) in [(None, "edge-1"), (Some(""), "edge-1"), (Some(" Node-A\n"), "node-a")] {
            let flags = Flags { hostname_override: given.map(ToOwned::to_owned), ..Flags::default() };
            let config = run(&flags, None, None, &host()).unwrap().config;
            assert_eq!(config.node_name, name, "{given:?}");
            assert_eq!(config.provenance.contains_key("nodeName"), name == "node-a");
        }
    }
}
