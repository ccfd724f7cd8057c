//! Tests against real members of etcd.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_etcd::{
    Change, Etcd, EtcdError, Expect, Follower, NodeKeys, Operation, Range, WatchEvent, Written,
};
use support::{Scene, put};
use tokio::time::timeout;

/// Longer than any step here takes; a test that exceeds it fails.
const PATIENCE: Duration = Duration::from_secs(60);

async fn set(etcd: &Etcd, key: &str, value: &str) -> i64 {
    let expected = match etcd.get(key).await.unwrap() {
        Some(entry) => Expect::Revision(entry.mod_revision),
        None => Expect::Absent,
    };
    match etcd.write(&[(key.into(), expected)], &[put(key, value)]).await.unwrap() {
        Written::Done(revision) => revision,
        Written::Conflict(found) => panic!("{key} was changed by somebody else: {found:?}"),
    }
}

/// What a follower has reported, as a map.
#[derive(Default)]
struct Seen {
    keys: BTreeMap<String, String>,
    lists: usize,
    losses: usize,
}

impl Seen {
    fn take(&mut self, event: WatchEvent) {
        match event {
            WatchEvent::Listed(entries) => {
                self.lists += 1;
                self.keys =
                    entries.into_iter().map(|e| (e.key, String::from_utf8(e.value).unwrap())).collect();
            }
            WatchEvent::Changed(changes) => {
                for change in changes {
                    match change {
                        Change::Put(e) => drop(self.keys.insert(e.key, String::from_utf8(e.value).unwrap())),
                        Change::Deleted(key) => drop(self.keys.remove(&key)),
                    }
                }
            }
            WatchEvent::Contact => {}
            WatchEvent::Lost(_) => self.losses += 1,
        }
    }

    async fn until(&mut self, follower: &mut Follower, what: &str, done: impl Fn(&Self) -> bool) {
        let wait = async {
            while !done(self) {
                let event = follower.next().await;
                self.take(event);
            }
        };
        if timeout(PATIENCE, wait).await.is_err() {
            panic!(
                "not seen: {what}; {} keys, {} lists, {} losses",
                self.keys.len(),
                self.lists,
                self.losses
            );
        }
    }

    fn has(&self, key: &str, value: &str) -> bool {
        self.keys.get(key).is_some_and(|now| now == value)
    }
}

#[tokio::test]
async fn second_of_two_writers_gets_a_conflict_with_the_first_value() {
    let scene = Scene::new(1);
    let etcd = &scene.etcd;
    let absent = [("/k".to_owned(), Expect::Absent)];
    let Written::Done(first) = etcd.write(&absent, &[put("/k", "one")]).await.unwrap() else { panic!() };
    let Written::Conflict(found) = etcd.write(&absent, &[put("/k", "two")]).await.unwrap() else {
        panic!("the second writer got no conflict")
    };
    let entry = found[0].clone().unwrap();
    assert_eq!((entry.value.as_slice(), entry.mod_revision), (&b"one"[..], first));
    let known = [("/k".to_owned(), Expect::Revision(first))];
    assert!(matches!(etcd.write(&known, &[put("/k", "two")]).await.unwrap(), Written::Done(_)));
    assert!(matches!(etcd.write(&known, &[put("/k", "late")]).await.unwrap(), Written::Conflict(_)));
    assert_eq!(etcd.get("/k").await.unwrap().unwrap().value, b"two");
}

#[tokio::test]
async fn long_range_is_listed_at_one_revision_and_watched_from_it() {
    let scene = Scene::new(1);
    let (etcd, keys) = (&scene.etcd, NodeKeys::new("n1"));
    for n in 0..100 {
        set(etcd, &keys.pod("default", &format!("p{n:03}")), "v").await;
    }
    set(etcd, &keys.pod_status("default", "p000"), "no pod that is wanted").await;
    let listing = etcd.list(&keys.desired()).await.unwrap();
    assert_eq!(listing.entries.len(), 100);
    assert!(listing.entries.is_sorted_by_key(|entry| entry.key.clone()));

    let mut follower = Follower::new(etcd.clone(), keys.desired());
    let mut seen = Seen::default();
    seen.until(&mut follower, "the list", |seen| seen.keys.len() == 100).await;
    set(etcd, &keys.object("Secret", "default", "s"), "x").await;
    let gone = keys.pod("default", "p007");
    let expected = [(gone.clone(), Expect::Revision(etcd.get(&gone).await.unwrap().unwrap().mod_revision))];
    etcd.write(&expected, &[Operation::Delete { key: gone.clone() }]).await.unwrap();
    let both = |seen: &Seen| seen.keys.len() == 100 && !seen.keys.contains_key(&gone);
    seen.until(&mut follower, "a new key and one less", both).await;
    assert_eq!((seen.lists, seen.losses), (1, 0));
}

