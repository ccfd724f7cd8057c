//! The options of a log request, for a log that was rotated and a container that has restarted (`/containerLogs`,
//! node-and-api.md §8.7). The expected content is read from the log files, never from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, http};
use serde_json::json;

fn small_logs(spec: &mut AgentSpec) {
    spec.kubelet.insert("containerLogMaxSize".into(), "32Ki".into());
    spec.kubelet.insert("containerLogMonitorInterval".into(), "3s".into());
}

/// Writes for some seconds before its log reaches the rotation size, until the test has seen a rotation, and a little more;
/// then it waits for its end. The second instance says so and sleeps.
const WRITER: &str = "if [ -e /data/again ]; then echo again; exec sleep 1000000; fi; touch /data/again; i=0; \
    some() { n=0; while [ $n -lt 12 ]; do echo \"line $i, which is made longer by these words\"; i=$((i+1)); \
    n=$((n+1)); done; }; until [ -e /data/rotated ]; do some; sleep 0.1; done; some; some; touch /data/written; \
    until [ -e /data/end ]; do sleep 0.1; done; exit 3";

fn pod(data: &Path) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", WRITER],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "hostPath": {"path": data, "type": "Directory"}}],
        },
    })
    .to_string()
}

/// The log files of the first instance, the oldest one first.
fn files(agent: &Agent) -> Vec<PathBuf> {
    let below = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let folders = below(agent.spec().pod_logs_dir.clone()).flat_map(below);
    let of_first = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("0.log");
    let mut files: Vec<PathBuf> = folders.flat_map(below).filter(of_first).collect();
    // Rotated files have the time of the rotation after the name; the current one does not.
    files.sort_by_key(|path| (path.extension().is_some_and(|e| e == "log"), path.clone()));
    files
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    at: Timestamp,
    text: String,
}

/// All lines that were written, and how many of them are in files before the last.
struct Written {
    lines: Vec<Line>,
    border: usize,
}

impl Written {
    fn read(agent: &Agent) -> Self {
        let (mut lines, mut border) = (Vec::new(), 0);
        for file in files(agent) {
            border = lines.len();
            let content = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            // Time, stream, tag, text.
            lines.extend(content.lines().map(|line| {
                let parts: Vec<&str> = line.splitn(4, ' ').collect();
                Line { at: parts[0].parse().unwrap(), text: parts[3].to_owned() }
            }));
        }
        Self { lines, border }
    }

    /// The lines after the first `lines`, as they are shown.
    fn from(&self, first: usize) -> String {
        self.lines[first..].iter().map(|line| format!("{}\n", line.text)).collect()
    }
}

#[tokio::test]
async fn log_options_work_across_rotations_and_for_the_previous_container() {
    let scratch = Scratch::new().unwrap();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let agent = Agent::builder(scratch.path()).configure(small_logs).start().await.unwrap();
    agent.write_manifest("web.json", &pod(&data)).unwrap();
    until_one_ready(&agent, "web").await;
    let rotated = eventually(LIMIT, "the log is rotated", async || files(&agent).len() > 1);
    rotated.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    fs::write(data.join("rotated"), "").unwrap();
    let url = format!("{}/containerLogs/default/web-{}/main", agent.api_url(), agent.spec().node_name);
    let all = eventually(LIMIT, "all is written", async || {
        data.join("written").exists()
            && Written::read(&agent).from(0) == http::get_ok(&url).await.unwrap_or_default()
    });
    all.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let written = Written::read(&agent);
    let (whole, after) = (written.from(0), written.lines.len() - written.border);
    assert!(written.border > 200 && after >= 24, "{} and {after}", written.border);

    let tail = format!("{url}?tailLines={}", after + 7);
    assert_eq!(http::get_ok(&tail).await.unwrap(), written.from(written.border - 7));
    let bytes = whole.len() - written.from(written.border).len() + 100;
    assert_eq!(http::get_ok(&format!("{url}?limitBytes={bytes}")).await.unwrap(), whole[..bytes]);
    let part = http::get_ok(&format!("{tail}&limitBytes=400")).await.unwrap();
    assert_eq!(part, written.from(written.border - 7)[..400]);
    check_timestamps(&written, &http::get_ok(&format!("{url}?timestamps=true")).await.unwrap());
    check_since_time(&url, &written).await;
    check_since_seconds(&url, &written).await;
    check_previous(&agent, &data, &url, &whole).await;
    agent.end().unwrap();
}

/// Each line has the timestamp of the file.
fn check_timestamps(written: &Written, shown: &str) {
    let shown: Vec<Line> = shown
        .lines()
        .map(|line| {
            let (at, text) = line.split_once(' ').unwrap();
            Line { at: at.parse().unwrap(), text: text.to_owned() }
        })
        .collect();
    assert_eq!(shown, written.lines);
}

async fn check_since_time(url: &str, written: &Written) {
    // The first line of a burst, well before the file border: lines of one burst may have the same time.
    let first = (1..written.border / 2).rfind(|i| written.lines[i - 1].at < written.lines[*i].at).unwrap();
    let shown = http::get_ok(&format!("{url}?sinceTime={}", written.lines[first].at)).await.unwrap();
    assert_eq!(shown, written.from(first));
    let last = written.lines.last().unwrap().at + SignedDuration::from_secs(1);
    assert_eq!(http::get_ok(&format!("{url}?sinceTime={last}")).await.unwrap(), "");
}

/// The first seconds of the log are left out, and the rest begins before the file border.
async fn check_since_seconds(url: &str, written: &Written) {
    let begun = written.lines[0].at;
    let mut last = 0;
    let crossed = eventually(LIMIT, "a request cuts the older file", async || {
        let asked = Timestamp::now();
        let seconds = asked.duration_since(begun).as_secs();
        let shown = http::get_ok(&format!("{url}?sinceSeconds={seconds}")).await.unwrap();
        let answered = Timestamp::now();
        let first = written.lines.len() - shown.lines().count();
        assert_eq!(shown, written.from(first));
        let age = SignedDuration::from_secs(seconds);
        if let Some(line) = written.lines.get(first) {
            assert!(line.at >= asked - age, "{line:?} is too old for {seconds} s before {asked}");
        }
        if let Some(line) = first.checked_sub(1).map(|i| &written.lines[i]) {
            assert!(line.at < answered - age, "{line:?} is young enough for {seconds} s before {answered}");
        }
        last = first;
        (1..written.border).contains(&first)
    });
    crossed.await.unwrap_or_else(|e| panic!("{e:#}: {last} of {}", written.border));
}

/// The container ends and is restarted: its first log is the previous one, with all of its files.
async fn check_previous(agent: &Agent, data: &Path, url: &str, whole: &str) {
    let none = http::get(&format!("{url}?previous=true")).await.unwrap();
    assert!(none.0 == 400 && none.2.contains("previous terminated container \"main\""), "{none:?}");
    fs::write(data.join("end"), "").unwrap();
    let again = eventually(LIMIT, "it runs again", async || {
        http::get_ok(url).await.is_ok_and(|shown| shown == "again\n")
    });
    again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert!(http::get_ok(&format!("{url}?previous=true")).await.unwrap() == whole);
    let tail = http::get_ok(&format!("{url}?previous=true&tailLines=40")).await.unwrap();
    assert!(whole.ends_with(&tail) && tail.lines().count() == 40, "{tail}");
    let limited = http::get_ok(&format!("{url}?previous=1&limitBytes=6")).await.unwrap();
    assert_eq!(limited, "line 0");
}
