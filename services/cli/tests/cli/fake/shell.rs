//! The commands of the fake containers.

use std::fmt::Write as _;
use std::process::Stdio;

use keelson_proto::keelson::runtime::v1::exec_request::Item as RequestItem;
use keelson_proto::keelson::runtime::v1::exec_response::Item as ResponseItem;
use keelson_proto::keelson::runtime::v1::{ExecRequest, ExecResponse, ExecStart, ExecStarted, TerminalSize};
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{Conversation, Recorder};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tonic::{Code, Status};

/// The streams of an `Exec` call.
struct Session(Conversation<ExecRequest, ExecResponse>);

impl Session {
    async fn send(&self, item: ResponseItem) {
        self.0.send(ExecResponse { item: Some(item) }).await;
    }

    async fn print(&self, text: &str) {
        self.send(ResponseItem::Stdout(text.to_owned().into())).await;
    }

    /// Ends the command with an exit code.
    async fn exit(&self, code: i32) -> Result<(), Status> {
        self.send(ResponseItem::ExitCode(code)).await;
        Ok(())
    }

    /// The next request; `None` when the caller is gone.
    async fn next(&mut self) -> Option<RequestItem> {
        self.0.next().await?.item
    }
}

/// Runs one command, and records it and its end.
pub(super) async fn run(
    calls: Recorder<String>,
    conversation: Conversation<ExecRequest, ExecResponse>,
) -> Result<(), Status> {
    let mut session = Session(conversation);
    let Some(RequestItem::Start(start)) = session.next().await else {
        return Err(error(Code::InvalidArgument, "BAD_REQUEST", "no start"));
    };
    calls.record(format!(
        "exec {}/{}{}/{} tty={} stdin={} {}",
        start.namespace,
        start.name,
        start.pod_uid,
        start.container,
        start.tty,
        start.stdin,
        start.command.join(" ")
    ));
    let end = command(&mut session, start).await;
    calls.record("the command is over".to_owned());
    end
}

async fn command(session: &mut Session, start: ExecStart) -> Result<(), Status> {
    let mut words: Vec<&str> = start.command.iter().map(String::as_str).collect();
    if start.attach {
        // The main process of the container.
        words = vec!["cat"];
    }
    match words.as_slice() {
        ["nowhere"] => {
            return Err(error(Code::NotFound, "CONTAINER_NOT_FOUND", "container not found (\"app\")"));
        }
        ["no-runtime"] => {
            let message = "the container runtime does not answer";
            return Err(error(Code::Unavailable, "RUNTIME_UNAVAILABLE", message));
        }
        ["absent"] => {
            let message = "exec: \"absent\": executable file not found in $PATH";
            return Err(error(Code::Unknown, "COMMAND_FAILED", message));
        }
        ["idle"] => {
            return Err(error(Code::DeadlineExceeded, "IDLE", "nothing went either way for 4h"));
        }
        _ => session.send(ResponseItem::Started(ExecStarted::default())).await,
    }
    match words.as_slice() {
        ["echo", rest @ ..] => session.print(&format!("{}\n", rest.join(" "))).await,
        ["cat"] => return cat(session).await,
        ["keys"] => return keys(session, start.size).await,
        ["lost"] => {
            session.print("half").await;
            return Err(error(Code::Unavailable, "RUNTIME_LOST", "the runtime has gone"));
        }
        ["tar" | "test", ..] => return program(session, &words).await,
        ["many", count] => {
            for _ in 0..count.parse().unwrap() {
                session.print(&"x".repeat(10_000)).await;
            }
        }
        ["exit", code] => {
            session.send(ResponseItem::Stderr("bye\n".to_owned().into())).await;
            return session.exit(code.parse().unwrap()).await;
        }
        other => panic!("{other:?}"),
    }
    session.exit(0).await
}

/// Prints its input up to the end.
async fn cat(session: &mut Session) -> Result<(), Status> {
    while let Some(request) = session.next().await {
        match request {
            RequestItem::Stdin(bytes) => session.send(ResponseItem::Stdout(bytes)).await,
            RequestItem::CloseStdin(_) => {
                session.print("[end]\n").await;
                return session.exit(0).await;
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(())
}

/// Runs a program of this machine, whose files are those of the container.
async fn program(session: &mut Session, words: &[&str]) -> Result<(), Status> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take();
    while let Some(RequestItem::Stdin(bytes)) = session.next().await {
        // A program that has ended reads no more.
        let _ = stdin.as_mut().unwrap().write_all(bytes.as_ref()).await;
    }
    stdin.take();
    let output = child.wait_with_output().await.unwrap();
    session.send(ResponseItem::Stdout(output.stdout)).await;
    session.send(ResponseItem::Stderr(output.stderr)).await;
    session.exit(output.status.code().unwrap()).await
}

/// Prints each key as a number, and each size of the terminal, up to `q`.
async fn keys(session: &mut Session, size: Option<TerminalSize>) -> Result<(), Status> {
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
                    return session.exit(0).await;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(())
}
