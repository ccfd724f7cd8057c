//! The statistics of volumes that belong to claims, from volume-manager: `pvcRef` and `volumeHealthStats` in `/stats/summary`,
//! and the families `kubelet_volume_stats_…` in `/metrics` (volumes.md §13).

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures_util::TryStreamExt as _;
use keelson_config::ServiceName;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_proto::keelson::volume_manager::v1::{
    PodVolumeStatsRequest, PodVolumeStatsResponse, VolumeStats,
};
use tonic::{Request, Status};

use crate::App;
use crate::metrics_text::{Family, escaped, write_family};

/// How long volume-manager may take. It answers from memory, and reads no volume.
const DEADLINE: Duration = Duration::from_secs(1);

/// The volumes with figures, by the UID of their pod.
#[derive(Debug, Default)]
pub(crate) struct VolumesByPod(HashMap<String, Vec<VolumeStats>>);

impl VolumesByPod {
    /// Reads them. If volume-manager does not answer, there are none: the rest of a response does not depend on it.
    pub(crate) async fn read(app: &App) -> Self {
        let pods = read(app).await.unwrap_or_else(|status| {
            tracing::warn!(error = status.message(), "cannot read the claims of volumes for /stats/summary");
            Vec::new()
        });
        Self::of(pods)
    }

    fn of(pods: Vec<PodVolumeStatsResponse>) -> Self {
        Self(pods.into_iter().map(|pod| (pod.pod.unwrap_or_default().uid, pod.volumes)).collect())
    }

    /// A volume by its name in the spec of the pod.
    pub(crate) fn find(&self, uid: &str, name: &str) -> Option<&VolumeStats> {
        self.0.get(uid)?.iter().find(|volume| volume.name == name)
    }
}

/// The metrics as text; empty if volume-manager does not answer.
pub(crate) async fn metrics(app: &App) -> String {
    match read(app).await {
        Ok(pods) => text(&pods),
        Err(status) => {
            tracing::debug!(error = status.message(), "cannot read the figures of volumes for /metrics");
            String::new()
        }
    }
}

async fn read(app: &App) -> Result<Vec<PodVolumeStatsResponse>, Status> {
    let peer = app.peer(ServiceName::VolumeManager);
    let read = async {
        let mut request = Request::new(PodVolumeStatsRequest::default());
        request.set_timeout(DEADLINE);
        let stream = VolumeManagerClient::new(peer.channel()).pod_volume_stats(request).await?.into_inner();
        stream.try_collect().await
    };
    tokio::time::timeout(DEADLINE, read).await.unwrap_or_else(|_| {
        let text =
            format!("volume-manager did not send the statistics of volumes within {} s", DEADLINE.as_secs());
        Err(Status::deadline_exceeded(text))
    })
}

/// Reads the value of a family; `None`: the volume has no sample of it.
type Getter = fn(&VolumeStats) -> Option<f64>;

const FAMILIES: [(Family, Getter); 7] = [
    (("kubelet_volume_stats_available_bytes", "gauge", "Bytes that are available in the volume"), |volume| {
        Some(volume.available_bytes as f64)
    }),
    (("kubelet_volume_stats_capacity_bytes", "gauge", "Capacity of the volume in bytes"), |volume| {
        Some(volume.capacity_bytes as f64)
    }),
    (
        (
            "kubelet_volume_stats_health_status_abnormal",
            "gauge",
            "1 if the volume is damaged, as its driver reports it",
        ),
        |volume| volume.abnormal.map(|abnormal| f64::from(u8::from(abnormal))),
    ),
    (("kubelet_volume_stats_inodes", "gauge", "Inodes of the volume"), |volume| Some(volume.inodes as f64)),
    (("kubelet_volume_stats_inodes_free", "gauge", "Free inodes of the volume"), |volume| {
        Some(volume.inodes_free as f64)
    }),
    (("kubelet_volume_stats_inodes_used", "gauge", "Used inodes of the volume"), |volume| {
        Some(volume.inodes_used as f64)
    }),
    (("kubelet_volume_stats_used_bytes", "gauge", "Bytes that are used in the volume"), |volume| {
        Some(volume.used_bytes as f64)
    }),
];

