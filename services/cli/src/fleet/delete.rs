//! `keelson delete --etcd`.

use std::time::{Duration, Instant};

use keelson_etcd::{Entry, Expect, NodeKeys, Operation, Written};
use serde_json::Value;

use super::delete_check::check_unused;
use super::etcd_error::from_etcd_error;
use super::nodes::{Fleet, Nodes};
use super::objects;
use crate::args::{DeleteArgs, DeleteWhat};
use crate::cmd::delete;
use crate::cmd::get_volume_objects::without_namespace;
use crate::cmd::manifests::{self, NamedObject, ObjectKind};
use crate::cmd::volume_objects::bare_name_of;
use crate::error::CliError;
use crate::output;
use crate::session::Session;

/// The interval of checks whether a pod is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The interval of checks whether its node has a lease.
const NODE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// After this time a notice says what is being waited for.
const NOTICE_DELAY: Duration = Duration::from_secs(3);

/// An object whose key has been deleted.
struct DeletedObject<'a> {
    object: &'a NamedObject,
    node: String,
    /// The UID that the node has reported, if any.
    uid: Option<String>,
}

/// Deletes the keys of the named objects, and waits until the node no longer reports their pods.
pub(crate) async fn run(session: &Session, fleet: &Fleet, args: &DeleteArgs) -> Result<(), CliError> {
    let mut targets = delete_targets(session, args)?;
    // Of several files, too: claims after the pods that use them, and PersistentVolumes after their claims.
    targets.sort_by_key(|target| target.kind);
    let nodes = fleet.selected_nodes().await?;
    let (mut deleted_objects, mut errors) = (Vec::new(), Vec::new());
    let (first, last): (Vec<_>, Vec<_>) = targets.iter().partition(|target| !target.kind.is_volume_object());
    for object in first {
        match remove(fleet, &nodes, object, &[]).await {
            Ok(object) => deleted_objects.push(object),
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    wait_for_pods(fleet, &nodes, args, &deleted_objects).await?;
    for object in last {
        match remove(fleet, &nodes, object, &deleted_objects).await {
            Ok(DeletedObject { node, .. }) => {
                output::print(&format!("{} deleted on {node}\n", object.kind.label(&object.name)))?;
            }
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    delete::all_or_some(session, errors, targets.len())
}

/// Waits until the nodes no longer report the deleted pods, and prints each deleted object.
async fn wait_for_pods(
    fleet: &Fleet,
    nodes: &Nodes,
    args: &DeleteArgs,
    deleted_objects: &[DeletedObject<'_>],
) -> Result<(), CliError> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    for pod in deleted_objects {
        let DeletedObject { object, node, .. } = pod;
        let label = object.kind.label(&object.name);
        let is_pod = object.kind == ObjectKind::Pod;
        let mut is_alive = nodes.is_alive(node);
        let mut is_gone = !is_pod;
        if is_pod && is_alive && args.wait {
            is_gone = wait_until_gone(fleet, pod, &label, deadline).await?;
            is_alive = is_gone;
        }
        if is_pod && !is_alive {
            output::notice(&format!("The node {node} is down; {label} ends when the node is back."));
        }
        let what = if is_gone { "deleted" } else { "is being deleted" };
        output::print(&format!("{label} {what} on {node}\n"))?;
    }
    Ok(())
}

fn delete_targets(session: &Session, args: &DeleteArgs) -> Result<Vec<NamedObject>, CliError> {
    let usage = |message: &str, hint: &str| CliError::Usage { message: message.into(), hint: hint.into() };
    match &args.what {
        Some(_) if !args.files.is_empty() => {
            Err(usage("objects are named both on the command line and with -f", "use one of the two"))
        }
        Some(_) if session.global.all_namespaces => {
            Err(usage("`keelson delete` takes no -A", "name the namespace with -n"))
        }
        // The caller handles this before it looks for objects.
        Some(DeleteWhat::Config) => Ok(Vec::new()),
        Some(DeleteWhat::Pod { names }) => Ok(named(ObjectKind::Pod, &session.global.namespace, names)),
        Some(DeleteWhat::PersistentVolumeClaim { names }) => {
            Ok(named(ObjectKind::PersistentVolumeClaim, &session.global.namespace, names))
        }
        Some(DeleteWhat::PersistentVolume { names }) => {
            without_namespace(session, "delete persistentvolume")?;
            Ok(named(ObjectKind::PersistentVolume, "", names))
        }
        None if args.files.is_empty() => Err(usage(
            "the command names nothing to delete",
            "`keelson delete pod NAME` or `keelson delete -f FILE`",
        )),
        None => {
            let mut targets = Vec::new();
            for path in manifests::paths(&args.files)? {
                targets.extend(manifests::objects(&manifests::read(&path)?)?);
            }
            Ok(targets)
        }
    }
}

fn named(kind: ObjectKind, namespace: &str, names: &[String]) -> Vec<NamedObject> {
    let object = |name: &String| NamedObject {
        kind,
        namespace: namespace.to_owned(),
        name: bare_name_of(kind, name).to_owned(),
        node: String::new(),
    };
    names.iter().map(object).collect()
}

/// Deletes the object's key of the requested node, or of the only node that has one. A claim or PersistentVolume must not be in use;
/// pods that are `deleted` do not count.
async fn remove<'a>(
    fleet: &Fleet,
    nodes: &Nodes,
    object: &'a NamedObject,
    deleted: &[DeletedObject<'_>],
) -> Result<DeletedObject<'a>, CliError> {
    let label = object.kind.label(&object.name);
    let (node, entry) = locate(fleet, nodes, object).await?;
    let deleted: Vec<(&str, &str)> = deleted
        .iter()
        .filter(|pod| pod.object.kind == ObjectKind::Pod && pod.node == node)
        .map(|pod| (pod.object.namespace.as_str(), pod.object.name.as_str()))
        .collect();
    check_unused(fleet, &node, object, objects::read(&entry), &deleted).await?;
    let uid = if object.kind == ObjectKind::Pod {
        reported_uid(fleet, object, &node).await?.flatten()
    } else {
        None
    };
    let expected = [(entry.key.clone(), Expect::Revision(entry.mod_revision))];
    let operation = Operation::Delete { key: entry.key };
    match fleet.etcd.write(&expected, &[operation]).await.map_err(from_etcd_error)? {
        Written::Done(_) => Ok(DeletedObject { object, node, uid }),
        Written::Conflict(_) => Err(CliError::Failed {
            message: format!("{label} on {node} was changed during the deletion"),
            hint: Some("check the change, then delete it again".into()),
        }),
    }
}

/// The node and the entry of the object: of the requested node, or of the only node that has it.
async fn locate(fleet: &Fleet, nodes: &Nodes, object: &NamedObject) -> Result<(String, Entry), CliError> {
    let NamedObject { kind, namespace, name, .. } = object;
    let label = kind.label(name);
    let requested = fleet.requested_node(&object.node)?;
    let mut found = Vec::new();
    for node in requested.map_or_else(|| nodes.names(), |node| [node.to_owned()].into()) {
        let key = objects::key(&node, *kind, namespace, name);
        if let Some(entry) = fleet.etcd.get(&key).await.map_err(from_etcd_error)? {
            found.push((node, entry));
        }
    }
    match found.as_slice() {
        [_] => Ok(found.remove(0)),
        [] => {
            let place = requested.map_or_else(|| "on any node".to_owned(), |node| format!("on {node}"));
            let (scope, all) = if kind.is_namespaced() {
                (format!(" in namespace {namespace}"), "-A ")
            } else {
                (String::new(), "")
            };
            let plural = kind.plural();
            Err(CliError::NotFound {
                what: format!("there is no {label}{scope} {place}"),
                hint: format!("`keelson get {plural} {all}--etcd …` lists all {plural}"),
            })
        }
        several => {
            let list: Vec<&str> = several.iter().map(|(node, _)| node.as_str()).collect();
            Err(CliError::Usage {
                message: format!("{label} is on several nodes: {}", list.join(", ")),
                hint: "choose one with --node".into(),
            })
        }
    }
}

/// The UID of the pod of that name that a node reports, if it has one. `None`: the node reports no such pod.
async fn reported_uid(
    fleet: &Fleet,
    object: &NamedObject,
    node: &str,
) -> Result<Option<Option<String>>, CliError> {
    let key = NodeKeys::new(node).pod_status(&object.namespace, &object.name);
    let status = fleet.etcd.get(&key).await.map_err(from_etcd_error)?;
    let uid = |pod: Value| pod.pointer("/metadata/uid").and_then(Value::as_str).map(ToOwned::to_owned);
    Ok(status.map(|entry| objects::read(&entry).and_then(uid)))
}

/// Waits until the node no longer reports the pod; a pod of the same name with another UID does not count. Returns false if
/// the node goes down before.
async fn wait_until_gone(
    fleet: &Fleet,
    pod: &DeletedObject<'_>,
    label: &str,
    deadline: Option<Instant>,
) -> Result<bool, CliError> {
    let DeletedObject { object, node, .. } = pod;
    let lease = NodeKeys::new(node).lease();
    let mut uid = pod.uid.clone();
    let started_at = Instant::now();
    let (mut next_node_check, mut is_noticed) = (started_at + NODE_POLL_INTERVAL, false);
    loop {
        match reported_uid(fleet, object, node).await? {
            None => return Ok(true),
            Some(Some(now)) => {
                if *uid.get_or_insert_with(|| now.clone()) != now {
                    return Ok(true);
                }
            }
            Some(None) => {}
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(CliError::TimedOut {
                message: format!("{label} is not gone from {node} yet; it is still terminating"),
                hint: format!("`keelson explain {label}` on the node shows what it waits for"),
            });
        }
        if now >= next_node_check {
            if fleet.etcd.get(&lease).await.map_err(from_etcd_error)?.is_none() {
                return Ok(false);
            }
            next_node_check = now + NODE_POLL_INTERVAL;
        }
        if !is_noticed && now.duration_since(started_at) >= NOTICE_DELAY {
            output::notice(&format!(
                "{label} is terminating on {node}; `keelson explain {label}` there shows what it waits for."
            ));
            is_noticed = true;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
