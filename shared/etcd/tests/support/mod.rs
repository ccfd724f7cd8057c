//! What tests against real members share.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

pub mod traffic;

use keelson_config::Etcd as Settings;
use keelson_etcd::{Etcd, Operation};
use keelson_testkit::{EtcdCluster, Scratch};

/// A cluster and a connection to it.
pub struct Scene {
    pub cluster: EtcdCluster,
    pub etcd: Etcd,
    _scratch: Scratch,
}

impl Scene {
    pub fn new(members: usize) -> Self {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("etcd"), members).unwrap();
        let etcd = Etcd::new(Settings::plain(cluster.endpoints()));
        Self { cluster, etcd, _scratch: scratch }
    }
}

/// A key with a value and without a lease.
pub fn put(key: &str, value: &str) -> Operation {
    Operation::Put { key: key.into(), value: value.into(), lease: 0 }
}
