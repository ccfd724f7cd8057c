//! What init tells systemd (sd_notify(3)), when it was started by it.

use std::time::Duration;

use keelson_service_kit::LoopHandle;
use sd_notify::NotifyState;

/// The conversation with systemd.
#[derive(Debug)]
pub(crate) struct Systemd {
    listens: bool,
    watchdog: Option<Duration>,
    told_ready: bool,
    status: String,
}

impl Systemd {
    pub(crate) fn new() -> Self {
        Self {
            listens: std::env::var_os("NOTIFY_SOCKET").is_some(),
            watchdog: sd_notify::watchdog_enabled(),
            told_ready: false,
            status: String::new(),
        }
    }

    /// How often [`Systemd::tell`] must be called: twice per watchdog period, and as often as any loop turns.
    pub(crate) fn heartbeat(&self) -> Duration {
        self.watchdog.map_or(LoopHandle::HEARTBEAT, |period| (period / 2).min(LoopHandle::HEARTBEAT))
    }

    /// Whether systemd listens at all.
    pub(crate) fn listens(&self) -> bool {
        self.listens
    }

    /// Feeds the watchdog, says once that all services are ready, and shows the status line when it changes.
    pub(crate) fn tell(&mut self, ready: bool, status: Option<String>) {
        let first_ready = ready && !self.told_ready;
        self.told_ready |= ready;
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
        if self.listens {
            send(&[NotifyState::Stopping, NotifyState::Status("ending the services; containers run on")]);
        }
    }
}

fn send(states: &[NotifyState<'_>]) {
    if !states.is_empty()
        && let Err(error) = sd_notify::notify(states)
    {
        tracing::debug!(%error, "cannot tell systemd");
    }
}
