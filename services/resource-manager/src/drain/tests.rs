//! The task with a manager that answers as the test says.

use std::fs;
use std::path::Path;

use keelson_resource_manager_core::desire::{DesireHeader, PodDesire, PodRef, Want};

use super::*;

fn known(uids: &[&str]) -> BTreeMap<String, KnownPod> {
    let one = |uid: &&str| {
        let pod = PodRef { uid: (*uid).to_owned(), ..PodRef::default() };
        let header = DesireHeader { pod, revision: 1, want: Want::Run };
        ((*uid).to_owned(), KnownPod { desire: Some(PodDesire::from(header)), admitted: true })
    };
    uids.iter().map(one).collect()
}

fn context(state_dir: &Path) -> Context {
    let mut config = Config { node_name: "node".into(), ..Config::default() };
    config.paths.state_dir = state_dir.to_owned();
    Context::detached(ServiceName::ResourceManager, config)
}

/// A task whose manager gives each of these lists once. The receiver has what the state was at each request.
fn start(
    ctx: &Context,
    lists: Vec<BTreeMap<String, KnownPod>>,
) -> (DrainHandle, mpsc::UnboundedReceiver<DrainState>) {
    let state = watch::Sender::new(None);
    let (commands, mut requests) = mpsc::channel(1);
    let (seen, states) = mpsc::unbounded_channel();
    let now: watch::Receiver<DrainState> = state.subscribe();
    tokio::spawn(async move {
        let mut lists = lists.into_iter();
        while let Some(Command::Request(ManagerRequest::ListPods { reply })) = requests.recv().await {
            let _ = seen.send(now.borrow().clone());
            let _ = reply.send(lists.next().unwrap());
        }
    });
    let ending = Ending {
        periods: periods(&ctx.config.resources.node_shutdown),
        commands,
        changes: watch::Sender::new(0).subscribe(),
        pods_known: watch::Sender::new(true).subscribe(),
        issue: mpsc::channel(1).0,
        orders: Orders::new(),
    };
    let (task, handle) = DrainLoop::new(ctx, state, ending);
    tokio::spawn(task.run(ctx.shutdown.clone(), ctx.progress.register("drain")));
    (handle, states)
}

#[tokio::test]
async fn a_pod_that_is_admitted_while_the_node_closes_is_one_of_the_drains_pods() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = context(dir.path());
    // `late` is admitted after the first list.
    let (handle, mut states) = start(&ctx, vec![known(&["early"]), known(&["early", "late"])]);
    handle.drain(pb::DrainRequest { stop_pods: false }).await.unwrap();
    assert_eq!(states.recv().await.unwrap(), None);
    let closed = states.recv().await.unwrap().expect("the last list is that of a closed node");
    assert!(closed.admits("early") && !closed.admits("new"));
    let drain = handle.state.borrow().clone().unwrap();
    assert!(drain.admits("late") && !drain.admits("new"));
    assert_eq!(state_file(&ctx.config).load().await.unwrap(), StoredDrain::from(&Some(drain)));
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_drain_that_cannot_be_stored_leaves_the_node_open() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let ctx = context(&file);
    let (handle, _states) = start(&ctx, vec![known(&[]), known(&[])]);
    let refused = handle.drain(pb::DrainRequest { stop_pods: true }).await.unwrap_err();
    assert_eq!(keelson_service_kit::status::reason(&refused).as_deref(), Some("NOT_STORED"));
    assert!(handle.state.borrow().is_none());
    ctx.shutdown.cancel();
}
