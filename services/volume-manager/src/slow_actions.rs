//! Reports actions that take long while they run.

use std::time::Duration;

use keelson_service_kit::{EventRing, ObjectRef};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume};
use keelson_volume_manager_core::ownership;
use keelson_volume_manager_core::plan::Action;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::walks::{FsGroupWalks, Walk};

/// An action that takes longer than this is reported.
const SLOW_AFTER: Duration = Duration::from_secs(2);

/// Watches the running actions of a pod.
pub(crate) struct SlowActionWatch<'a> {
    pub(crate) desire: &'a PodDesire,
    /// The action that is running now.
    pub(crate) current: &'a watch::Receiver<Option<Action>>,
    pub(crate) walks: &'a FsGroupWalks,
    pub(crate) events: &'a EventRing,
}

/// What was reported last.
#[derive(Default)]
struct LastReport {
    action: Option<Action>,
    /// When the walk started, and how many events have been recorded about it.
    walk: Option<(Instant, u64)>,
}

impl SlowActionWatch<'_> {
    /// Waits for the actions. Calls `report` when an action becomes slow and when there is something new to report.
    pub(crate) async fn watch<T>(
        &self,
        mut work: JoinHandle<T>,
        mut report: impl FnMut(String),
    ) -> Result<T, JoinError> {
        let mut last = LastReport::default();
        loop {
            // Cancel-safe: a join handle yields its result once, to the poll that completes it.
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(SLOW_AFTER) => {}
            }
            if let Some(text) = self.next_report(&mut last) {
                let pod = &self.desire.header.pod;
                tracing::warn!(uid = pod.uid, pod = pod.name, namespace = pod.namespace, "{text}");
                report(text);
            }
        }
    }

    /// The next message, if anything has changed since `last`. A slow fsGroup walk is recorded as an event of the pod,
    /// too (volumes.md §3.18).
    fn next_report(&self, last: &mut LastReport) -> Option<String> {
        let action = self.current.borrow().clone()?;
        let walk = self.walks.current();
        let events_due =
            walk.as_ref().map(|walk| (walk.started, ownership::events_due(walk.started.elapsed())));
        if last.action.as_ref() == Some(&action) && (events_due.is_none() || last.walk == events_due) {
            return None;
        }
        if let (Some(walk), Some((_, number))) = (&walk, events_due)
            && number > 0
        {
            let (pod, path) = (&self.desire.header.pod, walk.path.to_string_lossy());
            let text = ownership::event_message(&path, &pod.uid, number, walk.files());
            let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
            self.events.warning(object, "VolumePermissionChangeInProgress", text);
        }
        let text = message(self.desire, &action, walk.as_ref());
        *last = LastReport { action: Some(action), walk: events_due };
        Some(text)
    }
}

