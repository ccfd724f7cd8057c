//! The kubelet API: its listeners, TLS, access and handlers (node-and-api.md §6, §7, §8).

mod access;
mod handlers;
mod known_tls;
mod listeners;
mod tls;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use access::Access;
use handlers::Handlers;
use listeners::Listeners;

/// The settings of all parts.
#[derive(Debug)]
pub(crate) struct Api {
    access: Access,
    listeners: Listeners,
    handlers: Handlers,
    strict_verbs: Option<Sourced<bool>>,
}

impl Settings for Api {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            access: Access::read(reader),
            listeners: Listeners::read(reader),
            handlers: Handlers::read(reader),
            strict_verbs: files.keelson.boolean("strictVerbs"),
        }
    }

    fn check(kubelet: &mut Reader<'_>) {
        known_tls::check(kubelet);
        handlers::check_log_query(kubelet);
    }

    /// Whether there is an API server, which decides about TLS, must be resolved before.
    fn resolve(self, out: &mut Outcome<'_>) {
        self.access.resolve(out);
        self.listeners.resolve(out);
        self.handlers.resolve(out);
        out.set("api.strictVerbs", self.strict_verbs, |c, v| c.api.strict_verbs = v);
    }
}

#[cfg(test)]
mod tests;
