use bytes::Bytes;
use keelson_service_kit::status::chain;
use pb::exec_request::Item as Ask;
use pb::exec_response::Item as Told;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::fake::{Frame, Other, PING, StreamingServer, UPGRADED, soon};
use super::*;
use crate::fake::{Answer, FakeRuntime};

const DONE: &str = r#"{"metadata":{},"status":"Success"}"#;

/// A runtime with one running container, `c` of the pod `default/u`, and its streaming server.
struct World {
    runtime: FakeRuntime,
    server: StreamingServer,
    execs: Execs,
}

/// One exec, from the caller's side.
struct Caller {
    ask: mpsc::Sender<Result<pb::ExecRequest, Status>>,
    answers: mpsc::Receiver<Result<pb::ExecResponse, Status>>,
    end: JoinHandle<Result<(), ExecError>>,
}

fn start(change: impl FnOnce(&mut pb::ExecStart)) -> Ask {
    let mut start = pb::ExecStart {
        namespace: "default".into(),
        name: "u".into(),
        container: "c".into(),
        command: vec!["cat".into()],
        stdin: true,
        ..Default::default()
    };
    change(&mut start);
    Ask::Start(start)
}

impl World {
    async fn new() -> Self {
        let (runtime, server) = (FakeRuntime::start().await, StreamingServer::start().await);
        runtime.sandbox("s-u", "u", true);
        runtime.container("c", "u", cri::ContainerState::ContainerRunning);
        runtime.execs_at(&server.url);
        let execs = Execs::new(runtime.cri.clone(), &Metrics::new(), Progress::default());
        Self { runtime, server, execs }
    }

    fn call(&self) -> Caller {
        let (ask, asked) = mpsc::channel(1);
        let (to_caller, answers) = mpsc::channel(4);
        let execs = self.execs.clone();
        let end =
            tokio::spawn(async move { execs.serve(ReceiverStream::new(asked), Some(0), &to_caller).await });
        Caller { ask, answers, end }
    }

    /// A command that has been started, from both sides.
    async fn started(&self, change: impl FnOnce(&mut pb::ExecStart)) -> (Caller, Other) {
        let mut caller = self.call();
        let Ask::Start(start) = start(change) else { unreachable!() };
        let streams = 3 + usize::from(start.stdin);
        caller.say(Ask::Start(start)).await;
        let other = self.server.command(streams).await;
        assert_eq!(caller.next().await, Told::Started(pb::ExecStarted { container_id: "c".into() }));
        (caller, other)
    }

    /// How an exec ends that cannot be begun.
    async fn refused(&self, ask: Ask) -> String {
        let caller = self.call();
        caller.say(ask).await;
        caller.failure().await
    }
}

impl Caller {
    async fn say(&self, item: Ask) {
        soon(self.ask.send(Ok(pb::ExecRequest { item: Some(item) }))).await.unwrap();
    }

    async fn next(&mut self) -> Told {
        soon(self.answers.recv()).await.expect("an answer").unwrap().item.unwrap()
    }

    /// Its end, which has to be a failure. The caller waits for it: what it has is dropped after.
    async fn error(self) -> ExecError {
        soon(self.end).await.unwrap().unwrap_err()
    }

    /// The text of its end, which has to be a failure.
    async fn failure(self) -> String {
        chain(&self.error().await)
    }

