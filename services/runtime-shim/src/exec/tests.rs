use bytes::Bytes;
use keelson_service_kit::status::chain;
use keelson_testkit::fakes::cut_off;
use pb::exec_request::Item as RequestItem;
use pb::exec_response::Item as ResponseItem;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, refusal};
use crate::tests::fake_streaming_server::{Frame, PING, ServerEnd, StreamingServer, UPGRADED, soon};

const DONE: &str = r#"{"metadata":{},"status":"Success"}"#;

/// A runtime with one running container, `c` of the pod `default/u`, and its streaming server.
struct World {
    runtime: FakeRuntime,
    server: StreamingServer,
    execs: Execs,
}

/// One exec, from the caller's side.
struct Caller {
    request_sender: mpsc::Sender<Result<pb::ExecRequest, Status>>,
    answers: mpsc::Receiver<Result<pb::ExecResponse, Status>>,
    end: JoinHandle<Result<(), ExecError>>,
}

fn start(change: impl FnOnce(&mut pb::ExecStart)) -> RequestItem {
    let mut start = pb::ExecStart {
        namespace: "default".into(),
        name: "u".into(),
        container: "c".into(),
        command: vec!["cat".into()],
        stdin: true,
        ..Default::default()
    };
    change(&mut start);
    RequestItem::Start(start)
}

impl World {
    async fn new() -> Self {
        let (runtime, server) = (FakeRuntime::start().await, StreamingServer::start().await);
        runtime.sandbox("s-u", "u", true);
        runtime.container("c", "u", cri::ContainerState::ContainerRunning);
        runtime.set_exec_url(&server.url);
        let execs = Execs::new(runtime.cri.clone(), &Metrics::new(), Progress::default());
        Self { runtime, server, execs }
    }

    fn call(&self) -> Caller {
        let (request_sender, requests) = mpsc::channel(1);
        let (to_caller, answers) = mpsc::channel(4);
        let execs = self.execs.clone();
        let end =
            tokio::spawn(
                async move { execs.serve(ReceiverStream::new(requests), Some(0), &to_caller).await },
            );
        Caller { request_sender, answers, end }
    }

    /// A command that has been started, from both sides.
    async fn started(&self, change: impl FnOnce(&mut pb::ExecStart)) -> (Caller, ServerEnd) {
        let mut caller = self.call();
        let RequestItem::Start(start) = start(change) else { unreachable!() };
        let streams = 3 + usize::from(start.stdin);
        caller.say(RequestItem::Start(start)).await;
        let other = self.server.command(streams).await;
        assert_eq!(caller.next().await, ResponseItem::Started(pb::ExecStarted { container_id: "c".into() }));
        (caller, other)
    }

    /// The error of an exec that cannot begin.
    async fn refused(&self, item: RequestItem) -> String {
        let caller = self.call();
        caller.say(item).await;
        caller.error_text().await
    }
}

impl Caller {
    async fn say(&self, item: RequestItem) {
        soon(self.request_sender.send(Ok(pb::ExecRequest { item: Some(item) }))).await.unwrap();
    }

    async fn next(&mut self) -> ResponseItem {
        soon(self.answers.recv()).await.expect("an answer").unwrap().item.unwrap()
    }

    /// The error with which it ends. The caller's channels are dropped only afterwards.
    async fn error(self) -> ExecError {
        soon(self.end).await.unwrap().unwrap_err()
    }

    /// The text of the error with which it ends.
    async fn error_text(self) -> String {
        chain(&self.error().await)
    }

    /// Both outputs and the exit code.
    async fn all(mut self) -> (Vec<u8>, Vec<u8>, i32) {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next().await {
                ResponseItem::Stdout(bytes) => stdout.extend(bytes),
                ResponseItem::Stderr(bytes) => stderr.extend(bytes),
                ResponseItem::ExitCode(code) => {
                    soon(self.end).await.unwrap().unwrap();
                    assert!(self.answers.recv().await.is_none(), "nothing after the exit code");
                    return (stdout, stderr, code);
                }
                ResponseItem::Started(_) => panic!("started twice"),
            }
        }
    }
}

