//! The loop `node-configuration`: writes the value of this node's configuration key in etcd to a file in the state folder, for
//! init.
//!
//! The value is not validated here: init knows the rest of the configuration, tries it and reverts it. While etcd is down the
//! file stays unchanged.

use std::io;
use std::path::Path;

use keelson_config::AssignedConfiguration;
use keelson_etcd::{Change, Entry, Etcd, Follower, NodeKeys, Range, WatchEvent};
use keelson_files::{Replacement, remove_if_exists};
use keelson_service_kit::{Context, LoopHandle};

/// The condition for whether the file has the value of the key.
const CONDITION: &str = "node configuration";

/// Keeps the file equal to the key until shutdown.
pub(crate) async fn run(ctx: Context, etcd: Etcd) {
    let loop_handle = ctx.progress.register("node-configuration");
    let key = NodeKeys::new(&ctx.config.node_name).config();
    let mut follower = Follower::new(etcd, Range::key(key));
    let path = ctx.config.paths.assigned_configuration();
    // The value that is still to be written.
    let mut pending = None;
    loop {
        loop_handle.tick();
        if let Some(wanted) = pending.take() {
            let written = write(&path, &wanted).await;
            let result = written.as_ref().map_err(|error| {
                format!("cannot write {}: {error}; the node configuration stays unchanged", path.display())
            });
            ctx.progress.condition(CONDITION, result.copied());
            if written.is_err() {
                pending = Some(wanted);
            }
        }
        // Cancel-safe: the follower returns again what was not taken, and the sleep holds no state.
        let event = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            event = follower.next() => event,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => continue,
        };
        match event {
            WatchEvent::Listed(entries) => pending = Some(entries.into_iter().next().map(assigned)),
            WatchEvent::Changed(changes) => {
                for change in changes {
                    pending = Some(match change {
                        Change::Put(entry) => Some(assigned(entry)),
                        Change::Deleted(_) => None,
                    });
                }
            }
            // The source of pods reports that etcd is down.
            WatchEvent::Contact | WatchEvent::Lost(_) => {}
        }
    }
}

fn assigned(entry: Entry) -> AssignedConfiguration {
    AssignedConfiguration::new(entry.mod_revision, entry.value)
}

/// Writes the file; `None` deletes it.
async fn write(path: &Path, wanted: &Option<AssignedConfiguration>) -> io::Result<()> {
    let (path, wanted) = (path.to_owned(), wanted.clone());
    let done = tokio::task::spawn_blocking(move || replace(&path, wanted.as_ref())).await;
    done.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Replaces the file by rename, mode 0600. Leaves an equal file untouched.
fn replace(path: &Path, wanted: Option<&AssignedConfiguration>) -> io::Result<()> {
    match wanted {
        Some(wanted) => {
            let bytes = serde_json::to_vec(wanted)?;
            Replacement::new().mode(0o600).write_if_changed(path, &bytes).map(drop)
        }
        None => remove_if_exists(path),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn the_configuration_file_equals_the_key_and_is_not_rewritten_if_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-configuration.json");
        let of = |revision| AssignedConfiguration::new(revision, b"maxPods: 7".to_vec());
        replace(&path, None).unwrap();
        replace(&path, Some(&of(3))).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.mode() & 0o777, 0o600);
        replace(&path, Some(&of(3))).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        replace(&path, Some(&of(4))).unwrap();
        let now: AssignedConfiguration = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(now, of(4));
        replace(&path, None).unwrap();
        assert!(!path.exists());
    }
}
