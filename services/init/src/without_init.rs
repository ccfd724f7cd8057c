//! Services that no init keeps: those of units and of containers, after `--resolve-only`.
//!
//! They hold no locks, and an init that came into their run dir would bind over their sockets. So it looks whether one
//! answers. The other way round a file says that such services may run there: `--resolve-only` makes it, and who finds
//! another agent takes it away. The units do not start without it, whatever `config.json` an init has left.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Paths, ServiceName};
use tokio::time::Instant;

use crate::remove_if_there;

/// How long a service of a killed init that is written down nowhere may take to end.
const LEFT_BEHIND: Duration = Duration::from_secs(5);
/// How often it is looked meanwhile.
const AGAIN: Duration = Duration::from_millis(50);

/// Services that no init keeps run where an init is to run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "services without an init run in {} ({names}); two agents would end each other's pods: stop them first \
     (systemctl stop keelson.target, where they are units)",
    run_dir.display()
)]
pub(crate) struct Answering {
    run_dir: PathBuf,
    names: String,
}

/// The file that lets services run without an init.
fn file(run_dir: &Path) -> PathBuf {
    run_dir.join("without-init")
}

/// Lets services run without an init.
pub(crate) fn allow(paths: &Paths) -> io::Result<()> {
    fs::write(file(&paths.run_dir), "")
}

/// Lets none be started any more.
pub(crate) fn forbid(paths: &Paths) -> io::Result<()> {
    remove_if_there(&file(&paths.run_dir))
}

/// Refuses while a service answers in the run dir. Those of an earlier init have ended by then.
pub(crate) async fn refuse(paths: &Paths) -> Result<(), Answering> {
    let patience = Instant::now() + LEFT_BEHIND;
    loop {
        let names = answering(&paths.run_dir).join(", ");
        if names.is_empty() {
            return Ok(());
        }
        if Instant::now() >= patience {
            return Err(Answering { run_dir: paths.run_dir.clone(), names });
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Services at whose socket somebody listens.
fn answering(run_dir: &Path) -> Vec<&'static str> {
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
    async fn a_service_that_answers_keeps_an_init_away_and_a_socket_that_was_left_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        assert_eq!(refuse(&paths).await, Ok(()));
        let mut listeners = Vec::new();
        for service in [ServiceName::PodSync, ServiceName::NodeApi] {
            fs::create_dir(paths.socket_dir(service)).unwrap();
            listeners.push(UnixListener::bind(paths.socket(service)).unwrap());
        }
        listeners.pop();
        let text = refuse(&paths).await.unwrap_err().to_string();
        assert!(text.contains(&format!("{} (pod-sync)", dir.path().display())), "{text}");
        assert!(text.contains("systemctl stop keelson.target"), "{text}");
        drop(listeners);
        assert!(paths.socket(ServiceName::PodSync).exists());
        assert_eq!(refuse(&paths).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_is_about_to_end_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        fs::create_dir(paths.socket_dir(ServiceName::PodSync)).unwrap();
        let listener = UnixListener::bind(paths.socket(ServiceName::PodSync)).unwrap();
        let ends = async {
            tokio::time::sleep(LEFT_BEHIND / 2).await;
            drop(listener);
        };
        let (refused, ()) = tokio::join!(refuse(&paths), ends);
        assert_eq!(refused, Ok(()));
    }

    #[test]
    fn the_file_is_there_while_services_may_run_without_init() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        forbid(&paths).unwrap();
        allow(&paths).unwrap();
        assert!(dir.path().join("without-init").is_file());
        forbid(&paths).unwrap();
        assert!(!dir.path().join("without-init").exists());
    }
}
