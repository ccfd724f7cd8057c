//! Services that run without init: those of units and of containers, after `--resolve-only`.
//!
//! They hold no locks, and an init in their run dir would replace their sockets. So init checks whether one answers.
//! Conversely, a file says that such services may run: `--resolve-only` creates it, and an init, or the detection of a
//! foreign agent, removes it. The units do not start without it, even if an init has left a `config.json`.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Paths, ServiceName};
use keelson_files::remove_if_exists;
use tokio::time::Instant;

/// How long an unrecorded service of a killed init may take to end.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often this is checked.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Services run without init in the run dir of a starting init.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "services run without init in {} ({names}); two agents would kill each other's pods: stop them first \
     (systemctl stop keelson.target, if they are units)",
    run_dir.display()
)]
pub(crate) struct ServicesRunningError {
    run_dir: PathBuf,
    names: String,
}

/// The file that allows services to run without init.
fn file(run_dir: &Path) -> PathBuf {
    run_dir.join("without-init")
}

/// Allows services to run without init.
pub(crate) fn allow(paths: &Paths) -> io::Result<()> {
    fs::write(file(&paths.run_dir), "")
}

/// Forbids starting services without init.
pub(crate) fn forbid(paths: &Paths) -> io::Result<()> {
    remove_if_exists(&file(&paths.run_dir))
}

/// Fails if a service answers in the run dir, after waiting for those of an earlier init to end.
pub(crate) async fn ensure_none_running(paths: &Paths) -> Result<(), ServicesRunningError> {
    let deadline = Instant::now() + ORPHAN_TIMEOUT;
    loop {
        let names = answering_services(&paths.run_dir).join(", ");
        if names.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(ServicesRunningError { run_dir: paths.run_dir.clone(), names });
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// The services whose sockets accept connections.
fn answering_services(run_dir: &Path) -> Vec<&'static str> {
    let listens = |service: &ServiceName| UnixStream::connect(Paths::socket_below(run_dir, *service)).is_ok();
    ServiceName::supervised().filter(listens).map(ServiceName::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn paths(run_dir: &Path) -> Paths {
        Paths { run_dir: run_dir.to_owned(), ..Paths::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_running_service_blocks_init_and_a_leftover_socket_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        assert_eq!(ensure_none_running(&paths).await, Ok(()));
        let mut listeners = Vec::new();
        for service in [ServiceName::PodSync, ServiceName::NodeApi] {
            fs::create_dir(paths.socket_dir(service)).unwrap();
            listeners.push(UnixListener::bind(paths.socket(service)).unwrap());
        }
        listeners.pop();
        let text = ensure_none_running(&paths).await.unwrap_err().to_string();
        assert!(text.contains(&format!("{} (pod-sync)", dir.path().display())), "{text}");
        assert!(text.contains("systemctl stop keelson.target"), "{text}");
        drop(listeners);
        assert!(paths.socket(ServiceName::PodSync).exists());
        assert_eq!(ensure_none_running(&paths).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn init_waits_for_a_service_that_is_about_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        fs::create_dir(paths.socket_dir(ServiceName::PodSync)).unwrap();
        let listener = UnixListener::bind(paths.socket(ServiceName::PodSync)).unwrap();
        let ends = async {
            tokio::time::sleep(ORPHAN_TIMEOUT / 2).await;
            drop(listener);
        };
        let (refused, ()) = tokio::join!(ensure_none_running(&paths), ends);
        assert_eq!(refused, Ok(()));
    }

    #[test]
    fn the_without_init_file_exists_while_services_may_run_without_init() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        forbid(&paths).unwrap();
        allow(&paths).unwrap();
        assert!(dir.path().join("without-init").is_file());
        forbid(&paths).unwrap();
        assert!(!dir.path().join("without-init").exists());
    }
}
