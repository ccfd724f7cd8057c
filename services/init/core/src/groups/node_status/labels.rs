//! The labels of `--node-labels` (node-and-api.md §1.5).

use std::collections::BTreeMap;

use crate::names::{is_label_value, is_qualified_name};

/// Keys of the kubernetes.io and k8s.io domains that a node may set on itself.
const OWN_KEYS: &[&str] = &[
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
/// Prefixes, with their subdomains, under which a node may set any label on itself.
const OWN_PREFIXES: &[&str] = &["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Parses `key=value` lists, one per use of the flag; a key without `=` has an empty value. The errors say what to write
/// instead: one per invalid label, then one for all labels that a node may not set on itself.
pub(super) fn parse_node_labels(uses: &[String]) -> Result<BTreeMap<String, String>, Vec<String>> {
    let mut labels = BTreeMap::new();
    let (mut errors, mut foreign) = (Vec::new(), Vec::new());
    for pair in uses.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if let Err(error) = check(key, value) {
            errors.push(error);
        } else if is_own(key) {
            labels.insert(key.to_owned(), value.to_owned());
        } else {
            foreign.push(key);
        }
    }
    if !foreign.is_empty() {
        foreign.sort_unstable();
        foreign.dedup();
        errors.push(format!(
            "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [{}]\n\
             a node may set labels below {} and {} on itself; set others through the control plane",
            foreign.join(" "),
            OWN_PREFIXES.join(" and "),
            OWN_KEYS.join(", ")
        ));
    }
    if errors.is_empty() { Ok(labels) } else { Err(errors) }
}

fn check(key: &str, value: &str) -> Result<(), String> {
    if !is_qualified_name(key) {
        return Err(format!(
            "invalid node labels: '{key}' - the key is not a qualified name: an optional DNS name and '/', then at most 63 \
             letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
        ));
    }
    if !is_label_value(value) {
        return Err(format!(
            "invalid node labels: '{value}' - the value of {key} is not a label value: at most 63 letters, digits, '-', '_' \
             and '.', beginning and ending with a letter or digit"
        ));
    }
    Ok(())
}

/// Whether a node may set a label with this key on itself.
fn is_own(key: &str) -> bool {
    let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
    let is_below = |domain: &&str| prefix == *domain || below(prefix, domain);
    !["kubernetes.io", "k8s.io"].iter().any(is_below)
        || OWN_KEYS.contains(&key)
        || OWN_PREFIXES.iter().any(is_below)
}

fn below(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::is_subdomain;

    fn parse(text: &str) -> Result<BTreeMap<String, String>, Vec<String>> {
        parse_node_labels(&[text.to_owned()])
    }

    #[test]
    fn node_labels_are_parsed_from_key_value_lists() {
        let labels =
            parse("zone=a,example.com/disk=ssd,bare,node.kubernetes.io/x=1,kubernetes.io/arch=arm").unwrap();
        let pairs: Vec<String> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(
            pairs,
            ["bare=", "example.com/disk=ssd", "kubernetes.io/arch=arm", "node.kubernetes.io/x=1", "zone=a"]
        );
        assert_eq!(parse_node_labels(&["a=1".into(), "b=2".into()]).unwrap().len(), 2);
    }

    #[test]
    fn node_labels_of_kubernetes_domains_are_refused_unless_allowed() {
        for (key, allowed) in [
            ("node-role.kubernetes.io/worker", false),
            ("kubernetes.io/role", false),
            ("foo.k8s.io/x", false),
            ("topology.kubernetes.io/zone", true),
            ("foo.kubelet.kubernetes.io/x", true),
            ("evilkubernetes.io/x", true),
        ] {
            assert_eq!(parse(&format!("{key}=v")).is_ok(), allowed, "{key}");
        }
    }

    #[test]
    fn disallowed_node_labels_are_listed_in_one_error() {
        let errors = parse("foo.k8s.io/x=1,ok=1,node-role.kubernetes.io/worker=,-a=1").unwrap_err();
        assert_eq!(errors.len(), 2, "{errors:?}");
        let (first, second) = errors[1].split_once('\n').unwrap();
        assert_eq!(
            first,
            "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [foo.k8s.io/x node-role.kubernetes.io/worker]"
        );
        for part in OWN_KEYS.iter().chain(OWN_PREFIXES) {
            assert!(second.contains(part), "{part}: {second}");
        }
    }

    #[test]
    fn every_invalid_node_label_is_reported() {
        let errors = parse("-a=1,ok=1,b=x y,UP/er/x=1").unwrap_err();
        assert_eq!(errors.len(), 3);
        assert!(
            errors[0].contains("invalid node labels: '-a' - ")
                && errors[1].contains("invalid node labels: 'x y' - ")
                && errors[2].contains("'UP/er/x'"),
            "{errors:?}"
        );
    }

    #[test]
    fn node_names_are_lower_case_dns_subdomains() {
        for (name, good) in [
            ("edge-1", true),
            ("a.b.c", true),
            ("1a", true),
            ("", false),
            ("A", false),
            ("a_b", false),
            ("-a", false),
            ("a..b", false),
        ] {
            assert_eq!(is_subdomain(name), good, "{name:?}");
        }
    }
}
