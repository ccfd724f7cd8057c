//! Reports processes that the kernel has killed because the machine was out of memory (runtime-and-resources.md §12.8).

use std::fs::File;
use std::io;
use std::path::Path;

use keelson_resource_manager_core::kernel::{OomParser, Victim};
use keelson_service_kit::{Context, LoopHandle, ObjectRef};
use rustix::fs::{Mode, OFlags, SeekFrom};
use tokio::net::unix::pipe::Receiver;

const KMSG: &str = "/dev/kmsg";
/// The maximum size of a record; each read returns one.
const RECORD: usize = 8192;

/// Starts to watch the kernel's log from its current end. The log belongs to the agent that manages the host; where it cannot
/// be read, as in a user namespace, nothing is reported.
pub(crate) fn watch(ctx: &Context) {
    if !ctx.config.manage_host {
        return;
    }
    match Log::open(Path::new(KMSG)) {
        Ok(log) => {
            let handle = ctx.progress.register("oom");
            ctx.spawn("oom", follow(ctx.clone(), log, handle));
        }
        Err(error) => {
            tracing::warn!(
                "cannot report processes that the kernel kills when memory runs out: {KMSG}: {error}"
            );
        }
    }
}

async fn follow(ctx: Context, log: Log, handle: LoopHandle) {
    let mut parser = OomParser::default();
    loop {
        handle.tick();
        // Cancel-safe: `next` reads nothing before the log is readable, and then returns the record at once; the others hold
        // nothing.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            record = log.next() => match record {
                Ok(record) => {
                    if let Some(victim) = parser.take(&record) {
                        report(&ctx, &victim);
                    }
                }
                Err(error) => {
                    tracing::warn!("can no longer report processes that the kernel kills when memory runs out: {error}");
                    ctx.shutdown.cancelled().await;
                    return;
                }
            },
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

fn report(ctx: &Context, victim: &Victim) {
    let Victim { process, pid } = victim;
    let text = format!("System OOM encountered, victim process: {process}, pid: {pid}");
    tracing::warn!(process, pid, "the kernel has killed a process because the machine was out of memory");
    ctx.events.warning(ObjectRef::node(&ctx.config.node_name), "SystemOOM", text);
}

/// The kernel's log, from its end. It is read like a pipe: when it is readable, and without blocking.
#[derive(Debug)]
struct Log(Receiver);

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        rustix::fs::seek(&file, SeekFrom::End(0))?;
        Ok(Self(Receiver::from_file_unchecked(File::from(file))?))
    }

    async fn next(&self) -> io::Result<String> {
        loop {
            self.0.readable().await?;
            let mut record = [0_u8; RECORD];
            match self.0.try_read(&mut record) {
                Ok(length) => return Ok(String::from_utf8_lossy(&record[..length]).into_owned()),
                // A spurious wakeup, or an unread record was overwritten: read the next record.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_kernels_log_is_followed_from_its_end() {
        let log = Log::open(Path::new(KMSG)).expect("run this as root where /dev/kmsg is the host's");
        let marker = format!("keelson-test-{}", fastrand::u64(..));
        std::fs::write(KMSG, format!("<7>{marker}\n")).unwrap();
        let seen = async {
            loop {
                if log.next().await.unwrap().contains(&marker) {
                    return;
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(10), seen).await.unwrap();
    }
}
