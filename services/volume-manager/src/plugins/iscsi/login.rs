//! Logs in to the target of a disk and waits for its device.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_volume_manager_core::iscsi::commands::{self, Call, Chap, Next, PROGRAM, Transport};
use keelson_volume_manager_core::iscsi::device::{
    self, Device, DiskPath, LINK_WAIT_SECONDS, LINKS, multipath_wait,
};
use keelson_volume_manager_core::iscsi::disk::Disk;
use keelson_volume_manager_core::iscsi::rounds::{AfterRound, NoPath, after_round};
use keelson_volume_manager_core::sources::IscsiSource;

use super::{IscsiDisks, secret_of, sessions};
use crate::mounter::DEADLINE;
use crate::plugins::host::shortened;
use crate::plugins::secrets;
use crate::plugins::{PluginError, VolumeSpec};

/// How often links and multipath devices are looked up while one is awaited.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

impl IscsiDisks {
    /// The CHAP credentials; empty if the source asks for none.
    pub(super) async fn secret(
        &self,
        volume: &VolumeSpec,
        source: &IscsiSource,
    ) -> Result<BTreeMap<String, String>, PluginError> {
        let wants_chap = source.chap_auth_discovery || source.chap_auth_session;
        let Some(reference) = secret_of(source).filter(|_| wants_chap) else { return Ok(BTreeMap::new()) };
        let (name, secret) = secrets::read(&*self.secrets, reference, &volume.pod.namespace).await?;
        secret
            .texts()
            .map_err(|why| PluginError::new(format!("the Secret {name} cannot be used: {why}")).for_you())
    }

    /// Logs in at the portals of a disk, round by round, and returns its device.
    pub(super) async fn log_in(
        &self,
        disk: &Disk,
        source: &IscsiSource,
        secret: &BTreeMap<String, String>,
    ) -> Result<String, PluginError> {
        let shown = self.call(&commands::show_interface(disk.base_interface())).await?;
        let base = disk.base_interface();
        let transport = commands::transport(base, &shown)
            .map_err(|error| PluginError::new(error.to_string()).for_you())?;
        let interface = commands::make_interface(disk, &shown);
        self.run_all(&interface.map_err(|error| PluginError::new(error.to_string()).for_you())?).await?;
        let chap = Chap { discovery: source.chap_auth_discovery, session: source.chap_auth_session, secret };
        let mut last_error = "none".to_owned();
        let mut round = 0;
        loop {
            round += 1;
            for portal in disk.portals() {
                if self.path(disk, portal, transport).await?.is_none()
                    && let Err(error) = self.reach(disk, portal, transport, chap).await
                {
                    let volume = disk.volume();
                    tracing::warn!(event = "iscsi_portal_failed", volume, portal, %error, "a portal gives no path");
                    last_error = format!("{portal}: {error}");
                }
            }
            let paths = self.paths_over(disk, transport).await?;
            match after_round(round, disk.portals().len(), paths.len()) {
                AfterRound::Again => {}
                AfterRound::Enough => return self.choose(disk, transport).await,
                AfterRound::NoPath => {
                    if let Some(call) = commands::drop_interface(disk) {
                        // The error that counts is that there is no path.
                        let _ = self.run_all(&[call]).await;
                    }
                    return Err(PluginError::new(NoPath::of(disk, last_error).to_string()));
                }
            }
        }
    }

    /// Makes sure that there is a session at a portal, and that the disk has a link through it.
    async fn reach(
        &self,
        disk: &Disk,
        portal: &str,
        transport: Transport,
        chap: Chap<'_>,
    ) -> Result<(), PluginError> {
        let host = match self.scsi_host(disk, portal).await? {
            Some(host) => host,
            None => {
                self.run_all(&commands::log_in(disk, portal, chap)).await?;
                self.scsi_host(disk, portal).await?.ok_or_else(|| {
                    PluginError::new(format!(
                        "iscsiadm has logged in to {}, but there is no session",
                        disk.iqn()
                    ))
                })?
            }
        };
        let (file, text) = device::scan(host, disk.lun());
        self.host.on_machine("scan the SCSI host", move |machine| machine.write(&file, &text)).await?;
        let wait = async {
            while self.path(disk, portal, transport).await?.is_none() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            Ok(())
        };
        let limit = Duration::from_secs(LINK_WAIT_SECONDS.into());
        tokio::time::timeout(limit, wait).await.unwrap_or_else(|_| {
            let text = format!("no link of LUN {} in {LINKS} after {LINK_WAIT_SECONDS} s", disk.lun());
            Err(PluginError::new(text))
        })
    }