/// The metrics: one sample for each claim, also if several pods use it.
fn text(pods: &[PodVolumeStatsResponse]) -> String {
    let mut claims = BTreeMap::new();
    for pod in pods {
        // The namespace of a pod that was only found on disk is not known.
        let namespace = pod.pod.as_ref().map(|pod| pod.namespace.as_str()).filter(|name| !name.is_empty());
        let Some(namespace) = namespace else { continue };
        for volume in pod.volumes.iter().filter(|volume| !volume.claim.is_empty()) {
            claims.entry((namespace, volume.claim.as_str())).or_insert(volume);
        }
    }
    let labels = |namespace: &str, claim: &str| {
        format!("{{namespace=\"{}\",persistentvolumeclaim=\"{}\"}}", escaped(namespace), escaped(claim))
    };
    let mut text = String::new();
    for (family, getter) in &FAMILIES {
        let samples = claims.iter().filter_map(|((namespace, claim), volume)| {
            Some((labels(namespace, claim), getter(volume)?, None))
        });
        write_family(&mut text, family, samples);
    }
    text
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1::PodRef;

    use super::*;

    fn pod(namespace: &str, uid: &str, volumes: Vec<VolumeStats>) -> PodVolumeStatsResponse {
        let pod = PodRef { uid: uid.into(), namespace: namespace.into(), name: uid.into() };
        PodVolumeStatsResponse { pod: Some(pod), volumes }
    }

    fn volume(claim: &str, used_bytes: u64, abnormal: Option<bool>) -> VolumeStats {
        VolumeStats {
            name: "data".into(),
            claim: claim.into(),
            used_bytes,
            capacity_bytes: 1 << 50,
            available_bytes: 4,
            inodes: 30,
            inodes_free: 20,
            inodes_used: 10,
            abnormal,
            ..VolumeStats::default()
        }
    }

    fn samples(text: &str) -> Vec<&str> {
        text.lines().filter(|line| !line.starts_with('#')).collect()
    }

    #[test]
    fn volume_metrics_have_one_sample_of_each_family_for_a_claim() {
        let pods = [
            pod("default", "a", vec![volume("disk", 5, Some(true)), volume("", 9, None)]),
            pod("default", "b", vec![volume("disk", 5, Some(true))]),
            pod("", "found-on-disk", vec![volume("disk", 7, None)]),
        ];
        let labels = "{namespace=\"default\",persistentvolumeclaim=\"disk\"}";
        let expected = [
            ("available_bytes", "4"),
            ("capacity_bytes", "1125899906842624"),
            ("health_status_abnormal", "1"),
            ("inodes", "30"),
            ("inodes_free", "20"),
            ("inodes_used", "10"),
            ("used_bytes", "5"),
        ];
        let expected = expected.map(|(name, value)| format!("kubelet_volume_stats_{name}{labels} {value}"));
        assert_eq!(samples(&text(&pods)), expected);
    }

    #[test]
    fn volumes_without_a_health_report_have_no_health_metric() {
        let text = text(&[pod("x", "a", vec![volume("one", 1, None), volume("two", 2, Some(false))])]);
        let health: Vec<_> = samples(&text).into_iter().filter(|line| line.contains("abnormal")).collect();
        let labels = "{namespace=\"x\",persistentvolumeclaim=\"two\"}";
        assert_eq!(health, [format!("kubelet_volume_stats_health_status_abnormal{labels} 0")]);
        assert_eq!(samples(&text).len(), 13);
        assert_eq!(super::text(&[pod("x", "a", vec![volume("", 1, None)])]), "", "no claim");
    }
}
