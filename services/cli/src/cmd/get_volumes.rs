//! `keelson get volumes`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::{Either, join, select};
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item as PodItem};
use keelson_proto::keelson::volume_manager::v1::{
    PodVolumes, WatchPodVolumesRequest, watch_pod_volumes_response::Item as VolumesItem,
};
use keelson_service_kit::Signal;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::WatchArgs;
use crate::error::CliError;
use crate::output;
use crate::pods::{self, PodEntry, Scope};
use crate::row_tracker::{Change, Row, RowTracker};
use crate::session::Session;
use crate::table::Table;
use crate::watch::{self, Printer};

/// A volume as `-o json` shows it; `null` is an unknown value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct VolumeRow {
    namespace: Option<String>,
    /// The name, or the UID for a pod that volume-manager knows and pod-sync does not.
    pod: String,
    uid: String,
    volume: String,
    /// The field of the spec: `emptyDir`, `secret`…
    kind: Option<String>,
    /// `mounted`, or the state of all volumes of the pod: `pending`, `failed`, `unmounting` or `unmounted`.
    state: String,
    /// What the pod's volumes wait for, or why they failed; empty for a mounted volume.
    message: String,
    /// The path on this machine; `null` while it is not mounted.
    path: Option<String>,
    read_only: Option<bool>,
}

