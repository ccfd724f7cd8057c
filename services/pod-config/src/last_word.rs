//! When the control plane was last heard, as the checkpoint has it for the time after a reboot.

use std::time::Duration;

use keelson_config::Offline;
use keelson_pod_config_core::offline::written_every;
use keelson_service_kit::now_unix_nanos;
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;

/// The last word of one source.
pub struct LastWord {
    source: &'static str,
    checkpoint: Checkpoint,
    /// Of the runs before; seconds since 1970.
    earlier: Option<i64>,
    every: Duration,
    /// When this run wrote it down.
    written: Option<Instant>,
    is_heard: bool,
}

impl LastWord {
    /// Of `source`, which the runs before have last heard at `earlier`.
    pub fn new(
        source: &'static str,
        earlier: Option<i64>,
        offline: &Offline,
        checkpoint: Checkpoint,
    ) -> Self {
        Self { source, checkpoint, earlier, every: written_every(offline), written: None, is_heard: false }
    }

    /// When the runs before have last heard it, in seconds since 1970.
    pub fn of_earlier_runs(&self) -> Option<i64> {
        self.earlier
    }

    /// It is heard now.
    pub fn is_heard(&mut self) {
        self.is_heard = true;
        self.write();
    }

    /// It is not heard any more.
    pub fn is_not_heard(&mut self) {
        self.is_heard = false;
    }

    /// Returns when it is time to write it down, which is never while nothing is heard. Cancel-safe.
    pub async fn due(&self) {
        match self.written {
            _ if !self.is_heard => std::future::pending().await,
            Some(written) => tokio::time::sleep_until(written + self.every).await,
            None => {}
        }
    }

    /// Writes it down where it is time to.
    pub fn write(&mut self) {
        let now = Instant::now();
        if self.is_heard && self.written.is_none_or(|written| written + self.every <= now) {
            self.written = Some(now);
            self.checkpoint.put_heard(self.source, now_unix_seconds());
        }
    }
}

/// What does not go on while the control plane is away, as the end of a sentence.
pub fn but(waiting: usize) -> String {
    match waiting {
        0 => String::new(),
        1 => ", but 1 pod waits for it since the reboot; `keelson get sources` names it".to_owned(),
        n => format!(", but {n} pods wait for it since the reboot; `keelson get sources` names them"),
    }
}

/// The moment, in seconds since 1970.
pub fn now_unix_seconds() -> i64 {
    now_unix_nanos() / 1_000_000_000
}
