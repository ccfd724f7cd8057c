//! Services are killed and stopped while many pods are created and deleted: no container restarts, no pod is lost or
//! duplicated (proof 3 and 4).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::duplicates::DuplicateCheck;
use keelson_tests::{LIMIT, restarts, running, sleeper, until_ready};

/// Pods that stay, and pods that are created and deleted.
struct Churn {
    agent: Agent,
    steady: Vec<String>,
    moving: usize,
    present: BTreeSet<String>,
    turn: usize,
    duplicates: DuplicateCheck,
}

impl Churn {
    async fn start(scratch: &Scratch, steady: usize, moving: usize) -> Self {
        let agent = Agent::builder(scratch.path()).start().await.unwrap();
        let steady: Vec<String> = (0..steady).map(|i| format!("steady{i}")).collect();
        for name in &steady {
            agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
        }
        let names: Vec<&str> = steady.iter().map(String::as_str).collect();
        until_ready(&agent, &names).await.unwrap();
        Self {
            agent,
            steady,
            moving,
            present: BTreeSet::new(),
            turn: 0,
            duplicates: DuplicateCheck::default(),
        }
    }

    /// Creates one pod and deletes the one that was created `moving` steps ago.
    fn step(&mut self) {
        let name = format!("moving{}", self.turn);
        self.agent.write_manifest(&format!("{name}.yaml"), &sleeper(&name)).unwrap();
        self.present.insert(name);
        if let Some(old) = self.turn.checked_sub(self.moving) {
            let old = format!("moving{old}");
            self.agent.remove_manifest(&format!("{old}.yaml")).unwrap();
            self.present.remove(&old);
        }
        self.turn += 1;
    }

    /// Steps a few times per second, for as long as `time` takes.
    async fn keep_moving(&mut self, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.step();
            self.duplicates.record_runtime(&self.agent).await.unwrap();
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Waits until every desired pod is Ready, and the runtime runs exactly these, each once and for the first time.
    async fn until_settled(&mut self, what: &str) {
        let names: Vec<&str> = self.steady.iter().chain(&self.present).map(String::as_str).collect();
        until_ready(&self.agent, &names).await.unwrap_or_else(|e| panic!("{what}: {e:#}"));
        let exact = eventually(LIMIT, format!("exactly the wanted containers run ({what})"), async || {
            running(&self.agent).await.is_ok_and(|now| now.len() == names.len())
        });
        exact.await.unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()));
        self.duplicates.record_runtime(&self.agent).await.unwrap();
        self.duplicates.record_statuses(&self.agent).await.unwrap();
        assert!(
            self.duplicates.violations().is_empty(),
            "{what}: {:#?}\n{}",
            self.duplicates.violations(),
            self.agent.log_tail()
        );
    }

    /// Checks at the end that `before` still runs, and that no pod was ever duplicated or restarted.
    async fn finish(self, before: &[keelson_tests::Process]) {
        assert_eq!(self.steady_processes().await, before, "no steady container has restarted");
        let (seen, least) = (self.duplicates.pods(), self.steady.len() + self.present.len());
        println!("{seen} pods were seen, {} were created", self.turn);
        assert!(seen > least, "only {seen} pods were seen");
        assert!(self.duplicates.violations().is_empty(), "{:#?}", self.duplicates.violations());
        self.agent.end().unwrap();
    }

    async fn steady_processes(&self) -> Vec<keelson_tests::Process> {
        let now = running(&self.agent).await.unwrap();
        let node = &self.agent.spec().node_name;
        self.steady.iter().map(|n| now[&format!("{n}-{node}/main")].clone()).collect()
    }

    async fn until_replaced(&self, service: ServiceName, old: ProcessId) {
        eventually(LIMIT, format!("{service} runs again"), async || {
            self.agent.service(service).is_some_and(|p| p != old)
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()));
    }
}

async fn kill_everything_in_turn(steady: usize, moving: usize, pause: Duration) {
    let scratch = Scratch::new().unwrap();
    let mut churn = Churn::start(&scratch, steady, moving).await;
    let before = churn.steady_processes().await;
    for service in ServiceName::supervised() {
        let process = churn.agent.service(service).unwrap();
        churn.step();
        process.signal(Signal::KILL);
        churn.keep_moving(pause).await;
        churn.until_replaced(service, process).await;
        churn.until_settled(&format!("after {service} was killed")).await;
    }
    churn.step();
    churn.agent.kill_init();
    churn.keep_moving(pause).await;
    churn.agent.start().await.unwrap();
    churn.until_settled("after init was killed").await;

    churn.step();
    for service in ServiceName::supervised() {
        churn.agent.service(service).unwrap().signal(Signal::KILL);
    }
    churn.agent.kill_init();
    churn.keep_moving(pause).await;
    churn.agent.start().await.unwrap();
    churn.until_settled("after everything was killed at once").await;
    churn.finish(&before).await;
}

#[tokio::test]
async fn services_are_killed_in_turn_while_pods_come_and_go() {
    kill_everything_in_turn(4, 4, Duration::from_millis(1500)).await;
}

#[tokio::test]
#[ignore = "long: fifty pods, several minutes"]
async fn services_are_killed_in_turn_while_fifty_pods_come_and_go() {
    kill_everything_in_turn(30, 20, Duration::from_secs(6)).await;
}

