//! `keelson exec`.

use std::io::Read as _;
use std::pin::Pin;

use futures_util::stream::{self, Stream, StreamExt as _};
use keelson_config::ServiceName;
use keelson_kube_model::{ContainerStatus, Pod};
use keelson_proto::keelson::runtime::v1::exec_request::Item as RequestItem;
use keelson_proto::keelson::runtime::v1::exec_response::Item as ResponseItem;
use keelson_proto::keelson::runtime::v1::{ExecRequest, ExecResponse, ExecStart};
use keelson_service_kit::status;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::logs;
use crate::args::{ContainerArgs, ExecArgs};
use crate::error::CliError;
use crate::human;
use crate::output::{self, OutputWriter, Target};
use crate::pods::{self, PodEntry, bare_name};
use crate::session::Session;
use crate::terminal::{self, RawTerminal};

/// Bytes of standard input that are sent in one message.
const STDIN_CHUNK_BYTES: usize = 32 * 1024;
/// Chunks of standard input that are buffered for a command that reads slowly.
const BUFFERED_CHUNKS: usize = 8;

/// Runs the command and ends with its exit code.
pub(crate) async fn run(session: &Session, args: &ExecArgs) -> Result<(), CliError> {
    let target = find(session, &args.target).await?;
    let begin = async |tty: bool| {
        let start = ExecStart {
            tty,
            stdin: args.stdin,
            command: args.command.clone(),
            size: if tty { terminal::size() } else { None },
            ..target.start.clone()
        };
        begin(session, start).await
    };
    match run_attached(args.stdin, args.tty, begin).await {
        Ok(code) => exit_with(code),
        Err(ExecError::Local(error)) => Err(error),
        Err(ExecError::Remote { status, started }) => {
            Err(remote_error(session, &args.target, &target, status, started))
        }
    }
}

/// Starts the command, with or without a terminal, and relays its streams until it ends. Returns its exit code.
pub(crate) async fn run_attached<S>(
    stdin: bool,
    tty: bool,
    begin: impl AsyncFnOnce(bool) -> Result<S, ExecError>,
) -> Result<i32, ExecError>
where
    S: Stream<Item = Result<ExecResponse, Status>> + Unpin,
{
    // As kubectl: a terminal only for interactive input.
    let raw = if tty && stdin { enable_raw_mode()? } else { None };
    if tty && raw.is_none() {
        output::notice(if stdin {
            "No terminal for the command: standard input is not a terminal."
        } else {
            "No terminal for the command: -t needs -i."
        });
    }
    let tty = raw.is_some();
    let result = match begin(tty).await {
        Ok(answers) => relay_output(answers, tty).await,
        Err(error) => Err(error),
    };
    // Restore the terminal before anything is printed.
    drop(raw);
    result
}

/// Turns the exit code of the command into the result of this one.
pub(crate) fn exit_with(code: i32) -> Result<(), CliError> {
    if code == 0 {
        return Ok(());
    }
    output::notice(&format!("The command ended with exit code {code}."));
    // An exit code has eight bits; a larger one must still be a failure.
    Err(CliError::CommandEnded { code: u8::try_from(code).unwrap_or(1) })
}

/// The container in which the command runs.
pub(super) struct ExecTarget {
    pub(super) start: ExecStart,
    /// `None` when pod-sync does not answer.
    pub(super) entry: Option<PodEntry>,
}

/// Finds the container, and says which one was chosen.
pub(super) async fn find(session: &Session, args: &ContainerArgs) -> Result<ExecTarget, CliError> {
    let mut all = match pods::list(&session.agent).await {
        Ok(all) => all,
        Err(error @ (CliError::ServiceNotRunning { .. } | CliError::ServiceTimeout { .. })) => {
            return without_pod_sync(session, args, error);
        }
        Err(error) => return Err(error),
    };
    let entry = pods::resolve(&session.agent, &all, &session.scope(), &args.pod).await?;
    let container = logs::choose_container(entry.typed()?, args.container.as_deref())?;
    let start = ExecStart { pod_uid: entry.document.uid.clone(), container, ..ExecStart::default() };
    let index = all.iter().position(|p| p.document.uid == start.pod_uid);
    Ok(ExecTarget { start, entry: index.map(|index| all.swap_remove(index)) })
}

/// The target by full names, which runtime-shim resolves itself, for use while pod-sync is down.
fn without_pod_sync(
    session: &Session,
    args: &ContainerArgs,
    error: CliError,
) -> Result<ExecTarget, CliError> {
    let (Some(container), false) = (&args.container, session.global.all_namespaces) else {
        output::notice("While pod-sync is down, exec needs the full name of the pod, -n and -c.");
        return Err(error);
    };
    output::notice(&format!("{error}; the name is used as the full name of the pod"));
    let start = ExecStart {
        namespace: session.global.namespace.clone(),
        name: bare_name(&args.pod).to_owned(),
        container: container.clone(),
        ..ExecStart::default()
    };
    Ok(ExecTarget { start, entry: None })
}

