//! The objects that pods refer to: read once by `GetObject`, followed by `WatchObjects`.

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
use crate::desired::{Desired, Found};

/// When a control plane that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Where objects come from: the manifests first, then the control plane.
#[derive(Clone)]
pub struct Objects {
    /// The merged manifests.
    pub desired: Desired,
    /// Where objects come from that no manifest has.
    pub plane: Arc<dyn ControlPlane>,
}

impl Objects {
    /// What is known of an object now.
    ///
    /// # Errors
    /// No manifest has it, and the control plane does not answer.
    pub async fn find(&self, wanted: &ObjectRequest) -> Result<Found, ControlPlaneError> {
        let ObjectRequest { kind, namespace, name } = wanted.clone();
        let of_manifest = match Kind::parse(&kind) {
            Some(kind) => self.desired.object(&ObjectKey { kind, namespace, name }),
            None if self.desired.is_ready() => Found::Nothing,
            None => Found::NotRead,
        };
        if matches!(of_manifest, Found::Object(_)) {
            return Ok(of_manifest);
        }
        let of_plane = self.plane.get_object(wanted.clone()).await?;
        Ok(of_plane.map_or(of_manifest, |json| Found::Object(json.into())))
    }
}

/// The answers of one `WatchObjects` call.
pub fn answers(
    objects: Objects,
    requests: Streaming<pb::WatchObjectsRequest>,
) -> impl Stream<Item = Result<pb::WatchObjectsResponse, Status>> + Send {
    let changes = objects.desired.objects_change();
    let plane_changes = objects.plane.objects_change();
    let watch = Watch {
        objects,
        requests,
        changes,
        plane_changes,
        told: BTreeMap::new(),
        to_look_at: VecDeque::new(),
        first: None,
        synced: false,
        away: false,
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

/// What was told of an object: the object, or that there is none.
type Told = Option<Arc<[u8]>>;

struct Watch {
    objects: Objects,
    requests: Streaming<pb::WatchObjectsRequest>,
    changes: watch::Receiver<u64>,
    plane_changes: Option<watch::Receiver<u64>>,
    /// The watched objects with what was told of each last; none before anything was.
    told: BTreeMap<ObjectRequest, Option<Told>>,
    /// The keys of `told` that may have changed. One answer is made at a time, however many there are.
    to_look_at: VecDeque<ObjectRequest>,
    /// What of the first request has not been told; none before there was a request.
    first: Option<BTreeSet<ObjectRequest>>,
    synced: bool,
    /// The control plane did not answer.
    away: bool,
}

impl Watch {
    /// The next answer; none when the caller has gone.
    async fn next(&mut self) -> Result<Option<Item>, Status> {
        loop {
            if !self.synced && self.first.as_ref().is_some_and(BTreeSet::is_empty) {
                self.synced = true;
                return Ok(Some(Item::Synced(Synced {})));
            }
            if let Some(key) = self.to_look_at.pop_front() {
                if let Some(state) = self.look(&key).await {
                    return Ok(Some(Item::Object(state)));
                }
                continue;
            }
            // Cancel-safe: a message is taken whole or not at all, and `changed` marks nothing as seen unless it
            // returns.
            tokio::select! {
                request = self.requests.message() => match request? {
                    Some(request) => self.take(request)?,
                    None => return Ok(None),
                },
                changed = self.changes.changed() => match changed {
                    Ok(()) => self.to_look_at = self.told.keys().cloned().collect(),
                    Err(_) => return Ok(None),
                },
                () = changed(self.plane_changes.as_mut()) => {
                    self.to_look_at = self.told.keys().cloned().collect();
                }
                () = tokio::time::sleep(ASK_AGAIN), if self.away => {
                    self.away = false;
                    self.to_look_at = self.told.keys().cloned().collect();
                }
            }
        }
    }

    fn take(&mut self, request: pb::WatchObjectsRequest) -> Result<(), Status> {
        for reference in request.unwatch {
            let key = key_of(reference)?;
            if self.told.remove(&key).is_some() {
                self.objects.plane.retain_objects(&key, false);
            }
            if let Some(first) = &mut self.first {
                first.remove(&key);
            }
        }
        let mut watched = BTreeSet::new();
        for reference in request.watch {
            let key = key_of(reference)?;
            if !self.told.contains_key(&key) {
                self.objects.plane.retain_objects(&key, true);
                self.told.insert(key.clone(), None);
            }
            self.to_look_at.push_back(key.clone());
            watched.insert(key);
        }
        self.first.get_or_insert(watched);
        Ok(())
    }

    /// What is to be told of an object; none when it is known, or nobody can tell.
    async fn look(&mut self, key: &ObjectRequest) -> Option<pb::ObjectState> {
        if !self.told.contains_key(key) {
            return None;
        }
        let now = match self.objects.find(key).await {
            Ok(Found::Object(json)) => Some(json),
            Ok(Found::Nothing) => None,
            Ok(Found::NotRead) => return None,
            Err(cause) => {
                tracing::debug!(kind = key.kind, name = key.name, %cause, "nobody can tell of an object yet");
                self.away = true;
                return None;
            }
        };
        if let Some(first) = &mut self.first {
            first.remove(key);
        }
        let told = self.told.get_mut(key)?;
        if told.as_ref() == Some(&now) {
            return None;
        }
        *told = Some(now.clone());
        let ObjectRequest { kind, namespace, name } = key.clone();
        let reference = Some(pb::ObjectReference { kind, namespace, name });
        Some(pb::ObjectState { reference, object_json: now.map(|json| json.to_vec()) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for key in self.told.keys() {
            self.objects.plane.retain_objects(key, false);
        }
    }
}

/// Returns when the control plane may tell something else of an object; never where it tells nothing by itself.
async fn changed(changes: Option<&mut watch::Receiver<u64>>) {
    if let Some(changes) = changes
        && changes.changed().await.is_ok()
    {
        return;
    }
    // The sender lives as long as the plane.
    std::future::pending().await
}

fn key_of(reference: pb::ObjectReference) -> Result<ObjectRequest, Status> {
    let pb::ObjectReference { kind, namespace, name } = reference;
    if kind.is_empty() || name.is_empty() {
        return Err(error(Code::InvalidArgument, "NAME_MISSING", "kind and name must be given"));
    }
    Ok(ObjectRequest { kind, namespace, name })
}