#[tokio::test]
async fn range_is_listed_again_after_compaction() {
    let mut scene = Scene::new(1);
    let etcd = scene.etcd.clone();
    let mut follower = Follower::new(etcd.clone(), Range::prefix("/a/"));
    let mut seen = Seen::default();
    set(&etcd, "/a/goes", "1").await;
    set(&etcd, "/a/stays", "1").await;
    seen.until(&mut follower, "both", |seen| seen.keys.len() == 2).await;
    // The watch is open before its connection is cut.
    set(&etcd, "/a/stays", "2").await;
    seen.until(&mut follower, "a change", |seen| seen.has("/a/stays", "2")).await;
    scene.cluster.restart(0).unwrap();

    // Not polled: the watch stays closed.
    set(&etcd, "/a/new", "1").await;
    let goes = etcd.get("/a/goes").await.unwrap().unwrap();
    let expected = [("/a/goes".to_owned(), Expect::Revision(goes.mod_revision))];
    etcd.write(&expected, &[Operation::Delete { key: "/a/goes".into() }]).await.unwrap();
    let last = set(&etcd, "/a/stays", "3").await;
    let mut client = etcd_client::Client::connect(scene.cluster.endpoints(), None).await.unwrap();
    client.compact(last, None).await.unwrap();

    seen.until(&mut follower, "all as it is", |seen| seen.has("/a/stays", "3")).await;
    assert_eq!(seen.keys.keys().collect::<Vec<_>>(), ["/a/new", "/a/stays"]);
    assert_eq!(seen.lists, 2, "a compaction costs one more list");
}

#[tokio::test]
async fn range_is_listed_again_after_the_store_is_recreated() {
    let mut scene = Scene::new(1);
    let etcd = scene.etcd.clone();
    for n in 0..20 {
        set(&etcd, "/a/old", &n.to_string()).await;
    }
    let mut follower = Follower::new(etcd.clone(), Range::prefix("/a/"));
    let mut seen = Seen::default();
    seen.until(&mut follower, "the list", |seen| seen.has("/a/old", "19")).await;

    // The same members with fewer revisions, as after a restored snapshot.
    scene.cluster.wipe().unwrap();
    set(&etcd, "/a/new", "1").await;
    seen.until(&mut follower, "what the new store has", |seen| seen.has("/a/new", "1")).await;
    assert_eq!(seen.keys.keys().collect::<Vec<_>>(), ["/a/new"]);
    set(&etcd, "/a/new", "2").await;
    seen.until(&mut follower, "a change of it", |seen| seen.has("/a/new", "2")).await;
    assert_eq!(seen.lists, 2, "one for each store");
}

#[tokio::test]
async fn no_change_is_lost_while_members_die_and_freeze_in_turn() {
    let mut scene = Scene::new(3);
    let etcd = scene.etcd.clone();
    let writer = tokio::spawn({
        let etcd = etcd.clone();
        async move {
            for n in 0..300 {
                set(&etcd, &format!("/a/{:02}", n % 20), &n.to_string()).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let mut follower = Follower::new(etcd, Range::prefix("/a/"));
    let mut seen = Seen::default();
    seen.until(&mut follower, "the beginning", |seen| seen.keys.len() == 20).await;
    scene.cluster.kill(0);
    let reached = |n: usize| move |seen: &Seen| seen.keys.values().any(|v| v.parse::<usize>().unwrap() >= n);
    seen.until(&mut follower, "changes with one member dead", reached(80)).await;
    scene.cluster.restart(0).unwrap();
    scene.cluster.freeze(1).unwrap();
    seen.until(&mut follower, "changes with one member frozen", reached(160)).await;
    scene.cluster.thaw(1).unwrap();
    scene.cluster.kill(2);
    seen.until(&mut follower, "all changes", |seen| seen.has("/a/19", "299")).await;
    writer.await.unwrap();
    for n in 280..300 {
        assert!(seen.has(&format!("/a/{:02}", n % 20), &n.to_string()), "{n} was lost: {:?}", seen.keys);
    }
    assert_eq!(seen.lists, 1, "the watch resumes from its revision");
}

#[tokio::test]
async fn expired_lease_deletes_its_key() {
    let scene = Scene::new(1);
    let etcd = &scene.etcd;
    let lease = etcd.grant(60).await.unwrap();
    let operation = Operation::Put { key: "/l".into(), value: b"x".to_vec(), lease };
    etcd.write(&[("/l".into(), Expect::Absent)], &[operation]).await.unwrap();
    assert!(etcd.keep_alive(lease).await.unwrap());
    let on_lease = [("/l".to_owned(), Expect::Lease(lease))];
    assert!(matches!(etcd.write(&on_lease, &[put("/other", "1")]).await.unwrap(), Written::Done(_)));
    etcd.revoke(lease).await.unwrap();
    etcd.revoke(lease).await.unwrap();
    assert!(!etcd.keep_alive(lease).await.unwrap());
    assert_eq!(etcd.get("/l").await.unwrap(), None);
    assert!(matches!(etcd.write(&on_lease, &[put("/other", "2")]).await.unwrap(), Written::Conflict(_)));
}

#[tokio::test]
async fn unreachable_cluster_error_names_the_endpoints_and_the_call_ends() {
    let mut scene = Scene::new(1);
    scene.cluster.kill(0);
    let begun = std::time::Instant::now();
    let error = scene.etcd.get("/k").await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(15));
    let endpoint = &scene.cluster.endpoints()[0];
    assert!(error.is_transient() && error.to_string().contains(endpoint.as_str()), "{error}");
    assert!(
        matches!(&error, EtcdError::Unreachable { message, .. } if message.contains("refused")),
        "{error}"
    );
}
