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

use super::Session;
use crate::args::WatchArgs;
use crate::error::Failure;
use crate::output;
use crate::pods::{self, PodEntry, Scope};
use crate::seen::{Change, Row, Seen};
use crate::table::Table;
use crate::watch::{self, Printer};

/// A volume as `-o json` shows it; `null` is what nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct VolumeRow {
    namespace: Option<String>,
    /// The name, or the UID where volume-manager holds volumes of a pod that pod-sync does not know.
    pod: String,
    uid: String,
    volume: String,
    /// The field of the spec: `emptyDir`, `secret`…
    kind: Option<String>,
    /// `mounted`, or how the volumes of the pod are: `pending`, `failed`, `unmounting` or `unmounted`.
    state: String,
    /// What the pod's volumes wait for, or why they failed; empty for a volume that is mounted.
    message: String,
    /// On this machine; `null` while it is not mounted.
    path: Option<String>,
    read_only: Option<bool>,
}

/// The volumes of one pod: those of its spec, and those that volume-manager holds beside them. `pod` is what pod-sync
/// knows of it, `held` what volume-manager does.
fn rows(uid: &str, pod: Option<&PodEntry>, held: Option<&PodVolumes>) -> Vec<VolumeRow> {
    let json = pod.and_then(|pod| pod.json().ok()).unwrap_or_default();
    let spec = json["spec"]["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let specified = spec.iter().filter_map(|volume| Some((volume["name"].as_str()?, kind(volume))));
    let mut names: BTreeMap<&str, Option<String>> = specified.collect();
    for mount in held.iter().flat_map(|held| &held.volumes) {
        names.entry(&mount.name).or_default();
    }
    let row = |(name, kind): (&str, Option<String>)| {
        let mount = held.and_then(|held| held.volumes.iter().find(|mount| mount.name == name));
        let whole = held.map_or("pending", |held| &held.state);
        // A volume that is there already can be used, whatever the others wait for.
        let state = if mount.is_some() && matches!(whole, "pending" | "failed") { "mounted" } else { whole };
        let message = held.map_or("", |held| &held.message);
        VolumeRow {
            namespace: pod.map(|pod| pod.document.namespace.clone()),
            pod: pod.map_or_else(|| uid.to_owned(), |pod| pod.document.name.clone()),
            uid: uid.to_owned(),
            volume: name.to_owned(),
            kind,
            state: state.to_owned(),
            // What fails of a pod all of whose volumes are there is to bring one of them up to date.
            message: if state == "mounted" && whole != "mounted" {
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

/// The source of a volume: the only other field beside its name.
fn kind(volume: &Value) -> Option<String> {
    volume.as_object()?.keys().find(|key| *key != "name").cloned()
}

/// Which pods' volumes are shown.
struct Wanted {
    scope: Scope,
    /// By namespace and name; all of the scope when it is empty.
    names: BTreeSet<(String, String)>,
}

impl Wanted {
    fn holds(&self, pod: Option<&PodEntry>) -> bool {
        match pod {
            Some(pod) if self.names.is_empty() => self.scope.holds(&pod.document.namespace),
            Some(pod) => self.names.contains(&(pod.document.namespace.clone(), pod.document.name.clone())),
            // Whose it was nobody knows: it belongs to all namespaces together.
            None => self.names.is_empty() && self.scope.namespace.is_none(),
        }
    }
}

/// Shows the volumes of the pods of the namespace, or of those that are named.
pub(crate) async fn run(session: &Session, names: &[String], args: WatchArgs) -> Result<(), Failure> {
    let (all, held) = join(pods::list(&session.agent), session.agent.volumes()).await;
    let (all, held) = (all?, held?);
    let scope = session.scope();
    let mut wanted = Wanted { scope: session.scope(), names: BTreeSet::new() };
    for name in names {
        let pod = &pods::resolve(&session.agent, &all, &scope, name).await?.document;
        wanted.names.insert((pod.namespace.clone(), pod.name.clone()));
    }
    if args.watch {
        return follow(session, &wanted, args).await;
    }
    let mut held: BTreeMap<String, PodVolumes> = held.into_iter().map(|v| (v.uid.clone(), v)).collect();
    let mut items = Vec::new();
    for pod in all.iter().filter(|pod| wanted.holds(Some(pod))) {
        items.extend(rows(&pod.document.uid, Some(pod), held.get(&pod.document.uid)));
    }
    for pod in &all {
        held.remove(&pod.document.uid);
    }
    for (uid, held) in held.iter().filter(|_| wanted.holds(None)) {
        items.extend(rows(uid, None, Some(held)));
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

/// What both services have told, and what of it is shown.
struct Board<'a> {
    session: &'a Session,
    wanted: &'a Wanted,
    printer: Printer,
    /// By UID.
    pods: BTreeMap<String, PodEntry>,
    held: BTreeMap<String, PodVolumes>,
    /// UIDs that the replays have named which go on now.
    replays: [Option<BTreeSet<String>>; 2],
    /// Whether each of the two has said synced: before that nothing is shown.
    complete: [bool; 2],
    /// Volumes by UID and name.
    seen: Seen,
    /// The volumes that are shown of each pod.
    shown: BTreeMap<String, BTreeSet<String>>,
}

/// The places of the two in [`Board`].
const PODS: usize = 0;
const VOLUMES: usize = 1;

impl Board<'_> {
    fn opened(&mut self, who: usize) {
        self.replays[who] = Some(BTreeSet::new());
    }

    fn named(&mut self, who: usize, uid: &str) -> Result<(), Failure> {
        if let Some(replay) = &mut self.replays[who] {
            replay.insert(uid.to_owned());
        }
        self.refresh(uid)
    }

    fn gone(&mut self, who: usize, uid: &str) -> Result<(), Failure> {
        if who == PODS {
            drop(self.pods.remove(uid))
        } else {
            drop(self.held.remove(uid))
        }
        self.refresh(uid)
    }

    fn synced(&mut self, who: usize) -> Result<(), Failure> {
        if let Some(replay) = self.replays[who].take() {
            self.pods.retain(|uid, _| who != PODS || replay.contains(uid));
            self.held.retain(|uid, _| who != VOLUMES || replay.contains(uid));
        }
        self.complete[who] = true;
        if self.complete != [true, true] {
            return Ok(());
        }
        self.printer.hold();
        // By the names of pods, as people read.
        let name = |uid: &String| {
            self.pods.get(uid).map(|p| (p.document.namespace.clone(), p.document.name.clone()))
        };
        let all: BTreeSet<_> = self.pods.keys().chain(self.held.keys()).chain(self.shown.keys()).collect();
        let mut all: Vec<_> = all.into_iter().map(|uid| (name(uid), uid.clone())).collect();
        all.sort();
        for (_, uid) in all {
            self.refresh(&uid)?;
        }
        self.printer.release()
    }

    /// Shows what has changed of a pod's volumes.
    fn refresh(&mut self, uid: &str) -> Result<(), Failure> {
        if self.complete != [true, true] {
            return Ok(());
        }
        let (pod, held) = (self.pods.get(uid), self.held.get(uid));
        let is_there = (pod.is_some() || held.is_some()) && self.wanted.holds(pod);
        let rows = if is_there { rows(uid, pod, held) } else { Vec::new() };
        let mut before = self.shown.remove(uid).unwrap_or_default();
        for row in rows {
            let key = format!("{uid}/{}", row.volume);
            before.remove(&key);
            self.shown.entry(uid.to_owned()).or_default().insert(key.clone());
            let row = shown(self.session, row)?;
            if let Some(change) = self.seen.set(&key, &row) {
                self.printer.show(change, row)?;
            }
        }
        for key in before {
            if let Some(row) = self.seen.gone(&key) {
                self.printer.show(Change::Deleted, row)?;
            }
        }
        Ok(())
    }
}

/// A volume as a watch shows it.
fn shown(session: &Session, row: VolumeRow) -> Result<Row, Failure> {
    if output::is_document(session.format()) {
        let document = serde_json::to_value(&row).map_err(|e| Failure::Encode { reason: e.to_string() })?;
        return Ok(Row { mark: document.to_string(), cells: Vec::new(), document });
    }
    let cells = cells(session, row);
    Ok(Row { mark: cells.join("\0"), cells, document: Value::Null })
}

/// Shows each change of the volumes.
async fn follow(session: &Session, wanted: &Wanted, args: WatchArgs) -> Result<(), Failure> {
    let printer = Printer::new(session.format(), args, header(session), "STATE");
    let board = RefCell::new(Board {
        session,
        wanted,
        printer,
        pods: BTreeMap::new(),
        held: BTreeMap::new(),
        replays: [None, None],
        complete: [false, false],
        seen: Seen::default(),
        shown: BTreeMap::new(),
    });
    // Neither closure waits for anything, so that no borrow meets another.
    let on_pods = |signal| {
        let mut board = board.borrow_mut();
        match signal {
            Signal::Opened => board.opened(PODS),
            Signal::Lost(_) => {}
            Signal::Message(message) => return on_pod(&mut board, message),
        }
        Ok(())
    };
    let on_volumes = |signal| {
        let mut board = board.borrow_mut();
        match signal {
            Signal::Opened => board.opened(VOLUMES),
            Signal::Lost(_) => {}
            Signal::Message(message) => return on_volume(&mut board, message),
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
    board: &mut Board<'_>,
    message: keelson_proto::keelson::pod_sync::v1::WatchPodsResponse,
) -> Result<(), Failure> {
    match message.item {
        Some(PodItem::Pod(document)) => {
            let uid = document.uid.clone();
            board.pods.insert(uid.clone(), PodEntry::new(document));
            board.named(PODS, &uid)
        }
        Some(PodItem::GoneUid(uid)) => board.gone(PODS, &uid),
        Some(PodItem::Synced(_)) => board.synced(PODS),
        None => Ok(()),
    }
}

fn on_volume(
    board: &mut Board<'_>,
    message: keelson_proto::keelson::volume_manager::v1::WatchPodVolumesResponse,
) -> Result<(), Failure> {
    match message.item {
        Some(VolumesItem::Pod(held)) => {
            let uid = held.uid.clone();
            board.held.insert(uid.clone(), held);
            board.named(VOLUMES, &uid)
        }
        Some(VolumesItem::GoneUid(uid)) => board.gone(VOLUMES, &uid),
        Some(VolumesItem::Synced(_)) => board.synced(VOLUMES),
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

    fn held(state: &str, message: &str, mounted: &[&str]) -> PodVolumes {
        let mount = |name: &&str| VolumeMount {
            name: (*name).into(),
            host_path: format!("/v/{name}"),
            read_only: false,
        };
        let volumes = mounted.iter().map(mount).collect();
        PodVolumes { uid: "u1".into(), state: state.into(), volumes, message: message.into() }
    }

    /// Name, kind, state, what it waits for.
    fn told(pod: Option<&PodEntry>, held: Option<&PodVolumes>) -> Vec<String> {
        let text = |row: VolumeRow| {
            format!("{} {} {} {:?}", row.volume, row.kind.unwrap_or_default(), row.state, row.message)
        };
        rows("u1", pod, held).into_iter().map(text).collect()
    }

    #[test]
    fn a_volume_that_is_there_is_mounted_although_another_of_its_pod_waits() {
        let held = held("failed", "no secret tls", &["scratch"]);
        assert_eq!(
            told(Some(&pod()), Some(&held)),
            ["key secret failed \"no secret tls\"", "scratch emptyDir mounted \"\""]
        );
    }

    #[test]
    fn what_keeps_a_mounted_volume_from_being_brought_up_to_date_is_told() {
        let held = held("mounted", "no connection", &["scratch", "key"]);
        assert_eq!(
            told(Some(&pod()), Some(&held)),
            ["key secret mounted \"no connection\"", "scratch emptyDir mounted \"no connection\""]
        );
    }

    #[test]
    fn volumes_that_are_unmounted_are_not_said_to_be_mounted() {
        let held = held("unmounting", "still running", &["scratch"]);
        assert_eq!(
            told(Some(&pod()), Some(&held)),
            ["key secret unmounting \"still running\"", "scratch emptyDir unmounting \"still running\""]
        );
    }

    #[test]
    fn volumes_of_a_pod_that_nobody_has_begun_with_are_pending() {
        assert_eq!(told(Some(&pod()), None), ["key secret pending \"\"", "scratch emptyDir pending \"\""]);
    }

    #[test]
    fn volumes_of_a_pod_that_pod_sync_does_not_know_have_its_uid() {
        let held = held("unmounting", "", &["scratch"]);
        let rows = rows("u1", None, Some(&held));
        assert_eq!((rows[0].pod.as_str(), &rows[0].namespace, &rows[0].kind), ("u1", &None, &None));
        assert_eq!(rows[0].path.as_deref(), Some("/v/scratch"));
    }
}
