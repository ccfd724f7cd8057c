//! The environment variables of services in containers (runtime-and-resources.md §3.4).

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Namespace of the API server's service, which all containers get.
const MASTER_NAMESPACE: &str = "default";
/// Name of that service.
const MASTER_SERVICE: &str = "kubernetes";

/// A port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Name of the port; may be empty.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The port of the service, not of its pods.
    pub port: u16,
}

/// What the variables of a service are made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// `spec.clusterIP`.
    pub address: String,
    /// At least one.
    pub ports: Vec<ServicePort>,
}

/// Services by namespace and name.
pub type Services = BTreeMap<(String, String), Service>;

/// Reads a Service object; `None` if it has no cluster IP (headless or ExternalName) or no ports.
pub fn service(object: &Value) -> Option<Service> {
    let spec = &object["spec"];
    let address = spec["clusterIP"].as_str().filter(|ip| !ip.is_empty() && *ip != "None")?.to_owned();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let port = |port: &Value| {
        let protocol = Some(text(&port["protocol"])).filter(|protocol| !protocol.is_empty());
        Some(ServicePort {
            name: text(&port["name"]),
            protocol: protocol.unwrap_or_else(|| "TCP".to_owned()),
            port: u16::try_from(port["port"].as_u64()?).ok()?,
        })
    };
    let ports: Vec<ServicePort> = spec["ports"].as_array().into_iter().flatten().filter_map(port).collect();
    (!ports.is_empty()).then_some(Service { address, ports })
}

/// The minimal object for the checkpoint, which [`service`] reads as the same service.
pub fn checkpoint_object(service: &Service) -> Value {
    let port = |p: &ServicePort| json!({"name": p.name, "protocol": p.protocol, "port": p.port});
    let ports: Vec<Value> = service.ports.iter().map(port).collect();
    json!({"spec": {"clusterIP": service.address, "ports": ports}})
}

/// The variables of a container in `namespace`: always those of `default/kubernetes`, and with `links` those of the services in
/// its namespace. A service named `kubernetes` in its namespace overrides the former.
pub fn variables(services: &Services, namespace: &str, links: bool) -> BTreeMap<String, String> {
    let mut chosen: BTreeMap<&str, &Service> = BTreeMap::new();
    let master = (MASTER_NAMESPACE.to_owned(), MASTER_SERVICE.to_owned());
    chosen.extend(services.get(&master).map(|service| (MASTER_SERVICE, service)));
    if links {
        let own = services.range((namespace.to_owned(), String::new())..);
        let own = own.take_while(|((of, _), _)| of == namespace);
        chosen.extend(own.map(|((_, name), service)| (name.as_str(), service)));
    }
    let mut found = BTreeMap::new();
    for (name, service) in chosen {
        add(&mut found, name, service);
    }
    found
}

