//! Leaders that go and networks that are cut, while two writers count and a follower watches.
//!
//! Every update is made once and told once, and nothing takes longer than the crate says.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use etcd_client::Client;
use keelson_testkit::{EtcdCluster, Relay};
use support::Scene;
use support::traffic::Traffic;

/// Which member leads, by its place in the cluster, and its id.
async fn leader(cluster: &EtcdCluster) -> (usize, u64) {
    for (n, endpoint) in cluster.endpoints().into_iter().enumerate() {
        let mut client = Client::connect([endpoint], None).await.unwrap();
        let status = client.status().await.unwrap();
        if status.header().unwrap().member_id() == status.leader() {
            return (n, status.leader());
        }
    }
    panic!("no member leads");
}

/// The id of a member that is not the leader `n`.
async fn another(cluster: &EtcdCluster, n: usize) -> u64 {
    let endpoint = cluster.endpoints().swap_remove((n + 1) % 3);
    let mut client = Client::connect([endpoint], None).await.unwrap();
    client.status().await.unwrap().header().unwrap().member_id()
}

/// The id of the leader as a member other than `n` has it.
async fn leader_of_others(cluster: &EtcdCluster, n: usize) -> u64 {
    let endpoint = cluster.endpoints().swap_remove((n + 1) % 3);
    Client::connect([endpoint], None).await.unwrap().status().await.unwrap().leader()
}

/// The leader is chosen by what the members say, and while it is away the others have another one. Who leads once it is back is
/// for them to say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_hands_over_freezes_or_dies_costs_no_update_and_no_news() {
    let mut scene = Scene::new(3);
    let endpoints = scene.cluster.endpoints();
    let mut traffic = Traffic::start(&endpoints).await;

    let (first, _) = leader(&scene.cluster).await;
    let next = another(&scene.cluster, first).await;
    let mut client = Client::connect([endpoints[first].clone()], None).await.unwrap();
    client.move_leader(next).await.unwrap();
    traffic.goes_on("the leader has handed over").await;
    let (second, id) = leader(&scene.cluster).await;
    assert_eq!(id, next);

    scene.cluster.freeze(second).unwrap();
    traffic.goes_on("the leader is frozen").await;
    assert_ne!(leader_of_others(&scene.cluster, second).await, id, "the others have chosen a new one");
    scene.cluster.thaw(second).unwrap();
    traffic.goes_on("the frozen one is back").await;
    let (third, id) = leader(&scene.cluster).await;

    scene.cluster.kill(third);
    traffic.goes_on("the leader is dead").await;
    assert_ne!(leader_of_others(&scene.cluster, third).await, id);
    scene.cluster.restart(third).unwrap();
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
