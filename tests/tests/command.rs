//! The `keelson` command on a whole agent: exec, restarts, watches, images and volumes.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};

use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, pods, running, sleeper, text, until_ready};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

async fn agent_with_web(scratch: &Scratch) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    agent
}

/// Both outputs of the command, and its exit code.
fn parts(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The command as a child process with piped standard input and output.
struct RunningCommand {
    child: Child,
    lines: Receiver<String>,
    notices: Receiver<String>,
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (to, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

impl RunningCommand {
    fn start(agent: &Agent, args: &[&str]) -> Self {
        let mut command = agent.spec().cli();
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        let notices = read_lines(child.stderr.take().unwrap());
        Self { child, lines, notices }
    }

    /// Reads lines up to the first match, including it.
    #[track_caller]
    fn until(&self, fits: impl Fn(&str) -> bool) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(LIMIT) {
                Ok(line) => seen.push(line),
                Err(e) => panic!("{e}: {seen:#?} {:#?}", self.notices.try_iter().collect::<Vec<_>>()),
            }
            if seen.last().is_some_and(|line| fits(line)) {
                return seen;
            }
        }
    }

    /// Sends SIGINT; the signal that has ended the command, and the unread output.
    fn interrupt(mut self) -> (Option<i32>, Vec<String>) {
        assert!(ProcessId::of(self.child.id()).unwrap().signal(Signal::INT));
        let status = self.child.wait().unwrap();
        (status.signal(), self.lines.iter().collect())
    }
}

#[tokio::test]
async fn exec_returns_the_streams_and_the_exit_code() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    let script = "echo out; echo err >&2; exit 7";
    let output = agent.keelson(&["exec", "web", "--", "sh", "-c", script]).await.unwrap();
    let expected = "err\nThe command ended with exit code 7.\n";
    assert_eq!(parts(&output), (Some(7), "out\n".to_owned(), expected.to_owned()));

    // The command runs in the container.
    let output = agent.keelson(&["exec", "web", "--", "sh", "-c", "echo x > /scratch/f; hostname"]).await;
    assert_eq!(parts(&output.unwrap()).1.trim(), format!("web-{}", agent.spec().node_name));
    let output = agent.keelson(&["exec", "pod/web", "-c", "main", "--", "cat", "/scratch/f"]).await.unwrap();
    assert_eq!(parts(&output), (Some(0), "x\n".to_owned(), String::new()));

    // Standard input has an end, and output comes after it.
    let mut running_command =
        RunningCommand::start(&agent, &["exec", "-i", "web", "--", "sh", "-c", "wc -c; echo done"]);
    let mut stdin = running_command.child.stdin.take().unwrap();
    let input = vec![b'x'; 1_000_000];
    stdin.write_all(&input).unwrap();
    drop(stdin);
    assert_eq!(running_command.until(|line| line == "done"), ["1000000", "done"]);
    assert_eq!(running_command.child.wait().unwrap().code(), Some(0));

    let output = agent.keelson(&["exec", "web", "--", "no-such-program"]).await.unwrap();
    let (code, out, err) = parts(&output);
    assert!(code.is_some_and(|code| code != 0) && out.is_empty(), "{err}");
    assert!(err.contains("no-such-program"), "{err}");
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn exec_terminal_has_the_callers_size_and_forwards_every_key() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let name = ptsname(&person, Vec::new()).unwrap().into_string().unwrap();
    let side = || std::fs::OpenOptions::new().read(true).write(true).open(&name).unwrap();
    tcsetwinsize(side(), Winsize { ws_col: 111, ws_row: 33, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let mut command = agent.spec().cli();
    command.args(["exec", "-it", "web", "--", "sh"]);
    let mut child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
    let mut screen = std::fs::File::from(person);
    let reader = screen.try_clone().unwrap();
    let shown = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    let to = std::sync::Arc::clone(&shown);
    std::thread::spawn(move || {
        let mut reader = reader;
        let mut some = [0; 256];
        while let Ok(count @ 1..) = reader.read(&mut some) {
            to.lock().unwrap().push_str(&String::from_utf8_lossy(&some[..count]));
        }
    });
    let until = async |part: &str| {
        eventually(LIMIT, format!("the screen shows {part:?}"), async || {
            shown.lock().unwrap().contains(part)
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}: {:?}", shown.lock().unwrap()));
    };
    screen.write_all(b"stty size; echo to-$((1+1))\r").unwrap();
    until("33 111").await;
    until("to-2").await;
    tcsetwinsize(side(), Winsize { ws_col: 80, ws_row: 20, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    assert!(ProcessId::of(child.id()).unwrap().signal(Signal::WINCH));
    // Ctrl-C ends the foreground job of the shell, and neither the shell nor the command. The job itself says that it has begun:
    // then it is in the foreground, and Ctrl-C reaches it.
    screen.write_all(b"sh -c \"echo be''gun; sleep 1000\"\r").unwrap();
    until("begun").await;
    screen.write_all(b"\x03").unwrap();
    eventually(LIMIT, "the terminal in the container has the new size", async || {
        screen.write_all(b"stty size\r").unwrap();
        shown.lock().unwrap().contains("20 80")
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {:?}", shown.lock().unwrap()));
    screen.write_all(b"exit 5\r").unwrap();
    let status = tokio::task::spawn_blocking(move || child.wait().unwrap()).await.unwrap();
    assert_eq!(status.code(), Some(5), "{:?}", shown.lock().unwrap());
    agent.end().unwrap();
}

#[tokio::test]
async fn exec_reports_an_ended_container_and_a_killed_service() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let job = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: job\nspec:\n  restartPolicy: Never\n  containers:\n  \
         - name: main\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
         command: [\"/bin/sh\", \"-c\", \"exit 3\"]\n"
    );
    agent.write_manifest("job.yaml", &job).unwrap();
    let full = format!("job-{}", agent.spec().node_name);
    eventually(LIMIT, "the job has failed", async || {
        pods(&agent).await.is_ok_and(|p| p.get(&full).is_some_and(|p| p["status"]["phase"] == "Failed"))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let (code, _, err) = parts(&agent.keelson(&["exec", "job", "--", "true"]).await.unwrap());
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("is not running: it has ended with exit code 3"), "{err}");
    assert!(err.contains(&format!("try: `keelson logs {full} -c main`")), "{err}");

    // runtime-shim is killed during a command; the container is unaffected.
    let before = running(&agent).await.unwrap();
    let mut running_command =
        RunningCommand::start(&agent, &["exec", "-i", "web", "--", "sh", "-c", "echo begun; cat"]);
    running_command.until(|line| line == "begun");
    let shim = agent.service(ServiceName::RuntimeShim).unwrap();
    assert!(shim.signal(Signal::KILL));
    assert_eq!(running_command.child.wait().unwrap().code(), Some(1));
    let notice: Vec<String> = running_command.notices.iter().collect();
    assert!(notice[0].contains("the connection broke while the command ran"), "{notice:?}");
    assert!(notice[1].contains("may still run"), "{notice:?}");
    drop(running_command);
    eventually(LIMIT, "commands run again", async || {
        agent.keelson(&["exec", "web", "--", "true"]).await.is_ok_and(|o| o.status.success())
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn restart_returns_when_the_services_serve_and_affects_no_container() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    let processes = || -> Vec<ProcessId> {
        ServiceName::supervised().map(|service| agent.service(service).unwrap()).collect()
    };
    let old = processes();
    let output = agent.keelson(&["services", "restart", "--all"]).await.unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let printed = parts(&output).1;
    let expected: Vec<String> =
        ServiceName::supervised().map(|service| format!("service/{service} restarted")).collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
    // Each service is a new process, and each answers at once.
    assert!(old.iter().zip(processes()).all(|(old, new)| *old != new));
    let list = agent.keelson_json(&["get", "services", "-o", "json"]).await.unwrap();
    for row in list["items"].as_array().unwrap() {
        assert!(row["state"] == "running" || row["state"] == "degraded", "{row}");
    }
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before);
    let output = agent.keelson(&["services", "restart", "init"]).await.unwrap();
    assert!(!output.status.success() && text(&output).contains("restart its unit"), "{}", text(&output));
    agent.end().unwrap();
}

/// The objects of lines of JSON: event type, pod and phase.
fn changes(lines: &[String]) -> Vec<(String, String, String)> {
    let change = |line: &String| {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let object = &event["object"];
        (text(&event["type"]), text(&object["metadata"]["name"]), text(&object["status"]["phase"]))
    };
    lines.iter().map(change).collect()
}

#[tokio::test]
async fn a_watch_survives_the_kill_of_its_service_without_repeats() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let watch =
        RunningCommand::start(&agent, &["get", "pods", "-A", "-w", "-o", "json", "--output-watch-events"]);
    let (web, job) = (format!("web-{}", agent.spec().node_name), format!("job-{}", agent.spec().node_name));
    let first = changes(&watch.until(|_| true));
    assert_eq!(first, [("ADDED".to_owned(), web.clone(), "Running".to_owned())]);
    agent.service(ServiceName::PodSync).unwrap().signal(Signal::KILL);
    let notice = watch.notices.recv_timeout(LIMIT).unwrap();
    assert!(notice.contains("waiting for pod-sync to come back"), "{notice}");
    assert_eq!(watch.notices.recv_timeout(LIMIT).unwrap(), "pod-sync is back");
    agent.write_manifest("job.yaml", &sleeper("job")).unwrap();
    let of_job =
        |line: &str, part: &str| line.contains(&format!("\"name\":\"{job}\"")) && line.contains(part);
    let until_running = watch.until(|line| of_job(line, "\"phase\":\"Running\""));
    let seen = changes(&until_running);
    // The old pod has not changed: the restarted service has adopted it and sends it again.
    assert!(seen.iter().all(|(_, name, _)| *name == job), "{seen:?}");
    assert_eq!(seen[0].0, "ADDED");
    // No event of the new pod is shown twice.
    assert!(until_running.windows(2).all(|pair| pair[0] != pair[1]), "{until_running:#?}");
    agent.remove_manifest("job.yaml").unwrap();
    let gone = changes(&watch.until(|line| line.starts_with("{\"type\":\"DELETED\"")));
    assert!(gone.iter().all(|(_, name, _)| *name == job), "{gone:?}");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
    agent.end().unwrap();
}

#[tokio::test]
async fn get_watch_covers_services_volumes_and_events() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let services = RunningCommand::start(&agent, &["get", "services", "-w"]);
    services.until(|line| line.starts_with("node-api"));
    let volumes = RunningCommand::start(&agent, &["get", "volumes", "-w"]);
    let first = volumes.until(|line| line.contains("scratch"));
    assert_eq!(first.len(), 2, "{first:#?}");
    assert!(first[1].contains("emptyDir   mounted"), "{first:#?}");
    let events = RunningCommand::start(&agent, &["get", "events", "-w", "-o", "json"]);
    events.until(|line| line.contains("\"reason\":\"Started\""));

    let old = agent.service_pid(ServiceName::VolumeManager).unwrap();
    agent.service(ServiceName::VolumeManager).unwrap().signal(Signal::KILL);
    let row = |pid: u32| {
        move |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[0] == "volume-manager" && words[1] == "running" && words[2] != pid.to_string()
        }
    };
    services.until(row(old));
    let notice = volumes.notices.recv_timeout(LIMIT).unwrap();
    assert!(notice.contains("waiting for volume-manager"), "{notice}");
    assert_eq!(volumes.notices.recv_timeout(LIMIT).unwrap(), "volume-manager is back");

    agent.write_manifest("job.yaml", &sleeper("job")).unwrap();
    let job = format!("job-{}", agent.spec().node_name);
    let more = volumes.until(|line| line.starts_with(&job) && line.contains("mounted"));
    // The old pod is pending until pod-sync has sent it again, which volume-manager reports itself; no row
    // of it is shown twice.
    let of_web: Vec<&String> =
        first[1..].iter().chain(more.iter().filter(|line| !line.starts_with(&job))).collect();
    assert!(of_web.windows(2).all(|pair| pair[0] != pair[1]), "{more:#?}");
    events.until(|line| line.contains(&job) && line.contains("\"reason\":\"Started\""));
    agent.remove_manifest("job.yaml").unwrap();
    volumes.until(|line| line.starts_with(&job) && line.contains("Deleted"));
    for watch in [services, volumes, events] {
        assert_eq!(watch.interrupt().0, Some(2));
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn get_images_and_volumes_match_the_runtime_and_the_node() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let list = agent.keelson_json(&["get", "images", BUSYBOX_IMAGE, "-o", "json"]).await.unwrap();
    let items = list["items"].as_array().unwrap();
    assert_eq!(items.len(), 1, "{list:#}");
    assert!(items[0]["size_bytes"].as_u64().unwrap() > 0, "{list:#}");
    let used = &items[0]["used_by"][0];
    assert_eq!(used["pod"], format!("web-{}", agent.spec().node_name));
    assert_eq!((&used["container"], &used["state"]), (&"main".into(), &"running".into()));
    // As many as the runtime has.
    let all = agent.keelson_json(&["get", "images", "-o", "json"]).await.unwrap();
    let ids: std::collections::BTreeSet<&str> =
        all["items"].as_array().unwrap().iter().filter_map(|i| i["id"].as_str()).collect();
    let mut client = agent.containerd().images();
    let listed = client.list_images(k8s_cri::v1::ListImagesRequest { filter: None }).await.unwrap();
    let known = listed.into_inner().images;
    assert_eq!(ids, known.iter().map(|image| image.id.as_str()).collect());
    let table = parts(&agent.keelson(&["get", "images"]).await.unwrap()).1;
    assert!(table.starts_with("IMAGE ") && table.contains("web-"), "{table}");

    let list = agent.keelson_json(&["get", "volumes", "web", "-o", "json"]).await.unwrap();
    let volume = &list["items"][0];
    assert_eq!((&volume["volume"], &volume["kind"]), (&"scratch".into(), &"emptyDir".into()));
    assert_eq!(volume["state"], "mounted");
    let path = std::path::Path::new(volume["path"].as_str().unwrap());
    assert!(path.is_dir() && path.starts_with(&agent.spec().root_dir), "{volume}");
    agent.end().unwrap();
}

#[tokio::test]
async fn shell_completion_offers_the_names_of_running_pods() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let mut command = Command::new(agent.spec().bin_dir.join("keelson"));
    command.env("KEELSON_COMPLETE", "bash").env("KEELSON_RUN_DIR", &agent.spec().run_dir);
    command.env("_CLAP_IFS", "\n").env("_CLAP_COMPLETE_INDEX", "2").env("_CLAP_COMPLETE_COMP_TYPE", "9");
    let output = command.args(["--", "keelson", "logs", "we"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(parts(&output).1.trim(), format!("web-{}", agent.spec().node_name), "{}", text(&output));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_watch_with_a_closed_pipe_ends_at_the_next_change() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let mut command = agent.spec().cli();
    command.args(["get", "pods", "-w"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("NAME"));
    drop(lines);
    agent.write_manifest("job.yaml", &sleeper("job")).unwrap();
    let status = tokio::task::spawn_blocking(move || child.wait().unwrap()).await.unwrap();
    assert_eq!(status.code(), Some(0));
    agent.end().unwrap();
}
