//! The images of the runtime, asked for again and again.

use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use keelson_config::ServiceName;
use keelson_kube_model::ContainerImage;
use keelson_node_status_core::{RuntimeImage, listed_images};
use keelson_service_kit::{Context, Peer};
use tokio::sync::watch;
use tonic::{Request, Status};

use crate::inputs::World;

/// From one answer to the next question (node-and-api.md §9.4). Nothing tells when images come and go.
const EVERY: Duration = Duration::from_secs(30);

/// Between two questions until the first answer.
const FIRST_AGAIN: Duration = Duration::from_secs(1);

/// Bound of one question.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest answer that is read: the kubelet's bound for those of a runtime.
const LONGEST: usize = 16 << 20;

/// Asks for the images. The real one is [`Images`].
pub(crate) trait ImageLister: Send {
    fn list(&self) -> impl Future<Output = Result<Vec<RuntimeImage>, Status>> + Send;
}

/// Asks from the runtime's first word on, for ever. What is not shown is not kept; when there is no answer, the list
/// of the last one stands, and whether the node is ready does not depend on it.
pub(crate) async fn run<L: ImageLister>(ctx: &Context, lister: L, world: Arc<watch::Sender<World>>) {
    let mut live = ctx.live.subscribe();
    let spoken = |world: &World| world.runtime.as_ref().is_some_and(|runtime| !runtime.name.is_empty());
    loop {
        let most = usize::try_from(live.borrow_and_update().node_status.max_images).ok();
        if most == Some(0) {
            take(&world, Vec::new());
            if live.changed().await.is_err() {
                return pending().await;
            }
            continue;
        }
        let _ = world.subscribe().wait_for(spoken).await;
        let answer = lister.list().await;
        let state = answer.as_ref().map(|_| ()).map_err(|status| {
            format!(
                "the runtime's images are not listed, the node shows those of before: {}",
                status.message()
            )
        });
        ctx.progress.condition("images", state);
        match answer {
            Ok(images) => take(&world, listed_images(images, most)),
            // The first Node waits for them, if not for long.
            Err(_) if world.borrow().images.is_none() => {
                tokio::time::sleep(FIRST_AGAIN).await;
                continue;
            }
            Err(_) => {}
        }
        // Cancel-safe: what has changed is seen until it is taken.
        tokio::select! {
            Ok(()) = live.changed() => {}
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Nobody is woken but by the first ones, for which the first Node waits: the Node of the next heartbeat has them, so
/// that images that come and go are written no more often than a kubelet writes them.
pub(crate) fn take(world: &watch::Sender<World>, images: Vec<ContainerImage>) {
    world.send_if_modified(|world| {
        let first = world.images.is_none();
        if world.images.as_deref() != Some(&*images) {
            world.images = Some(images.into());
        }
        first
    });
}

/// The runtime, through runtime-shim, which hands the answer on as it is.
pub(crate) struct Images(Peer);

impl Images {
    pub(crate) fn new(ctx: &Context) -> Self {
        Self(ctx.peer(ServiceName::RuntimeShim))
    }
}

impl ImageLister for Images {
    async fn list(&self) -> Result<Vec<RuntimeImage>, Status> {
        let mut request = Request::new(cri::ListImagesRequest { filter: None });
        request.set_timeout(DEADLINE);
        let mut client = ImageServiceClient::new(self.0.channel()).max_decoding_message_size(LONGEST);
        let images = client.list_images(request).await?.into_inner().images;
        Ok(images.into_iter().map(image_of).collect())
    }
}

fn image_of(message: cri::Image) -> RuntimeImage {
    RuntimeImage {
        id: message.id,
        digests: message.repo_digests,
        tags: message.repo_tags,
        size_bytes: message.size,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use keelson_config::Config;
    use keelson_node_status_core::RuntimeState;

    use super::*;

    /// How often it was asked, and what it has, if it answers.
    #[derive(Clone, Default)]
    struct Script(Arc<Mutex<(u32, Option<Vec<u64>>)>>);

    impl ImageLister for Script {
        async fn list(&self) -> Result<Vec<RuntimeImage>, Status> {
            let mut script = self.0.lock().unwrap();
            script.0 += 1;
            let sizes = script.1.clone().ok_or_else(|| Status::unavailable("no socket"))?;
            Ok(sizes
                .into_iter()
                .map(|size_bytes| RuntimeImage { size_bytes, ..Default::default() })
                .collect())
        }
    }

    impl Script {
        fn has(&self, sizes: Option<&[u64]>) {
            self.0.lock().unwrap().1 = sizes.map(<[u64]>::to_vec);
        }

        fn asked(&self) -> u32 {
            std::mem::take(&mut self.0.lock().unwrap().0)
        }
    }

    struct Bench {
        ctx: Context,
        script: Script,
        world: Arc<watch::Sender<World>>,
    }

    /// A node that lists so many images, and a runtime that has said who it is when it is `known`.
    fn bench(max_images: i64, known: bool) -> Bench {
        let mut config = Config::default();
        config.node_status.max_images = max_images;
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let (script, world) = (Script::default(), Arc::new(watch::Sender::new(World::default())));
        let bench = Bench { ctx, script, world };
        if known {
            bench.runtime();
        }
        let (ctx, lister, world) = (bench.ctx.clone(), bench.script.clone(), Arc::clone(&bench.world));
        tokio::spawn(async move { run(&ctx, lister, world).await });
        bench
    }

    impl Bench {
        fn runtime(&self) {
            let state = RuntimeState { name: "containerd".into(), ..RuntimeState::default() };
            self.world.send_modify(|world| world.take_runtime(state, 0));
        }

        fn sizes(&self) -> Vec<i64> {
            let images = self.world.borrow().images.clone();
            images.iter().flat_map(|images| &**images).filter_map(|image| image.size_bytes).collect()
        }

        fn condition(&self) -> Option<String> {
            let report = self.ctx.progress.report("");
            let images = report.conditions.into_iter().find(|c| c.name == "images");
            images.filter(|c| !c.ok).map(|c| c.message)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn images_are_asked_for_once_the_runtime_is_known_and_then_every_thirty_seconds() {
        let bench = bench(2, false);
        bench.script.has(Some(&[3, 9, 5]));
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!((bench.script.asked(), bench.world.borrow().images.clone()), (0, None));

        bench.runtime();
        tokio::time::sleep(Duration::from_secs(29)).await;
        assert_eq!((bench.script.asked(), bench.sizes()), (1, vec![9, 5]));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(bench.script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_answer_the_images_of_before_stand_and_it_is_told() {
        let bench = bench(-1, true);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let told = bench.condition().unwrap();
        assert!(told.contains("no socket"), "{told}");
        assert_eq!(bench.world.borrow().images, None);

        bench.script.has(Some(&[1, 2, 3]));
        tokio::time::sleep(FIRST_AGAIN).await;
        assert_eq!((bench.condition(), bench.sizes()), (None, vec![3, 2, 1]));

        bench.script.has(None);
        tokio::time::sleep(EVERY).await;
        assert!(bench.condition().is_some());
        assert_eq!(bench.sizes(), [3, 2, 1]);

        bench.script.has(Some(&[]));
        tokio::time::sleep(EVERY).await;
        assert_eq!((bench.condition(), bench.sizes()), (None, vec![]), "an empty list is an answer");
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_images_wake_somebody_and_the_same_ones_are_kept_as_they_are() {
        let bench = bench(-1, true);
        bench.script.has(Some(&[1, 2]));
        let mut seen = bench.world.subscribe();
        assert!(!seen.has_changed().unwrap());
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(seen.has_changed().unwrap());
        let kept = seen.borrow_and_update().images.clone().unwrap();
        assert_eq!(kept.len(), 2);
        bench.script.has(Some(&[2, 1]));
        tokio::time::sleep(EVERY).await;
        assert!(Arc::ptr_eq(&kept, bench.world.borrow().images.as_ref().unwrap()));
        bench.script.has(Some(&[2]));
        tokio::time::sleep(EVERY).await;
        assert_eq!(bench.sizes(), [2]);
        assert!(!seen.has_changed().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn another_number_of_images_counts_as_soon_as_the_configuration_has_it() {
        let bench = bench(0, true);
        bench.script.has(Some(&[3, 9, 5]));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut config = Config::clone(&bench.ctx.config);
        for (most, shown) in [(2, vec![9, 5]), (0, vec![]), (-1, vec![9, 5, 3])] {
            config.node_status.max_images = most;
            assert!(bench.ctx.live.take(&config));
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(bench.sizes(), shown, "{most}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_lists_no_images_does_not_ask_for_them() {
        let bench = bench(0, true);
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!(bench.script.asked(), 0);
        assert_eq!(
            bench.world.borrow().images.as_deref(),
            Some(&[][..]),
            "the first Node does not wait for any"
        );
    }
}
