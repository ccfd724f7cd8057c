//! What is said of a step of the disk while it takes long.

use std::time::Duration;

use keelson_service_kit::{EventRing, ObjectRef};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume};
use keelson_volume_manager_core::ownership;
use keelson_volume_manager_core::plan::Step;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::walks::{Walk, Walks};

/// A step that takes longer than this is named.
const SLOW: Duration = Duration::from_secs(2);

/// The steps of a pod, seen from outside.
pub(crate) struct Slow<'a> {
    pub(crate) desire: &'a PodDesire,
    /// The step that is carried out.
    pub(crate) at: &'a watch::Receiver<Option<Step>>,
    pub(crate) walks: &'a Walks,
    pub(crate) events: &'a EventRing,
}

/// What was said last.
#[derive(Default)]
struct Told {
    step: Option<Step>,
    /// The walk, by its beginning, and how often it was told of in events.
    walk: Option<(Instant, u64)>,
}

impl Slow<'_> {
    /// Waits for the steps, and hands to `say` what takes long, when it begins to and when there is more to tell.
    pub(crate) async fn watch<T>(
        &self,
        mut work: JoinHandle<T>,
        mut say: impl FnMut(String),
    ) -> Result<T, JoinError> {
        let mut told = Told::default();
        loop {
            // Cancel-safe: the handle of a task gives its result once, to whoever polls it to the end.
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(SLOW) => {}
            }
            if let Some(text) = self.news(&mut told) {
                let pod = &self.desire.pod;
                tracing::warn!(uid = pod.uid, pod = pod.name, namespace = pod.namespace, "{text}");
                say(text);
            }
        }
    }

    /// What there is to say since `told`. A walk that is slow is an event of the pod as well (volumes.md §3.18).
    fn news(&self, told: &mut Told) -> Option<String> {
        let step = self.at.borrow().clone()?;
        let walk = self.walks.present();
        let tellings = walk.as_ref().map(|walk| (walk.begun, ownership::tellings(walk.begun.elapsed())));
        if told.step.as_ref() == Some(&step) && (tellings.is_none() || told.walk == tellings) {
            return None;
        }
        if let (Some(walk), Some((_, telling))) = (&walk, tellings)
            && telling > 0
        {
            let (pod, path) = (&self.desire.pod, walk.path.to_string_lossy());
            let text = ownership::text(&path, &pod.uid, telling, walk.files());
            let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
            self.events.warning(object, "VolumePermissionChangeInProgress", text);
        }
        let text = text(self.desire, &step, walk.as_ref());
        *told = Told { step: Some(step), walk: tellings };
        Some(text)
    }
}

/// What is said of a step that takes long, and of the walk that it is at.
fn text(desire: &PodDesire, step: &Step, walk: Option<&Walk>) -> String {
    let seconds = SLOW.as_secs();
    match step {
        Step::MakeFolders => format!("making the pod's folders takes longer than {seconds} s"),
        Step::SetUp(i) | Step::Refresh(i) => {
            let Some(Volume { name, source }) = desire.volumes.get(*i) else { return String::new() };
            if let Some(walk) = walk {
                let seconds = walk.begun.elapsed().max(SLOW).as_secs();
                return format!(
                    "giving the files of volume \"{name}\" to the pod's group {} takes longer than {seconds} s; {} are done",
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
        Step::RemoveSubpaths => format!("unmounting parts of volumes takes longer than {seconds} s"),
        Step::TearDown(key) => format!("removing volume \"{}\" takes longer than {seconds} s", key.name),
        Step::RemoveFolder => format!("removing the pod's folder takes longer than {seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;
    use keelson_volume_manager_core::desire::{Desire as _, Medium, PodRef, Want};
    use tokio::sync::oneshot;

    use super::*;

    fn desire() -> PodDesire {
        let pod = PodRef { uid: "u-1".into(), namespace: "default".into(), name: "web".into() };
        let source = Source::EmptyDir { medium: Medium::Disk, size_limit: None };
        let volumes = vec![Volume { name: "data".into(), source }];
        PodDesire { want: Want::Run, volumes, ..PodDesire::forget(pod) }
    }

    async fn told(events: &EventRing) -> Vec<(String, u32)> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let told = events.list_events(request).await.unwrap().into_inner().events;
        let of_the_pod = |event: &keelson_proto::keelson::events::v1::Event| {
            (event.kind.as_str(), event.uid.as_str(), event.r#type.as_str()) == ("Pod", "u-1", "Warning")
                && event.reason == "VolumePermissionChangeInProgress"
        };
        assert!(told.iter().all(of_the_pod), "{told:#?}");
        told.into_iter().map(|event| (event.message, event.count)).collect()
    }

    /// What is said of a step that takes so many seconds.
    async fn watched(seconds: u64, walks: &Walks, events: &EventRing, step: Step) -> Vec<String> {
        let (_at, at) = watch::channel(Some(step));
        let (end, ended) = oneshot::channel::<()>();
        let work = tokio::spawn(ended);
        let desire = desire();
        let slow = Slow { desire: &desire, at: &at, walks, events };
        let mut said = Vec::new();
        let after = async {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            end.send(()).unwrap();
        };
        let (done, ()) = tokio::join!(slow.watch(work, |text| said.push(text)), after);
        done.unwrap().unwrap();
        said
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_walk_is_named_at_once_and_an_event_after_thirty_seconds_and_then_each_minute() {
        let (walks, events) = (Walks::default(), EventRing::default());
        let path = "/r/pods/u-1/volumes/kubernetes.io~empty-dir/data";
        let walking = walks.begin(Path::new(path), 4711);
        walking.done();
        walking.done();
        let said = watched(29, &walks, &events, Step::SetUp(0)).await;
        let text = |seconds| {
            format!(
                "giving the files of volume \"data\" to the pod's group 4711 takes longer than {seconds} s; 2 are done"
            )
        };
        assert_eq!(said, [text(2)]);
        assert_eq!(told(&events).await, []);

        // The walk is as old as the test.
        let said = watched(130, &walks, &events, Step::SetUp(0)).await;
        assert_eq!(said, [text(31), text(91), text(151)]);
        let shown = "Setting volume ownership for u-1/volumes/kubernetes.io~empty-dir/data";
        let slow = format!("{shown} is taking longer than expected");
        assert_eq!(told(&events).await, [(slow, 1), (format!("{shown}, processed 2 files."), 2)]);
        walking.end(true);

        let said = watched(5, &walks, &events, Step::SetUp(0)).await;
        assert_eq!(said, ["setting up volume \"data\" takes longer than 2 s"]);
        assert_eq!(told(&events).await.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_that_ends_in_time_is_not_told_of_and_a_slow_one_once() {
        let (walks, events) = (Walks::default(), EventRing::default());
        assert!(watched(1, &walks, &events, Step::MakeFolders).await.is_empty());
        let said = watched(200, &walks, &events, Step::MakeFolders).await;
        assert_eq!(said, ["making the pod's folders takes longer than 2 s"]);
        assert!(told(&events).await.is_empty());
    }
}
