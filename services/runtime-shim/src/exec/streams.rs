//! The places for streams of the kubelet API, which pods, namespaces and users share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Holder, HolderKind, Metrics, NoPlace, Progress, SharedPlace, Shares};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

/// The condition that names the holder of too many places.
const CONDITION: &str = "streams into containers";

/// The places, with their metrics and condition. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Streams {
    shares: Arc<Shares>,
    report: Arc<StreamReport>,
}

/// Where the use of the places is reported.
#[derive(Debug)]
struct StreamReport {
    progress: Progress,
    open: Gauge,
    refused: Counter,
    /// A stream was refused, and since then less than half of the places have been free.
    exhausted: AtomicBool,
}

/// The place of one stream; dropping it frees the place.
#[derive(Debug)]
pub(super) struct StreamPlace {
    place: Option<SharedPlace>,
    streams: Streams,
}

impl Streams {
    pub(super) fn new(places: usize, metrics: &Metrics, progress: Progress) -> Self {
        let report = StreamReport {
            progress,
            open: Gauge::default(),
            refused: Counter::default(),
            exhausted: AtomicBool::new(false),
        };
        let help = "Open streams of the kubelet API into containers and to ports of pods";
        metrics.register("keelson_runtime_streams", help, report.open.clone());
        let help = "Streams that were refused because a pod, a namespace or a user has its share of them, or all are taken";
        metrics.register("keelson_runtime_streams_refused", help, report.refused.clone());
        Self { shares: Shares::new(places), report: Arc::new(report) }
    }

    /// Takes a place for the requested stream.
    pub(super) fn take(&self, start: &pb::StreamStart) -> Result<StreamPlace, NoPlace> {
        match self.shares.take(holders(start)) {
            Ok(place) => {
                self.report.open.inc();
                Ok(StreamPlace { place: Some(place), streams: self.clone() })
            }
            Err(refused) => {
                self.report.refused.inc();
                // Only the first refusal of a series is reported.
                if !self.report.exhausted.swap(true, Ordering::Relaxed) {
                    self.report
                        .progress
                        .condition(CONDITION, Err(format!("a stream was refused: {refused}")));
                }
                Err(refused)
            }
        }
    }

    /// Number of open streams.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.shares.taken()
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let Streams { shares, report } = &self.streams;
        drop(self.place.take());
        report.open.dec();
        if shares.taken() <= shares.places() / 2 && report.exhausted.swap(false, Ordering::Relaxed) {
            report.progress.condition(CONDITION, Ok(()));
        }
    }
}

fn holders(start: &pb::StreamStart) -> Vec<Holder> {
    let pod = if start.name.is_empty() {
        start.pod_uid.clone()
    } else {
        format!("{}/{}", start.namespace, start.name)
    };
    let named = [
        (HolderKind::Pod, pod.as_str()),
        (HolderKind::Namespace, start.namespace.as_str()),
        (HolderKind::User, start.user.as_str()),
    ];
    let known = named.into_iter().filter(|(_, name)| !name.is_empty());
    known.map(|(kind, name)| Holder::new(kind, name)).collect()
}
