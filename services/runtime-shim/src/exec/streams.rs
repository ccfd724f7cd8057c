//! The places of streams that the kubelet API asks for, which pods, namespaces and users share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Holder, HolderKind, Metrics, NoPlace, Progress, SharedPlace, Shares};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

/// The condition that names who is in the way.
const CONDITION: &str = "streams into containers";

/// The places, with what is told of them. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Streams {
    shares: Arc<Shares>,
    told: Arc<Told>,
}

#[derive(Debug)]
struct Told {
    progress: Progress,
    open: Gauge,
    refused: Counter,
    /// Somebody was refused, and not half of the places have been free since.
    short: AtomicBool,
}

/// A stream's place.
#[derive(Debug)]
pub(super) struct StreamPlace {
    place: Option<SharedPlace>,
    streams: Streams,
}

impl Streams {
    pub(super) fn new(places: usize, metrics: &Metrics, progress: Progress) -> Self {
        let told = Told {
            progress,
            open: Gauge::default(),
            refused: Counter::default(),
            short: AtomicBool::new(false),
        };
        let help = "Streams into containers and to ports of pods that are open, of the kubelet API";
        metrics.register("keelson_runtime_streams", help, told.open.clone());
        let help = "Streams that were refused because a pod, a namespace or a user has its share of them, or all are taken";
        metrics.register("keelson_runtime_streams_refused", help, told.refused.clone());
        Self { shares: Shares::new(places), told: Arc::new(told) }
    }

    /// A place for what is asked.
    pub(super) fn take(&self, start: &pb::StreamStart) -> Result<StreamPlace, NoPlace> {
        match self.shares.take(holders(start)) {
            Ok(place) => {
                self.told.open.inc();
                Ok(StreamPlace { place: Some(place), streams: self.clone() })
            }
            Err(refused) => {
                self.told.refused.inc();
                // The first one is told, and not each of a flood.
                if !self.told.short.swap(true, Ordering::Relaxed) {
                    self.told.progress.condition(CONDITION, Err(format!("one was refused: {refused}")));
                }
                Err(refused)
            }
        }
    }

    /// How many are open.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.shares.taken()
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let Streams { shares, told } = &self.streams;
        drop(self.place.take());
        told.open.dec();
        if shares.taken() <= shares.places() / 2 && told.short.swap(false, Ordering::Relaxed) {
            told.progress.condition(CONDITION, Ok(()));
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
