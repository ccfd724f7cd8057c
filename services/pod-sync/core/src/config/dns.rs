//! DNS configuration of a sandbox (§2.3).

use keelson_kube_model::Pod;

use super::ConfigWarning;

/// The most name servers that a resolver uses.
const MAX_NAMESERVERS: usize = 3;
/// The most search paths.
const MAX_SEARCHES: usize = 32;
/// Search paths that a cluster domain adds.
const CLUSTER_SEARCHES: usize = 3;
/// Longest search path.
const MAX_SEARCH_LENGTH: usize = 253;
/// Longest line of search paths.
const MAX_SEARCH_LINE: usize = 2048;

/// A parsed resolv.conf, or an empty one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvConf {
    /// Servers in order.
    pub nameservers: Vec<String>,
    /// Search paths in order.
    pub searches: Vec<String>,
    /// Options in order.
    pub options: Vec<String>,
}

/// CRI `DNSConfig`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsSpec {
    /// Servers in order.
    pub servers: Vec<String>,
    /// Search paths in order.
    pub searches: Vec<String>,
    /// Options in order.
    pub options: Vec<String>,
}

/// DNS configuration of the node and the cluster.
#[derive(Clone, Copy, Debug, Default)]
pub struct DnsInputs<'a> {
    /// `clusterDNS`.
    pub cluster_dns: &'a [String],
    /// `clusterDomain`, or empty.
    pub cluster_domain: &'a str,
    /// The node's resolv.conf; `None` if none is configured.
    pub resolv_conf: Option<&'a ResolvConf>,
    /// Addresses of the node, for its families.
    pub node_ips: &'a [String],
}

impl ResolvConf {
    /// Parses a resolv.conf. The error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut conf = Self::default();
        for (number, line) in text.lines().enumerate() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => match words.next() {
                    Some(server) => conf.nameservers.push(server.to_owned()),
                    None => return Err(format!("line {}: nameserver without an address", number + 1)),
                },
                Some("search") => {
                    let trimmed = words.map(|word| word.trim_end_matches('.'));
                    conf.searches = trimmed.filter(|word| !word.is_empty()).map(str::to_owned).collect();
                }
                Some("options") => words.for_each(|word| merge_option(&mut conf.options, word)),
                _ => {}
            }
        }
        Ok(conf)
    }

    /// Why pods do not get all of the node's search paths (runtime-and-resources.md §2.3). With a cluster domain three of a
    /// pod's paths are those of the cluster.
    pub fn excess(&self, cluster_domain: &str) -> Option<String> {
        let max = if cluster_domain.is_empty() { MAX_SEARCHES } else { MAX_SEARCHES - CLUSTER_SEARCHES };
        if self.searches.len() > max {
            return Some(format!(
                "it has {} search paths, and pods can have {max} of them",
                self.searches.len()
            ));
        }
        let length = self.searches.join(" ").len();
        (length > MAX_SEARCH_LINE)
            .then(|| format!("its search paths are {length} characters, and pods can have {MAX_SEARCH_LINE}"))
    }
}

fn option_name(option: &str) -> &str {
    option.split_once(':').map_or(option, |(name, _)| name)
}

fn merge_option(options: &mut Vec<String>, option: &str) {
    match options.iter_mut().find(|known| option_name(known) == option_name(option)) {
        Some(known) => option.clone_into(known),
        None => options.push(option.to_owned()),
    }
}

/// The DNS configuration of a pod, and Warning events to record.
pub fn dns_for(pod: &Pod, inputs: &DnsInputs<'_>) -> (DnsSpec, Vec<ConfigWarning>) {
    let mut warnings = Vec::new();
    let host_network = pod.is_host_network();
    let mut spec = match pod.spec.dns_policy.as_str() {
        "None" => DnsSpec::default(),
        "Default" => node_base(inputs),
        "ClusterFirstWithHostNet" => cluster_base(pod, inputs, &mut warnings),
        _ if host_network => node_base(inputs),
        _ => cluster_base(pod, inputs, &mut warnings),
    };
    if let Some(own) = &pod.spec.dns_config {
        own.nameservers.iter().for_each(|server| add_new(&mut spec.servers, server));
        own.searches.iter().for_each(|search| add_new(&mut spec.searches, search));
        for option in &own.options {
            let text = option
                .value
                .as_ref()
                .filter(|value| !value.is_empty())
                .map_or_else(|| option.name.clone(), |value| format!("{}:{value}", option.name));
            merge_option(&mut spec.options, &text);
        }
    }
    limit(&mut spec, &mut warnings);
    (spec, warnings)
}

fn add_new(list: &mut Vec<String>, item: &str) {
    if !list.iter().any(|known| known == item) {
        list.push(item.to_owned());
    }
}

