//! `keelson attach`.

use keelson_proto::keelson::runtime::v1::ExecStart;

use super::exec::{self, ExecError, ExecTarget};
use crate::args::AttachArgs;
use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::terminal;

/// Shows the output of a container's main process, and passes input to it, until the process ends.
pub(crate) async fn run(session: &Session, args: &AttachArgs) -> Result<(), CliError> {
    let target = exec::find(session, &args.target).await?;
    let spec = ContainerSpec::of(&target)?;
    if args.stdin && !spec.stdin {
        return Err(CliError::Failed {
            message: format!("the container {} was started without standard input", target.start.container),
            hint: Some("leave -i out, or set `stdin: true` in the container's spec".into()),
        });
    }
    if args.tty && !spec.tty {
        output::notice("No terminal: the container has none; `tty: true` in its spec gives it one.");
    }
    let begin = async |is_raw: bool| {
        let start = ExecStart {
            attach: true,
            // The container has a terminal whether or not this side is one.
            tty: spec.tty,
            stdin: args.stdin,
            size: if is_raw { terminal::size() } else { None },
            ..target.start.clone()
        };
        exec::begin(session, start).await
    };
    match exec::run_attached(args.stdin, args.tty && spec.tty, begin).await {
        Ok(code) => exec::exit_with(code),
        Err(ExecError::Local(error)) => Err(error),
        Err(ExecError::Remote { status, started }) => {
            Err(exec::remote_error(session, &args.target, &target, status, started))
        }
    }
}

/// What the container was started with.
#[derive(Debug, Clone, Copy)]
struct ContainerSpec {
    stdin: bool,
    tty: bool,
}

impl ContainerSpec {
    fn of(target: &ExecTarget) -> Result<Self, CliError> {
        let container = &target.start.container;
        let pod = target.entry.as_ref().and_then(|entry| entry.pod.as_ref());
        let (_, spec) = pod.and_then(|pod| pod.container(container)).ok_or_else(|| CliError::Failed {
            message: format!("the spec of the container {container} is unknown"),
            hint: Some("attach needs pod-sync: `keelson get services` shows its state".into()),
        })?;
        Ok(Self { stdin: spec.stdin == Some(true), tty: spec.tty == Some(true) })
    }
}
