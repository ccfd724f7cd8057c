//! The access to the host that pods of each source have, from the KeelsonConfiguration.

use keelson_config::{LIMITED_SOURCES, SourceLimit};

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The limits that the file sets: source, name and value.
#[derive(Debug, Default)]
pub(super) struct SourceLimits {
    set: Vec<(&'static str, String, Sourced<bool>)>,
}

impl SourceLimits {
    /// Reads `sourceLimits`.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let mut own = Self::default();
        if !reader.object("sourceLimits") {
            return own;
        }
        for source in LIMITED_SOURCES {
            let path = format!("sourceLimits.{source}");
            for truth in reader.booleans(&path) {
                let name = truth.field.strip_prefix(&format!("{path}.")).unwrap_or_default().to_owned();
                if SourceLimit::default().of(&name).is_none() {
                    let remedy = "there is no such limit; the limits are hostNetwork, hostPID, hostIPC, privileged, agentRunFolder";
                    reader.refuse(&truth, remedy);
                    continue;
                }
                own.set.push((source, name, truth));
            }
        }
        own
    }

    /// Applies the limits to the configuration.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        for (source, name, truth) in self.set {
            out.set(&format!("pods.sourceLimits.{source}.{name}"), Some(truth), |config, may| {
                let limit = config.pods.source_limits.entry(source.to_owned()).or_default();
                if let Some(place) = limit.of(&name) {
                    *place = may;
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::SourceLimit;
    use serde_json::json;

    use crate::inputs::Flags;
    use crate::testing::{host, keelson, run};

    #[test]
    fn source_limits_are_applied_per_source() {
        let of = |fields: serde_json::Value| {
            run(&Flags::default(), None, Some(&keelson(fields)), &host()).map(|resolved| resolved.config)
        };
        assert!(of(json!({})).unwrap().pods.source_limits.is_empty());
        let config =
            of(json!({"sourceLimits": {"http": {"hostPID": false, "privileged": false}, "api": {"hostNetwork": true}}}))
                .unwrap();
        let limits = &config.pods.source_limits;
        let http = SourceLimit { host_pid: false, privileged: false, ..SourceLimit::default() };
        assert_eq!((limits.get("http"), limits.get("api")), (Some(&http), Some(&SourceLimit::default())));
        assert_eq!(limits.get("file"), None);
        assert!(config.provenance.contains_key("pods.sourceLimits.http.hostPID"), "{:?}", config.provenance);
        for (fields, part) in [
            (json!({"sourceLimits": {"url": {"hostPID": false}}}), "there is no such field"),
            (json!({"sourceLimits": {"http": {"hostPid": false}}}), "there is no such limit"),
            (json!({"sourceLimits": {"http": {"hostPID": "no"}}}), "true or false"),
            (json!({"sourceLimits": {"http": false}}), "this must be a map"),
            (json!({"sourceLimits": []}), "this must be a map"),
        ] {
            let errors = of(fields.clone()).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(part), "{fields}: {errors:?}");
        }
    }
}