/// The message about a slow action and its fsGroup walk, if one is running.
fn message(desire: &PodDesire, action: &Action, walk: Option<&Walk>) -> String {
    let seconds = SLOW_AFTER.as_secs();
    match action {
        Action::CreateFolders => format!("creating the pod's folders takes longer than {seconds} s"),
        Action::SetUp(i) | Action::Refresh(i) => {
            let Some(Volume { name, source, .. }) = desire.volumes.get(*i) else { return String::new() };
            if let Some(walk) = walk {
                let seconds = walk.started.elapsed().max(SLOW_AFTER).as_secs();
                return format!(
                    "changing the ownership of volume \"{name}\" to fsGroup {} takes longer than {seconds} s; {} files are done",
                    walk.gid,
                    walk.files()
                );
            }
            let cause = match source {
                Source::HostPath { path, .. } => format!(": the file system at {path} does not answer"),
                _ => String::new(),
            };
            format!("setting up volume \"{name}\" takes longer than {seconds} s{cause}")
        }
        Action::ReleasePlugins => String::new(),
        Action::RemoveSubpaths => format!("unmounting subPaths takes longer than {seconds} s"),
        Action::TearDown(key) => format!("removing volume \"{}\" takes longer than {seconds} s", key.name),
        Action::RemoveFolder => format!("removing the pod's folder takes longer than {seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;
    use keelson_volume_manager_core::desire::{DesireHeader, Medium, PodRef, VolumeUse, Want};
    use tokio::sync::oneshot;

    use super::*;

    fn desire() -> PodDesire {
        let pod = PodRef { uid: "u-1".into(), namespace: "default".into(), name: "web".into() };
        let source = Source::EmptyDir { medium: Medium::Disk, size_limit: None };
        let volumes = vec![Volume { name: "data".into(), source, used: VolumeUse::default() }];
        PodDesire { volumes, ..DesireHeader { pod, revision: 0, want: Want::Run }.into() }
    }

    async fn recorded_events(events: &EventRing) -> Vec<(String, u32)> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let recorded = events.list_events(request).await.unwrap().into_inner().events;
        let is_of_the_pod = |event: &keelson_proto::keelson::events::v1::Event| {
            (event.kind.as_str(), event.uid.as_str(), event.r#type.as_str()) == ("Pod", "u-1", "Warning")
                && event.reason == "VolumePermissionChangeInProgress"
        };
        assert!(recorded.iter().all(is_of_the_pod), "{recorded:#?}");
        recorded.into_iter().map(|event| (event.message, event.count)).collect()
    }

    /// The messages about an action that takes `seconds`.
    async fn reports(seconds: u64, walks: &FsGroupWalks, events: &EventRing, action: Action) -> Vec<String> {
        let (_sender, current) = watch::channel(Some(action));
        let (end, ended) = oneshot::channel::<()>();
        let work = tokio::spawn(ended);
        let desire = desire();
        let slow = SlowActionWatch { desire: &desire, current: &current, walks, events };
        let mut messages = Vec::new();
        let after = async {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            end.send(()).unwrap();
        };
        let (done, ()) = tokio::join!(slow.watch(work, |text| messages.push(text)), after);
        done.unwrap().unwrap();
        messages
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_fsgroup_walk_is_reported_and_gets_an_event_after_30_s_and_each_minute() {
        let (walks, events) = (FsGroupWalks::default(), EventRing::default());
        let path = "/r/pods/u-1/volumes/kubernetes.io~empty-dir/data";
        let recorder = walks.start(Path::new(path), 4711);
        recorder.count_file();
        recorder.count_file();
        let messages = reports(29, &walks, &events, Action::SetUp(0)).await;
        let text = |seconds| {
            format!(
                "changing the ownership of volume \"data\" to fsGroup 4711 takes longer than {seconds} s; 2 files are done"
            )
        };
        assert_eq!(messages, [text(2)]);
        assert_eq!(recorded_events(&events).await, []);

        // The walk started with the test.
        let messages = reports(130, &walks, &events, Action::SetUp(0)).await;
        assert_eq!(messages, [text(31), text(91), text(151)]);
        let shown = "Setting volume ownership for u-1/volumes/kubernetes.io~empty-dir/data";
        let slow = format!("{shown} is taking longer than expected");
        assert_eq!(recorded_events(&events).await, [(slow, 1), (format!("{shown}, processed 2 files."), 2)]);
        recorder.end(true);

        let messages = reports(5, &walks, &events, Action::SetUp(0)).await;
        assert_eq!(messages, ["setting up volume \"data\" takes longer than 2 s"]);
        assert_eq!(recorded_events(&events).await.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_action_is_reported_once_and_a_fast_one_not_at_all() {
        let (walks, events) = (FsGroupWalks::default(), EventRing::default());
        assert!(reports(1, &walks, &events, Action::CreateFolders).await.is_empty());
        let messages = reports(200, &walks, &events, Action::CreateFolders).await;
        assert_eq!(messages, ["creating the pod's folders takes longer than 2 s"]);
        assert!(recorded_events(&events).await.is_empty());
    }
}
