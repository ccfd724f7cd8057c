//! Pods with many containers, long log lines or a flood of lines: they delay no other pod.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::bystander::BystanderPod;
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, is_ready, own_kib, pods, running, sleeper, text, until_ready};

/// Containers of the large pod.
const MANY: usize = 20;

/// A container that ignores SIGTERM and uses its whole grace period.
const IGNORES_SIGTERM: &str = "trap '' TERM; echo ready; while true; do sleep 1; done";

fn full_name(agent: &Agent, name: &str) -> String {
    format!("{name}-{}", agent.spec().node_name)
}

/// A pod with one container that runs this script.
fn script(name: &str, script: &str) -> String {
    let script = serde_json::Value::from(script);
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  restartPolicy: Never\n  \
         terminationGracePeriodSeconds: 0\n  containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    \
         imagePullPolicy: IfNotPresent\n    command: [\"/bin/sh\", \"-c\", {script}]\n"
    )
}

fn large(name: &str, grace: u32) -> String {
    let container = |i| {
        format!(
            "  - name: c{i}\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
             command: [\"/bin/sh\", \"-c\", \"echo I am c{i}; {IGNORES_SIGTERM}\"]\n"
        )
    };
    let containers: String = (0..MANY).map(container).collect();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  \
         terminationGracePeriodSeconds: {grace}\n  containers:\n{containers}"
    )
}

