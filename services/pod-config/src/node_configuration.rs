//! The loop `node-configuration`: what etcd says under this node's key, in a file of the state folder for init.
//!
//! Here it is not judged: init knows the rest of the configuration, tries it and takes it back. While etcd is away the
//! file stays as it is.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use keelson_config::AssignedConfiguration;
use keelson_etcd::{Change, Entry, Etcd, Follower, News, NodeKeys, Range};
use keelson_service_kit::{Context, LoopHandle};

/// The condition that says whether the file is what stands under the key.
const CONDITION: &str = "node configuration";

/// Keeps the file as the key is, until the shutdown.
pub(crate) async fn run(ctx: Context, etcd: Etcd) {
    let turn = ctx.progress.register("node-configuration");
    let key = NodeKeys::new(&ctx.config.node_name).config();
    let mut follower = Follower::new(etcd, Range::key(key));
    let path = ctx.config.paths.assigned_configuration();
    // What is still to be written.
    let mut open = None;
    loop {
        turn.tick();
        if let Some(wanted) = open.take() {
            let written = write(&path, &wanted).await;
            let told = written.as_ref().map_err(|error| {
                format!("cannot write {}, the node configuration stays as it is: {error}", path.display())
            });
            ctx.progress.condition(CONDITION, told.copied());
            if written.is_err() {
                open = Some(wanted);
            }
        }
        // Cancel-safe: the follower tells again what was not taken, and the sleep holds nothing.
        let news = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            news = follower.next() => news,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => continue,
        };
        match news {
            News::Listed(entries) => open = Some(entries.into_iter().next().map(assigned)),
            News::Changed(changes) => {
                for change in changes {
                    open = Some(match change {
                        Change::Put(entry) => Some(assigned(entry)),
                        Change::Deleted(_) => None,
                    });
                }
            }
            // The source of pods says that etcd is away.
            News::InTouch | News::Lost(_) => {}
        }
    }
}

fn assigned(entry: Entry) -> AssignedConfiguration {
    AssignedConfiguration::new(entry.mod_revision, entry.value)
}

/// Makes the file what it should be; `None`: there is none.
async fn write(path: &Path, wanted: &Option<AssignedConfiguration>) -> io::Result<()> {
    let (path, wanted) = (path.to_owned(), wanted.clone());
    let done = tokio::task::spawn_blocking(move || replace(&path, wanted.as_ref())).await;
    done.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// By rename, mode 0600. A file that is so already is left alone.
fn replace(path: &Path, wanted: Option<&AssignedConfiguration>) -> io::Result<()> {
    let Some(wanted) = wanted else {
        return match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    };
    let bytes = serde_json::to_vec(wanted)?;
    if fs::read(path).is_ok_and(|now| now == bytes) {
        return Ok(());
    }
    let temporary = path.with_extension("json.new");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&bytes)?;
    fs::rename(temporary, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn the_file_is_what_stands_under_the_key_and_is_not_written_twice() {
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
