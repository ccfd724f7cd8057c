//! Sessions, links and devices of iscsi disks (volumes.md §10.4).

use std::collections::BTreeSet;

use crate::iscsi::commands::Transport;
use crate::iscsi::disk::Disk;
use crate::iscsi::portal;
use crate::multipath::{self, Mapping, Step};

/// The folder of the links of disks.
pub const LINKS: &str = "/dev/disk/by-path";
/// How long a link may take to appear after a scan, in seconds.
pub const LINK_WAIT_SECONDS: u32 = 30;
/// How long a multipath device may take to appear over several portals, in seconds.
const MULTIPATH_WAIT_SECONDS: u32 = 10;

/// A connection of a session, as sysfs shows it below `/sys/class/iscsi_host`. White space around the texts is ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connection {
    /// The number of the SCSI host.
    pub host: u32,
    /// `targetname` of the session.
    pub target: String,
    /// `address`.
    pub address: String,
    /// `port`.
    pub port: String,
    /// `persistent_address`.
    pub persistent_address: String,
    /// `persistent_port`.
    pub persistent_port: String,
}

/// The SCSI host of a session with the target `iqn` at `portal`.
pub fn host(connections: &[Connection], iqn: &str, portal: &str) -> Option<u32> {
    let spellings = portal::kernel_spellings(portal);
    connections
        .iter()
        .filter(|connection| connection.target.trim() == iqn)
        .find(|connection| {
            [
                (&connection.address, &connection.port),
                (&connection.persistent_address, &connection.persistent_port),
            ]
            .iter()
            .any(|(address, port)| spellings.contains(&format!("{}:{}", address.trim(), port.trim())))
        })
        .map(|connection| connection.host)
}

/// The file and the text that scan exactly one LUN of a SCSI host. A scan of all LUNs would find disks that nobody
/// removes later.
pub fn scan(host: u32, lun: u8) -> (String, String) {
    (format!("/sys/class/scsi_host/host{host}/scan"), format!("0 0 {lun}"))
}

/// Where the names of a LUN's disks are, relative to the session's folder in sysfs: the entries of this folder.
pub fn disks_of_lun(host: u32, lun: u8) -> String {
    format!("target{host}:0:0/{host}:0:0:{lun}/block")
}

/// The link of `disk` at `portal` among the names in [`LINKS`]. With an adapter the first one in order counts.
pub fn link(disk: &Disk, portal: &str, transport: Transport, names: &[String]) -> Option<String> {
    let wanted: Vec<String> = portal::kernel_spellings(portal)
        .iter()
        .map(|portal| format!("ip-{portal}-iscsi-{}-lun-{}", disk.iqn(), disk.lun()))
        .collect();
    let is_link = |name: &&String| match transport {
        Transport::Tcp => wanted.contains(*name),
        Transport::Adapter => wanted.iter().any(|wanted| {
            name.strip_suffix(wanted.as_str()).is_some_and(|start| {
                start.len() > "pci-".len() && start.starts_with("pci-") && start.ends_with('-')
            })
        }),
    };
    names.iter().filter(is_link).min().map(|name| format!("{LINKS}/{name}"))
}

/// How long to wait for a multipath device, in seconds. Zero: look once.
pub fn multipath_wait(portals: usize) -> u32 {
    if portals > 1 { MULTIPATH_WAIT_SECONDS } else { 0 }
}

/// A link of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPath {
    /// The link.
    pub link: String,
    /// The device node that it leads to, such as `/dev/sda`.
    pub device: String,
}

/// What is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// The multipath device over the paths.
    Multipath(String),
    /// The link of the first portal that has one.
    Single(String),
}

/// The device of a disk with these paths, in the order of its portals. `None` without a path.
pub fn choose(paths: &[DiskPath], mappings: &[Mapping]) -> Option<Device> {
    paths
        .iter()
        .filter_map(|path| multipath::kernel_name(&path.device))
        .find_map(|name| multipath::over(name, mappings))
        .map(|mapping| Device::Multipath(mapping.device()))
        .or_else(|| paths.first().map(|path| Device::Single(path.link.clone())))
}

