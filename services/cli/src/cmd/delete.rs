//! `keelson delete`.

use std::future::Future;
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::DeleteManifestRequest;
use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item};

use super::manifests::ObjectKind;
use super::{Session, manifests};
use crate::args::{DeleteArgs, DeleteWhat};
use crate::error::Failure;
use crate::output::{self, Colour};
use crate::pods::{self, PodEntry, Scope, bare_name};

/// After this long a person is told that and why nothing seems to happen.
const PATIENCE: Duration = Duration::from_secs(3);
/// For this long a pod-sync that is away is waited for: init starts it again.
const PATIENCE_WITHOUT_POD_SYNC: Duration = Duration::from_secs(30);

/// An object that is to go.
struct Wanted {
    kind: ObjectKind,
    scope: Scope,
    name: String,
}

/// An object that is on its way out.
struct Leaving {
    /// `pod/web-edge`.
    label: String,
    /// Empty for what is gone at once.
    uid: String,
}

/// Removes the pods that are named or what stands in the files.
pub(crate) async fn run(session: &Session, args: &DeleteArgs) -> Result<(), Failure> {
    let wanted = wanted(session, args)?;
    // Without pod-sync names cannot be completed, but a manifest can still be withdrawn.
    let known = match pods::list(&session.agent).await {
        Ok(pods) => pods,
        Err(Failure::ServiceAway { .. } | Failure::Silent { .. }) => Vec::new(),
        Err(failure) => return Err(failure),
    };
    let mut leaving: Vec<Leaving> = Vec::new();
    let mut failures = Vec::new();
    for object in &wanted {
        let deleted = match object.kind {
            ObjectKind::Pod => delete_pod(session, &known, object).await,
            ObjectKind::Secret | ObjectKind::ConfigMap => {
                delete_other(session, &known, &leaving, object).await
            }
        };
        match deleted {
            Ok(object) => leaving.push(object),
            Err(failure) if failure.is_unreachable() => return Err(failure),
            Err(failure) => failures.push(failure),
        }
    }
    let deadline = args.timeout.map(|t| Instant::now() + t);
    for object in &leaving {
        let at_once = object.uid.is_empty();
        if args.wait && !at_once {
            wait(session, object, deadline).await?;
        }
        let what = if args.wait || at_once { "deleted" } else { "is being deleted" };
        output::print(&format!("{} {what}\n", object.label))?;
    }
    all_or_some(session, failures, wanted.len())
}

/// One failure as it is; of several, each is told and counted.
pub(crate) fn all_or_some(
    session: &Session,
    mut failures: Vec<Failure>,
    total: usize,
) -> Result<(), Failure> {
    match failures.len() {
        0 => Ok(()),
        1 => Err(failures.swap_remove(0)),
        failed => {
            let colour = Colour::for_stderr(session.global.no_color);
            for failure in &failures {
                failure.print(colour);
            }
            Err(Failure::Some { failed, total })
        }
    }
}

fn wanted(session: &Session, args: &DeleteArgs) -> Result<Vec<Wanted>, Failure> {
    match &args.what {
        Some(_) if !args.files.is_empty() => Err(Failure::Usage {
            message: "pods are named both on the command line and by -f".into(),
            hint: "one of the two".into(),
        }),
        Some(DeleteWhat::Config) => Err(super::only_with_etcd("delete config")),
        Some(DeleteWhat::Pod { names }) => {
            let pod =
                |name: &String| Wanted { kind: ObjectKind::Pod, scope: session.scope(), name: name.clone() };
            Ok(names.iter().map(pod).collect())
        }
        None if args.files.is_empty() => Err(Failure::Usage {
            message: "nothing to delete is named".into(),
            hint: "`keelson delete pod NAME` or `keelson delete -f FILE`".into(),
        }),
        None => {
            let mut wanted = Vec::new();
            for path in manifests::paths(&args.files)? {
                for object in manifests::objects(&manifests::read(&path)?)? {
                    let scope = Scope { namespace: Some(object.namespace) };
                    wanted.push(Wanted { kind: object.kind, scope, name: object.name });
                }
            }
            Ok(wanted)
        }
    }
}

