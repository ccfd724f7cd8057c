//! The services have their OOM score where the kernel allows it; elsewhere one warning says that they do not.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually, has_cap_sys_resource, lines_with_event};
use keelson_tests::{LIMIT, running, sleeper, until_ready};

/// The kubelet's score, which init sets for all services (node-and-api.md §4, `oomScoreAdj`).
const PROMISED: i32 = -999;
/// The score of a BestEffort pod (runtime-and-resources.md §4.3).
const BEST_EFFORT: i32 = 1000;

fn score(pid: u32) -> i32 {
    std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap()
}

fn assert_scores(agent: &Agent, wanted: i32) {
    for service in ServiceName::ALL {
        let pid = agent.service_pid(service).unwrap_or_else(|| panic!("{service} runs"));
        assert_eq!(score(pid), wanted, "{service}");
    }
}

#[tokio::test]
async fn services_have_their_oom_score_or_one_warning_says_that_they_do_not() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let own = score(std::process::id());
    let may_lower = has_cap_sys_resource() || own <= PROMISED;
    println!("our own score is {own}, it may be lowered: {may_lower}");
    let wanted = if may_lower { own.min(PROMISED) } else { own };
    assert_scores(&agent, wanted);

    // A restarted service has the same score, and a container has its own.
    let api = agent.service(ServiceName::NodeApi).unwrap();
    assert!(api.signal(Signal::KILL));
    let back = eventually(LIMIT, "node-api runs again", async || {
        agent.service(ServiceName::NodeApi).is_some_and(|process| process != api)
    });
    back.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_scores(&agent, wanted);
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    for (name, process) in running(&agent).await.unwrap() {
        assert_eq!(score(process.pid), BEST_EFFORT, "{name}");
    }

    let log = agent.log();
    let about = lines_with_event(&log, "oom_score_not_set");
    assert_eq!(about.len(), usize::from(!may_lower), "{about:#?}");
    assert!(about.iter().all(|line| line.starts_with('W')), "{about:#?}");
    agent.end().unwrap();
}
