//! `--prepare-host` and `--resolve-only`: what comes before services that no init keeps, and ends.
//!
//! Whoever has it done for each change of a file may miss one that comes while it runs, as systemd does
//! (systemd.path(5) watches nothing while the unit runs). So files that are others at the end are read again, and so are
//! those that are refused, once they have stood still.

use std::process::ExitCode;
use std::time::Duration;

use keelson_config::Config;
use keelson_init_core::folders;

use crate::cli::Cli;
use crate::handed_files::{self, HandoverError};
use crate::kubelet::{self, Kubelet};
use crate::lock::{self, LockError};
use crate::reload::Stamp;
use crate::{
    EX_CONFIG, EX_SOFTWARE, Start, dirs, hand_over, hand_over_files, is_root, join_operator_group,
    node_configuration, signals, start, why_no_start, without_init, write_config, write_flags,
};

/// How long files must have stood still that are refused.
const STILL: Duration = Duration::from_millis(500);
/// How often files are read that change all the time, at most.
const LOOKS: u32 = 10;

/// Why nothing was done.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    /// For people.
    lines: Vec<String>,
    /// What the process ends with: 78 waits for a person, 70 may be tried again.
    code: u8,
    /// Whether other files could make a difference. Never while another agent is there: one that is being started
    /// again is away for a moment.
    may_pass: bool,
}

impl Refusal {
    fn of(error: &anyhow::Error) -> Self {
        let taken = matches!(error.downcast_ref(), Some(LockError::Taken { .. }));
        let another_agent = taken || error.is::<Kubelet>();
        let person = another_agent || error.is::<HandoverError>();
        let code = if person { EX_CONFIG } else { EX_SOFTWARE };
        Self { lines: vec![format!("keelson-init: {error:#}")], code, may_pass: !another_agent }
    }
}

/// Does what the command line asks for.
pub(crate) fn run(cli: &Cli, is_kubelet: bool) -> ExitCode {
    // There is nothing to end in order, and whoever stops the unit wants no service started after it.
    signals::let_through();
    let mut told = Vec::new();
    match settle(|| once(cli, is_kubelet, &mut told), || std::thread::sleep(STILL)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(refused) => {
            for line in refused.lines {
                eprintln!("{line}");
            }
            ExitCode::from(refused.code)
        }
    }
}

/// Looks until files are the same as before, or are refused for the same reasons as before.
fn settle(mut look: impl FnMut() -> Result<bool, Refusal>, wait: impl Fn()) -> Result<(), Refusal> {
    let mut last = Ok(());
    for _ in 0..LOOKS {
        match look() {
            Ok(true) => return Ok(()),
            Ok(false) => last = Ok(()),
            Err(refused) if !refused.may_pass || last.as_ref() == Err(&refused) => return Err(refused),
            Err(refused) => last = Err(refused),
        }
        wait();
    }
    last
}

/// Reads the files and acts on them. Whether they are still the same at the end.
fn once(cli: &Cli, is_kubelet: bool, told: &mut Vec<String>) -> Result<bool, Refusal> {
    let start = start(cli).map_err(|lines| Refusal {
        lines: lines.iter().map(|line| why_no_start(is_kubelet, line)).collect(),
        code: EX_CONFIG,
        may_pass: true,
    })?;
    for note in &start.resolved.notes {
        if !told.contains(&note.text) {
            eprintln!("keelson-init: {}", note.text);
            told.push(note.text.clone());
        }
    }
    let config = &start.resolved.config;
    let done = if cli.prepare_host() {
        prepare_host(config).map(|()| true)
    } else {
        let named = handed_files::digest(config);
        resolve_only(&start, cli)
            .map(|()| start.stamp == Stamp::of(cli) && named == handed_files::digest(config))
    };
    done.map_err(|error| Refusal::of(&error))
}

/// `--prepare-host`.
fn prepare_host(config: &Config) -> anyhow::Result<()> {
    dirs::prepare(&folders(config, is_root()))?;
    dirs::share(&config.paths.root_dir)?;
    Ok(())
}

/// `--resolve-only`.
fn resolve_only(start: &Start, cli: &Cli) -> anyhow::Result<()> {
    let config = &start.resolved.config;
    if let Err(kubelet) = kubelet::refuse(config) {
        // What runs is not ended, but nothing is started beside it.
        without_init::forbid(&config.paths)?;
        return Err(kubelet.into());
    }
    join_operator_group(config)?;
    let mut below_run = folders(config, is_root());
    below_run.retain(|folder| folder.path.starts_with(&config.paths.run_dir));
    dirs::prepare(&below_run)?;
    let _lock = lock::run_dir(config)?;
    // What an init has told of a node that had one.
    node_configuration::forget_status(&config.paths)?;
    hand_over(config, start.providers.as_ref())?;
    hand_over_files(config)?;
    write_config(&start.resolved)?;
    write_flags(config, cli)?;
    without_init::allow(&config.paths)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// What becomes of these looks, and how many of them there are.
    fn settled(looks: &[Result<bool, Refusal>]) -> (Result<(), Refusal>, usize) {
        let mut done = 0;
        let become_of = settle(
            || {
                done += 1;
                let look = &looks[(done - 1).min(looks.len() - 1)];
                look.as_ref().copied().map_err(|refused| refusal(&refused.lines[0], refused.may_pass))
            },
            || (),
        );
        (become_of, done)
    }

    fn refusal(line: &str, may_pass: bool) -> Refusal {
        Refusal { lines: vec![line.to_owned()], code: EX_CONFIG, may_pass }
    }

    #[test]
    fn files_that_change_meanwhile_are_read_again_and_what_is_refused_once_more() {
        let no_key = || Err(refusal("no key", true));
        let no_certificate = || Err(refusal("no certificate", true));
        let kubelet = || Err(refusal("a kubelet", false));
        for (looks, become_of, done) in [
            (vec![Ok(true)], Ok(()), 1),
            (vec![Ok(false), Ok(true)], Ok(()), 2),
            (vec![no_key(), Ok(true)], Ok(()), 2),
            (vec![no_key(), no_key(), Ok(true)], Err(refusal("no key", true)), 2),
            (vec![no_certificate(), no_key(), Ok(true)], Ok(()), 3),
            (vec![no_key(), Ok(false), no_key(), Ok(true)], Ok(()), 4),
            // Away for a moment, it would be taken for gone.
            (vec![kubelet(), Ok(true)], Err(refusal("a kubelet", false)), 1),
            (vec![Ok(false)], Ok(()), 10),
        ] {
            assert_eq!(settled(&looks), (become_of, done), "{looks:?}");
        }
    }

    #[test]
    fn another_agent_is_never_waited_for_and_the_machine_may_be_tried_again() {
        let taken =
            LockError::Taken { holder: Default::default(), what: "runs here".into(), way_out: "stop it" };
        let open =
            LockError::Open { path: "/run/x".into(), source: io::Error::from(io::ErrorKind::StorageFull) };
        let read = HandoverError::Read {
            path: "/etc/x".into(),
            field: "tlsCertFile",
            source: io::Error::from(io::ErrorKind::NotFound),
        };
        let of = |error: anyhow::Error| {
            let refusal = Refusal::of(&error.context("above it"));
            (refusal.code, refusal.may_pass)
        };
        assert_eq!(of(taken.into()), (EX_CONFIG, false));
        assert_eq!(of(open.into()), (EX_SOFTWARE, true));
        assert_eq!(of(read.into()), (EX_CONFIG, true));
        assert_eq!(of(anyhow::anyhow!("no room")), (EX_SOFTWARE, true));
    }
}