fn enable_raw_mode() -> Result<Option<RawTerminal>, CliError> {
    RawTerminal::enable().map_err(|source| CliError::Failed {
        message: format!("cannot put the terminal into raw mode: {source}"),
        hint: Some("leave -t out".into()),
    })
}

/// Why the command has no exit code.
pub(crate) enum ExecError {
    /// An error of this process.
    Local(CliError),
    /// An error of the service or the connection to it; `started`: the command had started.
    Remote { status: Status, started: bool },
}

impl From<CliError> for ExecError {
    fn from(error: CliError) -> Self {
        Self::Local(error)
    }
}

pub(super) fn exec_request(item: RequestItem) -> ExecRequest {
    ExecRequest { item: Some(item) }
}

/// Starts the command, and passes it standard input and sizes of the terminal.
pub(super) async fn begin(session: &Session, start: ExecStart) -> Result<Streaming<ExecResponse>, ExecError> {
    let rest = input(start.stdin, start.tty)?.filter_map(async |message| message.ok());
    let all = stream::once(std::future::ready(exec_request(RequestItem::Start(start)))).chain(rest);
    let answer = session.agent.runtime().exec(session.agent.request(all)).await;
    answer.map(tonic::Response::into_inner).map_err(|status| ExecError::Remote { status, started: false })
}

/// The requests of a session: standard input and sizes of the terminal. The stream never ends; a message of its own
/// reports the end of the input.
pub(crate) fn input(
    with_stdin: bool,
    tty: bool,
) -> Result<impl Stream<Item = Result<ExecRequest, Status>> + Send, CliError> {
    let stdin: Pin<Box<dyn Stream<Item = ExecRequest> + Send>> =
        if with_stdin { Box::pin(stdin_chunks()?) } else { Box::pin(stream::empty()) };
    let resizes: Pin<Box<dyn Stream<Item = ExecRequest> + Send>> = if tty {
        let changed =
            signal(SignalKind::window_change()).map_err(|source| CliError::AsyncRuntime { source })?;
        Box::pin(terminal_sizes(changed))
    } else {
        Box::pin(stream::empty())
    };
    Ok(stream::select(stdin, resizes).chain(stream::pending()).map(Ok))
}

/// Standard input, read by a thread that is never joined: a blocking read cannot be cancelled.
fn stdin_chunks() -> Result<impl Stream<Item = ExecRequest> + Send, CliError> {
    let (sender, receiver) = mpsc::channel(BUFFERED_CHUNKS);
    let read = move || {
        let mut chunk = vec![0; STDIN_CHUNK_BYTES];
        loop {
            let item = match std::io::stdin().read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => RequestItem::Stdin(chunk[..count].to_vec()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if sender.blocking_send(exec_request(item)).is_err() {
                return;
            }
        }
        // Ignore an error: the command may have ended.
        let _ = sender.blocking_send(exec_request(RequestItem::CloseStdin(true)));
    };
    let thread = std::thread::Builder::new().name("stdin".into()).spawn(read);
    thread.map_err(|source| CliError::AsyncRuntime { source })?;
    Ok(stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) }))
}

/// The new size of the terminal after each change.
fn terminal_sizes(changed: Signal) -> impl Stream<Item = ExecRequest> + Send {
    stream::unfold(changed, |mut changed| async move {
        loop {
            changed.recv().await?;
            if let Some(size) = terminal::size() {
                return Some((exec_request(RequestItem::Resize(size)), changed));
            }
        }
    })
}

/// Prints the output until the command ends. Returns its exit code.
async fn relay_output<S>(mut answers: S, tty: bool) -> Result<i32, ExecError>
where
    S: Stream<Item = Result<ExecResponse, Status>> + Unpin,
{
    let mut writer = OutputWriter::start()?;
    let mut signals = if tty { Some(Signals::new()?) } else { None };
    let mut started = false;
    let mut exit_code = None;
    loop {
        // Cancel-safe: a partial message stays in the stream, a signal in its receiver.
        let answer = tokio::select! {
            answer = answers.next() => answer,
            signal = next_signal(signals.as_mut()) => return Err(CliError::Signalled { signal }.into()),
        };
        match answer {
            Some(Ok(ExecResponse { item })) => match item {
                Some(ResponseItem::Started(_)) => started = true,
                Some(ResponseItem::Stdout(bytes)) => writer.write(Target::Stdout, bytes).await?,
                Some(ResponseItem::Stderr(bytes)) => writer.write(Target::Stderr, bytes).await?,
                Some(ResponseItem::ExitCode(code)) => exit_code = Some(code),
                None => {}
            },
            None => break,
            // The exit code is already known.
            Some(Err(_)) if exit_code.is_some() => break,
            Some(Err(status)) => {
                writer.finish().await?;
                return Err(ExecError::Remote { status, started });
            }
        }
    }
    writer.finish().await?;
    let without_exit_code = || Status::unavailable("runtime-shim ended the stream without an exit code");
    exit_code.ok_or_else(|| ExecError::Remote { status: without_exit_code(), started })
}

