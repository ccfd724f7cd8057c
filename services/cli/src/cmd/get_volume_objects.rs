//! `keelson get persistentvolumes` and `keelson get persistentvolumeclaims`.

mod watch;

use serde_json::{Value, json};

use super::manifests::ObjectKind;
use super::volume_objects::{
    access_modes, age, bare_name_of, bound_capacity, capacity, claim_of, class, name, namespace, reason,
    reclaim_policy, status, volume_mode, volume_of,
};
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::output;
use crate::pods::Scope;
use crate::session::Session;
use crate::suggest::similar_names;
use crate::table::Table;

/// Shows the PersistentVolumes of this node, or the named ones.
pub(crate) async fn volumes(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    without_namespace(session, "get persistentvolumes")?;
    show(session, ObjectKind::PersistentVolume, names, args).await
}

/// Shows the claims of the namespace, or the named ones.
pub(crate) async fn claims(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    show(session, ObjectKind::PersistentVolumeClaim, names, args).await
}

/// Refuses `-n`, which would have no effect.
///
/// # Errors
/// `-n` names a namespace.
pub(crate) fn without_namespace(session: &Session, command: &str) -> Result<(), CliError> {
    if session.global.namespace == "default" {
        return Ok(());
    }
    Err(CliError::Usage {
        message: format!("`keelson {command}` takes no -n: a PersistentVolume has no namespace"),
        hint: "leave -n out".into(),
    })
}

/// The objects that the command is about.
struct Selection<'a> {
    kind: ObjectKind,
    scope: Scope,
    /// Empty: all in the scope.
    names: Vec<&'a str>,
}

impl Selection<'_> {
    fn is_in_scope(&self, object: &Value) -> bool {
        !self.kind.is_namespaced() || self.scope.contains(namespace(object))
    }

    fn contains(&self, object: &Value) -> bool {
        self.is_in_scope(object) && (self.names.is_empty() || self.names.contains(&name(object)))
    }
}

async fn show(
    session: &Session,
    kind: ObjectKind,
    names: &[String],
    args: WatchArgs,
) -> Result<(), CliError> {
    let all = session.agent.volume_objects(kind.as_str()).await?;
    let names = names.iter().map(|name| bare_name_of(kind, name)).collect();
    let selection = Selection { kind, scope: session.scope(), names };
    let is_known = |wanted: &str| all.iter().any(|it| name(it) == wanted && selection.is_in_scope(it));
    if let Some(unknown) = selection.names.iter().find(|name| !is_known(name)) {
        return Err(not_found(&selection.scope, kind, &all, unknown));
    }
    let found: Vec<&Value> = all.iter().filter(|object| selection.contains(object)).collect();
    if args.watch {
        return watch::follow(session, &selection, &found, args).await;
    }
    if output::is_document(session.format()) {
        return match (selection.names.as_slice(), found.as_slice()) {
            ([_], [one]) => output::print_document(session.format(), one),
            (_, all) => output::print_document(
                session.format(),
                &json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": all}),
            ),
        };
    }
    if found.is_empty() {
        output::notice(&format!("No {} found.", kind.plural()));
        return Ok(());
    }
    let mut table = Table::with_header(header(session, kind));
    for object in found {
        table.row(cells(session, kind, object, session.now));
    }
    output::print(&table.render(0))
}

/// The error for an unknown name, with other namespaces that have it, or similar names.
pub(crate) fn not_found(scope: &Scope, kind: ObjectKind, all: &[Value], wanted: &str) -> CliError {
    let plural = kind.plural();
    if kind == ObjectKind::PersistentVolume {
        let similar = similar_names(wanted, all.iter().map(name));
        let list = format!("`keelson get {plural}` lists all {plural}");
        let hint =
            if similar.is_empty() { list } else { format!("did you mean {}? {list}", similar.join(" or ")) };
        return CliError::NotFound { what: format!("there is no {}", kind.label(wanted)), hint };
    }
    let list = format!("`keelson get {plural} -A` lists all {plural}");
    let place = scope.namespace.as_ref().map_or_else(|| "any namespace".into(), |n| format!("namespace {n}"));
    let elsewhere = all.iter().find(|object| name(object) == wanted).map(namespace);
    let here = all.iter().filter(|object| scope.contains(namespace(object)));
    let similar = similar_names(wanted, here.map(name));
    let hint = match elsewhere {
        Some(namespace) => {
            format!("there is {} in namespace {namespace}: -n {namespace}; {list}", kind.label(wanted))
        }
        None if similar.is_empty() => list,
        None => format!("did you mean {}? {list}", similar.join(" or ")),
    };
    CliError::NotFound { what: format!("there is no {} in {place}", kind.label(wanted)), hint }
}

fn header(session: &Session, kind: ObjectKind) -> Vec<String> {
    let is_claim = kind.is_namespaced();
    let mut header = if is_claim {
        vec!["NAME", "STATUS", "VOLUME", "CAPACITY", "ACCESS MODES", "STORAGECLASS", "AGE"]
    } else {
        vec!["NAME", "CAPACITY", "ACCESS MODES", "RECLAIM POLICY", "STATUS", "CLAIM", "STORAGECLASS", "AGE"]
    };
    if is_claim && session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.push("VOLUMEMODE");
    }
    if is_claim {
        header.push("REASON");
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

/// The cells of [`header`].
fn cells(session: &Session, kind: ObjectKind, object: &Value, now: i64) -> Vec<String> {
    let is_claim = kind.is_namespaced();
    let mut cells = if is_claim {
        vec![
            name(object).to_owned(),
            status(object).to_owned(),
            volume_of(object),
            bound_capacity(object),
            access_modes(object.pointer("/status/accessModes")),
        ]
    } else {
        vec![
            name(object).to_owned(),
            capacity(object),
            access_modes(object.pointer("/spec/accessModes")),
            reclaim_policy(object),
            status(object).to_owned(),
            claim_of(object),
        ]
    };
    cells.extend([class(object), age(object, now)]);
    if is_claim && session.global.all_namespaces {
        cells.insert(0, namespace(object).to_owned());
    }
    if session.is_wide() {
        cells.push(volume_mode(object));
    }
    if is_claim {
        cells.push(reason(object));
    }
    cells
}
