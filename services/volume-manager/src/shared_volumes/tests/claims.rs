//! Which claims the task reports as in use.

use super::*;

/// The name of a claim of the namespace `default`, or `PersistentVolume` and its name; and what uses it.
type Shown = Vec<(String, String)>;

fn shown(set: &ClaimSet) -> Shown {
    set.claims.iter().map(|(claim, user)| (claim.to_string(), user.clone())).collect()
}

fn claim(user: &str) -> Shown {
    vec![("the claim default/data".into(), user.into())]
}

fn volume(user: &str) -> Shown {
    vec![("the PersistentVolume disk".into(), user.into())]
}

impl World {
    async fn want_claim(&self, uid: &str) -> Option<u64> {
        self.shared.want_claims(&spec(uid, "disk").pod, ["data".to_owned()].into()).await.ok()
    }

    /// The volume `disk` through the claim `data`.
    fn want_claimed(&self, uid: &str) {
        self.want_spec(VolumeSpec { claim: Some("data".into()), ..spec(uid, "disk") }, false);
    }

    async fn until_in_use(&self, expected: Shown) {
        self.shared.claims().wait_for(|set| set.revision > 0 && shown(set) == expected).await.unwrap();
    }

    fn in_use(&self) -> Shown {
        shown(&self.shared.claims().borrow())
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_in_use_from_the_request_of_its_pod_until_the_end_of_its_teardown() {
    let (plugin, gate) = (FakePlugin::new(Shape::Device), Arc::new(Semaphore::new(0)));
    plugin.on("tear down disk for a", End::Wait(Arc::clone(&gate)));
    plugin.on("unmount device disk", End::Wait(Arc::clone(&gate)));
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    assert_eq!((world.shared.claims().borrow().revision, world.in_use()), (1, vec![]));
    assert_eq!(world.want_claim("a").await, Some(2));
    assert_eq!(world.in_use(), claim("the pod default/pod-a"));
    world.want_claimed("a");
    world.until_mounted("a", "disk").await;
    world.shared.stop("a");
    world.shared.release("a").await;
    plugin.until_called("tear down disk for a", 1).await;
    assert_eq!(world.in_use(), claim("the pod default/pod-a"));
    gate.add_permits(1);
    world.until_in_use(claim("the mounted device of the PersistentVolume disk")).await;
    plugin.until_called("unmount device disk", 1).await;
    gate.add_permits(1);
    world.until_in_use(vec![]).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_set_up_that_may_have_mounted_something_keeps_its_claim_in_use() {
    for (class, is_left) in [(FailureClass::Uncertain, true), (FailureClass::Final, false)] {
        let (plugin, gate) = (FakePlugin::new(Shape::PerPod), Arc::new(Semaphore::new(0)));
        plugin.on("set up disk for a", failed(class));
        plugin.on("set up disk for a", End::Wait(Arc::clone(&gate)));
        plugin.on("tear down disk for a", End::Wait(Arc::clone(&gate)));
        let world = start(&plugin, &[]).await;
        world.shared.set_populated();
        world.want_claim("a").await.unwrap();
        world.want_claimed("a");
        world.until("a", |status| status.waits.get("disk").is_some_and(|wait| wait.is_error)).await;
        world.shared.stop("a");
        world.shared.release("a").await;
        if is_left {
            plugin.until_called("tear down disk for a", 1).await;
            assert_eq!(world.in_use(), claim("the pod default/pod-a"));
            gate.add_permits(1);
        }
        world.until_in_use(vec![]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_stopped_before_its_volume_is_set_up_uses_no_claim() {
    let world = start(&FakePlugin::new(Shape::PerPod), &[]).await;
    world.want_claim("a").await.unwrap();
    world.shared.stop("a");
    world.until_in_use(vec![]).await;
    assert_eq!(world.want_claim("a").await, Some(4), "the pod runs again");
    world.shared.release("a").await;
    assert_eq!(world.in_use(), vec![]);
}

#[tokio::test(start_paused = true)]
async fn a_found_volume_holds_the_claim_of_its_persistent_volume_until_a_pod_names_it() {
    for is_understood in [true, false] {
        let plugin = FakePlugin::new(Shape::PerPod);
        if !is_understood {
            plugin.on("reconstruct disk", failed(FailureClass::Final));
        }
        let world = start(&plugin, &[("u1", "disk")]).await;
        world.shared.set_populated();
        assert_eq!(world.in_use(), volume("the volumes of the pod with UID u1"));
        world.want_claim("u1").await.unwrap();
        let user = "the pod default/pod-u1";
        assert_eq!(world.in_use(), [claim(user), volume(user)].concat());
        world.want_claimed("u1");
        world.until_mounted("u1", "disk").await;
        let found = if is_understood { vec![] } else { volume(user) };
        assert_eq!(world.in_use(), [claim(user), found].concat());
        world.shared.release("u1").await;
        world.until_in_use(vec![]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_device_found_on_disk_holds_its_persistent_volume_until_it_is_unmounted() {
    let (plugin, gate) = (FakePlugin::new(Shape::Device), Arc::new(Semaphore::new(0)));
    plugin.on("unmount device disk", End::Wait(Arc::clone(&gate)));
    let world = start(&plugin, &[("u1", "disk")]).await;
    world.shared.set_populated();
    let both = "the volumes of the pod with UID u1";
    assert_eq!(world.in_use(), volume(both));
    world.shared.release("u1").await;
    plugin.until_called("unmount device disk", 1).await;
    assert_eq!(world.in_use(), volume("the mounted device of the PersistentVolume disk"));
    gate.add_permits(1);
    world.until_in_use(vec![]).await;
}

#[tokio::test(start_paused = true)]
async fn a_folder_of_an_unknown_plugin_holds_its_persistent_volume_until_it_is_gone() {
    let folders = [("u1".into(), "disk".to_owned())].into();
    let found = FoundVolumes::default().with_foreign(folders);
    let world = start_found(&FakePlugin::new(Shape::Device), found, Config::default(), false);
    world.shared.set_populated();
    world.until_in_use(volume("the volumes of the pod with UID u1")).await;
    world.shared.release("u1").await;
    assert_eq!(world.in_use(), volume("the volumes of the pod with UID u1"), "it is still mounted");
    world.shared.foreign_removed("u1", "disk");
    world.until_in_use(vec![]).await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_a_pod_names_itself_is_no_claim_in_use() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    world.want("a", "disk", None);
    world.until_mounted("a", "disk").await;
    assert_eq!((world.shared.claims().borrow().revision, world.in_use()), (1, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_repeated_request_has_the_revision_of_the_first_set_with_its_claim() {
    let world = start(&FakePlugin::new(Shape::PerPod), &[]).await;
    assert_eq!(world.want_claim("a").await, Some(2));
    assert_eq!(world.want_claim("b").await, Some(3), "the text names two pods now");
    assert_eq!(world.in_use(), claim("the pod default/pod-a and another pod"));
    assert_eq!(world.want_claim("a").await, Some(2));
    world.shared.release("a").await;
    assert_eq!(world.in_use(), claim("the pod default/pod-b"));
    assert_eq!(world.want_claim("a").await, Some(5), "it may have been in no set since");
}
