//! `keelson delete --etcd`.

use std::time::{Duration, Instant};

use keelson_etcd::{Expect, NodeKeys, Operation, Written};
use serde_json::Value;

use super::{Fleet, Nodes, failure, objects};
use crate::args::{DeleteArgs, DeleteWhat};
use crate::cmd::manifests::{self, NamedObject, ObjectKind};
use crate::cmd::{Session, delete};
use crate::error::Failure;
use crate::output;
use crate::pods::bare_name;

/// Between two looks whether a pod is gone.
const LOOK: Duration = Duration::from_millis(200);
/// Between two looks whether its node lives.
const LOOK_FOR_NODE: Duration = Duration::from_secs(1);
/// After this long a person is told that and why nothing seems to happen.
const PATIENCE: Duration = Duration::from_secs(3);

/// An object that is on its way out.
struct Leaving<'a> {
    object: &'a NamedObject,
    node: String,
    /// Of the pod that the node has told, if it has.
    uid: Option<String>,
}

/// Removes what is named from the keys of its node, and waits until the node has no pod of it any more.
pub(crate) async fn run(session: &Session, fleet: &Fleet, args: &DeleteArgs) -> Result<(), Failure> {
    let wanted = wanted(session, args)?;
    let nodes = fleet.chosen().await?;
    let (mut leaving, mut failures) = (Vec::new(), Vec::new());
    for object in &wanted {
        match remove(fleet, &nodes, object).await {
            Ok(object) => leaving.push(object),
            Err(failure) if failure.is_unreachable() => return Err(failure),
            Err(failure) => failures.push(failure),
        }
    }
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    for pod in leaving {
        let Leaving { object, node, .. } = &pod;
        let label = object.kind.label(&object.name);
        let is_pod = object.kind == ObjectKind::Pod;
        let mut is_alive = nodes.is_alive(node);
        let mut is_gone = !is_pod;
        if is_pod && is_alive && args.wait {
            is_gone = until_gone(fleet, &pod, &label, deadline).await?;
            is_alive = is_gone;
        }
        if is_pod && !is_alive {
            output::notice(&format!("The node {node} is away; {label} ends when it is back."));
        }
        let what = if is_gone { "deleted" } else { "is being deleted" };
        output::print(&format!("{label} {what} on {node}\n"))?;
    }
    delete::all_or_some(session, failures, wanted.len())
}

fn wanted(session: &Session, args: &DeleteArgs) -> Result<Vec<NamedObject>, Failure> {
    let usage = |message: &str, hint: &str| Failure::Usage { message: message.into(), hint: hint.into() };
    match &args.what {
        Some(_) if !args.files.is_empty() => {
            Err(usage("pods are named both on the command line and by -f", "one of the two"))
        }
        Some(_) if session.global.all_namespaces => {
            Err(usage("a pod to be deleted is in one namespace", "-n instead of -A"))
        }
        // Carried out before any object is looked for.
        Some(DeleteWhat::Config) => Ok(Vec::new()),
        Some(DeleteWhat::Pod { names }) => {
            let namespace = &session.global.namespace;
            let pod = |name: &String| NamedObject {
                kind: ObjectKind::Pod,
                namespace: namespace.clone(),
                name: bare_name(name).to_owned(),
                node: String::new(),
            };
            Ok(names.iter().map(pod).collect())
        }
        None if args.files.is_empty() => {
            Err(usage("nothing to delete is named", "`keelson delete pod NAME` or `keelson delete -f FILE`"))
        }
        None => {
            let mut wanted = Vec::new();
            for path in manifests::paths(&args.files)? {
                wanted.extend(manifests::objects(&manifests::read(&path)?)?);
            }
            Ok(wanted)
        }
    }
}

/// Removes the key of the node that is said, or of the only one that has it.
async fn remove<'a>(fleet: &Fleet, nodes: &Nodes, object: &'a NamedObject) -> Result<Leaving<'a>, Failure> {
    let label = object.kind.label(&object.name);
    let said = fleet.said(&object.node)?;
    let mut found = Vec::new();
    for node in said.map_or_else(|| nodes.names(), |node| [node.to_owned()].into()) {
        let key = objects::key(&node, object.kind, &object.namespace, &object.name);
        if let Some(entry) = fleet.etcd.get(&key).await.map_err(failure)? {
            found.push((node, entry));
        }
    }
    let (node, entry) = match found.as_slice() {
        [] => {
            let place = said.map_or_else(|| "on any node".to_owned(), |node| format!("on {node}"));
            return Err(Failure::NotFound {
                what: format!("there is no {label} in namespace {} {place}", object.namespace),
                hint: "`keelson get pods -A --etcd …` lists all pods".into(),
            });
        }
        [one] => one,
        several => {
            let list: Vec<&str> = several.iter().map(|(node, _)| node.as_str()).collect();
            return Err(Failure::Usage {
                message: format!("{label} is on several nodes: {}", list.join(", ")),
                hint: "--node says which is meant".into(),
            });
        }
    };
    let uid =
        if object.kind == ObjectKind::Pod { told_uid(fleet, object, node).await?.flatten() } else { None };
    let expected = [(entry.key.clone(), Expect::Revision(entry.mod_revision))];
    let operation = Operation::Delete { key: entry.key.clone() };
    match fleet.etcd.write(&expected, &[operation]).await.map_err(failure)? {
        Written::Done(_) => Ok(Leaving { object, node: node.clone(), uid }),
        Written::Conflict(_) => Err(Failure::Answer {
            message: format!("{label} on {node} was changed while it was to be deleted"),
            hint: Some("look at it, then delete it again".into()),
        }),
    }
}

/// What a node tells of a pod of the name: its UID, as far as there is one. `None` while it tells of no pod.
async fn told_uid(
    fleet: &Fleet,
    object: &NamedObject,
    node: &str,
) -> Result<Option<Option<String>>, Failure> {
    let key = NodeKeys::new(node).pod_status(&object.namespace, &object.name);
    let told = fleet.etcd.get(&key).await.map_err(failure)?;
    let uid = |pod: Value| pod.pointer("/metadata/uid").and_then(Value::as_str).map(ToOwned::to_owned);
    Ok(told.map(|entry| objects::read(&entry).and_then(uid)))
}

/// Waits until the node tells of the pod no more; one of the name that was applied meanwhile is another pod. False when the
/// node has gone away before.
async fn until_gone(
    fleet: &Fleet,
    pod: &Leaving<'_>,
    label: &str,
    deadline: Option<Instant>,
) -> Result<bool, Failure> {
    let Leaving { object, node, .. } = pod;
    let lease = NodeKeys::new(node).lease();
    let mut uid = pod.uid.clone();
    let begun = Instant::now();
    let (mut look_for_node, mut is_told) = (begun + LOOK_FOR_NODE, false);
    loop {
        match told_uid(fleet, object, node).await? {
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
            return Err(Failure::TimedOut {
                message: format!("{label} is not gone from {node} yet; it goes on ending"),
                hint: format!("`keelson explain {label}` on the node says what it waits for"),
            });
        }
        if now >= look_for_node {
            if fleet.etcd.get(&lease).await.map_err(failure)?.is_none() {
                return Ok(false);
            }
            look_for_node = now + LOOK_FOR_NODE;
        }
        if !is_told && now.duration_since(begun) >= PATIENCE {
            output::notice(&format!(
                "{label} is ending on {node}; `keelson explain {label}` there says what it waits for."
            ));
            is_told = true;
        }
        tokio::time::sleep(LOOK).await;
    }
}
