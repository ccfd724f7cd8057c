//! Exec in running containers, and their images, over the RPCs and a real containerd.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::time::Instant;

use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::exec_request::Item as Ask;
use keelson_proto::keelson::runtime::v1::exec_response::Item as ExecItem;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::{PeerChannel, connect_unix, status};
use keelson_testkit::process::{self, ProcessId, Signal};
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, running, sleeper, until_ready};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

async fn agent(scratch: &Scratch) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    agent
}

fn client(agent: &Agent) -> RuntimeClient<PeerChannel> {
    RuntimeClient::new(connect_unix("runtime-shim", &agent.socket(ServiceName::RuntimeShim)))
}

/// Starts a command with standard input in the only container of the pod.
fn start(agent: &Agent, command: &[&str]) -> pb::ExecStart {
    pb::ExecStart {
        namespace: "default".into(),
        name: format!("web-{}", agent.spec().node_name),
        container: "main".into(),
        command: command.iter().map(ToString::to_string).collect(),
        stdin: true,
        ..Default::default()
    }
}

/// The caller's side of an exec stream.
struct Exec {
    ask: mpsc::Sender<pb::ExecRequest>,
    answers: Streaming<pb::ExecResponse>,
}

/// The outputs of a command and its end.
#[derive(Debug, PartialEq, Eq)]
struct CommandOutput {
    stdout: String,
    stderr: String,
    code: i32,
}

impl Exec {
    async fn open(agent: &Agent, start: pb::ExecStart) -> Self {
        let (ask, asked) = mpsc::channel(4);
        ask.send(pb::ExecRequest { item: Some(Ask::Start(start)) }).await.unwrap();
        let answers = client(agent).exec(ReceiverStream::new(asked)).await.unwrap().into_inner();
        Self { ask, answers }
    }

    /// Starts a command and waits until it runs.
    async fn started(agent: &Agent, start: pb::ExecStart) -> Self {
        let mut exec = Self::open(agent, start).await;
        let item = exec.next().await.unwrap_or_else(|e| panic!("{e:?}\n{}", agent.log_tail()));
        assert!(matches!(&item, ExecItem::Started(s) if !s.container_id.is_empty()), "{item:?}");
        exec
    }

    async fn send_item(&self, item: Ask) {
        let result = tokio::time::timeout(LIMIT, self.ask.send(pb::ExecRequest { item: Some(item) })).await;
        result.expect("it is taken").unwrap();
    }

    async fn next(&mut self) -> Result<ExecItem, Status> {
        let message = tokio::time::timeout(LIMIT, self.answers.message()).await.expect("an answer comes")?;
        Ok(message.expect("more comes").item.unwrap())
    }

    /// The error that ends the stream; output before it is ignored.
    async fn error(mut self) -> Status {
        loop {
            match self.next().await {
                Ok(ExecItem::ExitCode(code)) => panic!("it has ended with {code}"),
                Ok(_) => {}
                Err(status) => return status,
            }
        }
    }

    /// Reads everything until the end, as bytes.
    async fn rest(mut self) -> (Vec<u8>, Vec<u8>, i32) {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next().await.unwrap() {
                ExecItem::Started(_) => panic!("started twice"),
                ExecItem::Stdout(bytes) => stdout.extend(bytes),
                ExecItem::Stderr(bytes) => stderr.extend(bytes),
                ExecItem::ExitCode(code) => {
                    assert!(self.answers.message().await.unwrap().is_none(), "nothing after the exit code");
                    return (stdout, stderr, code);
                }
            }
        }
    }

    async fn into_output(self) -> CommandOutput {
        let (stdout, stderr, code) = self.rest().await;
        CommandOutput {
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
            code,
        }
    }

    /// The next line of two words, including output that was buffered before.
    async fn size(&mut self, written: &mut String) -> String {
        loop {
            while let Some(end) = written.find('\n') {
                let line: String = written.drain(..=end).collect();
                if line.trim().contains(' ') {
                    return line.trim().to_owned();
                }
            }
            written.push_str(&self.until_written("\n").await);
        }
    }

    /// Reads until the output contains `text`; all that was read.
    async fn until_written(&mut self, text: &str) -> String {
        let mut written = String::new();
        while !written.contains(text) {
            match self.next().await {
                Ok(ExecItem::Stdout(bytes)) => written.push_str(&String::from_utf8_lossy(&bytes)),
                other => panic!("{text:?} has not come after {written:?} but {other:?}"),
            }
        }
        written
    }
}