    /// Both outputs and the exit code.
    async fn all(mut self) -> (Vec<u8>, Vec<u8>, i32) {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next().await {
                Told::Stdout(bytes) => stdout.extend(bytes),
                Told::Stderr(bytes) => stderr.extend(bytes),
                Told::ExitCode(code) => {
                    soon(self.end).await.unwrap().unwrap();
                    assert!(self.answers.recv().await.is_none(), "nothing after the exit code");
                    return (stdout, stderr, code);
                }
                Told::Started(_) => panic!("started twice"),
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
async fn input_and_both_outputs_pass_and_the_input_ends_before_the_output() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    let names: Vec<_> = other.streams.keys().map(String::as_str).collect();
    assert_eq!(names, ["error", "stderr", "stdin", "stdout"]);
    let binary: Vec<u8> = (0..=255).collect();
    caller.say(Ask::Stdin(binary.clone())).await;
    assert_eq!(other.data().await, ("stdin".into(), binary.clone().into(), false));
    caller.say(Ask::CloseStdin(true)).await;
    assert_eq!(other.data().await, ("stdin".into(), Vec::new().into(), true));
    // What is said after the end is thrown away.
    caller.say(Ask::Stdin(b"late".to_vec())).await;
    other.send("stdout", &binary, false).await;
    other.send("stderr", b"oh", true).await;
    other.send("stdout", b"!", true).await;
    other.end(&exited(3)).await;
    let mut all = binary;
    all.push(b'!');
    assert_eq!(caller.all().await, (all, b"oh".to_vec(), 3));
    let asked = world.runtime.last_exec();
    assert_eq!((asked.cmd, asked.container_id), (vec!["cat".to_owned()], "c".to_owned()));
    assert_eq!((asked.stdin, asked.stdout, asked.stderr, asked.tty), (true, true, true, false));
}

#[tokio::test]
async fn the_end_of_the_callers_stream_is_the_end_of_the_input() {
    let world = World::new().await;
    let (mut caller, mut other) = world.started(|_| ()).await;
    let (ask, _) = mpsc::channel(1);
    drop(std::mem::replace(&mut caller.ask, ask));
    assert_eq!(other.data().await, ("stdin".into(), Vec::new().into(), true));
    other.send("stdout", b"after", false).await;
    other.end(DONE).await;
    assert_eq!(caller.all().await, (b"after".to_vec(), Vec::new(), 0));
}

#[tokio::test]
async fn a_terminal_has_a_size_one_output_and_an_input_without_end() {
    let world = World::new().await;
    let size = |width, height| pb::TerminalSize { width, height };
    let change = |start: &mut pb::ExecStart| (start.tty, start.size) = (true, Some(size(80, 24)));
    let (caller, mut other) = world.started(change).await;
    let names: Vec<_> = other.streams.keys().map(String::as_str).collect();
    assert_eq!(names, ["error", "resize", "stdin", "stdout"]);
    let resize = |text: &'static str| ("resize".to_owned(), Bytes::from_static(text.as_bytes()), false);
    assert_eq!(other.data().await, resize("{\"Width\":80,\"Height\":24}\n"));
    for passed_over in [Ask::CloseStdin(true), Ask::Resize(size(0, 24)), Ask::Resize(size(80, 1 << 16))] {
        caller.say(passed_over).await;
    }
    caller.say(Ask::Resize(size(132, 50))).await;
    assert_eq!(other.data().await, resize("{\"Width\":132,\"Height\":50}\n"));
    caller.say(Ask::Stdin(vec![4])).await;
    assert_eq!(other.data().await, ("stdin".into(), vec![4].into(), false));
    other.end(DONE).await;
    assert_eq!(caller.all().await, (Vec::new(), Vec::new(), 0));
    let asked = world.runtime.last_exec();
    assert_eq!((asked.stdin, asked.stdout, asked.stderr, asked.tty), (true, true, false, true));
}

#[tokio::test]
async fn a_command_without_input_has_no_such_stream() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|start| start.stdin = false).await;
    assert!(!other.streams.contains_key("stdin"));
    caller.say(Ask::Stdin(b"x".to_vec())).await;
    caller.say(Ask::CloseStdin(true)).await;
    caller.say(Ask::Resize(pb::TerminalSize { width: 1, height: 1 })).await;
    // Nothing of this has come: the answer to a ping is the first frame.
    other.control(PING, &[2]).await;
    assert!(
        matches!(other.frame().await, Some(Frame::Control { kind: PING, payload }) if payload[..] == [0, 0, 0, 2])
    );
    other.end(DONE).await;
    assert_eq!(caller.all().await.2, 0);
}

