//! `keelson delete`.

use std::future::Future;
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::DeleteManifestRequest;
use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item};

use super::delete_volume_object::{check_claim, check_volume, holder_of_deleted, wait_until_released};
use super::get_volume_objects::without_namespace;
use super::manifests;
use super::manifests::ObjectKind;
use super::volume_objects::bare_name_of;
use crate::args::{DeleteArgs, DeleteWhat};
use crate::error::CliError;
use crate::output::{self, Colour};
use crate::pods::{self, PodEntry, Scope, bare_name};
use crate::session::Session;

/// After this time a notice says what is being waited for.
const NOTICE_DELAY: Duration = Duration::from_secs(3);
/// How long to wait for pod-sync to come back: init restarts it.
const POD_SYNC_RESTART_TIMEOUT: Duration = Duration::from_secs(30);

/// An object to delete.
struct DeleteTarget {
    kind: ObjectKind,
    scope: Scope,
    name: String,
}

/// An object whose deletion has begun.
struct DeletedObject {
    /// `pod/web-edge`.
    label: String,
    /// Empty for an object that is gone at once.
    uid: String,
}

/// Deletes the named objects, or those in the files.
pub(crate) async fn run(session: &Session, args: &DeleteArgs) -> Result<(), CliError> {
    let mut targets = delete_targets(session, args)?;
    // Of several files, too: claims after the pods that use them, and PersistentVolumes after their claims.
    targets.sort_by_key(|target| target.kind);
    // Without pod-sync short names cannot be resolved, but a manifest can still be deleted.
    let known = match pods::list(&session.agent).await {
        Ok(pods) => pods,
        Err(CliError::ServiceNotRunning { .. } | CliError::ServiceTimeout { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let mut deleted_objects: Vec<DeletedObject> = Vec::new();
    let mut errors = Vec::new();
    let (first, last): (Vec<_>, Vec<_>) = targets.iter().partition(|target| !target.kind.is_volume_object());
    for object in first {
        let deleted = if object.kind == ObjectKind::Pod {
            delete_pod(session, &known, object).await
        } else {
            delete_other(session, &known, &deleted_objects, object).await
        };
        match deleted {
            Ok(object) => deleted_objects.push(object),
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    let wait = Wait { wanted: args.wait, deadline: args.timeout.map(|timeout| Instant::now() + timeout) };
    wait_for_pods(session, wait, &deleted_objects).await?;
    let deleted: Vec<&str> = deleted_objects.iter().map(|object| object.uid.as_str()).collect();
    for object in last {
        match delete_volume_object(session, object, &deleted).await {
            Ok(()) => {
                let what = released(session, wait, object).await?;
                output::print(&format!("{} {what}\n", object.kind.label(&object.name)))?;
            }
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    all_or_some(session, errors, targets.len())
}

/// Whether, and until when, to wait for the end of what is deleted.
#[derive(Clone, Copy)]
struct Wait {
    wanted: bool,
    deadline: Option<Instant>,
}

/// Waits until the deleted pods are gone, and prints each deleted object.
async fn wait_for_pods(
    session: &Session,
    wait: Wait,
    deleted_objects: &[DeletedObject],
) -> Result<(), CliError> {
    for object in deleted_objects {
        let at_once = object.uid.is_empty();
        if wait.wanted && !at_once {
            wait_for_pod(session, object, wait.deadline).await?;
        }
        let what = if wait.wanted || at_once { "deleted" } else { "is being deleted" };
        output::print(&format!("{} {what}\n", object.label))?;
    }
    Ok(())
}

/// Returns a single error unchanged; prints several errors and returns their count.
pub(crate) fn all_or_some(
    session: &Session,
    mut errors: Vec<CliError>,
    total: usize,
) -> Result<(), CliError> {
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.swap_remove(0)),
        failed => {
            let colour = Colour::for_stderr(session.global.no_color);
            for error in &errors {
                output::print_error(error, colour);
            }
            Err(CliError::SomeFailed { failed, total })
        }
    }
}

fn delete_targets(session: &Session, args: &DeleteArgs) -> Result<Vec<DeleteTarget>, CliError> {
    match &args.what {
        Some(_) if !args.files.is_empty() => Err(CliError::Usage {
            message: "objects are named both on the command line and with -f".into(),
            hint: "use one of the two".into(),
        }),
        Some(DeleteWhat::Config) => Err(CliError::only_with_etcd("delete config")),
        Some(DeleteWhat::Pod { names }) => Ok(named(ObjectKind::Pod, &session.scope(), names)),
        Some(DeleteWhat::PersistentVolumeClaim { .. }) if session.global.all_namespaces => {
            Err(CliError::Usage {
                message: "`keelson delete persistentvolumeclaim` takes no -A".into(),
                hint: "name the namespace with -n".into(),
            })
        }
        Some(DeleteWhat::PersistentVolumeClaim { names }) => {
            Ok(named(ObjectKind::PersistentVolumeClaim, &session.scope(), names))
        }
        Some(DeleteWhat::PersistentVolume { names }) => {
            without_namespace(session, "delete persistentvolume")?;
            Ok(named(ObjectKind::PersistentVolume, &Scope { namespace: None }, names))
        }
        None if args.files.is_empty() => Err(CliError::Usage {
            message: "the command names nothing to delete".into(),
            hint: "`keelson delete pod NAME` or `keelson delete -f FILE`".into(),
        }),
        None => {
            let mut targets = Vec::new();
            for path in manifests::paths(&args.files)? {
                for object in manifests::objects(&manifests::read(&path)?)? {
                    let scope = Scope { namespace: Some(object.namespace) };
                    targets.push(DeleteTarget { kind: object.kind, scope, name: object.name });
                }
            }
            Ok(targets)
        }
    }
}

fn named(kind: ObjectKind, scope: &Scope, names: &[String]) -> Vec<DeleteTarget> {
    let target = |name: &String| {
        let name = bare_name_of(kind, name).to_owned();
        DeleteTarget { kind, scope: scope.clone(), name }
    };
    names.iter().map(target).collect()
}

async fn delete_pod(
    session: &Session,
    known: &[PodEntry],
    target: &DeleteTarget,
) -> Result<DeletedObject, CliError> {
    let found = match pods::find(known, &target.scope, &target.name) {
        Ok(entry) => Some(&entry.document),
        // pod-config may still have a pod that pod-sync does not know.
        Err(CliError::NotFound { .. }) if target.scope.namespace.is_some() => None,
        Err(error) => return Err(error),
    };
    let (namespace, name) = match found {
        Some(pod) => (pod.namespace.clone(), pod.name.clone()),
        None => (target.scope.namespace.clone().unwrap_or_default(), bare_name(&target.name).to_owned()),
    };
    let label = target.kind.label(&name);
    let uid = delete_manifest(session, ObjectKind::Pod, namespace, name).await?;
    Ok(DeletedObject { label, uid: found.map_or(uid, |pod| pod.uid.clone()) })
}

/// Deletes a Secret or ConfigMap. A pod-config of an older release deletes by name alone, pods first; there, a pod of that name
/// must not exist.
async fn delete_other(
    session: &Session,
    known: &[PodEntry],
    deleted_objects: &[DeletedObject],
    target: &DeleteTarget,
) -> Result<DeletedObject, CliError> {
    let label = target.kind.label(&target.name);
    if let Ok(pod) = pods::find(known, &target.scope, &target.name)
        && !deleted_objects.iter().any(|l| l.uid == pod.document.uid)
        && !session.agent.deletes_by_kind().await?
    {
        return Err(CliError::Failed {
            message: format!(
                "{label} has the name of the pod {}, which this agent, of an older release, would delete first",
                pod.document.name
            ),
            hint: Some("delete the pod first, or restart pod-config with this release".into()),
        });
    }
    let namespace = target.scope.namespace.clone().unwrap_or_default();
    delete_manifest(session, target.kind, namespace, target.name.clone()).await?;
    Ok(DeletedObject { label, uid: String::new() })
}

/// Deletes a claim that no pod uses, or a PersistentVolume that no claim has. The pods with the UIDs of `deleted` are deleted by the
/// same command.
async fn delete_volume_object(
    session: &Session,
    target: &DeleteTarget,
    deleted: &[&str],
) -> Result<(), CliError> {
    let namespace = target.scope.namespace.clone().unwrap_or_default();
    if target.kind == ObjectKind::PersistentVolume {
        check_volume(session, &target.name).await?;
    } else {
        check_claim(session, &namespace, &target.name, deleted).await?;
    }
    delete_manifest(session, target.kind, namespace, target.name.clone()).await?;
    Ok(())
}

async fn delete_manifest(
    session: &Session,
    kind: ObjectKind,
    namespace: String,
    name: String,
) -> Result<String, CliError> {
    let request = DeleteManifestRequest { namespace, name, kind: kind.as_str().to_owned() };
    let answer = session.agent.pod_config().delete_manifest(session.agent.request(request)).await;
    Ok(answer.map_err(|s| session.agent.call_error(ServiceName::PodConfig, s))?.into_inner().uid)
}

/// Waits for a deleted claim whose volume is still mounted. Returns what has become of the object, for people.
async fn released(session: &Session, wait: Wait, object: &DeleteTarget) -> Result<&'static str, CliError> {
    if object.kind != ObjectKind::PersistentVolumeClaim {
        return Ok("deleted");
    }
    let (namespace, name) = (object.scope.namespace.as_deref().unwrap_or_default(), &object.name);
    let Some(holder) = holder_of_deleted(session, namespace, name).await? else { return Ok("deleted") };
    if !wait.wanted {
        return Ok("is being deleted");
    }
    let label = object.kind.label(name);
    let notice = format!("{label} is held by {holder}; `keelson get pvc -w` shows when it is gone.");
    let timed_out = CliError::TimedOut {
        message: format!("{label} is not gone yet; it is held by {holder}"),
        hint: "`keelson get volumes` shows what is mounted".to_owned(),
    };
    with_deadline(
        wait.deadline,
        with_notice(notice, wait_until_released(session, namespace, name)),
        timed_out,
    )
    .await
    .map(|()| "deleted")
}

/// Waits until pod-sync no longer knows the pod.
async fn wait_for_pod(
    session: &Session,
    pod: &DeletedObject,
    deadline: Option<Instant>,
) -> Result<(), CliError> {
    let label = &pod.label;
    let notice = format!("{label} is terminating; `keelson explain {label}` shows what it waits for.");
    let timed_out = CliError::TimedOut {
        message: format!("{label} is not gone yet; it is still terminating"),
        hint: format!("`keelson explain {label}` shows what it waits for"),
    };
    with_deadline(deadline, with_notice(notice, watch_through_restarts(session, &pod.uid)), timed_out).await
}

/// Waits for `end`, at most until the deadline.
async fn with_deadline(
    deadline: Option<Instant>,
    end: impl Future<Output = Result<(), CliError>>,
    timed_out: CliError,
) -> Result<(), CliError> {
    let Some(deadline) = deadline else { return end.await };
    let left = deadline.saturating_duration_since(Instant::now());
    tokio::time::timeout(left, end).await.unwrap_or(Err(timed_out))
}

/// Waits for `end`, and says what it waits for if that takes long.
async fn with_notice<T>(text: String, end: impl Future<Output = T>) -> T {
    let notice = async {
        tokio::time::sleep(NOTICE_DELAY).await;
        output::notice(&text);
        std::future::pending().await
    };
    first(end, notice).await
}

/// The output of the future that completes first.
async fn first<T>(a: impl Future<Output = T>, b: impl Future<Output = T>) -> T {
    let (a, b) = (std::pin::pin!(a), std::pin::pin!(b));
    futures_util::future::select(a, b).await.factor_first().0
}

async fn watch_through_restarts(session: &Session, uid: &str) -> Result<(), CliError> {
    let mut last_answer = Instant::now();
    loop {
        let started_at = Instant::now();
        match watch(session, uid).await {
            Ok(()) => return Ok(()),
            Err((answered, status)) => {
                if answered {
                    last_answer = Instant::now();
                } else if started_at.duration_since(last_answer) > POD_SYNC_RESTART_TIMEOUT {
                    return Err(session.agent.call_error(ServiceName::PodSync, status));
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Follows one stream until the pod is gone. An error says whether the stream had sent anything before.
async fn watch(session: &Session, uid: &str) -> Result<(), (bool, tonic::Status)> {
    let mut answered = false;
    let mut present = false;
    let request = session.agent.request(WatchPodsRequest::default());
    let mut stream = session.agent.pod_sync().watch_pods(request).await.map_err(|s| (false, s))?.into_inner();
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                answered = true;
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
            Ok(None) => return Err((answered, tonic::Status::unavailable("pod-sync ended the stream"))),
            Err(status) => return Err((answered, status)),
        }
    }
}
