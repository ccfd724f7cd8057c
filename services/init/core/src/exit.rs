//! Whether a process that ended is restarted.

use std::fmt;

/// The process was started with invalid arguments (sysexits(3)).
pub const EX_USAGE: i32 = 64;
/// The process cannot work with its configuration (sysexits(3)).
pub const EX_CONFIG: i32 = 78;

/// How a process ended (wait(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => match signal_name(number) {
                Some(name) => f.write_str(name),
                None => write!(f, "signal {number}"),
            },
        }
    }
}

/// The signals that usually end processes (signal(7)); the numbers are those of x86 and ARM.
const fn signal_name(number: i32) -> Option<&'static str> {
    Some(match number {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// What to do after the end of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Restart it after the back-off.
    Restart(String),
    /// Do not restart it: it would end the same way until an operator corrects the cause.
    Fail(String),
}

/// Decides what to do after the unexpected end of a service. The text says what happened; `reported_error` is the error that
/// the service itself reported.
pub fn judge_exit(exit: Exit, reported_error: Option<&str>) -> Verdict {
    let why = reported_error.unwrap_or("see its log");
    match exit {
        Exit::Code(EX_CONFIG) => Verdict::Fail(match reported_error {
            Some(why) => format!("{exit}: {why}"),
            None => format!("{exit}: configuration; see its log"),
        }),
        Exit::Code(EX_USAGE) => Verdict::Fail(format!(
            "{exit}: its command line is invalid; its binary is from another release than init"
        )),
        Exit::Code(0) => Verdict::Restart("ended by itself with exit code 0".to_owned()),
        Exit::Code(_) => Verdict::Restart(format!("ended with {exit}; {why}")),
        Exit::Signal(_) => Verdict::Restart(format!("ended by {exit}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_usage_and_configuration_errors_are_final() {
        for code in 0..=255 {
            let fails = matches!(judge_exit(Exit::Code(code), None), Verdict::Fail(_));
            assert_eq!(fails, code == EX_USAGE || code == EX_CONFIG, "exit code {code}");
        }
        for number in 1..=64 {
            assert!(matches!(judge_exit(Exit::Signal(number), None), Verdict::Restart(_)), "signal {number}");
        }
    }

    #[test]
    fn exit_text_names_the_code_or_the_signal() {
        let text = |exit| match judge_exit(exit, None) {
            Verdict::Restart(text) | Verdict::Fail(text) => text,
        };
        assert_eq!(text(Exit::Code(78)), "exit code 78: configuration; see its log");
        assert!(text(Exit::Code(64)).starts_with("exit code 64: "));
        assert_eq!(text(Exit::Signal(9)), "ended by SIGKILL");
        assert_eq!(text(Exit::Signal(40)), "ended by signal 40");
        assert_eq!(text(Exit::Code(70)), "ended with exit code 70; see its log");
    }

    #[test]
    fn common_signals_have_names() {
        for (number, name) in [
            (1, "SIGHUP"),
            (2, "SIGINT"),
            (3, "SIGQUIT"),
            (4, "SIGILL"),
            (6, "SIGABRT"),
            (7, "SIGBUS"),
            (8, "SIGFPE"),
            (9, "SIGKILL"),
            (11, "SIGSEGV"),
            (13, "SIGPIPE"),
            (15, "SIGTERM"),
            (31, "SIGSYS"),
        ] {
            assert_eq!(Exit::Signal(number).to_string(), name);
        }
    }

    #[test]
    fn the_error_of_a_service_replaces_the_hint_to_its_log() {
        let fail = judge_exit(Exit::Code(EX_CONFIG), Some("no such user: keelson"));
        assert_eq!(fail, Verdict::Fail("exit code 78: no such user: keelson".to_owned()));
        let restart = judge_exit(Exit::Code(70), Some("cannot serve: no room"));
        assert_eq!(restart, Verdict::Restart("ended with exit code 70; cannot serve: no room".to_owned()));
    }
}
