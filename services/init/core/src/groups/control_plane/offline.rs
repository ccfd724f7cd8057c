//! Which pods may start after a reboot without the control plane, from the KeelsonConfiguration (architecture §5).

use std::time::Duration;

use keelson_config::StartAfterReboot;

use crate::document::Sourced;
use crate::durations::{YEAR, millis};
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(super) struct Offline {
    start: Option<Sourced<String>>,
    max_age: Option<Sourced<Duration>>,
}

impl Offline {
    /// Reads `offline`.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        if !reader.object("offline") {
            return Self::default();
        }
        Self {
            start: reader.choice("offline.startAfterReboot", &StartAfterReboot::WORDS),
            max_age: reader.duration("offline.maxAge", Duration::ZERO..=YEAR),
        }
    }

    /// Applies the fields to the configuration.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        out.set("offline.startAfterReboot", self.start, |config, word| {
            config.offline.start_after_reboot = StartAfterReboot::parse(&word).unwrap_or_default();
        });
        out.set("offline.maxAgeMs", self.max_age, |config, age| config.offline.max_age_ms = millis(age));
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Offline, StartAfterReboot};
    use serde_json::json;

    use crate::inputs::Flags;
    use crate::testing::{host, keelson, run};

    #[test]
    fn offline_start_settings_are_applied() {
        let of = |fields: serde_json::Value| {
            run(&Flags::default(), None, Some(&keelson(fields)), &host()).map(|resolved| resolved.config)
        };
        let default = Offline { start_after_reboot: StartAfterReboot::Stateless, max_age_ms: 259_200_000 };
        assert_eq!(of(json!({})).unwrap().offline, default);
        for (word, start) in [
            ("never", StartAfterReboot::Never),
            ("stateless", StartAfterReboot::Stateless),
            ("all", StartAfterReboot::All),
        ] {
            let config = of(json!({"offline": {"startAfterReboot": word, "maxAge": "1h30m"}})).unwrap();
            assert_eq!(config.offline, Offline { start_after_reboot: start, max_age_ms: 5_400_000 });
            assert!(config.provenance.contains_key("offline.startAfterReboot"), "{:?}", config.provenance);
            assert!(config.provenance.contains_key("offline.maxAgeMs"), "{:?}", config.provenance);
        }
        let limitless = of(json!({"offline": {"maxAge": "0"}})).unwrap().offline;
        assert_eq!(limitless, Offline { max_age_ms: 0, ..default });
        for (fields, part) in [
            (json!({"startAfterReboot": "always"}), "one of: never, stateless, all"),
            (json!({"maxAge": "soon"}), "this is not a duration"),
            (json!({"maxAge": "-1h"}), "offline.maxAge"),
            (json!({"maxage": "1h"}), "there is no such field"),
        ] {
            let errors = of(json!({"offline": fields})).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(part), "{errors:?}");
        }
    }
}
