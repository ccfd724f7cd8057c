//! Sessions and their disks, as sysfs shows them.

use std::io;

use keelson_volume_manager_core::iscsi::device::{Connection, disks_of_lun};

use crate::plugins::host::Machine;

/// The folder of the SCSI hosts of sessions.
const HOSTS: &str = "/sys/class/iscsi_host";

/// A session: its folder and its target.
struct Session {
    host: u32,
    folder: String,
    target: String,
}

fn sessions(machine: &Machine) -> io::Result<Vec<Session>> {
    let mut sessions = Vec::new();
    for name in machine.names(HOSTS)? {
        let Some(host) = name.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
        let device = format!("{HOSTS}/{name}/device");
        for name in machine.names(&device)?.into_iter().filter(|name| name.starts_with("session")) {
            let folder = format!("{device}/{name}");
            let target = machine.text(&format!("{folder}/iscsi_session/{name}/targetname"));
            sessions.push(Session { host, folder, target });
        }
    }
    Ok(sessions)
}

/// The connections of all sessions.
pub(super) fn connections(machine: &Machine) -> io::Result<Vec<Connection>> {
    let mut connections = Vec::new();
    for session in sessions(machine)? {
        let names = machine.names(&session.folder)?;
        for name in names.into_iter().filter(|name| name.starts_with("connection")) {
            let folder = format!("{}/{name}/iscsi_connection/{name}", session.folder);
            let text = |file: &str| machine.text(&format!("{folder}/{file}"));
            connections.push(Connection {
                host: session.host,
                target: session.target.clone(),
                address: text("address"),
                port: text("port"),
                persistent_address: text("persistent_address"),
                persistent_port: text("persistent_port"),
            });
        }
    }
    Ok(connections)
}

/// The names of the disks with this LUN in every session with the target `iqn`, sorted.
pub(super) fn disks_of(machine: &Machine, iqn: &str, lun: u8) -> io::Result<Vec<String>> {
    let mut disks = Vec::new();
    for session in sessions(machine)?.into_iter().filter(|session| session.target == iqn) {
        disks.extend(machine.names(&format!("{}/{}", session.folder, disks_of_lun(session.host, lun)))?);
    }
    disks.sort();
    Ok(disks)
}
