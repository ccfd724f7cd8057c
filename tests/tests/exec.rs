//! Commands in running containers, and the images that they are made from, over the RPCs and a real containerd.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::time::Instant;

use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::exec_request::Item as Ask;
use keelson_proto::keelson::runtime::v1::exec_response::Item as Told;
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

/// The command in the only container of the pod, with input.
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

/// One command, from the caller's side.
struct Exec {
    ask: mpsc::Sender<pb::ExecRequest>,
    answers: Streaming<pb::ExecResponse>,
}

/// What a command has written, and how it ended.
#[derive(Debug, PartialEq, Eq)]
struct Whole {
    stdout: String,
    stderr: String,
    code: i32,
}

impl Exec {
    async fn begin(agent: &Agent, start: pb::ExecStart) -> Self {
        let (ask, asked) = mpsc::channel(4);
        ask.send(pb::ExecRequest { item: Some(Ask::Start(start)) }).await.unwrap();
        let answers = client(agent).exec(ReceiverStream::new(asked)).await.unwrap().into_inner();
        Self { ask, answers }
    }

    /// A command that has been started.
    async fn started(agent: &Agent, start: pb::ExecStart) -> Self {
        let mut exec = Self::begin(agent, start).await;
        let told = exec.next().await.unwrap_or_else(|e| panic!("{e:?}\n{}", agent.log_tail()));
        assert!(matches!(&told, Told::Started(s) if !s.container_id.is_empty()), "{told:?}");
        exec
    }

    async fn say(&self, item: Ask) {
        let said = tokio::time::timeout(LIMIT, self.ask.send(pb::ExecRequest { item: Some(item) })).await;
        said.expect("it is taken").unwrap();
    }

    async fn next(&mut self) -> Result<Told, Status> {
        let message = tokio::time::timeout(LIMIT, self.answers.message()).await.expect("an answer comes")?;
        Ok(message.expect("more comes").item.unwrap())
    }

    /// The error with which it ends, whatever it writes before.
    async fn failure(mut self) -> Status {
        loop {
            match self.next().await {
                Ok(Told::ExitCode(code)) => panic!("it has ended with {code}"),
                Ok(_) => {}
                Err(status) => return status,
            }
        }
    }

    /// Everything until its end, as bytes.
    async fn rest(mut self) -> (Vec<u8>, Vec<u8>, i32) {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next().await.unwrap() {
                Told::Started(_) => panic!("started twice"),
                Told::Stdout(bytes) => stdout.extend(bytes),
                Told::Stderr(bytes) => stderr.extend(bytes),
                Told::ExitCode(code) => {
                    assert!(self.answers.message().await.unwrap().is_none(), "nothing after the exit code");
                    return (stdout, stderr, code);
                }
            }
        }
    }

    async fn whole(self) -> Whole {
        let (stdout, stderr, code) = self.rest().await;
        Whole { stdout: String::from_utf8(stdout).unwrap(), stderr: String::from_utf8(stderr).unwrap(), code }
    }

    /// The next line that has two words, of what was written before and comes now.
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

    /// Reads until its output contains `text`; what was read.
    async fn until_written(&mut self, text: &str) -> String {
        let mut written = String::new();
        while !written.contains(text) {
            match self.next().await {
                Ok(Told::Stdout(bytes)) => written.push_str(&String::from_utf8_lossy(&bytes)),
                other => panic!("{text:?} has not come after {written:?} but {other:?}"),
            }
        }
        written
    }
}

/// Runs a script without input.
async fn sh(agent: &Agent, script: &str) -> Whole {
    let start = pb::ExecStart { stdin: false, ..start(agent, &["/bin/sh", "-c", script]) };
    Exec::started(agent, start).await.whole().await
}

/// A mark that no other test has.
fn mark(name: &str) -> String {
    format!("mark-{}-{name}", std::process::id())
}

/// The shell on the host that runs a script with this mark in it.
fn marked(mark: &str) -> Option<ProcessId> {
    let runs = |p: &process::Process| p.name == "sh" && p.args.iter().any(|arg| arg.contains(mark));
    process::all().into_iter().find(runs).map(|p| p.id)
}

