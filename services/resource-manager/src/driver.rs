//! Follows the cgroup driver that the container runtime reports, and checkpoints it, so that a restart while the runtime is
//! down uses the same cgroup tree.

use std::time::Duration;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
pub(crate) use keelson_resource_manager_core::driver::ReportedDriver;
use keelson_resource_manager_core::driver::{DriverChoice, choose};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, Peer, StateFile, StoredState};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;

/// How long to wait for the first report of the runtime at startup: as long as a kubelet's three tries, 2 s apart (§4.2). A
/// kubelet exits then; here the configured driver is used until the runtime reports one.
const FIRST_REPORT_TIMEOUT: Duration = Duration::from_secs(6);
/// The condition for an unwritable checkpoint.
const CONDITION: &str = "runtime-state";

/// The checkpoint: the driver of the runtime at this endpoint, empty when the runtime named none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DriverCheckpoint {
    endpoint: String,
    cgroup_driver: String,
}

impl StoredState for DriverCheckpoint {
    const VERSION: u64 = 1;
    const CONSEQUENCE_OF_LOSS: &'static str =
        "the configured cgroup driver is used when the container runtime does not answer";
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str = "a restart without the container runtime would use the configured cgroup driver: free \
                                     disk space and make the directory writable";
}

/// Selects the cgroup driver from the runtime's reports, the checkpoint and the configuration.
pub(crate) struct DriverSelector {
    ctx: Context,
    file: StateFile<DriverCheckpoint>,
    /// The last report, as in the file.
    checkpointed: Option<ReportedDriver>,
    /// The last report since the start.
    reported: watch::Receiver<Option<ReportedDriver>>,
    wait_until: Instant,
}

impl DriverSelector {
    /// Loads the checkpoint; it counts only for the same runtime endpoint.
    ///
    /// # Errors
    /// The file has a newer version.
    pub(crate) async fn load(
        ctx: &Context,
        reported: watch::Receiver<Option<ReportedDriver>>,
    ) -> anyhow::Result<Self> {
        let file = state_file(&ctx.config);
        let DriverCheckpoint { endpoint, cgroup_driver } = file.load().await?;
        let checkpointed =
            (endpoint == ctx.config.runtime.endpoint).then(|| ReportedDriver::parse(&cgroup_driver));
        let wait_until = Instant::now() + FIRST_REPORT_TIMEOUT;
        Ok(Self { ctx: ctx.clone(), file, checkpointed, reported, wait_until })
    }

    /// Chooses the driver, and checkpoints a new report.
    pub(crate) async fn choose(&mut self) -> DriverChoice {
        let reported = *self.reported.borrow_and_update();
        if let Some(new) = reported.filter(|new| self.checkpointed != Some(*new)) {
            self.write_checkpoint(new).await;
        }
        let may_wait = Instant::now() < self.wait_until;
        choose(&self.ctx.config.runtime.cgroup_driver, reported, self.checkpointed, may_wait)
    }

    async fn write_checkpoint(&mut self, reported: ReportedDriver) {
        let endpoint = self.ctx.config.runtime.endpoint.clone();
        let stored = DriverCheckpoint { endpoint, cgroup_driver: reported.name().to_owned() };
        let written = self.file.store(stored).await.map_err(|error| chain(&error));
        if written.is_ok() {
            self.checkpointed = Some(reported);
        }
        self.ctx.progress.condition(CONDITION, written);
    }

    /// Waits until [`Self::choose`] may return another choice than `choice`. Cancel-safe.
    pub(crate) async fn changed(&mut self, choice: DriverChoice) {
        let timeout = async {
            match choice {
                DriverChoice::Wait => tokio::time::sleep_until(self.wait_until).await,
                DriverChoice::Use(..) | DriverChoice::Unknown => std::future::pending().await,
            }
        };
        // Cancel-safe: `changed` marks nothing as seen unless it returns, and `choose` reads the value anyway.
        tokio::select! {
            changed = self.reported.changed() => if changed.is_err() { std::future::pending().await },
            () = timeout => {}
        }
    }
}

/// `<state-dir>/resource-manager/runtime.json`.
fn state_file(config: &Config) -> StateFile<DriverCheckpoint> {
    StateFile::at(config.paths.state(ServiceName::ResourceManager).join("runtime.json"))
}

