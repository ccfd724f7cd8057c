//! A pod network for one private containerd: its own bridge and subnet.

use std::fs;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Room for 1021 pods.
const PREFIX_LENGTH: u32 = 22;

/// How many /22 there are in 10.0.0.0/8.
const SUBNETS: u32 = 1 << (PREFIX_LENGTH - 8);

/// An interface name has 15 bytes at most.
const MAX_BRIDGE_NAME: usize = 15;

/// Routes with shorter prefixes (a company's 10.0.0.0/8) may be shadowed when nothing else is left.
const WIDE_ROUTE: u32 = 16;

/// An IPv4 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    /// The network's address in host order.
    base: u32,
    /// Length of its prefix, 0 to 32.
    prefix: u32,
}

/// The bridge and the subnet of one run.
#[derive(Debug)]
pub struct Network {
    /// The name of the CNI network.
    pub name: String,
    /// The name of the bridge.
    pub bridge: String,
    /// The subnet of the pods' addresses.
    pub subnet: Subnet,
    /// An abstract socket that reserves the subnet until the process ends; after that, the bridge's route does.
    _reservation: UnixDatagram,
}

impl Subnet {
    fn number(index: u32) -> Self {
        Self { base: 10 << 24 | index << (32 - PREFIX_LENGTH), prefix: PREFIX_LENGTH }
    }

    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - self.prefix).unwrap_or(0)
    }

    fn overlaps(self, other: Self) -> bool {
        let mask = self.mask() & other.mask();
        self.base & mask == other.base & mask
    }

    /// The address of the bridge, the first of the subnet.
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(self.base + 1)
    }
}

impl std::fmt::Display for Subnet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.base), self.prefix)
    }
}

impl Network {
    /// Picks names and a subnet for the run `id`, which is unique on this machine.
    pub fn choose(id: &str) -> anyhow::Result<Self> {
        let bridge = bridge_name(id);
        ensure!(bridge.len() <= MAX_BRIDGE_NAME, "the bridge name {bridge} is longer than {MAX_BRIDGE_NAME}");
        let routes = routes();
        let tight: Vec<Subnet> = routes.iter().copied().filter(|route| route.prefix >= WIDE_ROUTE).collect();
        let found = reserve(id, &routes).or_else(|| reserve(id, &tight));
        let (subnet, reservation) = found.context("every subnet of 10.0.0.0/8 is in use, see: ip route")?;
        Ok(Self { name: network_name(id), bridge, subnet, _reservation: reservation })
    }

    /// Writes the conflist into `conf_dir`; addresses are leased in files below `lease_dir`.
    ///
    /// containerd sets up `lo` by itself, with the plugin `loopback`.
    pub fn write(&self, conf_dir: &Path, lease_dir: &Path) -> anyhow::Result<()> {
        self.write_plugin(
            conf_dir,
            &json!({
                "type": "bridge",
                "bridge": self.bridge,
                "isGateway": true,
                "ipMasq": false,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": lease_dir,
                    "ranges": [[{"subnet": self.subnet.to_string()}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }),
        )
    }

    /// Writes a conflist whose only plugin is `plugin`, which does not exist: it loads, and each pod fails.
    pub(crate) fn write_broken(&self, conf_dir: &Path, plugin: &str) -> anyhow::Result<()> {
        self.write_plugin(conf_dir, &json!({ "type": plugin }))
    }

    /// Written in place: containerd 1.6 looks again after a write, but not after a rename into the folder.
    fn write_plugin(&self, conf_dir: &Path, plugin: &Value) -> anyhow::Result<()> {
        let conflist = json!({"cniVersion": "0.4.0", "name": self.name, "plugins": [plugin]});
        fs::create_dir_all(conf_dir)?;
        let path = conflist_path(conf_dir);
        fs::write(&path, serde_json::to_vec_pretty(&conflist)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The only configuration file of the network.
pub(crate) fn conflist_path(conf_dir: &Path) -> PathBuf {
    conf_dir.join("10-keelson.conflist")
}

/// The bridge of the run `id`.
pub(crate) fn bridge_name(id: &str) -> String {
    format!("kb{id}")
}

/// The CNI network of the run `id`.
pub(crate) fn network_name(id: &str) -> String {
    format!("keelson-{id}")
}

/// The first subnet, from one that `id` hashes to, that overlaps none of `taken` and is not reserved.
fn reserve(id: &str, taken: &[Subnet]) -> Option<(Subnet, UnixDatagram)> {
    let digest = Sha256::digest(id.as_bytes());
    let first = u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]);
    (0..SUBNETS)
        .map(|step| Subnet::number(first.wrapping_add(step) % SUBNETS))
        .filter(|subnet| !taken.iter().any(|route| route.overlaps(*subnet)))
        .find_map(|subnet| {
            let name = format!("keelson-testkit/{subnet}");
            let address = SocketAddr::from_abstract_name(name.as_bytes()).ok()?;
            Some((subnet, UnixDatagram::bind_addr(&address).ok()?))
        })
}

/// The destinations of this machine's routes, without default routes.
fn routes() -> Vec<Subnet> {
    let table = fs::read_to_string("/proc/net/route").unwrap_or_default();
    table.lines().skip(1).filter_map(parse_route).filter(|route| route.prefix > 0).collect()
}

/// A line of /proc/net/route: addresses are hexadecimal in network order on a little-endian machine.
fn parse_route(line: &str) -> Option<Subnet> {
    let mut fields = line.split_ascii_whitespace();
    let base = u32::from_str_radix(fields.nth(1)?, 16).ok()?;
    let mask = u32::from_str_radix(fields.nth(5)?, 16).ok()?;
    Some(Subnet { base: base.swap_bytes(), prefix: mask.count_ones() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_line_is_read() {
        let line = "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0";
        assert_eq!(parse_route(line).unwrap().to_string(), "172.17.0.0/16");
    }

    #[test]
    fn overlap_is_symmetric() {
        let wide = Subnet { base: 10 << 24, prefix: 8 };
        let narrow = Subnet::number(5);
        assert_eq!(narrow.to_string(), "10.0.20.0/22");
        assert_eq!(narrow.gateway().to_string(), "10.0.20.1");
        assert!(wide.overlaps(narrow) && narrow.overlaps(wide));
        assert!(!narrow.overlaps(Subnet::number(6)));
    }

    #[test]
    fn two_runs_with_one_hash_get_two_subnets() {
        let (first, _held) = reserve("same", &[]).unwrap();
        let (second, _held) = reserve("same", &[]).unwrap();
        assert_ne!(first, second);
        let (third, _held) = reserve("same", &[first, second, Subnet { base: 10 << 24, prefix: 9 }]).unwrap();
        assert!(third.base >= 10 << 24 | 128 << 16);
    }

    #[test]
    fn a_bridge_name_that_the_kernel_would_refuse_is_an_error() {
        assert!(Network::choose("much-too-long-a-name").is_err());
    }
}