fn exited(code: i32) -> String {
    format!(
        r#"{{"status":"Failure","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
    )
}

#[tokio::test]
async fn exec_passes_stdin_stdout_stderr_and_the_exit_code() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    let names: Vec<_> = other.streams.keys().map(String::as_str).collect();
    assert_eq!(names, ["error", "stderr", "stdin", "stdout"]);
    let binary: Vec<u8> = (0..=255).collect();
    caller.say(RequestItem::Stdin(binary.clone())).await;
    assert_eq!(other.data().await, ("stdin".into(), binary.clone().into(), false));
    caller.say(RequestItem::CloseStdin(true)).await;
    assert_eq!(other.data().await, ("stdin".into(), Vec::new().into(), true));
    // Input after the end is discarded.
    caller.say(RequestItem::Stdin(b"late".to_vec())).await;
    other.send("stdout", &binary, false).await;
    other.send("stderr", b"oh", true).await;
    other.send("stdout", b"!", true).await;
    other.end(&exited(3)).await;
    let mut all = binary;
    all.push(b'!');
    assert_eq!(caller.all().await, (all, b"oh".to_vec(), 3));
    let exec = world.runtime.last_exec();
    assert_eq!((exec.cmd, exec.container_id), (vec!["cat".to_owned()], "c".to_owned()));
    assert_eq!((exec.stdin, exec.stdout, exec.stderr, exec.tty), (true, true, true, false));
}

#[tokio::test]
async fn attach_connects_to_the_main_process_and_takes_no_command() {
    let world = World::new().await;
    let attached = |start: &mut pb::ExecStart| {
        start.attach = true;
        start.command.clear();
    };
    let (mut caller, mut other) = world.started(attached).await;
    caller.say(RequestItem::Stdin(b"in".to_vec())).await;
    assert_eq!(other.data().await, ("stdin".into(), b"in".to_vec().into(), false));
    other.send("stdout", b"out", true).await;
    other.send("stderr", b"", true).await;
    other.end(DONE).await;
    assert_eq!(caller.next().await, ResponseItem::Stdout(b"out".to_vec()));
    assert_eq!(caller.next().await, ResponseItem::ExitCode(0));
    let attach = world.runtime.last_attach();
    assert_eq!(attach.container_id, "c");
    assert_eq!((attach.stdin, attach.stdout, attach.stderr, attach.tty), (true, true, true, false));
    let error = world.refused(start(|start| start.attach = true)).await;
    assert!(error.contains("`attach` takes no `command`"), "{error}");
}

#[tokio::test]
async fn end_of_the_callers_stream_closes_stdin() {
    let world = World::new().await;
    let (mut caller, mut other) = world.started(|_| ()).await;
    let (request_sender, _) = mpsc::channel(1);
    drop(std::mem::replace(&mut caller.request_sender, request_sender));
    assert_eq!(other.data().await, ("stdin".into(), Vec::new().into(), true));
    other.send("stdout", b"after", false).await;
    other.end(DONE).await;
    assert_eq!(caller.all().await, (b"after".to_vec(), Vec::new(), 0));
}

