use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::fake::{Answer, Asked, FakeApi};
use crate::resource::Resource;

fn pod(name: &str, version: u32) -> Value {
    json!({"metadata": {"name": name, "namespace": "d", "resourceVersion": version.to_string()}})
}

fn list(version: u32, pods: &[Value], next: &str) -> Answer {
    Answer::json(
        &json!({"kind": "PodList", "metadata": {"resourceVersion": version.to_string(), "continue": next},
        "items": pods}),
    )
}

fn bookmark(version: u32) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}})
}

fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

async fn follower(answer: impl FnMut(&Asked) -> Answer + Send + 'static) -> (FakeApi, Follower, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(answer).await;
    let path = server.kubeconfig(folder.path(), &json!({}), &json!({}));
    let range = Range::of_fields(Resource::POD, "spec.nodeName=n 1".to_owned());
    let follower = Follower::new(KubeApi::new(path, "kubelet/test"), range);
    (server, follower, folder)
}

async fn next(follower: &mut Follower) -> WatchEvent {
    tokio::time::timeout(Duration::from_secs(20), follower.next()).await.expect("an event within 20 s")
}

/// The next event other than `Contact`, as text.
async fn next_change(follower: &mut Follower) -> String {
    loop {
        return match next(follower).await {
            WatchEvent::Contact => continue,
            WatchEvent::Listed(objects) => {
                let names: Vec<&str> = objects.iter().map(Object::name).collect();
                format!("listed {}", names.join(" "))
            }
            WatchEvent::Changed(Change::Put(object)) => format!("put {} {}", object.name(), object.version()),
            WatchEvent::Changed(Change::Deleted(object)) => format!("deleted {}", object.name()),
            WatchEvent::Lost(error) => format!("lost {error}"),
        };
    }
}

#[tokio::test]
async fn follower_lists_and_then_reports_every_change() {
    let (server, mut follower, _folder) = follower(|asked| match asked.path.contains("watch=1") {
        false => list(7, &[pod("a", 3), pod("b", 5)], ""),
        true => Answer::Open(vec![
            event("ADDED", pod("c", 8)),
            event("BOOKMARK", bookmark(9)),
            event("MODIFIED", pod("a", 11)),
            event("DELETED", pod("b", 12)),
        ]),
    })
    .await;
    for expected in ["listed a b", "put c 8", "put a 11", "deleted b"] {
        assert_eq!(next_change(&mut follower).await, expected);
    }
    let asked = server.asked();
    assert_eq!(asked[0].path, "/api/v1/pods?fieldSelector=spec.nodeName%3Dn+1&resourceVersion=0");
    assert!(asked[1].path.contains("&resourceVersion=7&timeoutSeconds="), "{}", asked[1].path);
    assert!(asked[1].path.contains("allowWatchBookmarks=true"));
    assert_eq!(asked.len(), 2);
}

#[tokio::test]
async fn ended_watch_resumes_from_its_resource_version() {
    let mut watches = 0;
    let (server, mut follower, _folder) = follower(move |asked| {
        if !asked.path.contains("watch=1") {
            return list(7, &[], "");
        }
        watches += 1;
        match watches {
            1 => Answer::Lines(vec![event("ADDED", pod("a", 8)), event("BOOKMARK", bookmark(20))]),
            2 => Answer::Whole(500, "an inner error".to_owned()),
            _ => Answer::Open(vec![event("ADDED", pod("b", 21))]),
        }
    })
    .await;
    assert_eq!(next_change(&mut follower).await, "listed ");
    assert_eq!(next_change(&mut follower).await, "put a 8");
    let lost = next_change(&mut follower).await;
    assert!(lost.starts_with("lost the API server http://127.0.0.1:"), "{lost}");
    assert_eq!(next_change(&mut follower).await, "put b 21");
    let versions: Vec<bool> =
        server.asked()[2..].iter().map(|asked| asked.path.contains("&resourceVersion=20&")).collect();
    assert_eq!(versions, [true, true]);
}

