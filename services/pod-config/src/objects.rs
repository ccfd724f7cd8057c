//! The objects to which pods refer: read once by `GetObject`, followed by `WatchObjects`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::ObjectKey;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_service_kit::status::error;
use tokio::sync::watch;
use tonic::{Code, Status, Streaming};

use crate::control_plane::{ControlPlane, ControlPlaneError, ObjectRequest};
use crate::desired_state::{DesiredState, ObjectLookup};

/// Delay before a control plane that did not respond is asked again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Looks up objects in the manifests first, then in the control plane.
#[derive(Clone)]
pub struct Objects {
    /// The merged manifests.
    pub desired: DesiredState,
    /// The control plane, for objects that are not in a manifest.
    pub control_plane: Arc<dyn ControlPlane>,
}

impl Objects {
    /// Looks up an object.
    ///
    /// # Errors
    /// The object is in no manifest, and the control plane is unavailable.
    pub async fn find(&self, wanted: &ObjectRequest) -> Result<ObjectLookup, ControlPlaneError> {
        let ObjectRequest { kind, namespace, name } = wanted.clone();
        let in_manifests = match Kind::parse(&kind) {
            Some(kind) => self.desired.object(&ObjectKey { kind, namespace, name }),
            None if self.desired.is_ready() => ObjectLookup::NotFound,
            None => ObjectLookup::SourcesNotRead,
        };
        if matches!(in_manifests, ObjectLookup::Object(_)) {
            return Ok(in_manifests);
        }
        let in_control_plane = self.control_plane.get_object(wanted.clone()).await?;
        Ok(in_control_plane.map_or(in_manifests, |json| ObjectLookup::Object(json.into())))
    }
}

/// The response stream of a `WatchObjects` call.
pub fn watch_objects(
    objects: Objects,
    requests: Streaming<pb::WatchObjectsRequest>,
) -> impl Stream<Item = Result<pb::WatchObjectsResponse, Status>> + Send {
    let changes = objects.desired.subscribe_objects();
    let control_plane_changes = objects.control_plane.subscribe_objects();
    let watch = ObjectWatch {
        objects,
        requests,
        changes,
        control_plane_changes,
        last_sent: BTreeMap::new(),
        pending: VecDeque::new(),
        first: None,
        synced: false,
        retry_control_plane: false,
    };
    futures_util::stream::unfold(Some(watch), |watch| async move {
        let mut watch = watch?;
        match watch.next().await {
            Ok(Some(item)) => Some((Ok(pb::WatchObjectsResponse { item: Some(item) }), Some(watch))),
            Ok(None) => None,
            Err(status) => Some((Err(status), None)),
        }
    })
}

/// The state of an object that was sent: the object, or that it does not exist.
type LastSent = Option<Arc<[u8]>>;

struct ObjectWatch {
    objects: Objects,
    requests: Streaming<pb::WatchObjectsRequest>,
    changes: watch::Receiver<u64>,
    control_plane_changes: Option<watch::Receiver<u64>>,
    /// The watched objects with the state that was sent last; `None` before the first one.
    last_sent: BTreeMap<ObjectRequest, Option<LastSent>>,
    /// Keys of `last_sent` that may have changed. They are processed one at a time.
    pending: VecDeque<ObjectRequest>,
    /// Objects of the first request that have not been sent yet; `None` before the first request.
    first: Option<BTreeSet<ObjectRequest>>,
    synced: bool,
    /// The control plane was unavailable.
    retry_control_plane: bool,
}

impl ObjectWatch {
    /// The next item of the stream; `None` when the caller has closed it.
    async fn next(&mut self) -> Result<Option<Item>, Status> {
        loop {
            if !self.synced && self.first.as_ref().is_some_and(BTreeSet::is_empty) {
                self.synced = true;
                return Ok(Some(Item::Synced(Synced {})));
            }
            if let Some(key) = self.pending.pop_front() {
                if let Some(state) = self.read_change(&key).await {
                    return Ok(Some(Item::Object(state)));
                }
                continue;
            }
            // Cancel-safe: a message is received completely or not at all, and `changed` marks a value as seen only when it
            // returns.
            tokio::select! {
                request = self.requests.message() => match request? {
                    Some(request) => self.apply_request(request)?,
                    None => return Ok(None),
                },
                changed = self.changes.changed() => match changed {
                    Ok(()) => self.pending = self.last_sent.keys().cloned().collect(),
                    Err(_) => return Ok(None),
                },
                () = changed(self.control_plane_changes.as_mut()) => {
                    self.pending = self.last_sent.keys().cloned().collect();
                }
                () = tokio::time::sleep(RETRY_DELAY), if self.retry_control_plane => {
                    self.retry_control_plane = false;
                    self.pending = self.last_sent.keys().cloned().collect();
                }
            }
        }
    }

    fn apply_request(&mut self, request: pb::WatchObjectsRequest) -> Result<(), Status> {
        for reference in request.unwatch {
            let key = key_of(reference)?;
            if self.last_sent.remove(&key).is_some() {
                self.objects.control_plane.retain_objects(&key, false);
            }
            if let Some(first) = &mut self.first {
                first.remove(&key);
            }
        }
        let mut watched = BTreeSet::new();
        for reference in request.watch {
            let key = key_of(reference)?;
            if !self.last_sent.contains_key(&key) {
                self.objects.control_plane.retain_objects(&key, true);
                self.last_sent.insert(key.clone(), None);
            }
            self.pending.push_back(key.clone());
            watched.insert(key);
        }
        self.first.get_or_insert(watched);
        Ok(())
    }

    /// Looks up an object. Returns its state if it has changed; `None` if it has not, or if it cannot be determined yet.
    async fn read_change(&mut self, key: &ObjectRequest) -> Option<pb::ObjectState> {
        if !self.last_sent.contains_key(key) {
            return None;
        }
        let now = match self.objects.find(key).await {
            Ok(ObjectLookup::Object(json)) => Some(json),
            Ok(ObjectLookup::NotFound) => None,
            Ok(ObjectLookup::SourcesNotRead) => return None,
            Err(cause) => {
                tracing::debug!(kind = key.kind, name = key.name, %cause, "the object cannot be looked up yet");
                self.retry_control_plane = true;
                return None;
            }
        };
        if let Some(first) = &mut self.first {
            first.remove(key);
        }
        let last = self.last_sent.get_mut(key)?;
        if last.as_ref() == Some(&now) {
            return None;
        }
        *last = Some(now.clone());
        let ObjectRequest { kind, namespace, name } = key.clone();
        let reference = Some(pb::ObjectReference { kind, namespace, name });
        Some(pb::ObjectState { reference, object_json: now.map(|json| json.to_vec()) })
    }
}

impl Drop for ObjectWatch {
    fn drop(&mut self) {
        for key in self.last_sent.keys() {
            self.objects.control_plane.retain_objects(key, false);
        }
    }
}

/// Returns when an object of the control plane may have changed; never if the control plane sends no notifications.
async fn changed(changes: Option<&mut watch::Receiver<u64>>) {
    if let Some(changes) = changes
        && changes.changed().await.is_ok()
    {
        return;
    }
    // The sender lives as long as the control plane.
    std::future::pending().await
}

fn key_of(reference: pb::ObjectReference) -> Result<ObjectRequest, Status> {
    let pb::ObjectReference { kind, namespace, name } = reference;
    if kind.is_empty() || name.is_empty() {
        return Err(error(Code::InvalidArgument, "NAME_MISSING", "kind and name must be given"));
    }
    Ok(ObjectRequest { kind, namespace, name })
}
