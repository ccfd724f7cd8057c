//! `keelson delete --etcd`.

use std::time::{Duration, Instant};

use keelson_etcd::{Expect, NodeKeys, Operation, Written};

use super::{Fleet, Nodes, failure, objects};
use crate::args::{DeleteArgs, DeleteWhat};
use crate::cmd::manifests::{self, NamedObject, ObjectKind};
use crate::cmd::{Session, delete};
use crate::error::Failure;
use crate::output;
use crate::pods::bare_name;

/// Between two looks whether a pod is gone.
const LOOK: Duration = Duration::from_millis(200);

/// Removes what is named from the keys of its node, and waits until the node has no pod of it any more.
pub(crate) async fn run(session: &Session, fleet: &Fleet, args: &DeleteArgs) -> Result<(), Failure> {
    let wanted = wanted(session, args)?;
    let nodes = fleet.chosen().await?;
    let (mut leaving, mut failures) = (Vec::new(), Vec::new());
    for object in &wanted {
        match remove(fleet, &nodes, object).await {
            Ok(node) => leaving.push((object, node)),
            Err(failure) if failure.is_unreachable() => return Err(failure),
            Err(failure) => failures.push(failure),
        }
    }
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    for (object, node) in leaving {
        let label = object.kind.label(&object.name);
        let what = if object.kind != ObjectKind::Pod {
            "deleted"
        } else if !nodes.is_alive(&node) {
            output::notice(&format!("The node {node} is away; {label} ends when it is back."));
            "is being deleted"
        } else if args.wait {
            until_gone(fleet, object, &node, &label, deadline).await?;
            "deleted"
        } else {
            "is being deleted"
        };
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

/// Removes the key, and says of which node it was.
async fn remove(fleet: &Fleet, nodes: &Nodes, object: &NamedObject) -> Result<String, Failure> {
    let label = object.kind.label(&object.name);
    let mut found = Vec::new();
    for node in nodes.names() {
        let key = objects::key(&node, object.kind, &object.namespace, &object.name);
        if let Some(entry) = fleet.etcd.get(&key).await.map_err(failure)? {
            found.push((node, entry));
        }
    }
    let (node, entry) = match found.as_slice() {
        [] => {
            let place =
                fleet.node.as_ref().map_or_else(|| "on any node".to_owned(), |node| format!("on {node}"));
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
    let expected = [(entry.key.clone(), Expect::Revision(entry.mod_revision))];
    let operation = Operation::Delete { key: entry.key.clone() };
    match fleet.etcd.write(&expected, &[operation]).await.map_err(failure)? {
        Written::Done(_) => Ok(node.clone()),
        Written::Conflict(_) => Err(Failure::Answer {
            message: format!("{label} on {node} was changed while it was to be deleted"),
            hint: Some("look at it, then delete it again".into()),
        }),
    }
}

/// Waits until the node tells of no such pod any more.
async fn until_gone(
    fleet: &Fleet,
    object: &NamedObject,
    node: &str,
    label: &str,
    deadline: Option<Instant>,
) -> Result<(), Failure> {
    let status = NodeKeys::new(node).pod_status(&object.namespace, &object.name);
    loop {
        if fleet.etcd.get(&status).await.map_err(failure)?.is_none() {
            return Ok(());
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Failure::TimedOut {
                message: format!("{label} is not gone from {node} yet; it goes on ending"),
                hint: format!("`keelson explain {label}` on the node says what it waits for"),
            });
        }
        tokio::time::sleep(LOOK).await;
    }
}
