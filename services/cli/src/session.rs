//! The context of a command.

use crate::agent::Agent;
use crate::args::Global;
use crate::error::CliError;
use crate::output::{Colour, Format};
use crate::pods::Scope;

/// The context of a command: the agent and the global flags.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) agent: Agent,
    pub(crate) global: Global,
    /// Colours for standard output.
    pub(crate) colour: Colour,
    /// Nanoseconds since the epoch when the command began.
    pub(crate) now: i64,
}

impl Session {
    /// The namespace that the flags select.
    pub(crate) fn scope(&self) -> Scope {
        let namespace = (!self.global.all_namespaces).then(|| self.global.namespace.clone());
        Scope { namespace }
    }

    /// The output format.
    pub(crate) fn format(&self) -> Option<Format> {
        self.global.output
    }

    pub(crate) fn is_wide(&self) -> bool {
        self.global.output == Some(Format::Wide)
    }

    /// Refuses `--output` for a command without formats; `instead` is the hint.
    pub(crate) fn without_format(&self, command: &str, instead: &str) -> Result<(), CliError> {
        if self.global.output.is_none() {
            return Ok(());
        }
        Err(CliError::Usage {
            message: format!("`keelson {command}` has no --output"),
            hint: instead.to_owned(),
        })
    }
}
