//! `keelson get volumes -w`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::{Either, select};
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item as PodItem};
use keelson_proto::keelson::volume_manager::v1::{
    PodVolumes, WatchPodVolumesRequest, watch_pod_volumes_response::Item as VolumesItem,
};
use keelson_service_kit::Signal;
use serde_json::Value;

use super::rows::{PodFilter, VolumeRow, cells, header, rows};
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::output;
use crate::pods::PodEntry;
use crate::row_tracker::{Change, Row, RowTracker};
use crate::session::Session;
use crate::watch::{self, Printer};

/// The volumes from the streams of both services, and the rows that are shown.
struct VolumeWatch<'a> {
    session: &'a Session,
    filter: &'a PodFilter,
    printer: Printer,
    /// By UID.
    pods: BTreeMap<String, PodEntry>,
    pod_volumes: BTreeMap<String, PodVolumes>,
    /// UIDs in the current replay of each stream; `None` outside of one.
    replays: [Option<BTreeSet<String>>; 2],
    /// Whether each stream has been synced; nothing is shown before.
    complete: [bool; 2],
    /// Volumes by UID and name.
    tracker: RowTracker,
    /// The keys of the shown volumes of each pod.
    shown: BTreeMap<String, BTreeSet<String>>,
}

/// Indices of the two streams in [`VolumeWatch`].
const PODS: usize = 0;
const VOLUMES: usize = 1;

impl VolumeWatch<'_> {
    fn begin_replay(&mut self, stream: usize) {
        self.replays[stream] = Some(BTreeSet::new());
    }

    fn changed(&mut self, stream: usize, uid: &str) -> Result<(), CliError> {
        if let Some(replay) = &mut self.replays[stream] {
            replay.insert(uid.to_owned());
        }
        self.refresh(uid)
    }

    fn removed(&mut self, stream: usize, uid: &str) -> Result<(), CliError> {
        if stream == PODS {
            drop(self.pods.remove(uid))
        } else {
            drop(self.pod_volumes.remove(uid))
        }
        self.refresh(uid)
    }

    fn synced(&mut self, stream: usize) -> Result<(), CliError> {
        if let Some(replay) = self.replays[stream].take() {
            self.pods.retain(|uid, _| stream != PODS || replay.contains(uid));
            self.pod_volumes.retain(|uid, _| stream != VOLUMES || replay.contains(uid));
        }
        self.complete[stream] = true;
        if self.complete != [true, true] {
            return Ok(());
        }
        self.printer.hold();
        // Sorted by the names of the pods.
        let name = |uid: &String| {
            self.pods.get(uid).map(|p| (p.document.namespace.clone(), p.document.name.clone()))
        };
        let all: BTreeSet<_> =
            self.pods.keys().chain(self.pod_volumes.keys()).chain(self.shown.keys()).collect();
        let mut all: Vec<_> = all.into_iter().map(|uid| (name(uid), uid.clone())).collect();
        all.sort();
        for (_, uid) in all {
            self.refresh(&uid)?;
        }
        self.printer.release()
    }

    /// Shows the changes of a pod's volumes.
    fn refresh(&mut self, uid: &str) -> Result<(), CliError> {
        if self.complete != [true, true] {
            return Ok(());
        }
        let (pod, pod_volumes) = (self.pods.get(uid), self.pod_volumes.get(uid));
        let is_shown = (pod.is_some() || pod_volumes.is_some()) && self.filter.matches(pod);
        let rows = if is_shown { rows(uid, pod, pod_volumes) } else { Vec::new() };
        let mut before = self.shown.remove(uid).unwrap_or_default();
        for row in rows {
            let key = format!("{uid}/{}", row.volume);
            before.remove(&key);
            self.shown.entry(uid.to_owned()).or_default().insert(key.clone());
            let row = watch_row(self.session, row)?;
            if let Some(change) = self.tracker.set(&key, &row) {
                self.printer.show(change, row)?;
            }
        }
        for key in before {
            if let Some(row) = self.tracker.remove(&key) {
                self.printer.show(Change::Deleted, row)?;
            }
        }
        Ok(())
    }
}