/// Runs a script without input.
async fn sh(agent: &Agent, script: &str) -> CommandOutput {
    let start = pb::ExecStart { stdin: false, ..start(agent, &["/bin/sh", "-c", script]) };
    Exec::started(agent, start).await.into_output().await
}

/// A marker that no other test has.
fn new_marker(name: &str) -> String {
    format!("mark-{}-{name}", std::process::id())
}

/// The host's process of the shell that runs a script with this marker.
fn find_marked(mark: &str) -> Option<ProcessId> {
    let runs = |p: &process::Process| p.name == "sh" && p.args.iter().any(|arg| arg.contains(mark));
    process::all().into_iter().find(runs).map(|p| p.id)
}

async fn until_marked(mark: &str) -> ProcessId {
    eventually(LIMIT, format!("{mark} runs"), async || find_marked(mark).is_some()).await.unwrap();
    find_marked(mark).unwrap()
}

async fn until_gone(agent: &Agent, process: ProcessId) {
    eventually(LIMIT, "the command has ended", async || !process.is_alive())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// Bytes in which any loss or swap shows.
fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

#[tokio::test]
async fn exec_has_separate_streams_an_exit_code_and_an_end_of_input() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;

    // The input ends while the command continues.
    let script = "cat; echo so much >&2; exit 7";
    let exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", script])).await;
    exec.send_item(Ask::Stdin(b"hello ".to_vec())).await;
    exec.send_item(Ask::Stdin(b"there\n".to_vec())).await;
    exec.send_item(Ask::CloseStdin(true)).await;
    let output = CommandOutput { stdout: "hello there\n".into(), stderr: "so much\n".into(), code: 7 };
    assert_eq!(exec.into_output().await, output);

    // Without input there is an immediate end of input, and a signal has its exit code.
    let output = sh(&agent, "cat; echo $?; kill -9 $$").await;
    assert_eq!(output, CommandOutput { stdout: "0\n".into(), stderr: String::new(), code: 137 });

    // By uid, and several at the same time.
    let images = client(&agent).list_images(pb::ListImagesRequest {}).await.unwrap().into_inner().images;
    let pods = images.into_iter().flat_map(|image| image.used_by).filter_map(|user| user.pod);
    let by_uid = pb::ExecStart {
        pod_uid: pods.map(|pod| pod.uid).next().unwrap(),
        namespace: String::new(),
        name: String::new(),
        ..start(&agent, &["/bin/echo", "by uid"])
    };
    let (a, b) = tokio::join!(Exec::started(&agent, by_uid), sh(&agent, "echo beside"));
    assert_eq!((a.into_output().await.stdout.as_str(), b.stdout.as_str()), ("by uid\n", "beside\n"));

    // Any bytes, both ways at once, more than all buffers on the way hold.
    let random_bytes = random_bytes(16 << 20);
    let exec = Exec::started(&agent, start(&agent, &["/bin/cat"])).await;
    let (ask, input) = (exec.ask.clone(), random_bytes.clone());
    let feeding = tokio::spawn(async move {
        for piece in input.chunks(100_000) {
            ask.send(pb::ExecRequest { item: Some(Ask::Stdin(piece.to_vec())) }).await.unwrap();
        }
        ask.send(pb::ExecRequest { item: Some(Ask::CloseStdin(true)) }).await.unwrap();
    });
    let (stdout, stderr, code) = exec.rest().await;
    assert!(
        stdout == random_bytes,
        "{} of {} bytes have come back as they were",
        stdout.len(),
        random_bytes.len()
    );
    assert_eq!((stderr.len(), code), (0, 0));
    feeding.await.unwrap();

    // A large output.
    let began = Instant::now();
    let script = "dd if=/dev/zero bs=1M count=100 2>/dev/null; echo end";
    let (stdout, stderr, code) =
        Exec::started(&agent, start(&agent, &["/bin/sh", "-c", script])).await.rest().await;
    assert_eq!((stdout.len(), stderr.len(), code), ((100 << 20) + 4, 0, 0));
    assert!(stdout.ends_with(b"\0end\n"));
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());

    // Its input is not read to the end: its output and exit code count all the same. With much more than this
    // containerd 1.6 itself would wait for ever.
    let exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", "head -c 3; exit 4"])).await;
    exec.send_item(Ask::Stdin(vec![b'x'; 20_000])).await;
    assert_eq!(
        exec.into_output().await,
        CommandOutput { stdout: "xxx".into(), stderr: String::new(), code: 4 }
    );
    agent.end().unwrap();
}