async fn delete_pod(session: &Session, known: &[PodEntry], wanted: &Wanted) -> Result<Leaving, Failure> {
    let found = match pods::find(known, &wanted.scope, &wanted.name) {
        Ok(entry) => Some(&entry.document),
        // A pod that pod-sync does not know may still be stored.
        Err(Failure::NotFound { .. }) if wanted.scope.namespace.is_some() => None,
        Err(failure) => return Err(failure),
    };
    let (namespace, name) = match found {
        Some(pod) => (pod.namespace.clone(), pod.name.clone()),
        None => (wanted.scope.namespace.clone().unwrap_or_default(), bare_name(&wanted.name).to_owned()),
    };
    let label = wanted.kind.label(&name);
    let uid = withdraw(session, namespace, name).await?;
    Ok(Leaving { label, uid: found.map_or(uid, |pod| pod.uid.clone()) })
}

/// pod-config removes by name, pods before others: a pod of the name that is to stay must not be hit.
async fn delete_other(
    session: &Session,
    known: &[PodEntry],
    leaving: &[Leaving],
    wanted: &Wanted,
) -> Result<Leaving, Failure> {
    let label = wanted.kind.label(&wanted.name);
    if let Ok(pod) = pods::find(known, &wanted.scope, &wanted.name)
        && !leaving.iter().any(|l| l.uid == pod.document.uid)
    {
        return Err(Failure::Answer {
            message: format!("{label} has the name of the pod {}, which would go first", pod.document.name),
            hint: Some("delete the pod before it".into()),
        });
    }
    let namespace = wanted.scope.namespace.clone().unwrap_or_default();
    withdraw(session, namespace, wanted.name.clone()).await?;
    Ok(Leaving { label, uid: String::new() })
}

async fn withdraw(session: &Session, namespace: String, name: String) -> Result<String, Failure> {
    let request = session.agent.request(DeleteManifestRequest { namespace, name });
    let answer = session.agent.pod_config().delete_manifest(request).await;
    Ok(answer.map_err(|s| session.agent.failure(ServiceName::PodConfig, s))?.into_inner().uid)
}

/// Waits until pod-sync knows the pod no more.
async fn wait(session: &Session, pod: &Leaving, deadline: Option<Instant>) -> Result<(), Failure> {
    let gone = until_gone(session, pod);
    let Some(deadline) = deadline else { return gone.await };
    let left = deadline.saturating_duration_since(Instant::now());
    tokio::time::timeout(left, gone).await.unwrap_or_else(|_| {
        Err(Failure::TimedOut {
            message: format!("{} is not gone yet; it goes on ending", pod.label),
            hint: format!("`keelson explain {}` says what it waits for", pod.label),
        })
    })
}

async fn until_gone(session: &Session, pod: &Leaving) -> Result<(), Failure> {
    let tell = async {
        tokio::time::sleep(PATIENCE).await;
        output::notice(&format!(
            "{} is ending; `keelson explain {}` says what it waits for.",
            pod.label, pod.label
        ));
        std::future::pending().await
    };
    first(watch_through_restarts(session, &pod.uid), tell).await
}

/// The outcome of whichever future ends first.
async fn first<T>(a: impl Future<Output = T>, b: impl Future<Output = T>) -> T {
    let (a, b) = (std::pin::pin!(a), std::pin::pin!(b));
    futures_util::future::select(a, b).await.factor_first().0
}

async fn watch_through_restarts(session: &Session, uid: &str) -> Result<(), Failure> {
    let mut last_heard = Instant::now();
    loop {
        let begun = Instant::now();
        match watch(session, uid).await {
            Ok(()) => return Ok(()),
            Err((heard, status)) => {
                if heard {
                    last_heard = Instant::now();
                } else if begun.duration_since(last_heard) > PATIENCE_WITHOUT_POD_SYNC {
                    return Err(session.agent.failure(ServiceName::PodSync, status));
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Follows one stream until the pod is gone. An error says whether anything was heard before.
async fn watch(session: &Session, uid: &str) -> Result<(), (bool, tonic::Status)> {
    let mut heard = false;
    let mut present = false;
    let request = session.agent.request(WatchPodsRequest {});
    let mut stream = session.agent.pod_sync().watch_pods(request).await.map_err(|s| (false, s))?.into_inner();
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                heard = true;
                match message.item {
                    Some(Item::Pod(pod)) if pod.uid == uid => {
                        if pod.finished {
                            return Ok(());
                        }
                        present = true;
                    }
                    Some(Item::GoneUid(gone)) if gone == uid => return Ok(()),
                    Some(Item::Synced(_)) if !present => return Ok(()),
                    _ => {}
                }
            }
            Ok(None) => return Err((heard, tonic::Status::unavailable("pod-sync has ended the stream"))),
            Err(status) => return Err((heard, status)),
        }
    }
}
