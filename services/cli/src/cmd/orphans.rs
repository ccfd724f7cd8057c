//! `keelson orphans`: the directories of pods that no source names and of which nothing runs.

use keelson_config::ServiceName;
use keelson_proto::keelson::volume_manager::v1::orphaned_path::Kind;
use keelson_proto::keelson::volume_manager::v1::{
    CleanOrphanRequest, CleanOrphanResponse, OrphanedPath, OrphanedPod,
};
use keelson_service_kit::status::reason;
use serde_json::{Value, json};
use tonic::Status;

use super::delete::all_or_some;
use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::table::{GrowingTable, Table};

/// The reason of the error if a pod has no directory.
const NO_ORPHAN: &str = "NO_ORPHAN";
/// The reason of the error if a pod's directory is still needed.
const NOT_AN_ORPHAN: &str = "NOT_AN_ORPHAN";

/// Shows the orphaned pods.
pub(crate) async fn list(session: &Session) -> Result<(), CliError> {
    let orphans = session.agent.orphans().await?;
    if output::is_document(session.format()) {
        let items: Vec<Value> = orphans.iter().map(document).collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    if orphans.is_empty() {
        output::notice("No orphaned pods found.");
        return Ok(());
    }
    let mut header = vec!["UID", "MOUNTS", "VOLUMES", "FILES", "MESSAGE"];
    if session.is_wide() {
        header.push("DIRECTORY");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for orphan in orphans {
        let count = |kind: Kind| orphan.paths.iter().filter(|path| path.kind() == kind).count().to_string();
        let (mounts, volumes, files) = (count(Kind::Mount), count(Kind::Volume), count(Kind::File));
        let message = if orphan.message.is_empty() { "-".to_owned() } else { orphan.message };
        let mut cells = vec![orphan.uid, mounts, volumes, files, message];
        if session.is_wide() {
            cells.push(orphan.path);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
}

fn document(orphan: &OrphanedPod) -> Value {
    json!({"uid": orphan.uid, "path": orphan.path, "paths": paths(&orphan.paths), "message": orphan.message})
}

fn paths(paths: &[OrphanedPath]) -> Value {
    paths.iter().map(|path| json!({"path": path.path, "kind": kind(path)})).collect()
}

fn kind(path: &OrphanedPath) -> &'static str {
    match path.kind() {
        Kind::Mount => "mount",
        Kind::Volume => "volume",
        Kind::File => "file",
        Kind::Unspecified => "unknown",
    }
}

/// Removes what is left of the named pods, or of all orphaned ones; with `dry_run` only shows it. Each pod is shown as soon as it
/// is done.
///
/// # Errors
/// Something was left, or a pod is not orphaned; the others are done all the same.
pub(crate) async fn clean(
    session: &Session,
    uids: &[String],
    all: bool,
    dry_run: bool,
) -> Result<(), CliError> {
    let uids = if all {
        session.agent.orphans().await?.into_iter().map(|orphan| orphan.uid).collect()
    } else {
        uids.to_vec()
    };
    let mut report = Report::new(session, dry_run);
    let mut errors = Vec::new();
    let mut unreachable = None;
    for uid in &uids {
        match clean_one(session, uid, dry_run).await {
            Ok(answer) => {
                errors.extend(left_error(uid, &answer).filter(|_| !dry_run));
                report.add(uid, &answer)?;
            }
            // It was removed since the list was read.
            Err(CliError::NotFound { .. }) if all => {}
            Err(error) if error.is_unreachable() => {
                unreachable = Some(error);
                break;
            }
            Err(error) => errors.push(error),
        }
    }
    report.finish(&uids)?;
    match unreachable {
        Some(error) => Err(error),
        None => all_or_some(session, errors, uids.len()),
    }
}

async fn clean_one(session: &Session, uid: &str, dry_run: bool) -> Result<CleanOrphanResponse, CliError> {
    let request = session.agent.request(CleanOrphanRequest { uid: uid.to_owned(), dry_run });
    let answer = session.agent.volume_manager().clean_orphan(request).await;
    answer.map(tonic::Response::into_inner).map_err(|status| clean_error(session, status))
}

fn clean_error(session: &Session, status: Status) -> CliError {
    match reason(&status).as_deref() {
        Some(NO_ORPHAN) => CliError::NotFound {
            what: status.message().to_owned(),
            hint: "`keelson orphans list` shows the orphaned pods".into(),
        },
        Some(NOT_AN_ORPHAN) => CliError::Failed {
            message: status.message().to_owned(),
            hint: Some(
                "only pods that no source names and of which nothing runs are cleaned; `keelson get pods -A` shows the others"
                    .into(),
            ),
        },
        _ => session.agent.call_error(ServiceName::VolumeManager, status),
    }
}

/// The error if something of the pod was left.
fn left_error(uid: &str, answer: &CleanOrphanResponse) -> Option<CliError> {
    let (left, removed) = (answer.left.len(), answer.removed.len());
    (left > 0).then(|| CliError::Failed {
        message: format!(
            "{left} of {} paths of the pod {uid} are left: they are in use, or not safe to remove",
            left + removed
        ),
        hint: Some("`keelson orphans list` shows why; unmount or move what is left, and repeat".into()),
    })
}

/// What was done with each pod.
struct Report<'a> {
    session: &'a Session,
    dry_run: bool,
    table: GrowingTable,
    items: Vec<Value>,
}

impl<'a> Report<'a> {
    fn new(session: &'a Session, dry_run: bool) -> Self {
        let header = ["UID", "RESULT", "KIND", "PATH"].map(ToOwned::to_owned).to_vec();
        Self { session, dry_run, table: GrowingTable::new(header), items: Vec::new() }
    }

    /// Adds a pod. A table is printed at once, a document at the end.
    fn add(&mut self, uid: &str, answer: &CleanOrphanResponse) -> Result<(), CliError> {
        let (removed, left) = (paths(&answer.removed), paths(&answer.left));
        if output::is_document(self.session.format()) {
            self.items.push(json!({"uid": uid, "dry_run": self.dry_run, "removed": removed, "left": left}));
            return Ok(());
        }
        let (done, kept) =
            if self.dry_run { ("would be removed", "would stay") } else { ("removed", "left") };
        let row = |result: &str, kind: &str, path: &str| -> Vec<String> {
            [uid, result, kind, path].map(ToOwned::to_owned).to_vec()
        };
        let removed = answer.removed.iter().map(|path| row(done, kind(path), &path.path));
        let left = answer.left.iter().map(|path| row(kept, kind(path), &path.path));
        let mut rows: Vec<_> = removed.chain(left).collect();
        if rows.is_empty() {
            rows.push(row(done, "directory", "."));
        }
        output::print(&self.table.render_batch(&rows))
    }

    /// Prints the document, or that there was no pod among `uids`.
    fn finish(self, uids: &[String]) -> Result<(), CliError> {
        if output::is_document(self.session.format()) {
            return output::print_document(self.session.format(), &json!({"items": self.items}));
        }
        if uids.is_empty() {
            output::notice("No orphaned pods found.");
        }
        Ok(())
    }
}
