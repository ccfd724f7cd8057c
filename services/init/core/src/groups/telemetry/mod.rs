//! Logs and traces, from the flags and both files (node-and-api.md §2.6, §14).

mod checks;
mod logging;
mod tracing;

use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use logging::Logging;
use tracing::Tracing;

/// The settings of all parts.
#[derive(Debug)]
pub(crate) struct Telemetry {
    logging: Logging,
    tracing: Tracing,
}

impl Settings for Telemetry {
    fn read(files: &mut Files<'_>) -> Self {
        Self { logging: Logging::read(files), tracing: Tracing::read(files) }
    }

    fn check(kubelet: &mut Reader<'_>) {
        checks::check(kubelet);
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        self.logging.resolve(out);
        self.tracing.resolve(out);
    }
}

#[cfg(test)]
mod tests;