/// The steps that remove the disks with these names after the unmount. An error of a step is ignored: the logout that
/// follows may help.
pub fn removal(names: &[String], mappings: &[Mapping]) -> Vec<Step> {
    let maps: BTreeSet<String> =
        names.iter().filter_map(|name| multipath::over(name, mappings)).map(Mapping::device).collect();
    let deletes = names.iter().map(|name| Step::Delete(name.clone()));
    maps.into_iter().map(Step::FlushMap).chain(deletes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::IscsiSource;

    const IQN: &str = "iqn.2001-04.com.example:a";

    fn disk() -> Disk {
        let source = IscsiSource {
            target_portal: "10.0.0.1".into(),
            iqn: IQN.into(),
            lun: 1,
            ..IscsiSource::default()
        };
        Disk::new("pv", &source).unwrap()
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn connection(host: u32, target: &str, address: &str, persistent: &str) -> Connection {
        Connection {
            host,
            target: format!("{target}\n"),
            address: format!("{address}\n"),
            port: "3260\n".into(),
            persistent_address: persistent.into(),
            persistent_port: "860".into(),
        }
    }

    #[test]
    fn a_session_is_found_by_its_current_or_persistent_portal() {
        let connections = [
            connection(1, "iqn.other", "10.0.0.1", "10.0.0.1"),
            connection(2, IQN, "10.0.0.1", "10.0.0.9"),
            connection(3, IQN, "fd00::1", ""),
        ];
        let found = |portal| host(&connections, IQN, portal);
        assert_eq!(found("10.0.0.1:3260"), Some(2));
        assert_eq!(found("10.0.0.9:860"), Some(2));
        assert_eq!(found("[fd00::1]:3260"), Some(3));
        for portal in ["10.0.0.9:3260", "10.0.0.1:860", "10.0.0.1", "0.0.0.1:3260"] {
            assert_eq!(found(portal), None, "{portal}");
        }
        assert_eq!(host(&connections, "iqn.2001-04.com.example", "10.0.0.1:3260"), None);
    }

    #[test]
    fn one_lun_is_scanned_and_looked_up() {
        assert_eq!(scan(4, 7), ("/sys/class/scsi_host/host4/scan".into(), "0 0 7".into()));
        assert_eq!(disks_of_lun(4, 7), "target4:0:0/4:0:0:7/block");
    }

    #[test]
    fn a_link_names_exactly_the_portal_target_and_lun() {
        let name = format!("ip-10.0.0.1:3260-iscsi-{IQN}-lun-1");
        let names = owned(&[
            &format!("{name}1"),
            &format!("{name}-part1"),
            &format!("x{name}"),
            &format!("pci-0000:05:00.1-{name}"),
            &format!("pci-0000:04:00.0-{name}"),
            &format!("pci-{name}"),
            &format!("pci-0000{name}"),
            &name,
        ]);
        let found = |transport, names: &[String]| link(&disk(), "10.0.0.1:3260", transport, names);
        assert_eq!(found(Transport::Tcp, &names), Some(format!("/dev/disk/by-path/{name}")));
        let adapter = format!("/dev/disk/by-path/pci-0000:04:00.0-{name}");
        assert_eq!(found(Transport::Adapter, &names), Some(adapter));
        assert_eq!(found(Transport::Tcp, &names[..7]), None);
        assert_eq!(found(Transport::Adapter, &names[5..]), None);
        assert_eq!(found(Transport::Tcp, &[]), None);
        let v6 = owned(&[&format!("ip-fd00::1:3260-iscsi-{IQN}-lun-1")]);
        assert!(link(&disk(), "[fd00::1]:3260", Transport::Tcp, &v6).is_some());
    }

    fn path(portal: &str, device: &str) -> DiskPath {
        DiskPath { link: format!("/dev/disk/by-path/ip-{portal}"), device: device.into() }
    }

    #[test]
    fn a_multipath_device_over_any_path_wins_over_the_first_path() {
        let mapping = Mapping { name: "dm-3".into(), uuid: "mpath-x".into(), slaves: owned(&["sdb"]) };
        let paths = [path("1", "/dev/sda"), path("2", "/dev/sdb")];
        let first = Some(Device::Single("/dev/disk/by-path/ip-1".into()));
        assert_eq!(
            choose(&paths, std::slice::from_ref(&mapping)),
            Some(Device::Multipath("/dev/dm-3".into()))
        );
        assert_eq!(choose(&paths[..1], std::slice::from_ref(&mapping)), first);
        assert_eq!(choose(&paths, &[]), first);
        assert_eq!(choose(&[], &[mapping]), None);
    }

    #[test]
    fn only_a_disk_with_several_portals_waits_for_a_multipath_device() {
        assert_eq!([1, 2, 3].map(multipath_wait), [0, 10, 10]);
    }

    #[test]
    fn every_multipath_map_is_flushed_once_before_its_disks_are_deleted() {
        let mapping = Mapping { name: "dm-3".into(), uuid: "mpath-x".into(), slaves: owned(&["sda", "sdb"]) };
        let steps = removal(&owned(&["sda", "sdb", "sdc"]), &[mapping]);
        let deletes = ["sda", "sdb", "sdc"].map(|name| Step::Delete(name.into()));
        assert_eq!(steps[0], Step::FlushMap("/dev/dm-3".into()));
        assert_eq!(steps[1..], deletes);
        assert_eq!(removal(&[], &[]), []);
    }
}