#[tokio::test]
async fn expired_resource_version_triggers_a_fresh_paged_list() {
    for in_the_stream in [true, false] {
        let mut watches = 0;
        let (server, mut follower, _folder) = follower(move |asked| {
            if asked.path.contains("watch=1") {
                watches += 1;
                let gone = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
                return match (watches, in_the_stream) {
                    (1, true) => Answer::Lines(vec![event("ERROR", gone)]),
                    (1, false) => Answer::refusal(410, "Gone", "too old"),
                    _ => Answer::Open(Vec::new()),
                };
            }
            match (asked.path.contains("limit=500"), asked.path.contains("continue=more")) {
                (false, _) => list(7, &[pod("a", 3)], ""),
                (true, false) => list(90, &[pod("b", 80)], "more"),
                (true, true) => list(90, &[pod("c", 81)], ""),
            }
        })
        .await;
        assert_eq!(next_change(&mut follower).await, "listed a");
        assert_eq!(next_change(&mut follower).await, "listed b c", "in the stream: {in_the_stream}");
        assert!(matches!(next(&mut follower).await, WatchEvent::Contact));
        let last = server.asked().pop().unwrap();
        assert!(last.path.contains("&resourceVersion=90&"), "{}", last.path);
    }
}

#[tokio::test]
async fn garbage_and_refusals_are_reported_and_retried() {
    let mut lists = 0;
    let (_server, mut follower, _folder) = follower(move |asked| {
        if asked.path.contains("watch=1") {
            return Answer::Open(Vec::new());
        }
        lists += 1;
        match lists {
            1 => Answer::Whole(200, "<html>a proxy</html>".to_owned()),
            2 => Answer::json(&json!({"kind": "Pod"})),
            3 => Answer::refusal(403, "Forbidden", "pods is forbidden"),
            _ => list(7, &[pod("a", 3)], ""),
        }
    })
    .await;
    for expected in
        ["is no Kubernetes object", "is no list", "refuses pods: pods is forbidden (403 Forbidden)"]
    {
        let change = next_change(&mut follower).await;
        assert!(change.starts_with("lost ") && change.contains(expected), "{change}");
    }
    assert_eq!(next_change(&mut follower).await, "listed a");
}

/// A watch that breaks in the middle of a line loses nothing: the next watch delivers the object.
#[tokio::test]
async fn truncated_watch_line_is_read_again() {
    let mut watches = 0;
    let (_server, mut follower, _folder) = follower(move |asked| {
        if !asked.path.contains("watch=1") {
            return list(7, &[], "");
        }
        watches += 1;
        let line = event("ADDED", pod("a", 8)).to_string();
        match watches {
            1 => Answer::Whole(200, line[..line.len() / 2].to_owned()),
            _ => Answer::Open(vec![event("ADDED", pod("a", 8))]),
        }
    })
    .await;
    assert_eq!(next_change(&mut follower).await, "listed ");
    assert_eq!(next_change(&mut follower).await, "put a 8");
}

#[tokio::test]
async fn object_of_five_megabytes_is_accepted() {
    let mut large = pod("a", 8);
    large["metadata"]["annotations"] = json!({"x": "y".repeat(5 << 20)});
    let (_server, mut follower, _folder) = follower(move |asked| match asked.path.contains("watch=1") {
        false => list(7, &[], ""),
        true => Answer::Open(vec![event("ADDED", large.clone())]),
    })
    .await;
    assert_eq!(next_change(&mut follower).await, "listed ");
    assert_eq!(next_change(&mut follower).await, "put a 8");
}

#[tokio::test]
async fn watch_resumes_with_new_credentials_from_its_resource_version() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.path.contains("watch=1") {
        false => list(7, &[pod("a", 3)], ""),
        true if asked.path.contains("resourceVersion=7&") => Answer::Open(vec![event("ADDED", pod("b", 8))]),
        true => Answer::Open(vec![event("ADDED", pod("c", 9))]),
    })
    .await;
    let user = |token: &str| json!({"token": token});
    let path = server.kubeconfig(folder.path(), &json!({}), &user("one"));
    let api = KubeApi::new(path, "kubelet/test");
    let mut follower = Follower::new(api.clone(), Range::all(Resource::POD));
    assert_eq!(next_change(&mut follower).await, "listed a");
    assert_eq!(next_change(&mut follower).await, "put b 8");
    // There are no calls meanwhile: polling finds the change.
    server.kubeconfig(folder.path(), &json!({}), &user("two"));
    assert_eq!(next_change(&mut follower).await, "put c 9");
    let watches = server.asked().into_iter().filter(|asked| asked.path.contains("watch=1"));
    let from: Vec<bool> = watches.map(|asked| asked.path.contains("resourceVersion=8&")).collect();
    assert_eq!(from, [false, true]);
}