/// Signals that would otherwise leave the terminal in raw mode.
struct Signals {
    term: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        let listen = |kind| signal(kind).map_err(|source| CliError::AsyncRuntime { source });
        Ok(Self { term: listen(SignalKind::terminate())?, hangup: listen(SignalKind::hangup())? })
    }
}

/// The number of the next signal; never returns without a terminal, where these signals end this process.
async fn next_signal(signals: Option<&mut Signals>) -> u8 {
    let Some(signals) = signals else { return std::future::pending().await };
    // Cancel-safe: a signal that was not received stays in its receiver.
    tokio::select! {
        _ = signals.term.recv() => 15,
        _ = signals.hangup.recv() => 1,
    }
}

/// The error for a command that could not be run, or not to its end.
pub(super) fn remote_error(
    session: &Session,
    args: &ContainerArgs,
    target: &ExecTarget,
    status: Status,
    started: bool,
) -> CliError {
    let message = status.message().to_owned();
    match status::reason(&status).as_deref() {
        Some("POD_NOT_FOUND") => CliError::NotFound {
            what: format!("the runtime has nothing of the pod {}: {message}", args.pod),
            hint: format!("`keelson explain pod {}` shows what it waits for", args.pod),
        },
        Some("CONTAINER_NOT_FOUND") => not_running_error(args, target, &message),
        Some("COMMAND_FAILED") => {
            CliError::Failed { message, hint: Some("the command must exist in the container's image".into()) }
        }
        Some("RUNTIME_UNAVAILABLE") => CliError::RuntimeUnavailable {
            message,
            hint: "start the container runtime; `keelson get node` shows its state".into(),
        },
        Some("IDLE") => CliError::TimedOut {
            message,
            hint: "the command may still run; `streamingConnectionIdleTimeout` of the configuration sets the limit".into(),
        },
        Some("BAD_REQUEST" | "RUNTIME_REFUSED") => CliError::Failed { message, hint: None },
        _ if started && matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal) => {
            CliError::Failed {
                message: format!("the connection broke while the command ran: {message}"),
                hint: Some("its exit code is unknown, and it may still run: check before you run it again".into()),
            }
        }
        _ => session.agent.call_error(ServiceName::RuntimeShim, status),
    }
}

/// The error for a container that is not running: how and when it ended, or what it waits for.
fn not_running_error(args: &ContainerArgs, target: &ExecTarget, message: &str) -> CliError {
    let container = &target.start.container;
    let pod = target.entry.as_ref().map_or(bare_name(&args.pod), |entry| &entry.document.name);
    let state = target.entry.as_ref().and_then(|entry| {
        let status = container_status(entry.pod.as_ref()?, container)?;
        Some(state(status, keelson_service_kit::now_unix_nanos()))
    });
    let (how, hint) = state.unwrap_or_else(|| (message.to_owned(), "why"));
    let hint = match hint {
        "logs" => format!("`keelson logs {pod} -c {container}` shows its last lines"),
        _ => format!("`keelson explain pod {pod}` shows what it waits for"),
    };
    CliError::NotFound {
        what: format!("the container {container} of the pod {pod} is not running: {how}"),
        hint,
    }
}

fn container_status<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let status = &pod.status;
    let all =
        [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    all.into_iter().flatten().find(|status| status.name == name)
}

/// The state of a container that is not running, and whether its `logs` or `why` it waits is the next thing to look at.
fn state(status: &ContainerStatus, now: i64) -> (String, &'static str) {
    let ended = status.state.terminated.as_ref();
    if let Some(ended) = ended {
        let since = human::nanos_of(ended.finished_at.as_deref());
        let ago = if since == 0 { String::new() } else { format!(" {} ago", human::since(since, now)) };
        let reason = if ended.reason.is_empty() { String::new() } else { format!(" ({})", ended.reason) };
        return (format!("it has ended with exit code {}{reason}{ago}", ended.exit_code), "logs");
    }
    match &status.state.waiting {
        Some(waiting) if !waiting.reason.is_empty() => (format!("it waits ({})", waiting.reason), "why"),
        _ => ("it has not been started yet, or is being restarted".to_owned(), "why"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state_text(state_of: Value) -> (String, &'static str) {
        let status: ContainerStatus =
            serde_json::from_value(json!({"name": "app", "state": state_of})).unwrap();
        state(&status, 65 * human::SECOND)
    }

    #[test]
    fn exec_error_shows_how_the_container_ended_or_what_it_waits_for() {
        let ended = json!({"exitCode": 3, "reason": "Error", "finishedAt": "1970-01-01T00:00:05Z"});
        assert_eq!(
            state_text(json!({"terminated": ended})),
            ("it has ended with exit code 3 (Error) 60s ago".into(), "logs")
        );
        assert_eq!(state_text(json!({"terminated": {"exitCode": 0}})).0, "it has ended with exit code 0");
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        assert_eq!(state_text(waiting), ("it waits (CrashLoopBackOff)".into(), "why"));
        assert!(state_text(json!({"running": {}})).0.contains("not been started yet"));
    }
}
