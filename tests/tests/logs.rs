//! Logs that are rotated while they are written and read, on a real containerd.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::PathBuf;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, pods, text};

/// Lines that the container writes, in bursts over about fifteen seconds: several checks of the log's size.
const LINES: usize = 30_000;

/// A pod that writes numbered lines and ends.
fn writer(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  restartPolicy: Never\n  \
         terminationGracePeriodSeconds: 0\n  containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    \
         imagePullPolicy: IfNotPresent\n    command:\n    - /bin/sh\n    - -c\n    - |\n      \
         i=0; while [ $i -lt {LINES} ]; do\n        \
         echo \"line $i, which is made longer by these words\"; i=$((i+1))\n        \
         if [ $((i % 200)) -eq 0 ]; then sleep 0.1; fi\n      done\n"
    )
}

/// Small log files, with so many kept that nothing is dropped.
fn small_logs(spec: &mut AgentSpec) {
    for (field, value) in [("containerLogMaxSize", "100Ki".into()), ("containerLogMaxFiles", 50.into())] {
        spec.kubelet.insert(field.to_owned(), value);
    }
    spec.kubelet.insert("containerLogMonitorInterval".to_owned(), "3s".into());
}

async fn agent(scratch: &Scratch, name: &str) -> Agent {
    let agent = Agent::builder(scratch.path()).configure(small_logs).start().await.unwrap();
    agent.write_manifest(&format!("{name}.yaml"), &writer(name)).unwrap();
    agent
}

/// The log files of the only container.
fn files(agent: &Agent) -> Vec<String> {
    let below = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let folders = below(agent.spec().pod_logs_dir.clone()).flat_map(below);
    let mut names: Vec<String> =
        folders.flat_map(below).map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

async fn until_rotated(agent: &Agent) {
    let mut last = Vec::new();
    eventually(LIMIT, "the log is rotated and compressed", async || {
        last = files(agent);
        last.iter().any(|name| name.ends_with(".gz"))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {last:?}\n{}", agent.log_tail()));
}

async fn until_ended(agent: &Agent, name: &str) {
    let full = format!("{name}-{}", agent.spec().node_name);
    eventually(LIMIT, "the pod has succeeded", async || {
        pods(agent).await.is_ok_and(|p| p.get(&full).is_some_and(|p| p["status"]["phase"] == "Succeeded"))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// The numbers of the lines that a command prints.
async fn numbers(agent: &Agent, args: &[&str]) -> Vec<usize> {
    let output = agent.keelson(args).await.unwrap();
    assert!(output.status.success(), "{args:?}: {}\n{}", text(&output), agent.log_tail());
    let number = |line: &str| {
        let rest = line.strip_prefix("line ").and_then(|rest| rest.split_once(','));
        rest.and_then(|(number, _)| number.parse().ok()).unwrap_or_else(|| panic!("not a line: {line:?}"))
    };
    String::from_utf8_lossy(&output.stdout).lines().map(number).collect()
}

/// Panics at the first difference between two long lists.
fn assert_lines(found: &[usize], expected: std::ops::Range<usize>) {
    let differs = found.iter().copied().zip(expected.clone()).find(|(found, expected)| found != expected);
    assert_eq!(differs, None, "found and expected");
    assert_eq!(found.len(), expected.len());
}

#[tokio::test]
async fn a_log_is_rotated_and_tail_reads_across_rotations() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch, "writer").await;
    until_rotated(&agent).await;
    // While the log is written: a contiguous range, longer than any one file.
    let tail = numbers(&agent, &["logs", "writer", "--tail", "5000"]).await;
    // Lines written during the read are read, too.
    assert!(tail.len() >= 5_000, "{}", tail.len());
    assert_lines(&tail, tail[0]..tail[0] + tail.len());
    until_ended(&agent, "writer").await;
    let names = files(&agent);
    assert!(names.len() > 3 && names.iter().all(|name| name.starts_with("0.log")), "{names:?}");
    assert_lines(&numbers(&agent, &["logs", "writer"]).await, 0..LINES);
    let tail = LINES - 500;
    assert_lines(&numbers(&agent, &["logs", "writer", "--tail", &tail.to_string()]).await, 500..LINES);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_followed_log_has_every_line_exactly_once() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch, "writer").await;
    eventually(LIMIT, "the log has begun", async || {
        agent.keelson(&["logs", "writer"]).await.is_ok_and(|output| output.status.success())
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    // Following ends with the container.
    let followed = numbers(&agent, &["logs", "-f", "writer"]).await;
    assert_lines(&followed, 0..LINES);
    assert!(files(&agent).len() > 3, "{:?}", files(&agent));
    agent.end().unwrap();
}

#[tokio::test]
async fn no_log_line_is_lost_while_runtime_shim_is_killed_repeatedly() {
    let scratch = Scratch::new().unwrap();
    let agent = agent(&scratch, "writer").await;
    until_rotated(&agent).await;
    for _ in 0..3 {
        let process = agent.service(ServiceName::RuntimeShim).unwrap();
        let before = files(&agent).len();
        process.signal(Signal::KILL);
        eventually(LIMIT, "runtime-shim runs again", async || {
            agent.service(ServiceName::RuntimeShim).is_some_and(|p| p != process)
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        // Rotation continues, unless the container has ended meanwhile.
        eventually(LIMIT, "one more file, or the end", async || {
            let ended =
                pods(&agent).await.is_ok_and(|p| p.values().any(|p| p["status"]["phase"] == "Succeeded"));
            ended || files(&agent).len() > before
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    until_ended(&agent, "writer").await;
    eventually(LIMIT, "runtime-shim answers", async || {
        agent.keelson(&["logs", "writer"]).await.is_ok_and(|output| output.status.success())
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_lines(&numbers(&agent, &["logs", "writer"]).await, 0..LINES);
    let names = files(&agent);
    assert!(names.contains(&"0.log".to_owned()) && !names.iter().any(|n| n.ends_with(".tmp")), "{names:?}");
    agent.end().unwrap();
}