fn node_base(inputs: &DnsInputs<'_>) -> DnsSpec {
    if let Some(conf) = inputs.resolv_conf {
        return DnsSpec {
            servers: conf.nameservers.clone(),
            searches: conf.searches.clone(),
            options: conf.options.clone(),
        };
    }
    let mut servers = Vec::new();
    for ip in inputs.node_ips {
        add_new(&mut servers, if ip.contains(':') { "::1" } else { "127.0.0.1" });
    }
    if servers.is_empty() {
        servers.push("127.0.0.1".to_owned());
    }
    DnsSpec { servers, searches: vec![".".to_owned()], options: Vec::new() }
}

fn cluster_base(pod: &Pod, inputs: &DnsInputs<'_>, warnings: &mut Vec<ConfigWarning>) -> DnsSpec {
    if inputs.cluster_dns.is_empty() {
        let policy =
            if pod.spec.dns_policy.is_empty() { "ClusterFirst" } else { pod.spec.dns_policy.as_str() };
        warnings.push(ConfigWarning {
            reason: "MissingClusterDNS",
            message: format!(
                "pod {} has dnsPolicy \"{policy}\", but no cluster DNS server is configured (clusterDNS): \
                 it gets the node's resolv.conf",
                crate::backoff::pod_text(pod)
            ),
        });
        return node_base(inputs);
    }
    let mut searches = Vec::new();
    let domain = inputs.cluster_domain;
    if !domain.is_empty() {
        searches.push(format!("{}.svc.{domain}", pod.metadata.namespace));
        searches.push(format!("svc.{domain}"));
        searches.push(domain.to_owned());
    }
    let host = inputs.resolv_conf.map(|conf| conf.searches.as_slice()).unwrap_or_default();
    host.iter().for_each(|search| add_new(&mut searches, search));
    DnsSpec { servers: inputs.cluster_dns.to_vec(), searches, options: vec!["ndots:5".to_owned()] }
}