    async fn scsi_host(&self, disk: &Disk, portal: &str) -> Result<Option<u32>, PluginError> {
        let connections = self.host.on_machine("read the iscsi sessions", sessions::connections).await?;
        Ok(device::host(&connections, disk.iqn(), portal))
    }

    async fn path(
        &self,
        disk: &Disk,
        portal: &str,
        transport: Transport,
    ) -> Result<Option<DiskPath>, PluginError> {
        let (disk, portal) = (disk.clone(), portal.to_owned());
        let read = move |machine: &crate::plugins::host::Machine| {
            let names = machine.names(LINKS)?;
            let link = device::link(&disk, &portal, transport, &names);
            Ok(link.and_then(|link| machine.follow(&link).map(|device| DiskPath { link, device })))
        };
        self.host.on_machine("read the links of disks", read).await
    }

    async fn paths_over(&self, disk: &Disk, transport: Transport) -> Result<Vec<DiskPath>, PluginError> {
        let mut paths = Vec::new();
        for portal in disk.portals() {
            paths.extend(self.path(disk, portal, transport).await?);
        }
        Ok(paths)
    }

    /// The paths that a disk has now, over whichever transport.
    pub(super) async fn paths(&self, disk: &Disk) -> Result<Vec<DiskPath>, PluginError> {
        let mut paths = self.paths_over(disk, Transport::Tcp).await?;
        paths.extend(self.paths_over(disk, Transport::Adapter).await?);
        Ok(paths)
    }

    /// The device of a disk that has paths. Over several portals, a multipath device may take some time to appear.
    async fn choose(&self, disk: &Disk, transport: Transport) -> Result<String, PluginError> {
        let deadline =
            tokio::time::Instant::now() + Duration::from_secs(multipath_wait(disk.portals().len()).into());
        loop {
            let paths = self.paths_over(disk, transport).await?;
            let mappings =
                self.host.on_machine("read the multipath devices", |machine| machine.mappings()).await?;
            match device::choose(&paths, &mappings) {
                Some(Device::Multipath(device)) => return Ok(device),
                Some(Device::Single(link)) if tokio::time::Instant::now() >= deadline => return Ok(link),
                None => {
                    return Err(PluginError::new(format!("the links of {} are gone again", disk.volume())));
                }
                Some(Device::Single(_)) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    /// Runs one call that has to succeed, and returns its output.
    async fn call(&self, call: &Call) -> Result<String, PluginError> {
        let (exit, output) = self.iscsiadm(call.arguments(), call.ends_with_secret()).await?;
        match call.next(exit) {
            Next::Proceed | Next::Warn => Ok(output),
            Next::Fail | Next::Undo(_) => Err(failed(call, exit, &output)),
        }
    }

    /// Runs calls in order.
    pub(super) async fn run_all(&self, calls: &[Call]) -> Result<(), PluginError> {
        for call in calls {
            let (exit, output) = match self.iscsiadm(call.arguments(), call.ends_with_secret()).await {
                Ok(ended) => ended,
                Err(error) => (None, error.to_string()),
            };
            match call.next(exit) {
                Next::Proceed => {}
                Next::Warn => {
                    let error = failed(call, exit, &output);
                    tracing::warn!(event = "iscsiadm_failed", %error, "a call of iscsiadm that may fail has failed");
                }
                Next::Fail => return Err(failed(call, exit, &output)),
                Next::Undo(arguments) => {
                    let _ = self.iscsiadm(arguments, false).await;
                    return Err(failed(call, exit, &output));
                }
            }
        }
        Ok(())
    }

    /// Runs iscsiadm. The exit code, and stdout, after an error with stderr. With a secret among the arguments nothing of
    /// what it wrote is returned.
    async fn iscsiadm(
        &self,
        arguments: &[String],
        has_secret: bool,
    ) -> Result<(Option<i32>, String), PluginError> {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match self.host.commands.run(PROGRAM, &arguments, DEADLINE).await {
            Ok(ended) if has_secret => Ok((ended.code, "its output is not shown".to_owned())),
            Ok(ended) if ended.code == Some(0) => Ok((ended.code, ended.stdout)),
            Ok(ended) => Ok((ended.code, ended.stderr.trim().to_owned())),
            Err(error) if has_secret => {
                let text = format!("{PROGRAM} could not be run or did not end in time");
                Err(PluginError { message: text, ..error })
            }
            Err(error) => Err(error),
        }
    }
}

fn failed(call: &Call, exit: Option<i32>, output: &str) -> PluginError {
    let ended =
        exit.map_or_else(|| "without an exit code".to_owned(), |code| format!("with exit code {code}"));
    let text = format!("{call} ended {ended}: {}", shortened(output));
    match commands::advice(exit) {
        Some(advice) => PluginError::new(format!("{text}; {advice}")).for_you(),
        None => PluginError::new(text),
    }
}
