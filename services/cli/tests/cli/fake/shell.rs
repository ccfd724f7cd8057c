//! The commands of the fake containers.

use std::fmt::Write as _;
use std::sync::Arc;

use keelson_proto::keelson::runtime::v1::exec_request::Item as RequestItem;
use keelson_proto::keelson::runtime::v1::exec_response::Item as ResponseItem;
use keelson_proto::keelson::runtime::v1::{ExecRequest, ExecResponse, ExecStart, ExecStarted, TerminalSize};
use keelson_service_kit::status::error;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{Boxed, World};

/// The streams of an `Exec` call.
struct Session {
    requests: Streaming<ExecRequest>,
    answers: mpsc::Sender<Result<ExecResponse, Status>>,
}

impl Session {
    async fn send(&self, item: ResponseItem) {
        // Ignore an error: the caller is gone.
        let _ = self.answers.send(Ok(ExecResponse { item: Some(item) })).await;
    }

    async fn print(&self, text: &str) {
        self.send(ResponseItem::Stdout(text.to_owned().into())).await;
    }

    async fn fail(&self, code: Code, reason: &str, message: &str) {
        let _ = self.answers.send(Err(error(code, reason, message))).await;
    }

    /// The next request; `None` when the caller is gone.
    async fn next(&mut self) -> Option<RequestItem> {
        self.requests.message().await.ok().flatten()?.item
    }
}

pub(super) fn run(world: Arc<World>, requests: Streaming<ExecRequest>) -> Boxed<ExecResponse> {
    let (answers, stream) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut session = Session { requests, answers };
        let Some(RequestItem::Start(start)) = session.next().await else {
            return session.fail(Code::InvalidArgument, "BAD_REQUEST", "no start").await;
        };
        world.calls.record(format!(
            "exec {}/{}{}/{} tty={} stdin={} {}",
            start.namespace,
            start.name,
            start.pod_uid,
            start.container,
            start.tty,
            start.stdin,
            start.command.join(" ")
        ));
        command(&mut session, start).await;
        world.calls.record("the command is over".to_owned());
    });
    Box::pin(ReceiverStream::new(stream))
}

async fn command(session: &mut Session, start: ExecStart) {
    let words: Vec<&str> = start.command.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["nowhere"] => {
            return session
                .fail(Code::NotFound, "CONTAINER_NOT_FOUND", "container not found (\"app\")")
                .await;
        }
        ["no-runtime"] => {
            let message = "the container runtime does not answer";
            return session.fail(Code::Unavailable, "RUNTIME_UNAVAILABLE", message).await;
        }
        ["absent"] => {
            let message = "exec: \"absent\": executable file not found in $PATH";
            return session.fail(Code::Unknown, "COMMAND_FAILED", message).await;
        }
        ["idle"] => {
            return session.fail(Code::DeadlineExceeded, "IDLE", "nothing went either way for 4h").await;
        }
        _ => session.send(ResponseItem::Started(ExecStarted::default())).await,
    }
    match words.as_slice() {
        ["echo", rest @ ..] => session.print(&format!("{}\n", rest.join(" "))).await,
        ["cat"] => return cat(session).await,
        ["keys"] => return keys(session, start.size).await,
        ["lost"] => {
            session.print("half").await;
            return session.fail(Code::Unavailable, "RUNTIME_LOST", "the runtime has gone").await;
        }
        ["many", count] => {
            for _ in 0..count.parse().unwrap() {
                session.print(&"x".repeat(10_000)).await;
            }
        }
        ["exit", code] => {
            session.send(ResponseItem::Stderr("bye\n".to_owned().into())).await;
            return session.send(ResponseItem::ExitCode(code.parse().unwrap())).await;
        }
        other => panic!("{other:?}"),
    }
    session.send(ResponseItem::ExitCode(0)).await;
}

/// Prints its input up to the end.
async fn cat(session: &mut Session) {
    while let Some(request) = session.next().await {
        match request {
            RequestItem::Stdin(bytes) => session.send(ResponseItem::Stdout(bytes)).await,
            RequestItem::CloseStdin(_) => {
                session.print("[end]\n").await;
                return session.send(ResponseItem::ExitCode(0)).await;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Prints each key as a number, and each size of the terminal, up to `q`.
async fn keys(session: &mut Session, size: Option<TerminalSize>) {
    let text = |size: &TerminalSize| format!("[{}x{}]", size.width, size.height);
    session.print(&size.as_ref().map_or_else(|| "[no size]".to_owned(), text)).await;
    while let Some(request) = session.next().await {
        match request {
            RequestItem::Resize(size) => session.print(&text(&size)).await,
            RequestItem::Stdin(bytes) => {
                let bytes: &[u8] = bytes.as_ref();
                let mut text = String::new();
                for byte in bytes {
                    write!(text, "<{byte:02x}>").unwrap();
                }
                session.print(&text).await;
                if bytes.contains(&b'q') {
                    return session.send(ResponseItem::ExitCode(0)).await;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}