/// A volume as a watch shows it.
fn watch_row(session: &Session, row: VolumeRow) -> Result<Row, CliError> {
    if output::is_document(session.format()) {
        let document = serde_json::to_value(&row).map_err(|e| CliError::Encode { reason: e.to_string() })?;
        return Ok(Row { mark: document.to_string(), cells: Vec::new(), document });
    }
    let cells = cells(session, row);
    Ok(Row { mark: cells.join("\0"), cells, document: Value::Null })
}

/// Shows each change of the volumes.
pub(super) async fn follow(session: &Session, filter: &PodFilter, args: WatchArgs) -> Result<(), CliError> {
    let printer = Printer::new(session.format(), args, header(session), "STATE");
    let watch_state = RefCell::new(VolumeWatch {
        session,
        filter,
        printer,
        pods: BTreeMap::new(),
        pod_volumes: BTreeMap::new(),
        replays: [None, None],
        complete: [false, false],
        tracker: RowTracker::default(),
        shown: BTreeMap::new(),
    });
    // The closures do not await, so the borrows never overlap.
    let on_pods = |signal| {
        let mut watch_state = watch_state.borrow_mut();
        match signal {
            Signal::Opened => watch_state.begin_replay(PODS),
            Signal::Lost(_) => {}
            Signal::Message(message) => return on_pod(&mut watch_state, message),
        }
        Ok(())
    };
    let on_volumes = |signal| {
        let mut watch_state = watch_state.borrow_mut();
        match signal {
            Signal::Opened => watch_state.begin_replay(VOLUMES),
            Signal::Lost(_) => {}
            Signal::Message(message) => return on_volume(&mut watch_state, message),
        }
        Ok(())
    };
    let open_pods = || {
        let request = session.agent.request(WatchPodsRequest::default());
        let mut client = session.agent.pod_sync();
        async move { client.watch_pods(request).await }
    };
    let open_volumes = || {
        let request = session.agent.request(WatchPodVolumesRequest {});
        let mut client = session.agent.volume_manager();
        async move { client.watch_pod_volumes(request).await }
    };
    let pods = std::pin::pin!(watch::stream(&session.agent, ServiceName::PodSync, open_pods, on_pods));
    let volumes =
        std::pin::pin!(watch::stream(&session.agent, ServiceName::VolumeManager, open_volumes, on_volumes));
    match select(pods, volumes).await {
        Either::Left((end, _)) | Either::Right((end, _)) => Err(end),
    }
}

fn on_pod(
    watch_state: &mut VolumeWatch<'_>,
    message: keelson_proto::keelson::pod_sync::v1::WatchPodsResponse,
) -> Result<(), CliError> {
    match message.item {
        Some(PodItem::Pod(document)) => {
            let uid = document.uid.clone();
            watch_state.pods.insert(uid.clone(), PodEntry::new(document));
            watch_state.changed(PODS, &uid)
        }
        Some(PodItem::GoneUid(uid)) => watch_state.removed(PODS, &uid),
        Some(PodItem::Synced(_)) => watch_state.synced(PODS),
        None => Ok(()),
    }
}

fn on_volume(
    watch_state: &mut VolumeWatch<'_>,
    message: keelson_proto::keelson::volume_manager::v1::WatchPodVolumesResponse,
) -> Result<(), CliError> {
    match message.item {
        Some(VolumesItem::Pod(pod_volumes)) => {
            let uid = pod_volumes.uid.clone();
            watch_state.pod_volumes.insert(uid.clone(), pod_volumes);
            watch_state.changed(VOLUMES, &uid)
        }
        Some(VolumesItem::GoneUid(uid)) => watch_state.removed(VOLUMES, &uid),
        Some(VolumesItem::Synced(_)) => watch_state.synced(VOLUMES),
        None => Ok(()),
    }
}
