//! `keelson get volumes`.

mod rows;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join;
use keelson_proto::keelson::volume_manager::v1::PodVolumes;
use serde_json::json;

use self::rows::{PodFilter, cells, header, rows};
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::output;
use crate::pods;
use crate::session::Session;
use crate::table::Table;

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
        return watch::follow(session, &filter, args).await;
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
