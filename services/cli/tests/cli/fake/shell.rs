//! The commands that can be run in the containers of the fake.

use std::fmt::Write as _;
use std::sync::Arc;

use keelson_proto::keelson::runtime::v1::exec_request::Item as Ask;
use keelson_proto::keelson::runtime::v1::exec_response::Item as Told;
use keelson_proto::keelson::runtime::v1::{ExecRequest, ExecResponse, ExecStart, ExecStarted, TerminalSize};
use keelson_service_kit::status::error;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{Boxed, World};

/// The caller, and what it hears.
struct Session {
    asks: Streaming<ExecRequest>,
    answers: mpsc::Sender<Result<ExecResponse, Status>>,
}

impl Session {
    async fn tell(&self, item: Told) {
        // A caller that has gone hears nothing.
        let _ = self.answers.send(Ok(ExecResponse { item: Some(item) })).await;
    }

    async fn say(&self, text: &str) {
        self.tell(Told::Stdout(text.to_owned().into())).await;
    }

    async fn fail(&self, code: Code, reason: &str, message: &str) {
        let _ = self.answers.send(Err(error(code, reason, message))).await;
    }

    /// What the caller asks next; `None` when it has gone.
    async fn next(&mut self) -> Option<Ask> {
        self.asks.message().await.ok().flatten()?.item
    }
}

pub(super) fn run(world: Arc<World>, asks: Streaming<ExecRequest>) -> Boxed<ExecResponse> {
    let (answers, stream) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut session = Session { asks, answers };
        let Some(Ask::Start(start)) = session.next().await else {
            return session.fail(Code::InvalidArgument, "BAD_REQUEST", "no start").await;
        };
        world.told.hear(format!(
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
        world.told.hear("the command is over".to_owned());
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
        _ => session.tell(Told::Started(ExecStarted::default())).await,
    }
    match words.as_slice() {
        ["echo", rest @ ..] => session.say(&format!("{}\n", rest.join(" "))).await,
        ["cat"] => return cat(session).await,
        ["keys"] => return keys(session, start.size).await,
        ["lost"] => {
            session.say("half").await;
            return session.fail(Code::Unavailable, "RUNTIME_LOST", "the runtime has gone").await;
        }
        ["many", count] => {
            for _ in 0..count.parse().unwrap() {
                session.say(&"x".repeat(10_000)).await;
            }
        }
        ["exit", code] => {
            session.tell(Told::Stderr("bye\n".to_owned().into())).await;
            return session.tell(Told::ExitCode(code.parse().unwrap())).await;
        }
        other => panic!("{other:?}"),
    }
    session.tell(Told::ExitCode(0)).await;
}

/// Says what it is told, up to the end of its input.
async fn cat(session: &mut Session) {
    while let Some(ask) = session.next().await {
        match ask {
            Ask::Stdin(bytes) => session.tell(Told::Stdout(bytes)).await,
            Ask::CloseStdin(_) => {
                session.say("[end]\n").await;
                return session.tell(Told::ExitCode(0)).await;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Says each key as a number, and each size of the terminal, up to `q`.
async fn keys(session: &mut Session, size: Option<TerminalSize>) {
    let text = |size: &TerminalSize| format!("[{}x{}]", size.width, size.height);
    session.say(&size.as_ref().map_or_else(|| "[no size]".to_owned(), text)).await;
    while let Some(ask) = session.next().await {
        match ask {
            Ask::Resize(size) => session.say(&text(&size)).await,
            Ask::Stdin(bytes) => {
                let bytes: &[u8] = bytes.as_ref();
                let mut said = String::new();
                for byte in bytes {
                    write!(said, "<{byte:02x}>").unwrap();
                }
                session.say(&said).await;
                if bytes.contains(&b'q') {
                    return session.tell(Told::ExitCode(0)).await;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}