/// Cuts the configuration to the limits of resolvers, with a Warning event for each cut.
fn limit(spec: &mut DnsSpec, warnings: &mut Vec<ConfigWarning>) {
    let mut warn = |message: String| warnings.push(ConfigWarning { reason: "DNSConfigForming", message });
    if spec.servers.len() > MAX_NAMESERVERS {
        spec.servers.truncate(MAX_NAMESERVERS);
        warn(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            spec.servers.join(" ")
        ));
    }
    let before = spec.searches.len();
    spec.searches.truncate(MAX_SEARCHES);
    spec.searches.retain(|search| search.len() <= MAX_SEARCH_LENGTH);
    while spec.searches.join(" ").len() > MAX_SEARCH_LINE {
        spec.searches.pop();
    }
    if spec.searches.len() < before {
        warn(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            spec.searches.join(" ")
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    fn node() -> ResolvConf {
        ResolvConf::parse(
            "# node\nsearch old.example\nnameserver 192.0.2.1\nsearch corp.example. .\noptions rotate\n",
        )
        .unwrap()
    }

    fn run(spec: Value, cluster: &[&str]) -> (DnsSpec, Vec<ConfigWarning>) {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "shop"}, "spec": spec}))
                .unwrap();
        let (cluster_dns, conf) = (texts(cluster), node());
        let inputs = DnsInputs {
            cluster_dns: &cluster_dns,
            cluster_domain: "cluster.local",
            resolv_conf: Some(&conf),
            node_ips: &[],
        };
        dns_for(&pod, &inputs)
    }

    #[test]
    fn excess_search_paths_of_the_node_are_reported() {
        let of = |count: usize, length: usize| ResolvConf {
            searches: vec!["a".repeat(length); count],
            ..ResolvConf::default()
        };
        assert_eq!((of(32, 1).excess(""), of(29, 1).excess("cluster.local")), (None, None));
        assert!(of(33, 1).excess("").unwrap().contains("33 search paths, and pods can have 32"));
        assert!(of(30, 1).excess("cluster.local").unwrap().contains("can have 29"));
        // Eight paths with seven blanks between them.
        assert_eq!((of(8, 255).excess(""), of(3, 682).excess("")), (None, None), "2047 and 2048 characters");
        assert!(of(8, 256).excess("").unwrap().contains("2055 characters"));
    }

    #[test]
    fn the_last_search_line_wins_without_trailing_dots() {
        assert_eq!(node().searches, ["corp.example"]);
        assert_eq!(node().options, ["rotate"]);
        let merged = ResolvConf::parse("options ndots:1 rotate\noptions ndots:3").unwrap();
        assert_eq!(merged.options, ["ndots:3", "rotate"]);
    }

    #[test]
    fn a_nameserver_without_an_address_is_an_error_with_the_line() {
        assert!(ResolvConf::parse("search x\nnameserver\n").unwrap_err().contains("line 2"));
    }

    #[test]
    fn each_dns_policy_has_its_base() {
        let cluster =
            texts(&["shop.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"]);
        let table = [
            (json!({"dnsPolicy": "None"}), texts(&[]), texts(&[])),
            (json!({"dnsPolicy": "Default"}), texts(&["192.0.2.1"]), texts(&["corp.example"])),
            (
                json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}),
                texts(&["192.0.2.1"]),
                texts(&["corp.example"]),
            ),
            (json!({"dnsPolicy": "ClusterFirst"}), texts(&["10.0.0.10"]), cluster.clone()),
            (
                json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}),
                texts(&["10.0.0.10"]),
                cluster.clone(),
            ),
            (json!({"dnsPolicy": "Nonsense"}), texts(&["10.0.0.10"]), cluster),
        ];
        for (spec, servers, searches) in table {
            let (got, warnings) = run(spec.clone(), &["10.0.0.10"]);
            assert_eq!((got.servers, got.searches), (servers, searches), "{spec}");
            assert!(warnings.is_empty());
        }
        assert_eq!(run(json!({}), &["10.0.0.10"]).0.options, ["ndots:5"]);
    }

    #[test]
    fn cluster_first_without_cluster_dns_uses_resolv_conf_with_a_warning() {
        let (got, warnings) = run(json!({"dnsPolicy": "ClusterFirst"}), &[]);
        assert_eq!(got.servers, ["192.0.2.1"]);
        assert_eq!(warnings[0].reason, "MissingClusterDNS");
    }

    #[test]
    fn without_resolv_conf_the_nameservers_are_loopback_addresses() {
        let ips = texts(&["192.0.2.7", "2001:db8::7", "192.0.2.8"]);
        let pod: Pod = serde_json::from_value(json!({"spec": {"dnsPolicy": "Default"}})).unwrap();
        let (got, _) = dns_for(&pod, &DnsInputs { node_ips: &ips, ..DnsInputs::default() });
        assert_eq!(got.servers, ["127.0.0.1", "::1"]);
        assert_eq!(got.searches, ["."]);
    }

    #[test]
    fn dns_config_is_appended_and_its_options_win() {
        let own = json!({"nameservers": ["10.0.0.10", "1.1.1.1"], "searches": ["corp.example", "x.example"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]});
        let (got, _) = run(json!({"dnsConfig": own}), &["10.0.0.10"]);
        assert_eq!(got.servers, ["10.0.0.10", "1.1.1.1"]);
        assert_eq!(got.searches.last().map(String::as_str), Some("x.example"));
        assert_eq!(got.searches.iter().filter(|s| *s == "corp.example").count(), 1);
        assert_eq!(got.options, ["ndots:2", "edns0"]);
    }

    #[test]
    fn excess_dns_entries_are_cut_with_an_event() {
        let many: Vec<String> = (0..5).map(|n| format!("10.0.0.{n}")).collect();
        let (got, warnings) = run(json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": many}}), &[]);
        assert_eq!((got.servers.len(), warnings.len(), warnings[0].reason), (3, 1, "DNSConfigForming"));
        let paths: Vec<String> = (0..40).map(|n| format!("s{n}.example")).collect();
        let (got, warnings) = run(json!({"dnsPolicy": "None", "dnsConfig": {"searches": paths}}), &[]);
        assert_eq!((got.searches.len(), warnings.len()), (32, 1));
        let long = vec!["a".repeat(254), "b".repeat(253)];
        let (got, warnings) = run(json!({"dnsPolicy": "None", "dnsConfig": {"searches": long}}), &[]);
        assert_eq!((got.searches.len(), warnings.len()), (1, 1));
        // Exactly as long as the line may be.
        for (last, length, kept) in [(16, 2048, 9), (17, 2049, 8)] {
            let paths: Vec<String> = (0..8).map(|n| format!("{n:0>253}")).chain(["z".repeat(last)]).collect();
            assert_eq!(paths.join(" ").len(), length);
            let spec = json!({"dnsPolicy": "None", "dnsConfig": {"searches": paths}});
            assert_eq!(run(spec, &[]).0.searches.len(), kept);
        }
        let wide: Vec<String> = (0..20).map(|n| format!("{n:0>200}")).collect();
        let (got, _) = run(json!({"dnsPolicy": "None", "dnsConfig": {"searches": wide}}), &[]);
        assert!(got.searches.join(" ").len() <= 2048 && got.searches.len() == 10);
    }
}
