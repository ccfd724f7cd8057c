//! `--prepare-host` and `--resolve-only`: prepares for services that run without init, and exits.
//!
//! A caller that runs this for each change of a file may miss a change during the run, as systemd does (systemd.path(5)
//! watches nothing while the unit runs). So files that have changed at the end are read again, and so are invalid ones after
//! a short wait.

use std::process::ExitCode;
use std::time::Duration;

use keelson_config::Config;
use keelson_init_core::folders;

use crate::cli::Cli;
use crate::credential_copies::{self, CopyError};
use crate::foreign_kubelet::{self, ForeignKubeletError};
use crate::lock::{self, LockError};
use crate::reload::Stamp;
use crate::{
    EX_CONFIG, EX_SOFTWARE, StartInputs, copy_credentials_and_report, dirs, is_root, join_operator_group,
    node_configuration, read_start_inputs, signals, startup_error_line, without_init, write_config,
    write_flags, write_providers_copy,
};

/// How long to wait before invalid files are read again.
const QUIET_PERIOD: Duration = Duration::from_millis(500);
/// The maximum number of reads if files keep changing.
const MAX_ATTEMPTS: u32 = 10;

/// Why nothing was done.
#[derive(Debug, PartialEq, Eq)]
struct ResolveOnlyError {
    /// The messages for the operator.
    lines: Vec<String>,
    /// The exit code: 78 needs an operator, 70 may be retried.
    code: u8,
    /// Whether changed files could help. Never if another agent runs: one that is being restarted is only absent for a
    /// moment.
    is_retryable: bool,
}

impl ResolveOnlyError {
    fn of(error: &anyhow::Error) -> Self {
        let held = matches!(error.downcast_ref(), Some(LockError::Held { .. }));
        let another_agent = held || error.is::<ForeignKubeletError>();
        let needs_operator = another_agent || error.is::<CopyError>();
        let code = if needs_operator { EX_CONFIG } else { EX_SOFTWARE };
        Self { lines: vec![format!("keelson-init: {error:#}")], code, is_retryable: !another_agent }
    }
}

/// Does what the command line requests.
pub(crate) fn run(cli: &Cli, is_kubelet: bool) -> ExitCode {
    // Nothing has to end in order, and a stop of the unit must not start services afterwards.
    signals::unblock();
    let mut printed = Vec::new();
    match retry_until_stable(|| run_once(cli, is_kubelet, &mut printed), || std::thread::sleep(QUIET_PERIOD))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            for line in error.lines {
                eprintln!("{line}");
            }
            ExitCode::from(error.code)
        }
    }
}

/// Repeats `attempt` until the files are unchanged, or are invalid for the same reasons as before.
fn retry_until_stable(
    mut attempt: impl FnMut() -> Result<bool, ResolveOnlyError>,
    wait: impl Fn(),
) -> Result<(), ResolveOnlyError> {
    let mut last = Ok(());
    for _ in 0..MAX_ATTEMPTS {
        match attempt() {
            Ok(true) => return Ok(()),
            Ok(false) => last = Ok(()),
            Err(error) if !error.is_retryable || last.as_ref() == Err(&error) => return Err(error),
            Err(error) => last = Err(error),
        }
        wait();
    }
    last
}

/// Reads the files and acts on them. Returns whether they are unchanged at the end.
fn run_once(cli: &Cli, is_kubelet: bool, printed: &mut Vec<String>) -> Result<bool, ResolveOnlyError> {
    let inputs = read_start_inputs(cli).map_err(|lines| ResolveOnlyError {
        lines: lines.iter().map(|line| startup_error_line(is_kubelet, line)).collect(),
        code: EX_CONFIG,
        is_retryable: true,
    })?;
    for note in &inputs.resolved.notes {
        if !printed.contains(&note.text) {
            eprintln!("keelson-init: {}", note.text);
            printed.push(note.text.clone());
        }
    }
    let config = &inputs.resolved.config;
    let done = if cli.prepare_host() {
        prepare_host(config).map(|()| true)
    } else {
        let copies_digest = credential_copies::digest(config);
        resolve_only(&inputs, cli)
            .map(|()| inputs.stamp == Stamp::of(cli) && copies_digest == credential_copies::digest(config))
    };
    done.map_err(|error| ResolveOnlyError::of(&error))
}

