//! `keelson exec`.

use std::io::Read as _;
use std::pin::Pin;

use futures_util::stream::{self, Stream, StreamExt as _};
use keelson_config::ServiceName;
use keelson_kube_model::{ContainerStatus, Pod};
use keelson_proto::keelson::runtime::v1::exec_request::Item as Ask;
use keelson_proto::keelson::runtime::v1::exec_response::Item as Told;
use keelson_proto::keelson::runtime::v1::{ExecRequest, ExecResponse, ExecStart};
use keelson_service_kit::status;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::{Session, logs};
use crate::args::ExecArgs;
use crate::error::Failure;
use crate::human;
use crate::output::{self, Pump, Target};
use crate::pods::{self, PodEntry, bare_name};
use crate::terminal::{self, RawTerminal};

/// Bytes of standard input that are handed on at once.
const CHUNK: usize = 32 * 1024;
/// Chunks of standard input that may wait for the command to read them.
const WAITING_CHUNKS: usize = 8;

/// Runs the command and ends with its exit code.
pub(crate) async fn run(session: &Session, args: &ExecArgs) -> Result<(), Failure> {
    let target = find(session, args).await?;
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
    match attended(args, begin).await {
        Ok(code) => ended(code),
        Err(Broken::Local(failure)) => Err(failure),
        Err(Broken::Remote { status, started }) => Err(explain(session, args, &target, status, started)),
    }
}

/// Begins the command, with a terminal or without, and attends it until it has ended; its exit code.
pub(crate) async fn attended<S>(
    args: &ExecArgs,
    begin: impl AsyncFnOnce(bool) -> Result<S, Broken>,
) -> Result<i32, Broken>
where
    S: Stream<Item = Result<ExecResponse, Status>> + Unpin,
{
    // As kubectl: a terminal is for somebody who types.
    let raw = if args.tty && args.stdin { take_terminal()? } else { None };
    if args.tty && raw.is_none() {
        output::notice(if args.stdin {
            "No terminal for the command: standard input is none."
        } else {
            "No terminal for the command: -t needs -i."
        });
    }
    let tty = raw.is_some();
    let end = match begin(tty).await {
        Ok(answers) => attend(answers, tty).await,
        Err(failure) => Err(failure),
    };
    // The terminal is itself again before anything is said.
    drop(raw);
    end
}

/// Ends as the command has.
pub(crate) fn ended(code: i32) -> Result<(), Failure> {
    if code == 0 {
        return Ok(());
    }
    output::notice(&format!("The command ended with exit code {code}."));
    // More than eight bits do not come out of a process; that it failed must.
    Err(Failure::Ended { code: u8::try_from(code).unwrap_or(1) })
}

/// The container that is meant.
struct Wanted {
    start: ExecStart,
    /// `None` when pod-sync did not tell.
    entry: Option<PodEntry>,
}

async fn find(session: &Session, args: &ExecArgs) -> Result<Wanted, Failure> {
    let mut all = match pods::list(&session.agent).await {
        Ok(all) => all,
        Err(failure @ (Failure::ServiceAway { .. } | Failure::Silent { .. })) => {
            return without_pod_sync(session, args, failure);
        }
        Err(failure) => return Err(failure),
    };
    let entry = pods::resolve(&session.agent, &all, &session.scope(), &args.pod).await?;
    let container = logs::choose(entry.typed()?, args.container.as_deref())?;
    let start = ExecStart { pod_uid: entry.document.uid.clone(), container, ..ExecStart::default() };
    let index = all.iter().position(|p| p.document.uid == start.pod_uid);
    Ok(Wanted { start, entry: index.map(|index| all.swap_remove(index)) })
}

/// runtime-shim finds a pod by its full name, so that a container can be looked into while pod-sync is away.
fn without_pod_sync(session: &Session, args: &ExecArgs, failure: Failure) -> Result<Wanted, Failure> {
    let (Some(container), false) = (&args.container, session.global.all_namespaces) else {
        output::notice("Without pod-sync the full name of the pod, -n and -c are needed.");
        return Err(failure);
    };
    output::notice(&format!("{failure}; the name is taken for the full one"));
    let start = ExecStart {
        namespace: session.global.namespace.clone(),
        name: bare_name(&args.pod).to_owned(),
        container: container.clone(),
        ..ExecStart::default()
    };
    Ok(Wanted { start, entry: None })
}

