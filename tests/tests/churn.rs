//! Services are killed and stopped while many pods come and go: no container restarts, no pod is lost, none is
//! doubled (proof 3 and 4).

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::seen::Seen;
use keelson_tests::{LIMIT, restarts, running, sleeper, until_ready};

/// Pods that stay, and pods that come and go.
struct Churn {
    agent: Agent,
    steady: Vec<String>,
    moving: usize,
    present: BTreeSet<String>,
    turn: usize,
    seen: Seen,
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
        Self { agent, steady, moving, present: BTreeSet::new(), turn: 0, seen: Seen::default() }
    }

    /// One pod comes; the one that came `moving` turns ago goes.
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

    /// Steps for as long as `time` takes, a few in a second.
    async fn keep_moving(&mut self, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.step();
            self.seen.look(&self.agent).await.unwrap();
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Everything that should run is Ready, and the runtime runs exactly that, each once and for the first time.
    async fn settle(&mut self, what: &str) {
        let names: Vec<&str> = self.steady.iter().chain(&self.present).map(String::as_str).collect();
        until_ready(&self.agent, &names).await.unwrap_or_else(|e| panic!("{what}: {e:#}"));
        let exact = eventually(LIMIT, format!("exactly the wanted containers run ({what})"), async || {
            running(&self.agent).await.is_ok_and(|now| now.len() == names.len())
        });
        exact.await.unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()));
        self.seen.look(&self.agent).await.unwrap();
        self.seen.look_at_statuses(&self.agent).await.unwrap();
        assert!(self.seen.wrong().is_empty(), "{what}: {:#?}\n{}", self.seen.wrong(), self.agent.log_tail());
    }

    /// The end: `before` runs on, and no pod that was there at any look was there twice or started again.
    async fn finish(self, before: &[keelson_tests::Process]) {
        assert_eq!(self.steady_processes().await, before, "no steady container has restarted");
        let (seen, least) = (self.seen.pods(), self.steady.len() + self.present.len());
        println!("{seen} pods were looked at, {} came", self.turn);
        assert!(seen > least, "only {seen} pods were looked at");
        assert!(self.seen.wrong().is_empty(), "{:#?}", self.seen.wrong());
        self.agent.end().unwrap();
    }

    async fn steady_processes(&self) -> Vec<keelson_tests::Process> {
        let now = running(&self.agent).await.unwrap();
        let node = &self.agent.spec().node_name;
        self.steady.iter().map(|n| now[&format!("{n}-{node}/main")].clone()).collect()
    }

    async fn back(&self, service: ServiceName, old: ProcessId) {
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
        churn.back(service, process).await;
        churn.settle(&format!("after {service} was killed")).await;
    }
    churn.step();
    churn.agent.kill_init();
    churn.keep_moving(pause).await;
    churn.agent.start().await.unwrap();
    churn.settle("after init was killed").await;

    churn.step();
    for service in ServiceName::supervised() {
        churn.agent.service(service).unwrap().signal(Signal::KILL);
    }
    churn.agent.kill_init();
    churn.keep_moving(pause).await;
    churn.agent.start().await.unwrap();
    churn.settle("after everything was killed at once").await;
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
        churn.settle(&format!("after {service} was stopped and went on")).await;
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

/// Or the look at what is there twice would find nothing whatever happened.
#[tokio::test]
async fn a_container_that_is_started_again_is_seen() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("good.yaml", &sleeper("good")).unwrap();
    until_ready(&agent, &["good"]).await.unwrap();
    let mut seen = Seen::default();
    seen.look(&agent).await.unwrap();
    seen.look_at_statuses(&agent).await.unwrap();
    assert!(seen.wrong().is_empty() && seen.pods() == 1, "{seen:?}");
    agent.write_manifest("bad.yaml", &sleeper("bad").replace("exec sleep 1000000", "exit 1")).unwrap();
    let told = eventually(LIMIT, "the runtime and the status tell of the second start", async || {
        seen.look(&agent).await.unwrap();
        seen.look_at_statuses(&agent).await.unwrap();
        let has = |text: &str| seen.wrong().iter().any(|w| w.contains("bad") && w.contains(text));
        has("container attempt 1") && has("restartCount 1")
    });
    if let Err(error) = told.await {
        // Whether the runtime has seen the end of the first one.
        panic!("{error:#}: {seen:?}; the runtime runs {:?}\n{}", running(&agent).await, agent.log_tail());
    }
    assert!(!seen.wrong().iter().any(|w| w.contains("good")), "{seen:?}");
    agent.end().unwrap();
}

/// Without init nobody starts a service again; all else goes on. With everything stopped nothing goes on, and no more.
async fn stop_init_and_then_everything(steady: usize, moving: usize, pause: Duration) {
    let scratch = Scratch::new().unwrap();
    let mut churn = Churn::start(&scratch, steady, moving).await;
    let before = churn.steady_processes().await;
    let init = churn.agent.init().unwrap();
    assert!(init.signal(Signal::STOP));
    churn.keep_moving(pause).await;
    churn.settle("while init is stopped").await;
    assert!(init.signal(Signal::CONT));
    churn.settle("after init was stopped and went on").await;

    // One that ends meanwhile waits for init and for nothing else.
    let api = churn.agent.service(ServiceName::NodeApi).unwrap();
    assert!(init.signal(Signal::STOP));
    assert!(api.signal(Signal::KILL));
    churn.keep_moving(Duration::from_secs(1)).await;
    assert_eq!(churn.agent.service(ServiceName::NodeApi), None, "who has started it?");
    assert!(init.signal(Signal::CONT));
    churn.back(ServiceName::NodeApi, api).await;

    let all: Vec<ProcessId> = ServiceName::ALL.into_iter().map(|s| churn.agent.service(s).unwrap()).collect();
    assert!(all.iter().all(|process| process.signal(Signal::STOP)));
    churn.keep_moving(pause).await;
    assert!(all.iter().all(|process| process.signal(Signal::CONT)));
    churn.settle("after everything was stopped and went on").await;
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