#[tokio::test]
async fn exec_with_tty_has_a_size_one_output_and_an_open_stdin() {
    let world = World::new().await;
    let size = |width, height| pb::TerminalSize { width, height };
    let change = |start: &mut pb::ExecStart| (start.tty, start.size) = (true, Some(size(80, 24)));
    let (caller, mut other) = world.started(change).await;
    let names: Vec<_> = other.streams.keys().map(String::as_str).collect();
    assert_eq!(names, ["error", "resize", "stdin", "stdout"]);
    let resize = |text: &'static str| ("resize".to_owned(), Bytes::from_static(text.as_bytes()), false);
    assert_eq!(other.data().await, resize("{\"Width\":80,\"Height\":24}\n"));
    for passed_over in [
        RequestItem::CloseStdin(true),
        RequestItem::Resize(size(0, 24)),
        RequestItem::Resize(size(80, 1 << 16)),
    ] {
        caller.say(passed_over).await;
    }
    caller.say(RequestItem::Resize(size(132, 50))).await;
    assert_eq!(other.data().await, resize("{\"Width\":132,\"Height\":50}\n"));
    caller.say(RequestItem::Stdin(vec![4])).await;
    assert_eq!(other.data().await, ("stdin".into(), vec![4].into(), false));
    other.end(DONE).await;
    assert_eq!(caller.all().await, (Vec::new(), Vec::new(), 0));
    let exec = world.runtime.last_exec();
    assert_eq!((exec.stdin, exec.stdout, exec.stderr, exec.tty), (true, true, false, true));
}

#[tokio::test]
async fn exec_without_stdin_opens_no_stdin_stream() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|start| start.stdin = false).await;
    assert!(!other.streams.contains_key("stdin"));
    caller.say(RequestItem::Stdin(b"x".to_vec())).await;
    caller.say(RequestItem::CloseStdin(true)).await;
    caller.say(RequestItem::Resize(pb::TerminalSize { width: 1, height: 1 })).await;
    // None of this was sent: the first frame is the answer to a ping.
    other.control(PING, &[2]).await;
    assert!(
        matches!(other.frame().await, Some(Frame::Control { kind: PING, payload }) if payload[..] == [0, 0, 0, 2])
    );
    other.end(DONE).await;
    assert_eq!(caller.all().await.2, 0);
}

#[tokio::test]
async fn output_after_the_exit_status_is_not_lost() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    other.send("error", DONE.as_bytes(), true).await;
    other.send("stdout", b"late", true).await;
    other.send("stderr", b"later", true).await;
    assert_eq!(caller.all().await, (b"late".to_vec(), b"later".to_vec(), 0));
}

#[tokio::test]
async fn exec_without_a_status_never_counts_as_success() {
    let world = World::new().await;
    for (status, text) in [
        ("", "the connection to the container runtime was lost while the command ran (it was closed)"),
        (r#"{"status":"Succ"#, "(it was closed): how it ended is not known, and it may still run"),
    ] {
        let (caller, mut other) = world.started(|_| ()).await;
        other.send("error", status.as_bytes(), false).await;
        drop(other);
        let error_text = caller.error_text().await;
        assert!(error_text.contains(text), "{error_text}");
    }
    for (status, text) in [
        ("", "(it has ended the streams without a word)"),
        ("odd", "tells of the command's end what is not understood: \"odd\""),
        (r#"{"status":"Failure","message":"no such file","reason":"InternalError"}"#, "no such file"),
    ] {
        let (caller, other) = world.started(|_| ()).await;
        other.end(status).await;
        let error_text = caller.error_text().await;
        assert!(error_text.contains(text), "{error_text}");
    }
    let (caller, mut other) = world.started(|_| ()).await;
    other.socket.write_all(&[0x80, 9, 0, 1, 0, 0, 0, 0]).await.unwrap();
    let error_text = caller.error_text().await;
    assert!(error_text.contains("what comes is no SPDY/3.1: a control frame of version 9"), "{error_text}");
}

#[tokio::test]
async fn exec_output_blocks_while_the_caller_does_not_read() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    // Far more than sockets and channels hold.
    let piece = vec![7; 1 << 20];
    let mut sent = 0;
    let stuck = async {
        loop {
            other.send("stdout", &piece, false).await;
            sent += piece.len();
        }
    };
    let blocked = tokio::time::timeout(Duration::from_secs(1), stuck).await;
    assert!(blocked.is_err() && sent < 64 << 20, "{sent} bytes are stored up");
    drop(caller);
}

#[tokio::test]
async fn exec_input_blocks_while_the_command_does_not_read_and_output_still_passes() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    let mut taken = 0;
    let piece = pb::ExecRequest { item: Some(RequestItem::Stdin(vec![7; 1 << 20])) };
    while let Ok(sent) =
        tokio::time::timeout(Duration::from_secs(1), caller.request_sender.send(Ok(piece.clone()))).await
    {
        sent.unwrap();
        taken += 1;
        assert!(taken < 64, "{taken} MiB are stored up");
    }
    other.send("stdout", b"full", false).await;
    // A connection closed with unread input is reset: the status sent before counts.
    other.end(&exited(1)).await;
    assert_eq!(caller.all().await, (b"full".to_vec(), Vec::new(), 1));
}

