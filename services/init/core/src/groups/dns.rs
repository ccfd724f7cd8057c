//! DNS of pods, from the KubeletConfiguration (node-and-api.md §2.5).

use std::net::IpAddr;

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Dns {
    servers: Option<Sourced<Vec<String>>>,
    domain: Option<Sourced<String>>,
    resolv_conf: Option<Sourced<String>>,
}

impl Settings for Dns {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            servers: reader.strings("clusterDNS"),
            domain: reader.text_field("clusterDomain"),
            resolv_conf: reader.path_field("resolvConf"),
        }
    }

    fn resolve(mut self, out: &mut Outcome<'_>) {
        if let Some(servers) = &mut self.servers {
            servers.value.retain(|text| {
                let is_address = text.parse::<IpAddr>().is_ok();
                if !is_address {
                    let origin = &servers.origin;
                    let text = format!("clusterDNS {text:?} ({origin}) is not an IP address and is ignored");
                    out.note(Level::Warn, text);
                }
                is_address
            });
        }
        out.set_field(self.servers, |c, v| c.runtime.cluster_dns = v);
        out.set_field(self.domain, |c, v| c.runtime.cluster_domain = v);
        out.set_field(self.resolv_conf, |c, v| c.runtime.resolv_conf = v);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::inputs::Flags;
    use crate::testing::{host, kubelet, run};

    #[test]
    fn invalid_cluster_dns_servers_are_ignored_with_a_warning() {
        let file = kubelet(json!({"clusterDNS": ["10.0.0.10", "dns", "fd00::a"]}));
        let resolved = run(&Flags::default(), Some(&file), None, &host()).unwrap();
        assert_eq!(resolved.config.runtime.cluster_dns, ["10.0.0.10", "fd00::a"]);
        assert!(resolved.notes.iter().any(|n| n.text.contains("\"dns\" (kubelet.yaml:3)")));
    }
}