/// `--prepare-host`.
fn prepare_host(config: &Config) -> anyhow::Result<()> {
    dirs::prepare(&folders(config, is_root()))?;
    dirs::share(&config.paths.root_dir)?;
    Ok(())
}

/// `--resolve-only`.
fn resolve_only(inputs: &StartInputs, cli: &Cli) -> anyhow::Result<()> {
    let config = &inputs.resolved.config;
    if let Err(kubelet) = foreign_kubelet::ensure_none(config) {
        // Running services are not ended, but no others are started.
        without_init::forbid(&config.paths)?;
        return Err(kubelet.into());
    }
    join_operator_group(config)?;
    let mut below_run = folders(config, is_root());
    below_run.retain(|folder| folder.path.starts_with(&config.paths.run_dir));
    dirs::prepare(&below_run)?;
    let _lock = lock::run_dir(config)?;
    // The status that an init published on a node with a key.
    node_configuration::remove_status(&config.paths)?;
    write_providers_copy(config, inputs.providers.as_ref())?;
    copy_credentials_and_report(config)?;
    write_config(&inputs.resolved)?;
    write_flags(config, cli)?;
    without_init::allow(&config.paths)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// The result of these attempts, and their number.
    fn run_attempts(attempts: &[Result<bool, ResolveOnlyError>]) -> (Result<(), ResolveOnlyError>, usize) {
        let mut done = 0;
        let result = retry_until_stable(
            || {
                done += 1;
                let attempt = &attempts[(done - 1).min(attempts.len() - 1)];
                attempt.as_ref().copied().map_err(|error| error_with(&error.lines[0], error.is_retryable))
            },
            || (),
        );
        (result, done)
    }

    fn error_with(line: &str, is_retryable: bool) -> ResolveOnlyError {
        ResolveOnlyError { lines: vec![line.to_owned()], code: EX_CONFIG, is_retryable }
    }

    #[test]
    fn resolve_only_reads_changed_files_again_and_invalid_ones_once_more() {
        let no_key = || Err(error_with("no key", true));
        let no_certificate = || Err(error_with("no certificate", true));
        let kubelet = || Err(error_with("a kubelet", false));
        for (attempts, result, done) in [
            (vec![Ok(true)], Ok(()), 1),
            (vec![Ok(false), Ok(true)], Ok(()), 2),
            (vec![no_key(), Ok(true)], Ok(()), 2),
            (vec![no_key(), no_key(), Ok(true)], Err(error_with("no key", true)), 2),
            (vec![no_certificate(), no_key(), Ok(true)], Ok(()), 3),
            (vec![no_key(), Ok(false), no_key(), Ok(true)], Ok(()), 4),
            // A foreign agent that is absent for a moment must not count as gone.
            (vec![kubelet(), Ok(true)], Err(error_with("a kubelet", false)), 1),
            (vec![Ok(false)], Ok(()), 10),
        ] {
            assert_eq!(run_attempts(&attempts), (result, done), "{attempts:?}");
        }
    }

    #[test]
    fn resolve_only_does_not_retry_while_another_agent_runs() {
        let held =
            LockError::Held { holder: Default::default(), what: "runs here".into(), remedy: "stop it" };
        let open =
            LockError::Open { path: "/run/x".into(), source: io::Error::from(io::ErrorKind::StorageFull) };
        let read = CopyError::Read {
            path: "/etc/x".into(),
            field: "tlsCertFile",
            source: io::Error::from(io::ErrorKind::NotFound),
        };
        let of = |error: anyhow::Error| {
            let error = ResolveOnlyError::of(&error.context("above it"));
            (error.code, error.is_retryable)
        };
        assert_eq!(of(held.into()), (EX_CONFIG, false));
        assert_eq!(of(open.into()), (EX_SOFTWARE, true));
        assert_eq!(of(read.into()), (EX_CONFIG, true));
        assert_eq!(of(anyhow::anyhow!("no room")), (EX_SOFTWARE, true));
    }
}
