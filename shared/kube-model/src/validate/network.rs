//! Names and addresses that land in `/etc/hosts` and `resolv.conf`.

use super::{Findings, names};
use crate::types::PodSpec;

/// Most name servers of a pod.
const MAX_NAMESERVERS: usize = 3;
/// Most search paths of a pod.
const MAX_SEARCHES: usize = 32;
/// Most characters of all search paths, with a blank between two.
const MAX_SEARCH_CHARACTERS: usize = 2048;

pub(super) fn check_network(found: &mut Findings, spec: &PodSpec) {
    check_dns(found, spec);
    for (index, alias) in spec.host_aliases.iter().enumerate() {
        let field = format!("spec.hostAliases[{index}]");
        found.name(format!("{field}.ip"), &alias.ip, names::ip_address);
        for (index, name) in alias.hostnames.iter().enumerate() {
            found.name(format!("{field}.hostnames[{index}]"), name, names::dns_subdomain);
        }
    }
}

fn check_dns(found: &mut Findings, spec: &PodSpec) {
    let policies = ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"];
    found.one_of("spec.dnsPolicy", &spec.dns_policy, &policies);
    let config = spec.dns_config.as_ref();
    let servers = config.map(|config| config.nameservers.as_slice()).unwrap_or_default();
    if spec.dns_policy == "None" && servers.is_empty() {
        found.required("spec.dnsConfig.nameservers", "a name server is needed when dnsPolicy is None");
    }
    if servers.len() > MAX_NAMESERVERS {
        found.invalid("spec.dnsConfig.nameservers", servers, "must not have more than 3 entries");
    }
    for (index, server) in servers.iter().enumerate() {
        found.name(format!("spec.dnsConfig.nameservers[{index}]"), server, names::ip_address);
    }
    let Some(config) = config else { return };
    let characters =
        config.searches.iter().map(String::len).sum::<usize>() + config.searches.len().saturating_sub(1);
    if config.searches.len() > MAX_SEARCHES {
        found.invalid("spec.dnsConfig.searches", &config.searches, "must not have more than 32 search paths");
    }
    if characters > MAX_SEARCH_CHARACTERS {
        let detail = "must not have more than 2048 characters (including spaces) in the search list";
        found.invalid("spec.dnsConfig.searches", &config.searches, detail);
    }
    for (index, search) in config.searches.iter().enumerate() {
        found.name(format!("spec.dnsConfig.searches[{index}]"), search, names::search_path);
    }
    for (index, option) in config.options.iter().enumerate() {
        let field = format!("spec.dnsConfig.options[{index}]");
        if option.name.is_empty() {
            found.required(field, "must not be empty");
            continue;
        }
        for (part, text) in [("name", option.name.as_str()), ("value", option.value.as_deref().unwrap_or(""))]
        {
            found.name(format!("{field}.{part}"), text, names::one_word);
        }
    }
}
