//! The flags that no other group reads: checks, and which have no effect (node-and-api.md §1.4).

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};

/// These flags have no fields.
#[derive(Debug)]
pub(crate) struct OtherFlags;

impl Settings for OtherFlags {
    fn read(_files: &mut Files<'_>) -> Self {
        Self
    }

    /// Checks the flags without a field, and reports those that are not supported.
    fn resolve(self, out: &mut Outcome<'_>) {
        let mut unsupported_fields = Vec::new();
        for (name, text) in out.flags.others.iter().filter(|(_, text)| !text.is_empty()) {
            let given = Sourced {
                value: text.clone(),
                origin: "command line".to_owned(),
                field: format!("--{name}"),
            };
            match (*name, text.as_str()) {
                // These are handled elsewhere.
                ("kubeconfig" | "bootstrap-kubeconfig" | "cert-dir" | "node-ip" | "version", _) => {}
                ("machine-id-file" | "boot-id-file" | "experimental-allocatable-ignore-eviction", _) => {}
                ("cloud-provider", "external") | ("lock-file" | "exit-on-lock-contention", _) => {}
                ("cloud-provider", name) => out.errors.push(given.error(format!(
                    "cloud provider {name:?} was specified, but built-in cloud providers are disabled. Please set \
                     --cloud-provider=external and migrate to an external cloud provider"
                ))),
                _ => unsupported_fields.push(format!("--{name}")),
            }
        }
        if !unsupported_fields.is_empty() {
            let list = unsupported_fields.join(", ");
            out.note_without_effect(format!("these flags have no effect yet: {list}"));
        }
        if out.flags.is_on("exit-on-lock-contention")
            && out.flags.others.get("lock-file").is_none_or(String::is_empty)
        {
            let given = Sourced {
                value: true,
                origin: "command line".to_owned(),
                field: "--exit-on-lock-contention".to_owned(),
            };
            out.errors.push(given.error(
                "cannot exit on lock file contention: no lock file specified; set one with --lock-file",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::inputs::Flags;
    use crate::outcome::WITHOUT_EFFECT;
    use crate::testing::{host, run};

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
        assert!(locked.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{locked:?}");
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
}