#[tokio::test]
async fn output_that_comes_after_the_status_is_not_lost() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    other.send("error", DONE.as_bytes(), true).await;
    other.send("stdout", b"late", true).await;
    other.send("stderr", b"later", true).await;
    assert_eq!(caller.all().await, (b"late".to_vec(), b"later".to_vec(), 0));
}

#[tokio::test]
async fn an_end_without_a_status_is_never_a_good_one() {
    let world = World::new().await;
    for (status, text) in [
        ("", "the connection to the container runtime was lost while the command ran (it was closed)"),
        (r#"{"status":"Succ"#, "(it was closed): how it ended is not known, and it may still run"),
    ] {
        let (caller, mut other) = world.started(|_| ()).await;
        other.send("error", status.as_bytes(), false).await;
        drop(other);
        let failure = caller.failure().await;
        assert!(failure.contains(text), "{failure}");
    }
    for (status, text) in [
        ("", "(it has ended the streams without a word)"),
        ("odd", "tells of the command's end what is not understood: \"odd\""),
        (r#"{"status":"Failure","message":"no such file","reason":"InternalError"}"#, "no such file"),
    ] {
        let (caller, other) = world.started(|_| ()).await;
        other.end(status).await;
        let failure = caller.failure().await;
        assert!(failure.contains(text), "{failure}");
    }
    let (caller, mut other) = world.started(|_| ()).await;
    other.socket.write_all(&[0x80, 9, 0, 1, 0, 0, 0, 0]).await.unwrap();
    let failure = caller.failure().await;
    assert!(failure.contains("what comes is no SPDY/3.1: a control frame of version 9"), "{failure}");
}

#[tokio::test]
async fn a_command_waits_for_a_caller_that_does_not_read() {
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
async fn a_caller_waits_for_a_command_that_does_not_read_and_gets_its_output_all_the_same() {
    let world = World::new().await;
    let (caller, mut other) = world.started(|_| ()).await;
    let mut taken = 0;
    let piece = pb::ExecRequest { item: Some(Ask::Stdin(vec![7; 1 << 20])) };
    while let Ok(sent) =
        tokio::time::timeout(Duration::from_secs(1), caller.ask.send(Ok(piece.clone()))).await
    {
        sent.unwrap();
        taken += 1;
        assert!(taken < 64, "{taken} MiB are stored up");
    }
    other.send("stdout", b"full", false).await;
    // Closed with input unread, the connection is reset: what was told before counts.
    other.end(&exited(1)).await;
    assert_eq!(caller.all().await, (b"full".to_vec(), Vec::new(), 1));
}

#[tokio::test]
async fn with_the_caller_the_connection_to_the_runtime_goes() {
    let world = World::new().await;
    // Its answers are wanted no more.
    let (caller, mut other) = world.started(|_| ()).await;
    drop(caller.answers);
    assert!(other.frame().await.is_none());
    soon(caller.end).await.unwrap().unwrap();
    // Its stream breaks.
    let (caller, mut other) = world.started(|_| ()).await;
    caller.ask.send(Err(Status::cancelled("gone"))).await.unwrap();
    assert!(other.frame().await.is_none());
    assert!(caller.failure().await.contains("the caller's stream has broken: gone"));
    // Before anything has begun.
    let mut caller = world.call();
    caller.answers.close();
    soon(caller.end).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pod_is_found_by_its_uid_or_by_its_names_or_by_both() {
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
        let ask = start(|start| {
            (start.pod_uid, start.namespace, start.name) = (uid.into(), namespace.into(), name.into());
            start.container = container.into();
        });
        assert_eq!(world.refused(ask).await, text, "{uid} {namespace} {name}");
    }
}

#[tokio::test]
async fn what_a_caller_may_not_say_is_named() {
    let world = World::new().await;
    for (ask, text) in [
        (Ask::Stdin(vec![1]), "the first message has to be `start`"),
        (start(|start| start.command.clear()), "`command` is empty"),
        (start(|start| start.container.clear()), "`container` is empty"),
        (start(|start| start.name.clear()), "the pod has to be named by"),
        (start(|start| start.namespace.clear()), "the pod has to be named by"),
    ] {
        let failure = world.refused(ask).await;
        assert!(failure.contains(text), "{failure}");
    }
    let caller = world.call();
    drop(caller.ask);
    let failure = soon(caller.end).await.unwrap().unwrap_err().to_string();
    assert!(failure.contains("has ended before it said what to run"), "{failure}");
    let (caller, _other) = world.started(|_| ()).await;
    caller.say(start(|_| ())).await;
    assert!(caller.failure().await.contains("`start` has come a second time"));
}

#[tokio::test]
async fn a_runtime_that_refuses_or_is_away_is_told_apart() {
    let world = World::new().await;
    world.runtime.answer("Exec", Answer::Fail(1, Code::NotFound));
    let caller = world.call();
    caller.say(start(|_| ())).await;
    let failure = caller.error().await;
    assert!(matches!(&failure, ExecError::Refused(status) if status.code() == Code::NotFound), "{failure:?}");
    assert_eq!(failure.to_string(), "as the test wants it");
    for method in ["Exec", "ListContainers"] {
        world.runtime.answer(method, Answer::CutOff);
        let caller = world.call();
        caller.say(start(|_| ())).await;
        let failure = caller.error().await;
        assert!(matches!(failure, ExecError::Unavailable(_)), "{method}: {failure:?}");
        world.runtime.answer(method, Answer::Fail(0, Code::Ok));
    }
}

#[tokio::test]
async fn a_streaming_server_that_is_not_as_it_has_to_be_is_described_without_the_secret() {
    let world = World::new().await;
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for (url, text) in [
        (format!("http://{unused}/exec/secret"), "cannot connect to its streaming server at 127.0.0.1:"),
        (format!("https://{unused}/exec/secret"), "turn it off"),
        (String::new(), "names no http address"),
    ] {
        world.runtime.execs_at(&url);
        let failure = world.refused(start(|_| ())).await;
        assert!(failure.contains(text) && !failure.contains("secret"), "{failure}");
    }
    world.runtime.execs_at(&world.server.url);
    let other_streams = UPGRADED.replace("v4", "v1");
    for (answer, text) in [
        (
            "HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\ngone\nmore",
            "refuses them with status 404: gone",
        ),
        ("HTTP/1.1 200 OK\r\n\r\n", "refuses them with status 200: "),
        ("220 mail.example ESMTP\r\n\r\n", "is not its streaming server: the answer is no HTTP/1.1"),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "answers with \"websocket \""),
        (&other_streams, "answers with \"SPDY/3.1 v1.channel.k8s.io\""),
        ("", "has broken the connection"),
    ] {
        let caller = world.call();
        caller.say(start(|_| ())).await;
        drop(world.server.accept(answer).await);
        let failure = caller.failure().await;
        assert!(failure.contains(text) && !failure.contains("secret"), "{answer}: {failure}");
    }
}

#[tokio::test]
async fn streams_that_are_not_all_taken_are_an_error_and_nothing_is_started() {
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
        let failure = caller.failure().await;
        assert!(failure.contains(text), "{what}: {failure}");
    }
}

#[tokio::test]
async fn no_more_than_so_many_commands_run_at_once() {
    let world = World::new().await;
    let callers: Vec<Caller> = (0..AT_ONCE).map(|_| world.call()).collect();
    crate::fake::until("all are being served", || world.execs.permits.available_permits() == 0).await;
    let failure = world.call().failure().await;
    assert!(failure.contains("64 commands are being run already"), "{failure}");
    drop(callers);
    crate::fake::until("their places are free", || world.execs.permits.available_permits() == AT_ONCE).await;
}
