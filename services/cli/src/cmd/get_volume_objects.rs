//! `keelson get persistentvolumes` and `keelson get persistentvolumeclaims`.

use serde_json::{Value, json};

use super::manifests::ObjectKind;
use super::volume_objects::{
    access_modes, age, bare_name_of, bound_capacity, capacity, claim_of, class, name, namespace, reason,
    reclaim_policy, status, volume_mode, volume_of,
};
use crate::error::CliError;
use crate::output;
use crate::pods::Scope;
use crate::session::Session;
use crate::suggest::similar_names;
use crate::table::Table;

/// Shows the PersistentVolumes of this node, or the named ones.
pub(crate) async fn volumes(session: &Session, names: &[String]) -> Result<(), CliError> {
    without_namespace(session, "get persistentvolumes")?;
    let all = session.agent.volume_objects(ObjectKind::PersistentVolume.as_str()).await?;
    show(session, ObjectKind::PersistentVolume, &all, names, volume_table)
}

/// Shows the claims of the namespace, or the named ones.
pub(crate) async fn claims(session: &Session, names: &[String]) -> Result<(), CliError> {
    let all = session.agent.volume_objects(ObjectKind::PersistentVolumeClaim.as_str()).await?;
    show(session, ObjectKind::PersistentVolumeClaim, &all, names, claim_table)
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

fn show(
    session: &Session,
    kind: ObjectKind,
    all: &[Value],
    names: &[String],
    table: fn(&Session, &[&Value]) -> Table,
) -> Result<(), CliError> {
    let names: Vec<&str> = names.iter().map(|name| bare_name_of(kind, name)).collect();
    let scope = session.scope();
    let is_in_scope =
        |object: &&Value| kind == ObjectKind::PersistentVolume || scope.contains(namespace(object));
    if let Some(unknown) =
        names.iter().find(|wanted| !all.iter().filter(is_in_scope).any(|object| name(object) == **wanted))
    {
        return Err(not_found(&scope, kind, all, unknown));
    }
    let is_named = |object: &&Value| names.is_empty() || names.contains(&name(object));
    let found: Vec<&Value> = all.iter().filter(is_in_scope).filter(is_named).collect();
    if output::is_document(session.format()) {
        return match (names.as_slice(), found.as_slice()) {
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
    output::print(&table(session, &found).render(0))
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

fn volume_table(session: &Session, volumes: &[&Value]) -> Table {
    let mut header =
        vec!["NAME", "CAPACITY", "ACCESS MODES", "RECLAIM POLICY", "STATUS", "CLAIM", "STORAGECLASS", "AGE"];
    if session.is_wide() {
        header.push("VOLUMEMODE");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for volume in volumes {
        let mut cells = vec![
            name(volume).to_owned(),
            capacity(volume),
            access_modes(volume.pointer("/spec/accessModes")),
            reclaim_policy(volume),
            status(volume).to_owned(),
            claim_of(volume),
            class(volume),
            age(volume, session.now),
        ];
        if session.is_wide() {
            cells.push(volume_mode(volume));
        }
        table.row(cells);
    }
    table
}

fn claim_table(session: &Session, claims: &[&Value]) -> Table {
    let mut header = vec!["NAME", "STATUS", "VOLUME", "CAPACITY", "ACCESS MODES", "STORAGECLASS", "AGE"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.push("VOLUMEMODE");
    }
    header.push("REASON");
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for claim in claims {
        let mut cells = vec![
            name(claim).to_owned(),
            status(claim).to_owned(),
            volume_of(claim),
            bound_capacity(claim),
            access_modes(claim.pointer("/status/accessModes")),
            class(claim),
            age(claim, session.now),
        ];
        if session.global.all_namespaces {
            cells.insert(0, namespace(claim).to_owned());
        }
        if session.is_wide() {
            cells.push(volume_mode(claim));
        }
        cells.push(reason(claim));
        table.row(cells);
    }
    table
}