#[tokio::test]
async fn exec_terminal_can_be_resized() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let size = |width, height| pb::TerminalSize { width, height };
    let script = "tty; while read line; do stty size; done; echo bye >&2; exit 5";
    let start =
        pb::ExecStart { tty: true, size: Some(size(80, 24)), ..start(&agent, &["/bin/sh", "-c", script]) };
    let mut exec = Exec::started(&agent, start).await;
    let mut written = exec.until_written("/dev/").await;
    for (width, height) in [(80, 24), (132, 50)] {
        exec.send_item(Ask::Resize(size(width, height))).await;
        // The runtime sets the size concurrently with the input, so a line may be read before.
        let wanted = format!("{height} {width}");
        loop {
            exec.send_item(Ask::Stdin(b"\n".to_vec())).await;
            if exec.size(&mut written).await == wanted {
                break;
            }
        }
    }
    // A terminal has no end of input but the character for it, and one output.
    exec.send_item(Ask::CloseStdin(true)).await;
    exec.send_item(Ask::Stdin(vec![4])).await;
    let output = exec.into_output().await;
    assert!(output.stdout.contains("bye") && output.stderr.is_empty() && output.code == 5, "{output:?}");
    agent.end().unwrap();
}

#[tokio::test]
async fn exec_errors_have_the_kubelets_messages() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let good = start(&agent, &["/bin/true"]);
    let no_pod = pb::ExecStart { name: "web".into(), ..good.clone() };
    let no_container = pb::ExecStart { container: "other".into(), ..good.clone() };
    let no_command = pb::ExecStart { command: Vec::new(), ..good.clone() };
    let no_program = start(&agent, &["/bin/nonsense"]);
    for (start, code, reason, text) in [
        (no_pod, Code::NotFound, "POD_NOT_FOUND", "pod does not exist"),
        (no_container, Code::NotFound, "CONTAINER_NOT_FOUND", r#"container not found ("other")"#),
        (no_command, Code::InvalidArgument, "BAD_REQUEST", "`command` is empty"),
        (no_program, Code::Unknown, "COMMAND_FAILED", "/bin/nonsense"),
    ] {
        let error = Exec::open(&agent, start).await.error().await;
        assert_eq!((error.code(), status::reason(&error).as_deref()), (code, Some(reason)), "{error:?}");
        assert!(error.message().contains(text), "{error:?}");
    }

    // The users of an image.
    let images = client(&agent).list_images(pb::ListImagesRequest {}).await.unwrap().into_inner().images;
    let image = images.iter().find(|i| i.repo_tags.iter().any(|t| t == BUSYBOX_IMAGE)).unwrap();
    assert!(image.size_bytes > 0 && !image.id.is_empty(), "{image:?}");
    let users: Vec<_> = image.used_by.iter().map(|u| (u.container.as_str(), u.state())).collect();
    assert_eq!(users, [("main", pb::ContainerState::Running)]);
    let pod = image.used_by[0].pod.clone().unwrap();
    assert_eq!((pod.namespace.as_str(), pod.name), ("default", good.name));
    agent.end().unwrap();
}