async fn until_marked(mark: &str) -> ProcessId {
    eventually(LIMIT, format!("{mark} runs"), async || marked(mark).is_some()).await.unwrap();
    marked(mark).unwrap()
}

async fn until_gone(agent: &Agent, process: ProcessId) {
    eventually(LIMIT, "the command has ended", async || !process.is_alive())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// Bytes without a pattern that a cut or a swap would leave as it is.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

#[tokio::test]
async fn commands_have_their_streams_apart_an_exit_code_and_an_end_of_input() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;

    // The input ends while the command goes on.
    let script = "cat; echo so much >&2; exit 7";
    let exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", script])).await;
    exec.say(Ask::Stdin(b"hello ".to_vec())).await;
    exec.say(Ask::Stdin(b"there\n".to_vec())).await;
    exec.say(Ask::CloseStdin(true)).await;
    let whole = Whole { stdout: "hello there\n".into(), stderr: "so much\n".into(), code: 7 };
    assert_eq!(exec.whole().await, whole);

    // Without input there is an end at once, and a signal has its code.
    let whole = sh(&agent, "cat; echo $?; kill -9 $$").await;
    assert_eq!(whole, Whole { stdout: "0\n".into(), stderr: String::new(), code: 137 });

    // By uid, and at the same time as others.
    let images = client(&agent).list_images(pb::ListImagesRequest {}).await.unwrap().into_inner().images;
    let pods = images.into_iter().flat_map(|image| image.used_by).filter_map(|user| user.pod);
    let by_uid = pb::ExecStart {
        pod_uid: pods.map(|pod| pod.uid).next().unwrap(),
        namespace: String::new(),
        name: String::new(),
        ..start(&agent, &["/bin/echo", "by uid"])
    };
    let (a, b) = tokio::join!(Exec::started(&agent, by_uid), sh(&agent, "echo beside"));
    assert_eq!((a.whole().await.stdout.as_str(), b.stdout.as_str()), ("by uid\n", "beside\n"));

    // Any bytes, both ways at once, more than all buffers on the way hold.
    let noise = noise(16 << 20);
    let exec = Exec::started(&agent, start(&agent, &["/bin/cat"])).await;
    let (ask, input) = (exec.ask.clone(), noise.clone());
    let feeding = tokio::spawn(async move {
        for piece in input.chunks(100_000) {
            ask.send(pb::ExecRequest { item: Some(Ask::Stdin(piece.to_vec())) }).await.unwrap();
        }
        ask.send(pb::ExecRequest { item: Some(Ask::CloseStdin(true)) }).await.unwrap();
    });
    let (stdout, stderr, code) = exec.rest().await;
    assert!(stdout == noise, "{} of {} bytes have come back as they were", stdout.len(), noise.len());
    assert_eq!((stderr.len(), code), (0, 0));
    feeding.await.unwrap();

    // A lot.
    let began = Instant::now();
    let script = "dd if=/dev/zero bs=1M count=100 2>/dev/null; echo end";
    let (stdout, stderr, code) =
        Exec::started(&agent, start(&agent, &["/bin/sh", "-c", script])).await.rest().await;
    assert_eq!((stdout.len(), stderr.len(), code), ((100 << 20) + 4, 0, 0));
    assert!(stdout.ends_with(b"\0end\n"));
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());

    // Its input is not read to the end: what it has written and its code count all the same. With much more than this
    // containerd 1.6 itself would wait for ever.
    let exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", "head -c 3; exit 4"])).await;
    exec.say(Ask::Stdin(vec![b'x'; 20_000])).await;
    assert_eq!(exec.whole().await, Whole { stdout: "xxx".into(), stderr: String::new(), code: 4 });
    agent.end().unwrap();
}