/// Follows the reports of runtime-shim forever. While it is down, the last report stays in effect.
pub(crate) async fn follow(runtime: Peer, reports: watch::Sender<Option<ReportedDriver>>) {
    let mut backoff = Backoff::reconnect();
    loop {
        if let Err(status) = listen(&runtime, &reports, &mut backoff).await {
            tracing::debug!(
                error = status.message(),
                "cannot watch the container runtime's cgroup driver, will retry"
            );
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

async fn listen(
    runtime: &Peer,
    reports: &watch::Sender<Option<ReportedDriver>>,
    backoff: &mut Backoff,
) -> Result<(), Status> {
    use rt::watch_pods_response::Item;
    let request = rt::WatchPodsRequest { state_only: true };
    let mut states = RuntimeClient::new(runtime.channel()).watch_pods(request).await?.into_inner();
    while let Some(message) = states.message().await? {
        backoff.reset();
        // A runtime without a name has not answered since runtime-shim started.
        if let Some(Item::State(state)) = message.item
            && !state.name.is_empty()
        {
            let new = Some(ReportedDriver::parse(&state.cgroup_driver));
            reports.send_if_modified(|old| std::mem::replace(old, new) != new);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use keelson_resource_manager_core::driver::DriverSource;
    use keelson_resource_manager_core::layout::Driver;

    use super::*;

    fn config(dir: &std::path::Path, endpoint: &str) -> Config {
        let mut config = Config::default();
        config.paths.state_dir = dir.to_owned();
        config.runtime.endpoint = endpoint.to_owned();
        config
    }

    #[tokio::test]
    async fn the_checkpointed_cgroup_driver_is_used_until_the_runtime_answers() {
        let dir = tempfile::tempdir().unwrap();
        let ctx = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///a.sock"));
        let systemd = DriverChoice::Use(Driver::Systemd, DriverSource::Runtime);
        let configured = DriverChoice::Use(Driver::Cgroupfs, DriverSource::Configuration);
        let reports = watch::Sender::new(None);
        let mut first = DriverSelector::load(&ctx, reports.subscribe()).await.unwrap();
        assert_eq!(first.choose().await, DriverChoice::Wait);
        reports.send_replace(Some(ReportedDriver::Named(Driver::Systemd)));
        first.changed(DriverChoice::Wait).await;
        assert_eq!(first.choose().await, systemd);
        // Killed: nothing runs on drop.
        drop(first);
        let reports = watch::Sender::new(None);
        let mut next = DriverSelector::load(&ctx, reports.subscribe()).await.unwrap();
        assert_eq!(next.choose().await, systemd);
        reports.send_replace(Some(ReportedDriver::Unnamed));
        next.changed(systemd).await;
        assert_eq!(next.choose().await, configured);
        drop(next);
        let (_reports, no_report) = watch::channel(None);
        let mut last = DriverSelector::load(&ctx, no_report.clone()).await.unwrap();
        assert_eq!(last.choose().await, configured);
        // The checkpoint of another runtime does not count.
        let other = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///b.sock"));
        let mut other = DriverSelector::load(&other, no_report).await.unwrap();
        assert_eq!(other.choose().await, DriverChoice::Wait);
        other.wait_until = Instant::now();
        other.changed(DriverChoice::Wait).await;
        assert_eq!(other.choose().await, configured, "the wait is over");
    }

    #[tokio::test]
    async fn an_unwritable_driver_checkpoint_is_a_condition_and_the_runtimes_driver_is_used() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("resource-manager"), "in the way").unwrap();
        let ctx = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///a.sock"));
        let (_reports, reported) = watch::channel(Some(ReportedDriver::Named(Driver::Systemd)));
        let mut drivers = DriverSelector::load(&ctx, reported).await.unwrap();
        assert_eq!(drivers.choose().await, DriverChoice::Use(Driver::Systemd, DriverSource::Runtime));
        let report = ctx.progress.report("");
        let condition = report.conditions.into_iter().find(|c| c.name == CONDITION).unwrap();
        assert!(!condition.ok && condition.message.contains("runtime.json"), "{}", condition.message);
    }
}
