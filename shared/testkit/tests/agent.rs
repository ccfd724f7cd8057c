//! A whole agent starts on folders of its own, is killed and restarted, and leaves nothing behind.

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_testkit::{Agent, Scratch, Snapshot, eventually};

const LIMIT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn an_agent_restarts_after_kill_and_leaves_nothing_behind() {
    let before = Snapshot::take();
    let scratch = Scratch::new().expect("a scratch folder");
    let mut agent = Agent::builder(scratch.path()).start().await.expect("an agent that starts");
    let mark = scratch.path().file_name().and_then(|name| name.to_str()).expect("a named folder").to_owned();
    let bridge = agent.containerd().network().bridge.clone();
    let marks = [mark.as_str(), bridge.as_str(), agent.spec().cgroup_root.as_str()].map(str::to_owned);

    for service in ServiceName::ALL {
        assert!(agent.service_pid(service).is_some(), "{service} runs");
    }
    let version = agent.keelson(&["version"]).await.expect("the tool runs");
    assert!(version.status.success(), "{}", String::from_utf8_lossy(&version.stderr));

    let init = agent.init().expect("init runs");
    let orphans: Vec<_> = ServiceName::supervised().filter_map(|service| agent.service(service)).collect();
    agent.kill_init();
    assert!(!init.is_alive());
    eventually(LIMIT, "the services end with init", || {
        std::future::ready(orphans.iter().all(|service| !service.is_alive()))
    })
    .await
    .expect("no orphans");
    agent.start().await.expect("it starts again");
    agent.restart().await.expect("it restarts in good order");

    agent.end().expect("nothing is left");
    drop(scratch);
    let marks: Vec<&str> = marks.iter().map(String::as_str).collect();
    assert_eq!(before.left_of(&Snapshot::take(), &marks), Vec::<String>::new());
}