async fn until_gone(agent: &Agent, name: &str) {
    let full = full_name(agent, name);
    let gone = eventually(LIMIT, format!("{name} is gone"), async || {
        let runs = running(agent).await.map(|all| all.keys().any(|k| k.starts_with(&format!("{full}/"))));
        pods(agent).await.is_ok_and(|pods| !pods.contains_key(&full)) && matches!(runs, Ok(false))
    });
    gone.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// Runs a pod until it logs a line, and deletes it; how long it took to be Ready.
async fn run_and_delete(agent: &Agent, name: &str) -> Duration {
    let begun = Instant::now();
    agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    until_one_ready(agent, name).await;
    let took = begun.elapsed();
    let log = agent.keelson(&["logs", name]).await.unwrap();
    assert!(text(&log).contains(&format!("hello from {name}")), "{}", text(&log));
    agent.remove_manifest(&format!("{name}.yaml")).unwrap();
    until_gone(agent, name).await;
    took
}

/// The ids of all containers and sandboxes of the runtime, including ended ones.
fn containers(agent: &Agent) -> anyhow::Result<BTreeSet<String>> {
    let list = agent.containerd().ctr(&["containers", "list", "-q"])?;
    Ok(list.lines().map(ToOwned::to_owned).collect())
}

#[tokio::test]
async fn a_pod_of_twenty_containers_does_not_delay_another_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let calm = BystanderPod::start(&agent, "calm").await;
    let without = containers(&agent).unwrap();
    agent.write_manifest("large.yaml", &large("large", 25)).unwrap();
    agent.write_manifest("second.yaml", &sleeper("second")).unwrap();
    until_ready(&agent, &["calm", "large", "second"]).await.unwrap();
    calm.assert_untouched(&agent).await;
    agent.remove_manifest("second.yaml").unwrap();
    until_gone(&agent, "second").await;
    let full = full_name(&agent, "large");
    let before = running(&agent).await.unwrap();
    assert_eq!(before.len(), MANY + 1, "{before:#?}");
    let folder = agent.spec().root_dir.join("pods");
    let uid = pods(&agent).await.unwrap()[&full]["metadata"]["uid"].as_str().unwrap().to_owned();
    for i in [0, MANY / 2, MANY - 1] {
        let name = format!("c{i}");
        let log = agent.keelson(&["logs", "large", "-c", &name]).await.unwrap();
        assert!(text(&log).contains(&format!("I am c{i}")), "{}", text(&log));
    }
    agent.remove_manifest("large.yaml").unwrap();
    eventually(LIMIT, "the large pod is being ended", async || {
        let output = agent.keelson(&["get", "pods"]).await.unwrap();
        String::from_utf8_lossy(&output.stdout).contains("Terminating")
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let took = run_and_delete(&agent, "quiet").await;
    println!("the quiet pod was Ready after {took:?}");
    // All of it happened while twenty containers used up their grace period.
    assert_eq!(running(&agent).await.unwrap(), before);
    until_gone(&agent, "large").await;
    eventually(LIMIT, "nothing is left of the large pod", async || {
        !folder.join(&uid).exists() && containers(&agent).is_ok_and(|now| now == without)
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    calm.assert_untouched(&agent).await;
    agent.end().unwrap();
}

/// Lines of 64 KiB without repetition.
fn long_lines(count: usize) -> String {
    let numbers: Vec<String> = (10_000..=20_921).map(|n: u32| n.to_string()).collect();
    (100..100 + count).map(|i| format!("{i} {}\n", numbers.join(" "))).collect()
}

#[tokio::test]
async fn log_lines_of_64_kib_are_read_whole_and_followed() {
    const COUNT: usize = 60;
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let calm = BystanderPod::start(&agent, "calm").await;
    let commands = format!(
        "L=$(seq -s ' ' 10000 20921); i=100; while [ $i -lt {} ]; do echo \"$i $L\"; i=$((i+1)); done; \
         read gate < /gate/open",
        100 + COUNT
    );
    let gate = scratch.path().join("gate");
    fs::create_dir(&gate).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        gate.join("open"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    let manifest = format!(
        "{}    volumeMounts: [{{name: gate, mountPath: /gate}}]\n  volumes:\n  - name: gate\n    \
         hostPath: {{path: {}}}\n",
        script("long", &commands),
        gate.display()
    );
    agent.write_manifest("long.yaml", &manifest).unwrap();
    let expected = long_lines(COUNT);
    assert_eq!(expected.lines().next().unwrap().len(), 65_535);
    let mut last = 0;
    let whole = eventually(LIMIT, "the log is read whole", async || {
        let output = agent.keelson(&["logs", "long"]).await.unwrap();
        last = output.stdout.len();
        output.stdout == expected.as_bytes()
    });
    whole.await.unwrap_or_else(|e| panic!("{e:#}: {last} of {} bytes\n{}", expected.len(), agent.log_tail()));
    let timed = agent.keelson(&["logs", "long", "--timestamps"]).await.unwrap().stdout;
    let timed = String::from_utf8(timed).unwrap();
    assert_eq!(timed.lines().count(), COUNT);
    assert!(
        timed.lines().zip(expected.lines()).all(|(timed, line)| timed.split_once(' ').unwrap().1 == line)
    );

    // Following ends with the container, which is ended meanwhile.
    let open = gate.join("open");
    let opener = thread::spawn(move || fs::write(open, "go\n"));
    let followed = agent.keelson(&["logs", "-f", "long"]).await.unwrap();
    opener.join().unwrap().unwrap();
    assert!(followed.stdout == expected.as_bytes(), "{} of {} bytes", followed.stdout.len(), expected.len());
    run_pods_next_to_a_writer(&agent).await;
    calm.assert_untouched(&agent).await;
    agent.end().unwrap();
}

/// Runs and deletes a pod while another one writes such lines without an end.
async fn run_pods_next_to_a_writer(agent: &Agent) {
    let commands =
        "L=$(seq -s ' ' 10000 20921); i=100; while true; do echo \"$i $L\"; i=$((i+1)); sleep 0.02; done";
    agent.write_manifest("writer.yaml", &script("writer", commands)).unwrap();
    until_one_ready(agent, "writer").await;
    let key = format!("{}/main", full_name(agent, "writer"));
    let writer = running(agent).await.unwrap()[&key].clone();
    let from = written(writer.pid);
    let took = run_and_delete(agent, "second").await;
    let lines = (written(writer.pid) - from) >> 16;
    println!("the second pod was Ready after {took:?}, beside {lines} lines of 64 KiB");
    assert!(lines >= 5, "only {lines} lines were written meanwhile");
    assert_eq!(running(agent).await.unwrap().get(&key), Some(&writer));
}

/// The rotation limits of the flood's log.
const MAX_FILE: u64 = 10 << 20;
const MAX_FILES: usize = 3;
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// A check of a log's size may be this late on a busy machine.
const LATE: Duration = Duration::from_secs(4);
/// Number of quiet pods before the flood, and during it.
const QUIET: usize = 5;
/// The least that the flood writes while one quiet pod runs.
const LEAST: u64 = 8 << 20;

fn bounded_logs(spec: &mut AgentSpec) {
    for (field, value) in [("containerLogMaxSize", "10Mi".into()), ("containerLogMaxFiles", MAX_FILES.into())]
    {
        spec.kubelet.insert(field.to_owned(), value);
    }
    spec.kubelet.insert(
        "containerLogMonitorInterval".to_owned(),
        format!("{}s", LOG_CHECK_INTERVAL.as_secs()).into(),
    );
}

/// Samples the flood from outside the agent until dropped.
struct Watched {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Samples>,
}

#[derive(Debug, Default)]
struct Samples {
    /// Time, and bytes that the flood had written by then.
    written: Vec<(Instant, u64)>,
    /// The largest size of its log in bytes.
    most_bytes: u64,
    /// The largest number of its log's files.
    most_files: usize,
}

impl Watched {
    fn new(pid: u32, folder: PathBuf) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&over);
        let thread = thread::spawn(move || {
            let mut samples = Samples::default();
            while !end.load(Ordering::Relaxed) {
                let sizes = sizes(&folder);
                samples.most_bytes = samples.most_bytes.max(sizes.iter().sum());
                samples.most_files = samples.most_files.max(sizes.len());
                samples.written.push((Instant::now(), written(pid)));
                thread::sleep(Duration::from_millis(50));
            }
            samples
        });
        Self { over, thread }
    }

    fn end(self) -> Samples {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

impl Samples {
    /// The most that was written in any period of this length.
    fn most_in(&self, length: Duration) -> u64 {
        let mut most = 0;
        let mut from = 0;
        for (at, bytes) in &self.written {
            while *at - self.written[from].0 > length {
                from += 1;
            }
            most = most.max(bytes - self.written[from].1);
        }
        most
    }

    fn total(&self) -> u64 {
        self.written[self.written.len() - 1].1
    }

    fn megabytes_per_second(&self) -> f64 {
        let (first, last) = (self.written[0], self.written[self.written.len() - 1]);
        (last.1 - first.1) as f64 / 1e6 / (last.0 - first.0).as_secs_f64()
    }
}

/// Bytes that a process has written to anything (proc(5), `io`).
fn written(pid: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap_or_default();
    line.trim().parse().unwrap_or(0)
}

/// The sizes of the files of a log.
fn sizes(folder: &Path) -> Vec<u64> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).collect()
}

/// The folder of the only log of a pod.
fn log_folder(agent: &Agent, name: &str) -> PathBuf {
    let full = full_name(agent, name);
    let below = fs::read_dir(&agent.spec().pod_logs_dir).unwrap().flatten().map(|e| e.path());
    let named = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().contains(&full);
    below.into_iter().find(named).unwrap().join("main")
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

fn memory(agent: &Agent) -> u64 {
    ServiceName::ALL.into_iter().filter_map(|s| agent.service_pid(s)).map(own_kib).sum()
}

#[tokio::test]
#[ignore = "long: as much log as the machine can write"]
async fn a_container_that_floods_its_log_delays_no_other_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(bounded_logs).start().await.unwrap();
    let mut alone = Vec::new();
    for i in 0..QUIET {
        alone.push(run_and_delete(&agent, &format!("alone{i}")).await);
    }
    let before = memory(&agent);
    agent.write_manifest("flood.yaml", &script("flood", "exec yes \"$(printf %04000d 0)\"")).unwrap();
    until_one_ready(&agent, "flood").await;
    let key = format!("{}/main", full_name(&agent, "flood"));
    let flood = running(&agent).await.unwrap()[&key].clone();
    let watched = Watched::new(flood.pid, log_folder(&agent, "flood"));

    let (mut bystander, mut most_memory) = (Vec::new(), 0);
    for i in 0..QUIET {
        let from = written(flood.pid);
        bystander.push(run_and_delete(&agent, &format!("beside{i}")).await);
        most_memory = most_memory.max(memory(&agent));
        let wrote = written(flood.pid) - from;
        assert!(wrote > LEAST, "the flood wrote only {wrote} bytes while the pod ran");
    }
    let ticks = "i=0; while [ $i -lt 30 ]; do echo tick $i; i=$((i+1)); sleep 0.1; done";
    agent.write_manifest("ticks.yaml", &script("ticks", ticks)).unwrap();
    eventually(LIMIT, "the log has begun", async || {
        agent.keelson(&["logs", "ticks"]).await.is_ok_and(|output| output.status.success())
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let followed = agent.keelson(&["logs", "-f", "ticks"]).await.unwrap();
    let expected: String = (0..30).map(|i| format!("tick {i}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&followed.stdout), expected, "{}", text(&followed));
    let tail = agent.keelson(&["logs", "flood", "--tail", "3"]).await.unwrap();
    assert!(tail.status.success() && tail.stdout.len() > 3 * 4000, "{}", tail.stdout.len());

    // It was the same flood all the time, and it still writes.
    assert_eq!(running(&agent).await.unwrap().get(&key), Some(&flood));
    assert!(pods(&agent).await.unwrap().get(&full_name(&agent, "flood")).is_some_and(is_ready));
    let from = written(flood.pid);
    eventually(LIMIT, "the flood continues", async || written(flood.pid) > from + LEAST).await.unwrap();
    let samples = watched.end();
    // The time and the stream before each line are less than a tenth of it.
    let one = MAX_FILE + samples.most_in(LOG_CHECK_INTERVAL + LATE) / 10 * 11;
    println!(
        "{:.0} MB/s, {} MB in all; the log took {} MB in {} files at most, one file may take {} MB",
        samples.megabytes_per_second(),
        samples.total() / 1_000_000,
        samples.most_bytes / 1_000_000,
        samples.most_files,
        one / 1_000_000,
    );
    println!("alone {alone:?}\nbeside {bystander:?}");
    let (alone, bystander) = (median(alone), median(bystander));
    println!(
        "medians {alone:?} and {bystander:?}, ratio {:.2}",
        bystander.as_secs_f64() / alone.as_secs_f64()
    );
    println!("memory {before} KiB, then {most_memory} KiB");
    // One more while a file is compressed.
    assert!(samples.most_files <= MAX_FILES + 1, "{} files", samples.most_files);
    assert!(samples.most_bytes <= one * (MAX_FILES as u64 + 1), "{} bytes", samples.most_bytes);
    assert!(most_memory < before + (32 << 10), "grown from {before} to {most_memory} KiB");
    agent.remove_manifest("flood.yaml").unwrap();
    until_gone(&agent, "flood").await;
    agent.end().unwrap();
}
