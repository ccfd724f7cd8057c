//! Leaders that go and networks that are cut, while two writers count and a follower watches.
//!
//! Every update is made once and told once, and nothing takes longer than the crate says.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::time::Duration;

use etcd_client::Client;
use keelson_testkit::{EtcdCluster, Relay};
use support::Scene;
use support::traffic::Traffic;
use tokio::time::timeout;

/// Between two questions for the leader.
const POLL: Duration = Duration::from_millis(50);
/// No claim about etcd, only an end for a test that hangs.
const A_LEADER_WITHIN: Duration = Duration::from_secs(60);

/// What a member says: its own id, and whom it takes for the leader (0 while it knows none). Nothing while it does not answer.
async fn view(cluster: &EtcdCluster, n: usize) -> Option<(u64, u64)> {
    let mut client = Client::connect([cluster.endpoints().swap_remove(n)], None).await.ok()?;
    let status = client.status().await.ok()?;
    Some((status.header()?.member_id(), status.leader()))
}

/// Waits until a member other than the member `away` says that it leads: its place in the cluster and its id. Elections may go on
/// meanwhile: on a busy machine a leader may lose its office at any moment.
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
    timeout(A_LEADER_WITHIN, found).await.expect("a member leads")
}

/// Hands the leadership over to another member, however often the leader changes by itself meanwhile.
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
    timeout(A_LEADER_WITHIN, handed).await.expect("a leader hands over");
}

/// The leader is chosen by what the members say, and while it is away the others have another one. Who leads once it is back is
/// for them to say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_hands_over_freezes_or_dies_costs_no_update_and_no_news() {
    let mut scene = Scene::new(3);
    let endpoints = scene.cluster.endpoints();
    let mut traffic = Traffic::start(&endpoints).await;

    hand_over(&scene.cluster).await;
    traffic.goes_on("the leader has handed over").await;

    let (frozen, _) = leader(&scene.cluster, None).await;
    scene.cluster.freeze(frozen).unwrap();
    traffic.goes_on("the leader is frozen").await;
    leader(&scene.cluster, Some(frozen)).await;
    scene.cluster.thaw(frozen).unwrap();
    traffic.goes_on("the frozen one is back").await;

    let (killed, _) = leader(&scene.cluster, None).await;
    scene.cluster.kill(killed);
    traffic.goes_on("the leader is dead").await;
    leader(&scene.cluster, Some(killed)).await;
    scene.cluster.restart(killed).unwrap();
    traffic.goes_on("the dead one is back").await;
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
async fn a_network_that_is_cut_to_one_member_after_the_other_is_gone_around() {
    let mut net = Net::new().await;
    for n in 0..3 {
        net.relays[n].cut();
        net.traffic.goes_on(&format!("the network to member {n} is cut")).await;
        net.relays[n].heal();
        net.traffic.goes_on(&format!("the network to member {n} is healed")).await;
    }
    net.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_is_cut_altogether_or_resets_all_connections_loses_and_doubles_nothing() {
    let mut net = Net::new().await;
    net.relays.iter().for_each(Relay::cut);
    net.traffic.stands_still().await;
    net.relays.iter().for_each(Relay::heal);
    net.traffic.goes_on("the network is healed before a call has ended").await;

    for n in 0..5 {
        net.relays.iter().for_each(Relay::reset);
        net.traffic.goes_on(&format!("all connections are reset for the {n}th time")).await;
    }

    // Longer than a call may take, and longer than a silent connection is believed.
    net.relays.iter().for_each(Relay::cut);
    tokio::time::sleep(keelson_etcd::RESUMES_WITHIN).await;
    net.relays.iter().for_each(Relay::heal);
    net.traffic.goes_on("the network is healed after a long while").await;

    // What was sent and not answered is gone, too.
    net.relays.iter().for_each(Relay::cut);
    net.traffic.stands_still().await;
    net.relays.iter().for_each(Relay::reset);
    net.relays.iter().for_each(Relay::heal);
    net.traffic.goes_on("the network is healed and every connection reset").await;
    net.check().await;
}
