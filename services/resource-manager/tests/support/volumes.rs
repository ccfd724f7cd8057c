//! A volume-manager that reports the usage of volumes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_testkit::fakes::{FakeServer, FakeVolumeManager, StreamAnswer};
use tonic::service::Routes;

/// Bytes by pod and volume.
type Usage = BTreeMap<String, BTreeMap<String, u64>>;

/// A volume-manager at its socket.
pub struct FakeVolumes {
    usage: Arc<Mutex<Usage>>,
    _server: FakeServer,
}

impl FakeVolumes {
    pub async fn start(config: &Config) -> Self {
        let (api, usage) = (FakeVolumeManager::default(), Arc::<Mutex<Usage>>::default());
        let reported = Arc::clone(&usage);
        api.pod_volume_stats.answer_with(move |_| Ok(stats(&reported.lock().unwrap())));
        let routes = Routes::new(api.server());
        let server = FakeServer::start(config, ServiceName::VolumeManager, routes).await.unwrap();
        Self { usage, _server: server }
    }

    /// Sets the usage of a pod's volume in bytes.
    pub fn holds(&self, uid: &str, volume: &str, bytes: u64) {
        self.usage.lock().unwrap().entry(uid.to_owned()).or_default().insert(volume.to_owned(), bytes);
    }
}

fn stats(usage: &Usage) -> StreamAnswer<pb::PodVolumeStatsResponse> {
    StreamAnswer::items(usage.iter().map(|(uid, volumes)| {
        let volumes = volumes.iter().map(|(name, used_bytes)| pb::VolumeStats {
            name: name.clone(),
            used_bytes: *used_bytes,
            measured_unix_nanos: 1,
            local_ephemeral: true,
            ..Default::default()
        });
        let pod = Some(common::PodRef { uid: uid.clone(), ..Default::default() });
        pb::PodVolumeStatsResponse { pod, volumes: volumes.collect() }
    }))
}
