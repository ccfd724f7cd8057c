//! The periodic work of a running service: it reports to systemd and to the health API whether its loops make progress,
//! releases memory, and checks whether its configuration file has changed.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Config, ConfigError};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::context::Context;
use crate::progress::LoopHandle;
use crate::{lifeline, memory};

/// Runs until the shutdown. The systemd watchdog is fed twice per period, and only while no loop is stuck (sd_notify(3),
/// `WATCHDOG=1`). When the configuration changes, the service applies the values that may change while it runs. For any
/// other change a service without init exits, and its supervisor starts it again with the new configuration.
pub(crate) async fn run(context: Context, health: HealthReporter, file: Option<ConfigFile>) {
    let watchdog = sd_notify::watchdog_enabled();
    // init restarts its services itself.
    let kept_by_init = lifeline::is_held();
    beat(context, health, file, kept_by_init, watchdog, || {
        if watchdog.is_some() {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
        }
    })
    .await;
}

async fn beat(
    context: Context,
    health: HealthReporter,
    mut file: Option<ConfigFile>,
    kept_by_init: bool,
    watchdog: Option<Duration>,
    feed: impl Fn(),
) {
    let period = watchdog.map_or(LoopHandle::HEARTBEAT, |time| (time / 2).min(LoopHandle::HEARTBEAT));
    let mut serving = true;
    loop {
        // Cancel-safe: nothing is taken while waiting.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(period) => {}
        }
        memory::give_back();
        let good = context.progress.stuck().is_none();
        if good {
            feed();
        }
        if good != serving {
            serving = good;
            let status = if good { ServingStatus::Serving } else { ServingStatus::NotServing };
            health.set_service_status("", status).await;
        }
        let Some(new) = file.as_mut().and_then(ConfigFile::changed) else { continue };
        if !kept_by_init && !context.config.differs_live_alone(&new) {
            tracing::info!(
                "the configuration has changed; the service exits so that its supervisor restarts it with the new one"
            );
            context.shutdown.cancel();
        } else if context.live.take(&new) {
            tracing::info!(
                "the configuration has changed; values that may change while the service runs are in effect now"
            );
        }
    }
}

/// The file with the resolved configuration, which is replaced by rename.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    /// Version of the file that was read last.
    seen: Option<Version>,
}

/// Inode and ctime: a file and the one that replaces it differ in at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version(u64, i64, i64);

impl Version {
    fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|meta| Self(meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }
}

impl ConfigFile {
    /// Reads the configuration.
    pub(crate) fn load(path: &Path) -> Result<(Self, Config), ConfigError> {
        // The version is read first, so that a replacement during the read is noticed at the next check.
        let seen = Version::of(path);
        Ok((Self { path: path.to_owned(), seen }, Config::load(path)?))
    }

    /// The configuration, when the file has been replaced since the last check. A file that cannot be read counts as unchanged.
    fn changed(&mut self) -> Option<Config> {
        let now = Version::of(&self.path);
        if now.is_none() || now == self.seen {
            return None;
        }
        self.seen = now;
        match Config::load(&self.path) {
            Ok(new) => Some(new),
            Err(error) => {
                let error = crate::status::chain(&error);
                tracing::warn!(%error, "the new configuration is not used");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use keelson_config::ConfigExtras;

    use super::*;
    use crate::config_file::store_config;

    #[test]
    fn config_file_is_reread_when_replaced_by_rename() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        assert!(ConfigFile::load(&path).is_err());
        let mut written = Config::default();
        store_config(&path, &written, ConfigExtras::default()).unwrap();
        let (mut file, current) = ConfigFile::load(&path).unwrap();
        assert_eq!(current, written);
        assert_eq!(file.changed(), None);

        fs::write(&path, "{").unwrap();
        assert_eq!(file.changed(), None, "unreadable");
        fs::remove_file(&path).unwrap();
        assert_eq!(file.changed(), None, "absent");

        written.node_name = "other".into();
        store_config(&path, &written, ConfigExtras::default()).unwrap();
        assert_eq!(file.changed(), Some(written));
        assert_eq!(file.changed(), None, "once");
    }

    #[tokio::test(start_paused = true)]
    async fn systemd_watchdog_is_fed_twice_per_period_until_a_loop_is_stuck() {
        let context = Context::detached(keelson_config::ServiceName::PodSync, Config::default());
        let (progress, shutdown) = (context.progress.clone(), context.shutdown.clone());
        let (health, _service) = tonic_health::server::health_reporter();
        let fed = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&fed);
        let feed = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let beating = tokio::spawn(beat(context, health, None, false, Some(Duration::from_secs(8)), feed));
        tokio::time::sleep(Duration::from_secs(41)).await;
        assert_eq!(fed.swap(0, Ordering::Relaxed), 10);
        let _stuck = progress.register_within("stuck", Duration::ZERO);
        // Progress goes by the machine's clock.
        std::thread::sleep(Duration::from_millis(2));
        tokio::time::sleep(Duration::from_secs(80)).await;
        assert_eq!(fed.load(Ordering::Relaxed), 0);
        shutdown.cancel();
        beating.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn live_config_values_apply_without_restart_with_and_without_init() {
        for kept_by_init in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("config.json");
            let mut written = Config::default();
            store_config(&path, &written, ConfigExtras::default()).unwrap();
            let (file, config) = ConfigFile::load(&path).unwrap();
            let context = Context::detached(keelson_config::ServiceName::RuntimeShim, config);
            let (shutdown, mut live) = (context.shutdown.clone(), context.live.subscribe());
            live.mark_unchanged();
            let (health, _service) = tonic_health::server::health_reporter();
            let beating = tokio::spawn(beat(context, health, Some(file), kept_by_init, None, || ()));
            written.container_logs.max_files = 9;
            // The time of resolution and the provenance do not count as changes.
            written.resolved_unix_nanos += 1;
            written.provenance.insert("nodeName".into(), "the host".into());
            store_config(&path, &written, ConfigExtras::default()).unwrap();
            live.changed().await.unwrap();
            assert_eq!(live.borrow_and_update().container_logs.max_files, 9);
            assert!(!shutdown.is_cancelled());
            written.node_name = "other".into();
            written.container_logs.max_files = 8;
            store_config(&path, &written, ConfigExtras::default()).unwrap();
            if kept_by_init {
                live.changed().await.unwrap();
                assert_eq!(live.borrow().container_logs.max_files, 8);
                assert_eq!(live.borrow().node_name, "", "init starts it again for that");
                assert!(!shutdown.is_cancelled());
                shutdown.cancel();
            }
            beating.await.unwrap();
            assert!(shutdown.is_cancelled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_without_init_ends_when_its_configuration_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let mut written = Config::default();
        store_config(&path, &written, ConfigExtras::default()).unwrap();
        let (file, config) = ConfigFile::load(&path).unwrap();
        let context = Context::detached(keelson_config::ServiceName::PodSync, config);
        let shutdown = context.shutdown.clone();
        let (health, _service) = tonic_health::server::health_reporter();
        let beating = tokio::spawn(run(context, health, Some(file)));
        tokio::time::sleep(LoopHandle::HEARTBEAT * 3).await;
        assert!(!shutdown.is_cancelled());
        written.node_name = "other".into();
        store_config(&path, &written, ConfigExtras::default()).unwrap();
        shutdown.cancelled().await;
        beating.await.unwrap();
    }
}
