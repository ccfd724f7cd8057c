//! What pods of a source may use of the host, as the KeelsonConfiguration says it.

use keelson_config::{LIMITED_SOURCES, SourceLimit};

use crate::document::{Reader, Sourced};
use crate::resolve::Resolver;

/// The truths that the file sets, by source and limit.
#[derive(Debug, Default)]
pub(crate) struct SourceLimitsFile {
    set: Vec<(&'static str, String, Sourced<bool>)>,
}

impl SourceLimitsFile {
    /// Reads `sourceLimits`.
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let mut own = Self::default();
        if !reader.object("sourceLimits") {
            return own;
        }
        for source in LIMITED_SOURCES {
            let path = format!("sourceLimits.{source}");
            for truth in reader.booleans(&path) {
                let name = truth.field.strip_prefix(&format!("{path}.")).unwrap_or_default().to_owned();
                if SourceLimit::default().of(&name).is_none() {
                    let way_out = "there is no such limit; the limits are hostNetwork, hostPID, hostIPC, privileged, agentRunFolder";
                    reader.refuse(&truth, way_out);
                    continue;
                }
                own.set.push((source, name, truth));
            }
        }
        own
    }

    /// Takes them into the configuration.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>) {
        for (source, name, truth) in self.set {
            resolver.set(&format!("pods.sourceLimits.{source}.{name}"), Some(truth), |config, may| {
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

    use crate::resolve::Flags;
    use crate::resolve::tests::{host, keelson, run};

    #[test]
    fn each_source_has_its_limits_and_none_by_default() {
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
            let problems = of(fields.clone()).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(part), "{fields}: {problems:?}");
        }
    }
}