async fn stop_everything_in_turn(steady: usize, moving: usize, pause: Duration) {
    let scratch = Scratch::new().unwrap();
    let mut churn = Churn::start(&scratch, steady, moving).await;
    let before = churn.steady_processes().await;
    for service in ServiceName::supervised() {
        let process = churn.agent.service(service).unwrap();
        process.signal(Signal::STOP);
        churn.keep_moving(pause).await;
        let memory = agent_memory_kib(&churn.agent);
        assert!(memory < 400 << 10, "the agent has grown to {memory} KiB while {service} was stopped");
        process.signal(Signal::CONT);
        churn.until_settled(&format!("after {service} was stopped and continued")).await;
    }
    churn.finish(&before).await;
}

fn agent_memory_kib(agent: &Agent) -> u64 {
    let pids = ServiceName::ALL.into_iter().filter_map(|s| agent.service_pid(s));
    pids.map(|pid| {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find(|l| l.starts_with("Pss:")).unwrap_or_default().to_owned();
        line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
    })
    .sum()
}

#[tokio::test]
async fn services_are_stopped_in_turn_while_pods_come_and_go() {
    stop_everything_in_turn(3, 3, Duration::from_secs(3)).await;
}

#[tokio::test]
#[ignore = "long: each service stopped for a minute"]
async fn services_are_stopped_for_a_minute_each_while_fifty_pods_come_and_go() {
    stop_everything_in_turn(30, 20, Duration::from_secs(60)).await;
}

/// Checks the duplicate check itself, which could pass without seeing anything.
#[tokio::test]
async fn the_duplicate_check_detects_a_restarted_container() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("good.yaml", &sleeper("good")).unwrap();
    until_ready(&agent, &["good"]).await.unwrap();
    let mut duplicates = DuplicateCheck::default();
    duplicates.record_runtime(&agent).await.unwrap();
    duplicates.record_statuses(&agent).await.unwrap();
    assert!(duplicates.violations().is_empty() && duplicates.pods() == 1, "{duplicates:?}");
    agent.write_manifest("bad.yaml", &sleeper("bad").replace("exec sleep 1000000", "exit 1")).unwrap();
    let result = eventually(LIMIT, "the runtime and the status show the second start", async || {
        duplicates.record_runtime(&agent).await.unwrap();
        duplicates.record_statuses(&agent).await.unwrap();
        let has = |text: &str| duplicates.violations().iter().any(|w| w.contains("bad") && w.contains(text));
        has("container attempt 1") && has("restartCount 1")
    });
    if let Err(error) = result.await {
        // Shows whether the runtime has seen the end of the first container.
        panic!(
            "{error:#}: {duplicates:?}; the runtime runs {:?}\n{}",
            running(&agent).await,
            agent.log_tail()
        );
    }
    assert!(!duplicates.violations().iter().any(|w| w.contains("good")), "{duplicates:?}");
    agent.end().unwrap();
}

/// Without init no service is restarted; everything else continues. With everything stopped the pods still run.
async fn stop_init_and_then_everything(steady: usize, moving: usize, pause: Duration) {
    let scratch = Scratch::new().unwrap();
    let mut churn = Churn::start(&scratch, steady, moving).await;
    let before = churn.steady_processes().await;
    let init = churn.agent.init().unwrap();
    assert!(init.signal(Signal::STOP));
    churn.keep_moving(pause).await;
    churn.until_settled("while init is stopped").await;
    assert!(init.signal(Signal::CONT));
    churn.until_settled("after init was stopped and continued").await;

    // A service that ends meanwhile waits for init only.
    let api = churn.agent.service(ServiceName::NodeApi).unwrap();
    assert!(init.signal(Signal::STOP));
    assert!(api.signal(Signal::KILL));
    churn.keep_moving(Duration::from_secs(1)).await;
    assert_eq!(churn.agent.service(ServiceName::NodeApi), None, "who has started it?");
    assert!(init.signal(Signal::CONT));
    churn.until_replaced(ServiceName::NodeApi, api).await;

    let all: Vec<ProcessId> = ServiceName::ALL.into_iter().map(|s| churn.agent.service(s).unwrap()).collect();
    assert!(all.iter().all(|process| process.signal(Signal::STOP)));
    churn.keep_moving(pause).await;
    assert!(all.iter().all(|process| process.signal(Signal::CONT)));
    churn.until_settled("after everything was stopped and continued").await;
    let now: Vec<Option<ProcessId>> = ServiceName::ALL.into_iter().map(|s| churn.agent.service(s)).collect();
    assert!(now.iter().zip(&all).all(|(now, then)| *now == Some(*then)), "{now:?} {all:?}");
    let again = BTreeMap::from([(ServiceName::NodeApi.to_string(), 1)]);
    assert_eq!(restarts(&churn.agent).await.unwrap(), again);
    churn.finish(&before).await;
}

#[tokio::test]
async fn init_and_then_everything_is_stopped_while_pods_come_and_go() {
    stop_init_and_then_everything(3, 3, Duration::from_secs(5)).await;
}

#[tokio::test]
#[ignore = "long: everything stopped for a minute"]
async fn init_and_then_everything_is_stopped_for_a_minute_while_fifty_pods_come_and_go() {
    stop_init_and_then_everything(30, 20, Duration::from_secs(60)).await;
}