#[tokio::test]
async fn a_terminal_has_a_size_that_changes() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let size = |width, height| pb::TerminalSize { width, height };
    let script = "tty; while read line; do stty size; done; echo bye >&2; exit 5";
    let start =
        pb::ExecStart { tty: true, size: Some(size(80, 24)), ..start(&agent, &["/bin/sh", "-c", script]) };
    let mut exec = Exec::started(&agent, start).await;
    let mut written = exec.until_written("/dev/").await;
    for (width, height) in [(80, 24), (132, 50)] {
        exec.say(Ask::Resize(size(width, height))).await;
        // The runtime sets the size beside the input, so a line may be read before.
        let wanted = format!("{height} {width}");
        loop {
            exec.say(Ask::Stdin(b"\n".to_vec())).await;
            if exec.size(&mut written).await == wanted {
                break;
            }
        }
    }
    // A terminal has no end of input but the character for it, and one output.
    exec.say(Ask::CloseStdin(true)).await;
    exec.say(Ask::Stdin(vec![4])).await;
    let whole = exec.whole().await;
    assert!(whole.stdout.contains("bye") && whole.stderr.is_empty() && whole.code == 5, "{whole:?}");
    agent.end().unwrap();
}

#[tokio::test]
async fn what_cannot_be_run_says_why_in_the_kubelets_words() {
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
        let failure = Exec::begin(&agent, start).await.failure().await;
        assert_eq!(
            (failure.code(), status::reason(&failure).as_deref()),
            (code, Some(reason)),
            "{failure:?}"
        );
        assert!(failure.message().contains(text), "{failure:?}");
    }

    // Images, by the way: who uses them.
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
async fn when_the_caller_goes_the_input_ends_and_a_command_without_interest_in_it_goes_on() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let (reads, sleeps) = (mark("reads"), mark("sleeps"));
    let begin =
        async |script: String| Exec::started(&agent, start(&agent, &["/bin/sh", "-c", &script])).await;
    let reader = begin(format!("cat; : {reads}")).await;
    let sleeper = begin(format!("sleep 1000000; : {sleeps}")).await;
    let (reading, sleeping) = (until_marked(&reads).await, until_marked(&sleeps).await);
    drop(sleeper);
    drop(reader);
    until_gone(&agent, reading).await;
    // As with every client of CRI, which has no call that would end it.
    assert!(sleeping.is_alive());
    // With its container it ends.
    agent.remove_manifest("web.yaml").unwrap();
    until_gone(&agent, sleeping).await;
    agent.end().unwrap();
}

#[tokio::test]
async fn a_container_that_ends_takes_its_commands_with_it() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch).await;
    let mut exec = Exec::started(&agent, start(&agent, &["/bin/sh", "-c", "echo on; sleep 1000000"])).await;
    exec.until_written("on\n").await;
    agent.remove_manifest("web.yaml").unwrap();
    assert_eq!(exec.whole().await, Whole { stdout: String::new(), stderr: String::new(), code: 137 });
    // While the runtime is still about to notice, it refuses in its own words.
    eventually(LIMIT, "it is not found", async || {
        let failure = Exec::begin(&agent, start(&agent, &["/bin/true"])).await.failure().await;
        failure.code() == Code::NotFound
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn runtime_shim_or_the_runtime_is_killed_in_the_middle_and_nobody_takes_it_for_an_end() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent(&scratch).await;
    let before = running(&agent).await.unwrap();
    let mark = mark("killed");
    let script = format!("echo on; cat; : {mark}");
    let command = ["/bin/sh", "-c", &script];
    let mut exec = Exec::started(&agent, start(&agent, &command)).await;
    exec.until_written("on\n").await;
    let (process, shim) = (until_marked(&mark).await, agent.service(ServiceName::RuntimeShim).unwrap());
    shim.signal(Signal::KILL);
    // The caller's own client says it, for nobody else is left to.
    let failure = exec.failure().await;
    assert!(status::is_unanswered(&failure), "{failure:?}");
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
    let failure = exec.failure().await;
    let (code, reason) = (failure.code(), status::reason(&failure));
    assert_eq!((code, reason.as_deref()), (Code::Unavailable, Some("RUNTIME_LOST")), "{failure:?}");
    assert!(failure.message().contains("how it ended is not known, and it may still run"), "{failure:?}");
    let failure = Exec::begin(&agent, start(&agent, &command)).await.failure().await;
    assert_eq!(status::reason(&failure).as_deref(), Some("RUNTIME_UNAVAILABLE"), "{failure:?}");
    agent.containerd_mut().restart().unwrap();
    eventually(LIMIT, "commands run again", async || {
        let mut exec = Exec::begin(&agent, start(&agent, &["/bin/true"])).await;
        exec.next().await.is_ok()
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap(), before, "no container has noticed");
    agent.end().unwrap();
}
