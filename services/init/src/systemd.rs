//! Notifies systemd (sd_notify(3)), if it has started init.

use std::time::Duration;

use keelson_service_kit::LoopHandle;
use sd_notify::NotifyState;

/// The notifications to systemd.
#[derive(Debug)]
pub(crate) struct Systemd {
    is_enabled: bool,
    watchdog: Option<Duration>,
    ready_sent: bool,
    status: String,
}

impl Systemd {
    pub(crate) fn new() -> Self {
        Self {
            is_enabled: std::env::var_os("NOTIFY_SOCKET").is_some(),
            watchdog: sd_notify::watchdog_enabled(),
            ready_sent: false,
            status: String::new(),
        }
    }

    /// How often [`Systemd::notify`] must be called: twice per watchdog period, and at least with every heartbeat.
    pub(crate) fn heartbeat(&self) -> Duration {
        self.watchdog.map_or(LoopHandle::HEARTBEAT, |period| (period / 2).min(LoopHandle::HEARTBEAT))
    }

    /// Whether systemd expects notifications.
    pub(crate) fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// Feeds the watchdog, reports once that all services are ready, and updates the status line.
    pub(crate) fn notify(&mut self, ready: bool, status: Option<String>) {
        let first_ready = ready && !self.ready_sent;
        self.ready_sent |= ready;
        if first_ready {
            tracing::info!("Started kubelet: all services have answered");
        }
        let Some(status) = status else { return };
        let mut states = Vec::with_capacity(3);
        if self.watchdog.is_some() {
            states.push(NotifyState::Watchdog);
        }
        if first_ready {
            states.push(NotifyState::Ready);
        }
        if status != self.status {
            states.push(NotifyState::Status(&status));
        }
        send(&states);
        self.status = status;
    }

    pub(crate) fn stopping(&self) {
        if self.is_enabled {
            send(&[
                NotifyState::Stopping,
                NotifyState::Status("ending the services; containers keep running"),
            ]);
        }
    }
}

fn send(states: &[NotifyState<'_>]) {
    if !states.is_empty()
        && let Err(error) = sd_notify::notify(states)
    {
        tracing::debug!(%error, "cannot notify systemd");
    }
}