/// The volumes of one pod: those of its spec, and further ones of volume-manager. `pod` is from pod-sync,
/// `pod_volumes` from volume-manager.
fn rows(uid: &str, pod: Option<&PodEntry>, pod_volumes: Option<&PodVolumes>) -> Vec<VolumeRow> {
    let json = pod.and_then(|pod| pod.json().ok()).unwrap_or_default();
    let spec = json["spec"]["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let specified = spec.iter().filter_map(|volume| Some((volume["name"].as_str()?, kind(volume))));
    let mut names: BTreeMap<&str, Option<String>> = specified.collect();
    for mount in pod_volumes.iter().flat_map(|pod_volumes| &pod_volumes.volumes) {
        names.entry(&mount.name).or_default();
    }
    let row = |(name, kind): (&str, Option<String>)| {
        let mount =
            pod_volumes.and_then(|pod_volumes| pod_volumes.volumes.iter().find(|mount| mount.name == name));
        let pod_state = pod_volumes.map_or("pending", |pod_volumes| &pod_volumes.state);
        // A mounted volume is usable while others are still pending.
        let state =
            if mount.is_some() && matches!(pod_state, "pending" | "failed") { "mounted" } else { pod_state };
        let message = pod_volumes.map_or("", |pod_volumes| &pod_volumes.message);
        VolumeRow {
            namespace: pod.map(|pod| pod.document.namespace.clone()),
            pod: pod.map_or_else(|| uid.to_owned(), |pod| pod.document.name.clone()),
            uid: uid.to_owned(),
            volume: name.to_owned(),
            kind,
            state: state.to_owned(),
            // If all volumes are mounted, the message is about a failed update of one of them.
            message: if state == "mounted" && pod_state != "mounted" {
                String::new()
            } else {
                message.to_owned()
            },
            path: mount.map(|mount| mount.host_path.clone()),
            read_only: mount.map(|mount| mount.read_only),
        }
    };
    names.into_iter().map(row).collect()
}

/// The kind of a volume: its only field other than the name.
fn kind(volume: &Value) -> Option<String> {
    volume.as_object()?.keys().find(|key| *key != "name").cloned()
}

/// Selects the pods whose volumes are shown.
struct PodFilter {
    scope: Scope,
    /// Namespace and name of each named pod; empty for all of the scope.
    names: BTreeSet<(String, String)>,
}

impl PodFilter {
    fn matches(&self, pod: Option<&PodEntry>) -> bool {
        match pod {
            Some(pod) if self.names.is_empty() => self.scope.contains(&pod.document.namespace),
            Some(pod) => self.names.contains(&(pod.document.namespace.clone(), pod.document.name.clone())),
            // The namespace of an unknown pod is not known, so it is shown only with all namespaces.
            None => self.names.is_empty() && self.scope.namespace.is_none(),
        }
    }
}

/// Shows the volumes of the pods of the namespace, or of the named ones.
pub(crate) async fn run(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    let (all, pod_volumes) = join(pods::list(&session.agent), session.agent.volumes()).await;
    let (all, pod_volumes) = (all?, pod_volumes?);
    let scope = session.scope();
    let mut filter = PodFilter { scope: session.scope(), names: BTreeSet::new() };
    for name in names {
        let pod = &pods::resolve(&session.agent, &all, &scope, name).await?.document;
        filter.names.insert((pod.namespace.clone(), pod.name.clone()));
    }
    if args.watch {
        return follow(session, &filter, args).await;
    }
    let mut pod_volumes: BTreeMap<String, PodVolumes> =
        pod_volumes.into_iter().map(|v| (v.uid.clone(), v)).collect();
    let mut items = Vec::new();
    for pod in all.iter().filter(|pod| filter.matches(Some(pod))) {
        items.extend(rows(&pod.document.uid, Some(pod), pod_volumes.get(&pod.document.uid)));
    }
    for pod in &all {
        pod_volumes.remove(&pod.document.uid);
    }
    for (uid, pod_volumes) in pod_volumes.iter().filter(|_| filter.matches(None)) {
        items.extend(rows(uid, None, Some(pod_volumes)));
    }
    if output::is_document(session.format()) {
        return output::print_document(session.format(), &json!({"items": items}));
    }
    if items.is_empty() {
        output::notice("No volumes found.");
        return Ok(());
    }
    let mut table = Table::with_header(header(session));
    for item in items {
        table.row(cells(session, item));
    }
    output::print(&table.render(0))
}

fn header(session: &Session) -> Vec<String> {
    let mut header = vec!["POD", "VOLUME", "KIND", "STATE", "WAITS FOR", "PATH"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.extend(["READ ONLY", "UID"]);
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

fn cells(session: &Session, row: VolumeRow) -> Vec<String> {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "<unknown>".into());
    let or_dash = |text: Option<String>| text.filter(|t| !t.is_empty()).unwrap_or_else(|| "-".into());
    let mut cells = Vec::with_capacity(9);
    if session.global.all_namespaces {
        cells.push(or_unknown(row.namespace));
    }
    cells.extend([
        row.pod,
        row.volume,
        or_unknown(row.kind),
        row.state,
        or_dash(Some(row.message)),
        or_dash(row.path),
    ]);
    if session.is_wide() {
        cells.push(or_dash(row.read_only.map(|read_only| read_only.to_string())));
        cells.push(row.uid);
    }
    cells
}

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
async fn follow(session: &Session, filter: &PodFilter, args: WatchArgs) -> Result<(), CliError> {
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
        let request = session.agent.request(WatchPodsRequest {});
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

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::pod_sync::v1::PodDocument;
    use keelson_proto::keelson::volume_manager::v1::VolumeMount;

    use super::*;

    fn pod() -> PodEntry {
        let pod = json!({"spec": {"volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "key", "secret": {"secretName": "tls"}},
        ]}});
        PodEntry::new(PodDocument {
            uid: "u1".into(),
            namespace: "default".into(),
            name: "web-edge".into(),
            pod_json: pod.to_string().into(),
            ..PodDocument::default()
        })
    }

    fn pod_volumes(state: &str, message: &str, mounted: &[&str]) -> PodVolumes {
        let mount = |name: &&str| VolumeMount {
            name: (*name).into(),
            host_path: format!("/v/{name}"),
            read_only: false,
        };
        let volumes = mounted.iter().map(mount).collect();
        PodVolumes { uid: "u1".into(), state: state.into(), volumes, message: message.into() }
    }

    /// Name, kind, state and message of each row.
    fn row_texts(pod: Option<&PodEntry>, pod_volumes: Option<&PodVolumes>) -> Vec<String> {
        let text = |row: VolumeRow| {
            format!("{} {} {} {:?}", row.volume, row.kind.unwrap_or_default(), row.state, row.message)
        };
        rows("u1", pod, pod_volumes).into_iter().map(text).collect()
    }

    #[test]
    fn volume_is_mounted_while_another_of_its_pod_is_pending() {
        let pod_volumes = pod_volumes("failed", "no secret tls", &["scratch"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret failed \"no secret tls\"", "scratch emptyDir mounted \"\""]
        );
    }

    #[test]
    fn mounted_volume_shows_why_its_update_fails() {
        let pod_volumes = pod_volumes("mounted", "no connection", &["scratch", "key"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret mounted \"no connection\"", "scratch emptyDir mounted \"no connection\""]
        );
    }

    #[test]
    fn unmounting_volumes_are_not_shown_as_mounted() {
        let pod_volumes = pod_volumes("unmounting", "still running", &["scratch"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret unmounting \"still running\"", "scratch emptyDir unmounting \"still running\""]
        );
    }

    #[test]
    fn volumes_unknown_to_volume_manager_are_pending() {
        assert_eq!(
            row_texts(Some(&pod()), None),
            ["key secret pending \"\"", "scratch emptyDir pending \"\""]
        );
    }

    #[test]
    fn volumes_of_a_pod_unknown_to_pod_sync_show_its_uid() {
        let pod_volumes = pod_volumes("unmounting", "", &["scratch"]);
        let rows = rows("u1", None, Some(&pod_volumes));
        assert_eq!((rows[0].pod.as_str(), &rows[0].namespace, &rows[0].kind), ("u1", &None, &None));
        assert_eq!(rows[0].path.as_deref(), Some("/v/scratch"));
    }
}
