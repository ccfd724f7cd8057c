//! What the tests of this folder share.

use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;

use crate::support::{Service, Sync, desire};

pub const LONG: Duration = Duration::from_secs(20);
pub const SHORT: Duration = Duration::from_secs(2);

pub fn admitted() -> Verdict {
    Verdict::Admitted(pb::Admitted {})
}

pub fn requesting(uid: &str, milli: i64) -> pb::PodDesire {
    let mut wanted = desire(uid, 1, Want::Run, "Burstable");
    wanted.requests.insert("cpu".into(), milli);
    wanted
}

pub async fn machine(service: &Service) -> pb::Machine {
    let mut stream = service.client().watch_machine(pb::WatchMachineRequest {}).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap()
}

/// A service with an open stream whose set is complete.
pub async fn synced(service: &Service) -> Sync {
    let mut sync = Sync::open(&mut service.client()).await;
    sync.complete(1, true).await;
    sync
}
