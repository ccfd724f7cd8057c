//! What the container runtime says of its cgroup driver: followed while the service runs, and kept for the next start,
//! so that a restart while the runtime is away finds the same tree.

use std::time::Duration;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
pub(crate) use keelson_resource_manager_core::driver::Told;
use keelson_resource_manager_core::driver::{Choice, choose};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, Kept, Peer, StateFile};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;

/// How long the first word of a runtime is waited for at a start: as long as a kubelet's three tries, 2 s apart (§4.2).
/// A kubelet ends then; here pods are prepared as configured, and the runtime's word counts when it comes.
const FIRST_WITHIN: Duration = Duration::from_secs(6);
/// The name of the condition that it cannot be kept.
const CONDITION: &str = "runtime-state";

/// What is kept: the driver of the runtime at this endpoint, empty where it does not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Stored {
    endpoint: String,
    cgroup_driver: String,
}

impl Kept for Stored {
    const VERSION: u64 = 1;
    const WITHOUT: &'static str =
        "the configured cgroup driver is taken when the container runtime does not answer";
    const UNWRITTEN: &'static str = "a restart without the container runtime would take the configured cgroup driver: make \
                                     room, and make the folder writable";
}

/// Decides which driver is in force, by what is known.
pub(crate) struct Drivers {
    ctx: Context,
    file: StateFile<Stored>,
    /// What the runtime said last, as the file has it.
    kept: Option<Told>,
    /// What it has said since the start.
    told: watch::Receiver<Option<Told>>,
    patient_until: Instant,
}

impl Drivers {
    /// With what an earlier run has kept of the runtime at the same endpoint.
    ///
    /// # Errors
    /// The file is of a newer version.
    pub(crate) async fn load(ctx: &Context, told: watch::Receiver<Option<Told>>) -> anyhow::Result<Self> {
        let file = state_file(&ctx.config);
        let Stored { endpoint, cgroup_driver } = file.load().await?;
        let kept = (endpoint == ctx.config.runtime.endpoint).then(|| Told::parse(&cgroup_driver));
        let patient_until = Instant::now() + FIRST_WITHIN;
        Ok(Self { ctx: ctx.clone(), file, kept, told, patient_until })
    }

    /// Which driver is in force now; what the runtime has said is kept.
    pub(crate) async fn choose(&mut self) -> Choice {
        let now = *self.told.borrow_and_update();
        if let Some(told) = now.filter(|told| self.kept != Some(*told)) {
            self.keep(told).await;
        }
        choose(&self.ctx.config.runtime.cgroup_driver, now, self.kept, Instant::now() < self.patient_until)
    }

    async fn keep(&mut self, told: Told) {
        let endpoint = self.ctx.config.runtime.endpoint.clone();
        let stored = Stored { endpoint, cgroup_driver: told.name().to_owned() };
        let written = self.file.store(stored).await.map_err(|error| chain(&error));
        if written.is_ok() {
            self.kept = Some(told);
        }
        self.ctx.progress.condition(CONDITION, written);
    }

    /// Waits until [`Self::choose`] may answer otherwise than `choice`. Cancel-safe.
    pub(crate) async fn changed(&mut self, choice: Choice) {
        let patience = async {
            match choice {
                Choice::Wait => tokio::time::sleep_until(self.patient_until).await,
                Choice::Use(..) | Choice::Unknown => std::future::pending().await,
            }
        };
        // Cancel-safe: `changed` marks nothing as seen unless it returns, and `choose` reads the value anyway.
        tokio::select! {
            changed = self.told.changed() => if changed.is_err() { std::future::pending().await },
            () = patience => {}
        }
    }
}

/// `<state-dir>/resource-manager/runtime.json`.
fn state_file(config: &Config) -> StateFile<Stored> {
    StateFile::at(config.paths.state(ServiceName::ResourceManager).join("runtime.json"))
}

/// Follows what runtime-shim tells, for ever. While it is away the last word stands.
pub(crate) async fn follow(runtime: Peer, told: watch::Sender<Option<Told>>) {
    let mut backoff = Backoff::reconnect();
    loop {
        if let Err(status) = listen(&runtime, &told, &mut backoff).await {
            tracing::debug!(error = status.message(), "nothing is told of the container runtime, will retry");
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

async fn listen(
    runtime: &Peer,
    told: &watch::Sender<Option<Told>>,
    backoff: &mut Backoff,
) -> Result<(), Status> {
    use rt::watch_pods_response::Item;
    let request = rt::WatchPodsRequest { state_only: true };
    let mut states = RuntimeClient::new(runtime.channel()).watch_pods(request).await?.into_inner();
    while let Some(message) = states.message().await? {
        backoff.reset();
        // One without a name has not answered since runtime-shim began.
        if let Some(Item::State(state)) = message.item
            && !state.name.is_empty()
        {
            let new = Some(Told::parse(&state.cgroup_driver));
            told.send_if_modified(|old| std::mem::replace(old, new) != new);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use keelson_resource_manager_core::driver::By;
    use keelson_resource_manager_core::layout::Driver;

    use super::*;

    fn config(dir: &std::path::Path, endpoint: &str) -> Config {
        let mut config = Config::default();
        config.paths.state_dir = dir.to_owned();
        config.runtime.endpoint = endpoint.to_owned();
        config
    }

    #[tokio::test]
    async fn what_the_runtime_said_last_is_in_force_at_the_next_start_until_it_answers() {
        let dir = tempfile::tempdir().unwrap();
        let ctx = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///a.sock"));
        let systemd = Choice::Use(Driver::Systemd, By::Runtime);
        let configured = Choice::Use(Driver::Cgroupfs, By::Configuration);
        let says = watch::Sender::new(None);
        let mut first = Drivers::load(&ctx, says.subscribe()).await.unwrap();
        assert_eq!(first.choose().await, Choice::Wait);
        says.send_replace(Some(Told::Driver(Driver::Systemd)));
        first.changed(Choice::Wait).await;
        assert_eq!(first.choose().await, systemd);
        // Killed: nothing is said in farewell.
        drop(first);
        let says = watch::Sender::new(None);
        let mut next = Drivers::load(&ctx, says.subscribe()).await.unwrap();
        assert_eq!(next.choose().await, systemd);
        says.send_replace(Some(Told::Nothing));
        next.changed(systemd).await;
        assert_eq!(next.choose().await, configured);
        drop(next);
        let (_says, silence) = watch::channel(None);
        let mut last = Drivers::load(&ctx, silence.clone()).await.unwrap();
        assert_eq!(last.choose().await, configured);
        // Of another runtime nothing is known.
        let other = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///b.sock"));
        let mut other = Drivers::load(&other, silence).await.unwrap();
        assert_eq!(other.choose().await, Choice::Wait);
        other.patient_until = Instant::now();
        other.changed(Choice::Wait).await;
        assert_eq!(other.choose().await, configured, "it was waited for long enough");
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_written_is_a_condition_and_the_runtimes_word_counts() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("resource-manager"), "in the way").unwrap();
        let ctx = Context::detached(ServiceName::ResourceManager, config(dir.path(), "unix:///a.sock"));
        let (_says, told) = watch::channel(Some(Told::Driver(Driver::Systemd)));
        let mut drivers = Drivers::load(&ctx, told).await.unwrap();
        assert_eq!(drivers.choose().await, Choice::Use(Driver::Systemd, By::Runtime));
        let report = ctx.progress.report("");
        let condition = report.conditions.into_iter().find(|c| c.name == CONDITION).unwrap();
        assert!(!condition.ok && condition.message.contains("runtime.json"), "{}", condition.message);
    }
}