fn take_terminal() -> Result<Option<RawTerminal>, Failure> {
    RawTerminal::take().map_err(|source| Failure::Answer {
        message: format!("the terminal cannot be handed to the command: {source}"),
        hint: Some("leave -t out".into()),
    })
}

/// Why there is no exit code.
pub(crate) enum Broken {
    /// Something here.
    Local(Failure),
    /// The service or the connection to it; `started` says whether the command had begun.
    Remote { status: Status, started: bool },
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self::Local(failure)
    }
}

fn ask(item: Ask) -> ExecRequest {
    ExecRequest { item: Some(item) }
}

async fn begin(session: &Session, start: ExecStart) -> Result<Streaming<ExecResponse>, Broken> {
    let rest = input(start.stdin, start.tty)?.filter_map(async |message| message.ok());
    let all = stream::once(std::future::ready(ask(Ask::Start(start)))).chain(rest);
    let answer = session.agent.runtime().exec(session.agent.request(all)).await;
    answer.map(tonic::Response::into_inner).map_err(|status| Broken::Remote { status, started: false })
}

/// What a person types, and the size of their terminal. Never ended: what has an end is the input, and that is said.
pub(crate) fn input(
    with_stdin: bool,
    tty: bool,
) -> Result<impl Stream<Item = Result<ExecRequest, Status>> + Send, Failure> {
    let input: Pin<Box<dyn Stream<Item = ExecRequest> + Send>> =
        if with_stdin { Box::pin(keys()?) } else { Box::pin(stream::empty()) };
    let resizes: Pin<Box<dyn Stream<Item = ExecRequest> + Send>> = if tty {
        let changed = signal(SignalKind::window_change()).map_err(|source| Failure::Runtime { source })?;
        Box::pin(sizes(changed))
    } else {
        Box::pin(stream::empty())
    };
    Ok(stream::select(input, resizes).chain(stream::pending()).map(Ok))
}

/// Standard input, read by a thread that nobody waits for: a read of a terminal cannot be cut short.
fn keys() -> Result<impl Stream<Item = ExecRequest> + Send, Failure> {
    let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
    let read = move || {
        let mut chunk = vec![0; CHUNK];
        loop {
            let item = match std::io::stdin().read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => Ask::Stdin(chunk[..count].to_vec()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if sender.blocking_send(ask(item)).is_err() {
                return;
            }
        }
        // The command may have ended meanwhile.
        let _ = sender.blocking_send(ask(Ask::CloseStdin(true)));
    };
    let thread = std::thread::Builder::new().name("stdin".into()).spawn(read);
    thread.map_err(|source| Failure::Runtime { source })?;
    Ok(stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) }))
}

/// The size of the terminal whenever it has changed.
fn sizes(changed: Signal) -> impl Stream<Item = ExecRequest> + Send {
    stream::unfold(changed, |mut changed| async move {
        loop {
            changed.recv().await?;
            if let Some(size) = terminal::size() {
                return Some((ask(Ask::Resize(size)), changed));
            }
        }
    })
}

/// Hands the output on until the command has ended, and says how.
async fn attend<S>(mut answers: S, tty: bool) -> Result<i32, Broken>
where
    S: Stream<Item = Result<ExecResponse, Status>> + Unpin,
{
    let mut pump = Pump::start()?;
    let mut signals = if tty { Some(Signals::new()?) } else { None };
    let mut started = false;
    let mut exit_code = None;
    loop {
        // Cancel-safe: a message that has not come whole stays with the stream, a signal with the kernel.
        let answer = tokio::select! {
            answer = answers.next() => answer,
            signal = next_signal(signals.as_mut()) => return Err(Failure::Signalled { signal }.into()),
        };
        match answer {
            Some(Ok(ExecResponse { item })) => match item {
                Some(Told::Started(_)) => started = true,
                Some(Told::Stdout(bytes)) => pump.write(Target::Stdout, bytes).await?,
                Some(Told::Stderr(bytes)) => pump.write(Target::Stderr, bytes).await?,
                Some(Told::ExitCode(code)) => exit_code = Some(code),
                None => {}
            },
            None => break,
            // How it ended is known already.
            Some(Err(_)) if exit_code.is_some() => break,
            Some(Err(status)) => {
                pump.finish().await?;
                return Err(Broken::Remote { status, started });
            }
        }
    }
    pump.finish().await?;
    let without_end = || Status::unavailable("runtime-shim has ended the stream without an exit code");
    exit_code.ok_or_else(|| Broken::Remote { status: without_end(), started })
}