fn add(found: &mut BTreeMap<String, String>, name: &str, service: &Service) {
    let (name, address) = (variable_name(name), &service.address);
    found.insert(format!("{name}_SERVICE_HOST"), address.clone());
    for (index, ServicePort { name: port_name, protocol, port }) in service.ports.iter().enumerate() {
        let scheme = protocol.to_ascii_lowercase();
        let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
        let url = format!("{scheme}://{host}:{port}");
        if index == 0 {
            found.insert(format!("{name}_SERVICE_PORT"), port.to_string());
            found.insert(format!("{name}_PORT"), url.clone());
        }
        if !port_name.is_empty() {
            found.insert(format!("{name}_SERVICE_PORT_{}", variable_name(port_name)), port.to_string());
        }
        let prefix = format!("{name}_PORT_{port}_{}", protocol.to_ascii_uppercase());
        found.insert(format!("{prefix}_PROTO"), scheme);
        found.insert(format!("{prefix}_PORT"), port.to_string());
        found.insert(format!("{prefix}_ADDR"), address.clone());
        found.insert(prefix, url);
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_ascii_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(list: &[(&str, &str, Value)]) -> Services {
        let one = |(namespace, name, spec): &(&str, &str, Value)| {
            let key = ((*namespace).to_owned(), (*name).to_owned());
            service(&json!({"spec": spec})).map(|service| (key, service))
        };
        list.iter().filter_map(one).collect()
    }

    fn spec(address: &str, port: u16) -> Value {
        json!({"clusterIP": address, "ports": [{"port": port}]})
    }

    fn hosts(found: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
        let hosts = found.iter().filter(|(name, _)| name.ends_with("_SERVICE_HOST"));
        hosts.map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn each_port_of_a_service_has_its_variables() {
        let ports = json!([{"name": "dns-udp", "protocol": "UDP", "port": 53}, {"name": "web", "port": 80}]);
        let services = all(&[("a", "kube-dns", json!({"clusterIP": "10.0.0.10", "ports": ports}))]);
        let found = variables(&services, "a", true);
        let expected = [
            ("KUBE_DNS_PORT", "udp://10.0.0.10:53"),
            ("KUBE_DNS_PORT_53_UDP", "udp://10.0.0.10:53"),
            ("KUBE_DNS_PORT_53_UDP_ADDR", "10.0.0.10"),
            ("KUBE_DNS_PORT_53_UDP_PORT", "53"),
            ("KUBE_DNS_PORT_53_UDP_PROTO", "udp"),
            ("KUBE_DNS_PORT_80_TCP", "tcp://10.0.0.10:80"),
            ("KUBE_DNS_PORT_80_TCP_ADDR", "10.0.0.10"),
            ("KUBE_DNS_PORT_80_TCP_PORT", "80"),
            ("KUBE_DNS_PORT_80_TCP_PROTO", "tcp"),
            ("KUBE_DNS_SERVICE_HOST", "10.0.0.10"),
            ("KUBE_DNS_SERVICE_PORT", "53"),
            ("KUBE_DNS_SERVICE_PORT_DNS_UDP", "53"),
            ("KUBE_DNS_SERVICE_PORT_WEB", "80"),
        ];
        let shown: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn service_env_always_has_the_api_server_and_with_links_the_namespaces_services() {
        let services = all(&[
            ("default", "kubernetes", spec("10.0.0.1", 443)),
            ("default", "other", spec("10.0.0.2", 1)),
            ("a", "db", spec("10.0.0.3", 1)),
            ("ab", "far", spec("10.0.0.4", 1)),
        ]);
        let master = ("KUBERNETES_SERVICE_HOST", "10.0.0.1");
        for (namespace, links, expected) in [
            ("a", false, vec![master]),
            ("a", true, vec![("DB_SERVICE_HOST", "10.0.0.3"), master]),
            ("default", false, vec![master]),
            ("default", true, vec![master, ("OTHER_SERVICE_HOST", "10.0.0.2")]),
            ("none", true, vec![master]),
        ] {
            assert_eq!(hosts(&variables(&services, namespace, links)), expected, "{namespace} {links}");
        }
        assert!(variables(&Services::new(), "a", true).is_empty());
    }

    #[test]
    fn a_service_named_kubernetes_in_the_pods_namespace_overrides_the_api_server() {
        let services = all(&[
            ("default", "kubernetes", spec("10.0.0.1", 443)),
            ("a", "kubernetes", spec("10.0.0.9", 1)),
        ]);
        for (links, address) in [(true, "10.0.0.9"), (false, "10.0.0.1")] {
            assert_eq!(variables(&services, "a", links)["KUBERNETES_SERVICE_HOST"], address);
        }
    }

    #[test]
    fn a_service_without_an_address_or_a_port_is_left_out() {
        for spec in [
            spec("None", 1),
            spec("", 1),
            json!({"type": "ExternalName", "externalName": "x"}),
            json!({"clusterIP": "10.0.0.1", "ports": null}),
            json!({"clusterIP": "10.0.0.1", "ports": [{"port": 70_000}]}),
        ] {
            assert_eq!(service(&json!({"spec": spec})), None, "{spec}");
        }
    }

    #[test]
    fn an_ipv6_service_address_has_brackets_only_in_urls() {
        let found = variables(&all(&[("a", "s", spec("fd00::1", 80))]), "a", true);
        assert_eq!(
            (found["S_PORT"].as_str(), found["S_SERVICE_HOST"].as_str()),
            ("tcp://[fd00::1]:80", "fd00::1")
        );
    }

    #[test]
    fn the_checkpoint_object_of_a_service_reads_as_the_same_service() {
        let ports = json!([{"name": "a", "protocol": "SCTP", "port": 1}, {"port": 2}]);
        let service_ = service(&json!({"spec": {"clusterIP": "10.0.0.1", "ports": ports}}));
        assert_eq!(service_.as_ref().and_then(|one| service(&checkpoint_object(one))), service_);
        assert!(service_.is_some());
    }
}