#[tokio::test]
async fn when_the_exec_caller_disconnects_stdin_ends_and_the_command_continues() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let (reads, sleeps) = (new_marker("reads"), new_marker("sleeps"));
    let open = async |script: String| Exec::started(&agent, start(&agent, &["/bin/sh", "-c", &script])).await;
    let reader = open(format!("cat; : {reads}")).await;
    let sleeper = open(format!("sleep 1000000; : {sleeps}")).await;
    let (reading, sleeping) = (until_marked(&reads).await, until_marked(&sleeps).await);
    drop(sleeper);
    drop(reader);
    until_gone(&agent, reading).await;
    // As with every client of CRI, which has no call to end a command.
    assert!(sleeping.is_alive());
    // It ends with its container.
    agent.remove_manifest("web.yaml").unwrap();
    until_gone(&agent, sleeping).await;
    agent.end().unwrap();
}

#[tokio::test]
async fn exec_ends_with_its_container() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let mut exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", "echo on; sleep 1000000"])).await;
    exec.until_written("on\n").await;
    agent.remove_manifest("web.yaml").unwrap();
    assert_eq!(
        exec.into_output().await,
        CommandOutput { stdout: String::new(), stderr: String::new(), code: 137 }
    );
    // Until the runtime notices the end, it refuses in its own words.
    eventually(LIMIT, "it is not found", async || {
        let error = Exec::open(&agent, start(&agent, &["/bin/true"])).await.error().await;
        error.code() == Code::NotFound
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn killing_runtime_shim_or_the_runtime_is_not_reported_as_a_normal_end_of_exec() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent(&scratch).await;
    let before = running(&agent).await.unwrap();
    let mark = new_marker("killed");
    let script = format!("echo on; cat; : {mark}");
    let command = ["/bin/sh", "-c", &script];
    let mut exec = Exec::started(&agent, start(&agent, &command)).await;
    exec.until_written("on\n").await;
    let (process, shim) = (until_marked(&mark).await, agent.service(ServiceName::RuntimeShim).unwrap());
    shim.signal(Signal::KILL);
    // The client itself reports the error, as its peer is gone.
    let error = exec.error().await;
    assert!(status::is_unanswered(&error), "{error:?}");
    until_gone(&agent, process).await;
    eventually(LIMIT, "runtime-shim runs commands again", async || {
        let answers = client(&agent).list_images(pb::ListImagesRequest {}).await;
        agent.service(ServiceName::RuntimeShim).is_some_and(|p| p != shim) && answers.is_ok()
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(sh(&agent, "echo again").await.stdout, "again\n");

    let mut exec = Exec::started(&agent, start(&agent, &command)).await;
    exec.until_written("on\n").await;
    agent.containerd_mut().kill();
    let error = exec.error().await;
    let (code, reason) = (error.code(), status::reason(&error));
    assert_eq!((code, reason.as_deref()), (Code::Unavailable, Some("RUNTIME_LOST")), "{error:?}");
    assert!(error.message().contains("how it ended is not known, and it may still run"), "{error:?}");
    let error = Exec::open(&agent, start(&agent, &command)).await.error().await;
    assert_eq!(status::reason(&error).as_deref(), Some("RUNTIME_UNAVAILABLE"), "{error:?}");
    agent.containerd_mut().restart().unwrap();
    eventually(LIMIT, "commands run again", async || {
        let mut exec = Exec::open(&agent, start(&agent, &["/bin/true"])).await;
        exec.next().await.is_ok()
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap(), before, "no container has noticed");
    agent.end().unwrap();
}
