//! When the control plane last answered, stored in the checkpoint for the time after a reboot.

use std::time::Duration;

use keelson_config::Offline;
use keelson_pod_config_core::offline::contact_write_interval;
use keelson_service_kit::now_unix_nanos;
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;

/// The time of the last contact with one source.
pub struct LastContact {
    source: &'static str,
    checkpoint: Checkpoint,
    /// The last contact before the restart, in seconds since 1970.
    restored: Option<i64>,
    write_interval: Duration,
    /// When this run last wrote it.
    written_at: Option<Instant>,
    in_contact: bool,
}

impl LastContact {
    /// For `source`; `restored` is the last contact before the restart, in seconds since 1970.
    pub fn new(
        source: &'static str,
        restored: Option<i64>,
        offline: &Offline,
        checkpoint: Checkpoint,
    ) -> Self {
        Self {
            source,
            checkpoint,
            restored,
            write_interval: contact_write_interval(offline),
            written_at: None,
            in_contact: false,
        }
    }

    /// The last contact before the restart, in seconds since 1970.
    pub fn before_restart(&self) -> Option<i64> {
        self.restored
    }

    /// Records that the source answers.
    pub fn record_contact(&mut self) {
        self.in_contact = true;
        self.write_if_due();
    }

    /// Records that the source no longer answers.
    pub fn record_loss(&mut self) {
        self.in_contact = false;
    }

    /// Returns when the next write is due; never while there is no contact. Cancel-safe.
    pub async fn write_due(&self) {
        match self.written_at {
            _ if !self.in_contact => std::future::pending().await,
            Some(written_at) => tokio::time::sleep_until(written_at + self.write_interval).await,
            None => {}
        }
    }

    /// Writes the current time to the checkpoint if a write is due.
    pub fn write_if_due(&mut self) {
        let now = Instant::now();
        if self.in_contact && self.written_at.is_none_or(|written_at| written_at + self.write_interval <= now)
        {
            self.written_at = Some(now);
            self.checkpoint.put_last_contact(self.source, now_unix_seconds());
        }
    }
}

/// The end of a condition's message: how many pods wait for the control plane.
pub fn waiting_suffix(waiting: usize) -> String {
    match waiting {
        0 => String::new(),
        1 => ", but 1 pod waits for it since the reboot; `keelson get sources` shows it".to_owned(),
        n => format!(", but {n} pods wait for it since the reboot; `keelson get sources` shows them"),
    }
}

/// The current time, in seconds since 1970.
pub fn now_unix_seconds() -> i64 {
    now_unix_nanos() / 1_000_000_000
}