#[tokio::test]
async fn connection_to_the_runtime_closes_with_the_exec_caller() {
    let world = World::new().await;
    // The caller drops the responses.
    let (caller, mut other) = world.started(|_| ()).await;
    drop(caller.answers);
    assert!(other.frame().await.is_none());
    soon(caller.end).await.unwrap().unwrap();
    // The caller's stream breaks.
    let (caller, mut other) = world.started(|_| ()).await;
    caller.request_sender.send(Err(Status::cancelled("gone"))).await.unwrap();
    assert!(other.frame().await.is_none());
    assert!(caller.error_text().await.contains("the caller's stream has broken: gone"));
    // The caller leaves before anything has begun.
    let mut caller = world.call();
    caller.answers.close();
    soon(caller.end).await.unwrap().unwrap();
}

#[tokio::test]
async fn exec_finds_the_pod_by_uid_by_name_or_by_both() {
    let world = World::new().await;
    world.runtime.sandbox("s-v", "v", true);
    for (uid, namespace, name) in [("u", "", ""), ("", "default", "u"), ("u", "default", "u")] {
        let named = |start: &mut pb::ExecStart| {
            (start.pod_uid, start.namespace, start.name) = (uid.into(), namespace.into(), name.into());
        };
        let (caller, other) = world.started(named).await;
        other.end(DONE).await;
        assert_eq!(caller.all().await.2, 0);
    }
    world.runtime.container("ended", "u", cri::ContainerState::ContainerExited);
    let cases: [(&str, &str, &str, &str, &str); 6] = [
        ("x", "", "", "c", "pod does not exist"),
        ("", "default", "x", "c", "pod does not exist"),
        ("", "other", "u", "c", "pod does not exist"),
        ("v", "default", "u", "c", "pod does not exist"),
        ("v", "", "", "c", r#"container not found ("c")"#),
        ("u", "", "", "ended", r#"container not found ("ended"): its newest instance has ended"#),
    ];
    for (uid, namespace, name, container, text) in cases {
        let item = start(|start| {
            (start.pod_uid, start.namespace, start.name) = (uid.into(), namespace.into(), name.into());
            start.container = container.into();
        });
        assert_eq!(world.refused(item).await, text, "{uid} {namespace} {name}");
    }
}

#[tokio::test]
async fn invalid_exec_messages_are_refused_with_a_reason() {
    let world = World::new().await;
    for (item, text) in [
        (RequestItem::Stdin(vec![1]), "the first message must be `start`"),
        (start(|start| start.command.clear()), "`command` is empty"),
        (start(|start| start.container.clear()), "`container` is empty"),
        (start(|start| start.name.clear()), "the pod must be named by"),
        (start(|start| start.namespace.clear()), "the pod must be named by"),
    ] {
        let error_text = world.refused(item).await;
        assert!(error_text.contains(text), "{error_text}");
    }
    let caller = world.call();
    drop(caller.request_sender);
    let error_text = soon(caller.end).await.unwrap().unwrap_err().to_string();
    assert!(error_text.contains("ended before its first message"), "{error_text}");
    let (caller, _other) = world.started(|_| ()).await;
    caller.say(start(|_| ())).await;
    assert!(caller.error_text().await.contains("`start` has come a second time"));
}

#[tokio::test]
async fn refusing_runtime_is_distinguished_from_an_unavailable_one() {
    let world = World::new().await;
    let cri = &world.runtime.runtime;
    cri.exec.answer_once(Err(refusal(Code::NotFound)));
    let caller = world.call();
    caller.say(start(|_| ())).await;
    let error = caller.error().await;
    assert!(matches!(&error, ExecError::Refused(status) if status.code() == Code::NotFound), "{error:?}");
    assert_eq!(error.to_string(), "as the test wants it");
    for method in ["Exec", "ListContainers"] {
        match method {
            "Exec" => cri.exec.fail(cut_off()),
            _ => cri.list_containers.fail(cut_off()),
        }
        let caller = world.call();
        caller.say(start(|_| ())).await;
        let error = caller.error().await;
        assert!(matches!(error, ExecError::Unavailable(_)), "{method}: {error:?}");
        world.runtime.answer_as_usual();
    }
}

#[tokio::test]
async fn streaming_server_errors_do_not_show_the_url() {
    let world = World::new().await;
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for (url, text) in [
        (format!("http://{unused}/exec/secret"), "cannot connect to its streaming server at 127.0.0.1:"),
        (format!("https://{unused}/exec/secret"), "turn it off"),
        (String::new(), "returned no http URL"),
    ] {
        world.runtime.set_exec_url(&url);
        let error_text = world.refused(start(|_| ())).await;
        assert!(error_text.contains(text) && !error_text.contains("secret"), "{error_text}");
    }
    world.runtime.set_exec_url(&world.server.url);
    let other_streams = UPGRADED.replace("v4", "v1");
    for (answer, text) in [
        (
            "HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\ngone\nmore",
            "refuses them with status 404: gone",
        ),
        ("HTTP/1.1 200 OK\r\n\r\n", "refuses them with status 200: "),
        ("220 mail.example ESMTP\r\n\r\n", "is not its streaming server: the response is not HTTP/1.1"),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "answers with \"websocket \""),
        (&other_streams, "answers with \"SPDY/3.1 v1.channel.k8s.io\""),
        ("", "has broken the connection"),
    ] {
        let caller = world.call();
        caller.say(start(|_| ())).await;
        drop(world.server.accept(answer).await);
        let error_text = caller.error_text().await;
        assert!(error_text.contains(text) && !error_text.contains("secret"), "{answer}: {error_text}");
    }
}

#[tokio::test]
async fn exec_fails_when_a_stream_is_refused_and_nothing_is_started() {
    let world = World::new().await;
    for (what, text) in [
        ("refused", "does not take the stream stdout"),
        ("early", "sends data of a stream that it has not taken"),
        ("closed", "has broken the connection: it was closed"),
    ] {
        let mut caller = world.call();
        caller.say(start(|_| ())).await;
        let mut other = world.server.command(2).await;
        // The third stream is stdout.
        other.streams.insert("stdout".to_owned(), 5);
        match what {
            "refused" => other.reset("stdout").await,
            "early" => other.send("stdout", b"x", false).await,
            _ => other.socket.shutdown().await.unwrap(),
        }
        assert!(soon(caller.answers.recv()).await.is_none(), "started");
        let error_text = caller.error_text().await;
        assert!(error_text.contains(text), "{what}: {error_text}");
    }
}

#[tokio::test]
async fn concurrent_execs_are_limited() {
    let world = World::new().await;
    let callers: Vec<Caller> = (0..MAX_EXECS).map(|_| world.call()).collect();
    crate::tests::fake_runtime::until("all are being served", || {
        world.execs.permits.available_permits() == 0
    })
    .await;
    let error_text = world.call().error_text().await;
    assert!(error_text.contains("64 commands are already running"), "{error_text}");
    drop(callers);
    crate::tests::fake_runtime::until("their places are free", || {
        world.execs.permits.available_permits() == MAX_EXECS
    })
    .await;
}