/// The signals that would leave the terminal as the command has it.
struct Signals {
    term: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let hear = |kind| signal(kind).map_err(|source| Failure::Runtime { source });
        Ok(Self { term: hear(SignalKind::terminate())?, hangup: hear(SignalKind::hangup())? })
    }
}

/// The number of the next of them; without a terminal they end this process as they end any.
async fn next_signal(signals: Option<&mut Signals>) -> u8 {
    let Some(signals) = signals else { return std::future::pending().await };
    // Cancel-safe: a signal that was not taken is there the next time.
    tokio::select! {
        _ = signals.term.recv() => 15,
        _ = signals.hangup.recv() => 1,
    }
}

/// What a person is told of a command that could not be run, or not to its end.
fn explain(session: &Session, args: &ExecArgs, wanted: &Wanted, status: Status, started: bool) -> Failure {
    let message = status.message().to_owned();
    match status::reason(&status).as_deref() {
        Some("POD_NOT_FOUND") => Failure::NotFound {
            what: format!("nothing of the pod {} runs: {message}", args.pod),
            hint: format!("`keelson explain pod {}` says what it waits for", args.pod),
        },
        Some("CONTAINER_NOT_FOUND") => not_running(args, wanted, &message),
        Some("COMMAND_FAILED") => {
            Failure::Answer { message, hint: Some("the command must be there in the container's image".into()) }
        }
        Some("RUNTIME_UNAVAILABLE") => Failure::NoRuntime {
            message,
            hint: "start the container runtime; `keelson get node` shows what the agent sees of it".into(),
        },
        Some("IDLE") => Failure::TimedOut {
            message,
            hint: "the command may still run; `streamingConnectionIdleTimeout` of the configuration is the limit".into(),
        },
        Some("BAD_REQUEST" | "RUNTIME_REFUSED") => Failure::Answer { message, hint: None },
        _ if started && matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal) => {
            Failure::Answer {
                message: format!("the connection broke while the command ran: {message}"),
                hint: Some("how it ended is not known, and it may still run: look before you run it again".into()),
            }
        }
        _ => session.agent.failure(ServiceName::RuntimeShim, status),
    }
}

/// The container is not running: since when, how it ended, and where its last words are.
fn not_running(args: &ExecArgs, wanted: &Wanted, message: &str) -> Failure {
    let container = &wanted.start.container;
    let pod = wanted.entry.as_ref().map_or(bare_name(&args.pod), |entry| &entry.document.name);
    let state = wanted.entry.as_ref().and_then(|entry| {
        let status = container_status(entry.pod.as_ref()?, container)?;
        Some(state(status, keelson_service_kit::now_unix_nanos()))
    });
    let (how, hint) = state.unwrap_or_else(|| (message.to_owned(), "why"));
    let hint = match hint {
        "logs" => format!("`keelson logs {pod} -c {container}` shows its last words"),
        _ => format!("`keelson explain pod {pod}` says what it waits for"),
    };
    Failure::NotFound {
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

/// How a container is that does not run, and where one looks next.
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
        _ => ("it has not been started yet, or is being started anew".to_owned(), "why"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(state_of: Value) -> (String, &'static str) {
        let status: ContainerStatus =
            serde_json::from_value(json!({"name": "app", "state": state_of})).unwrap();
        state(&status, 65 * human::SECOND)
    }

    #[test]
    fn a_container_that_does_not_run_says_how_it_ended_or_what_it_waits_for() {
        let ended = json!({"exitCode": 3, "reason": "Error", "finishedAt": "1970-01-01T00:00:05Z"});
        assert_eq!(
            told(json!({"terminated": ended})),
            ("it has ended with exit code 3 (Error) 60s ago".into(), "logs")
        );
        assert_eq!(told(json!({"terminated": {"exitCode": 0}})).0, "it has ended with exit code 0");
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        assert_eq!(told(waiting), ("it waits (CrashLoopBackOff)".into(), "why"));
        assert!(told(json!({"running": {}})).0.contains("not been started yet"));
    }
}
