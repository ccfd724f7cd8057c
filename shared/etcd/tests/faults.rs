//! Leader loss and network partitions while two writers count and a follower watches.
//!
//! Every update is made once and reported once, and nothing takes longer than the crate documents.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::time::Duration;

use etcd_client::Client;
use keelson_testkit::{EtcdCluster, Relay};
use support::Scene;
use support::traffic::Traffic;
use tokio::time::timeout;

/// The interval between polls for the leader.
const POLL: Duration = Duration::from_millis(50);
/// Only bounds a test that hangs; no claim about etcd.
const LEADER_TIMEOUT: Duration = Duration::from_secs(60);

/// A member's own id and the id of its leader (0 while it knows none). `None` while it does not answer.
async fn view(cluster: &EtcdCluster, n: usize) -> Option<(u64, u64)> {
    let mut client = Client::connect([cluster.endpoints().swap_remove(n)], None).await.ok()?;
    let status = client.status().await.ok()?;
    Some((status.header()?.member_id(), status.leader()))
}

/// Waits until a member other than `away` reports itself as leader. Returns its index and id. On a busy machine the leader may
/// change at any moment.
async fn leader(cluster: &EtcdCluster, away: Option<usize>) -> (usize, u64) {
    let found = async {
        loop {
            for n in (0..3).filter(|n| Some(*n) != away) {
                if let Some((id, leader)) = view(cluster, n).await
                    && id == leader
                {
                    return (n, id);
                }
            }
            tokio::time::sleep(POLL).await;
        }
    };
    timeout(LEADER_TIMEOUT, found).await.expect("a member leads")
}

/// Hands the leadership over to another member, even if the leader changes by itself meanwhile.
async fn hand_over(cluster: &EtcdCluster) {
    let handed = async {
        loop {
            let (first, _) = leader(cluster, None).await;
            let endpoint = cluster.endpoints().swap_remove(first);
            if let Some((next, _)) = view(cluster, (first + 1) % 3).await
                && let Ok(mut client) = Client::connect([endpoint], None).await
                && client.move_leader(next).await.is_ok()
            {
                return;
            }
        }
    };
    timeout(LEADER_TIMEOUT, handed).await.expect("a leader hands over");
}

/// The leader is found through the members' own status. While it is away the others elect another one; the test does not assume
/// which member leads afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_change_freeze_or_death_loses_no_update_and_no_watch_event() {
    let mut scene = Scene::new(3);
    let endpoints = scene.cluster.endpoints();
    let mut traffic = Traffic::start(&endpoints).await;

    hand_over(&scene.cluster).await;
    traffic.assert_progress("the leader has handed over").await;

    let (frozen, _) = leader(&scene.cluster, None).await;
    scene.cluster.freeze(frozen).unwrap();
    traffic.assert_progress("the leader is frozen").await;
    leader(&scene.cluster, Some(frozen)).await;
    scene.cluster.thaw(frozen).unwrap();
    traffic.assert_progress("the frozen one is back").await;

    let (killed, _) = leader(&scene.cluster, None).await;
    scene.cluster.kill(killed);
    traffic.assert_progress("the leader is dead").await;
    leader(&scene.cluster, Some(killed)).await;
    scene.cluster.restart(killed).unwrap();
    traffic.assert_progress("the dead one is back").await;
    traffic.check(&endpoints).await;
}

struct Net {
    scene: Scene,
    relays: Vec<Relay>,
    traffic: Traffic,
}

impl Net {
    /// Clients reach the members through networks that can be cut.
    async fn new() -> Self {
        let scene = Scene::new(3);
        let relays = scene.cluster.relays().unwrap();
        let endpoints: Vec<String> =
            relays.iter().map(|relay| format!("http://{}", relay.address())).collect();
        Self { scene, traffic: Traffic::start(&endpoints).await, relays }
    }

    async fn check(self) {
        self.traffic.check(&self.scene.cluster.endpoints()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_from_one_member_fails_over_to_another() {
    let mut net = Net::new().await;
    for n in 0..3 {
        net.relays[n].cut();
        net.traffic.assert_progress(&format!("the network to member {n} is cut")).await;
        net.relays[n].heal();
        net.traffic.assert_progress(&format!("the network to member {n} is healed")).await;
    }
    net.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_partition_or_connection_reset_loses_and_duplicates_nothing() {
    let mut net = Net::new().await;
    net.relays.iter().for_each(Relay::cut);
    net.traffic.wait_until_idle().await;
    net.relays.iter().for_each(Relay::heal);
    net.traffic.assert_progress("the network is healed before a call has ended").await;

    for n in 0..5 {
        net.relays.iter().for_each(Relay::reset);
        net.traffic.assert_progress(&format!("all connections are reset for the {n}th time")).await;
    }

    // Longer than a call may take, and longer than a silent connection is kept.
    net.relays.iter().for_each(Relay::cut);
    tokio::time::sleep(keelson_etcd::RESUMES_WITHIN).await;
    net.relays.iter().for_each(Relay::heal);
    net.traffic.assert_progress("the network is healed after a long while").await;

    // Sent but unanswered requests are lost, too.
    net.relays.iter().for_each(Relay::cut);
    net.traffic.wait_until_idle().await;
    net.relays.iter().for_each(Relay::reset);
    net.relays.iter().for_each(Relay::heal);
    net.traffic.assert_progress("the network is healed and every connection reset").await;
    net.check().await;
}
