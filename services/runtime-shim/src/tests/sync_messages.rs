//! Messages of a `Sync` stream.

use keelson_proto::keelson::common::v1::{PodRef, SetComplete, Want};
use keelson_proto::keelson::runtime::v1 as pb;
use pb::sync_request::Item;

/// The epoch of [`complete`].
pub(crate) const EPOCH: u64 = 7;

/// A desired pod without a name and images.
pub(crate) fn pod(uid: &str, want: Want) -> Item {
    pod_with_images(uid, want, &[])
}

/// A desired pod whose spec has these images.
pub(crate) fn pod_with_images(uid: &str, want: Want, images: &[&str]) -> Item {
    Item::Pod(pb::PodDesire {
        pod: Some(PodRef { uid: uid.into(), ..Default::default() }),
        want: want as i32,
        images: images.iter().map(|image| (*image).to_owned()).collect(),
        ..Default::default()
    })
}

/// The end of a set.
pub(crate) fn complete(sources_ready: bool) -> Item {
    Item::Complete(SetComplete { epoch: EPOCH, sources_ready })
}
