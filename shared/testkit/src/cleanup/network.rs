//! Bridges, the interfaces plugged into them, and the results that CNI caches.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The folder in which libcni stores the results of its calls. containerd cannot configure another one.
const CNI_RESULTS: &str = "/var/lib/cni/results";

/// The network name under which containerd sets up `lo`.
const LOOPBACK_NETWORK: &str = "cni-loopback";

/// Deletes the bridge and every interface plugged into it.
pub(super) fn remove_bridge(bridge: &str) -> Vec<String> {
    let folder = Path::new("/sys/class/net").join(bridge);
    if !folder.join("bridge").is_dir() {
        return Vec::new();
    }
    let ports = fs::read_dir(folder.join("brif")).into_iter().flatten().flatten();
    for port in ports.filter_map(|entry| entry.file_name().into_string().ok()) {
        // One that dies with its network namespace at this moment is as good as deleted.
        let _ = delete_link(&port);
    }
    let result = delete_link(bridge);
    if folder.exists() {
        let cause = result.err().unwrap_or_default();
        return vec![format!("the bridge {bridge} cannot be deleted: {cause}")];
    }
    Vec::new()
}

fn delete_link(name: &str) -> Result<(), String> {
    let ip = crate::Component::Iproute.find().map_err(|error| format!("{error:#}"))?;
    let output = Command::new(ip)
        .args(["link", "delete", "dev", name])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// Deletes the cached results of `networks` and those of `lo` in the same sandboxes.
pub(super) fn remove_cni_results(networks: &[String]) {
    let folder = Path::new(CNI_RESULTS);
    let names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    for file in results_of(&names, networks) {
        // A plugin that was still running may have been faster.
        let _ = fs::remove_file(folder.join(file));
    }
}

/// The files of `names` that belong to `networks`; each is named `<network>-<container id>-<interface>`.
fn results_of(names: &[String], networks: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for network in networks {
        let own = names.iter().filter_map(|name| {
            let (id, _interface) = name.strip_prefix(network)?.strip_prefix('-')?.rsplit_once('-')?;
            // `keelson-a` is not `keelson-a-b`: container ids have no hyphen.
            (!id.contains('-')).then_some((name, id))
        });
        for (name, id) in own {
            found.push(name.clone());
            found.push(format!("{LOOPBACK_NETWORK}-{id}-lo"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_results_of_the_named_network_and_their_loopback_are_found() {
        let names = [
            "keelson-a-0123-eth0",
            "keelson-a-b-4567-eth0",
            "keelson-ab-89ab-eth0",
            "cni-loopback-0123-lo",
            "cni-loopback-4567-lo",
        ];
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let found = results_of(&names, &["keelson-a".to_owned()]);
        assert_eq!(found, ["keelson-a-0123-eth0", "cni-loopback-0123-lo"]);
    }
}
