//! Lists the runtime's images periodically.

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

use crate::observed_state::ObservedState;

/// How long after an answer the images are listed again (node-and-api.md §9.4). The runtime sends no events when images change.
const INTERVAL: Duration = Duration::from_secs(30);

/// Between two requests until the first answer.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(10);

/// The largest answer that is read, in bytes: the kubelet's limit for answers of a runtime.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Lists the images. The real one is [`CriImages`].
pub(crate) trait ImageLister: Send {
    fn list(&self) -> impl Future<Output = Result<Vec<RuntimeImage>, Status>> + Send;
}

/// Lists the images from the runtime's first report on, forever. Images that are not shown are not kept. If a request fails, the
/// last list stays in effect; whether the node is ready does not depend on it.
pub(crate) async fn run<L: ImageLister>(
    ctx: &Context,
    lister: L,
    observed: Arc<watch::Sender<ObservedState>>,
) {
    let mut live = ctx.live.subscribe();
    let has_reported =
        |observed: &ObservedState| observed.runtime.as_ref().is_some_and(|runtime| !runtime.name.is_empty());
    loop {
        let most = usize::try_from(live.borrow_and_update().node_status.max_images).ok();
        if most == Some(0) {
            store(&observed, Vec::new());
            if live.changed().await.is_err() {
                return pending().await;
            }
            continue;
        }
        let _ = observed.subscribe().wait_for(has_reported).await;
        let answer = lister.list().await;
        let state = answer.as_ref().map(|_| ()).map_err(|status| {
            format!(
                "the runtime does not list its images, so the Node keeps the previous list: {}",
                status.message()
            )
        });
        ctx.progress.condition("images", state);
        match answer {
            Ok(images) => store(&observed, listed_images(images, most)),
            // The first Node waits for the images, but only briefly.
            Err(_) if observed.borrow().images.is_none() => {
                tokio::time::sleep(FIRST_RETRY).await;
                continue;
            }
            Err(_) => {}
        }
        // Cancel-safe: a change stays visible until it is read.
        tokio::select! {
            Ok(()) = live.changed() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// Stores a list of images. Only the first list, for which the first Node waits, wakes the node loop; a later one is part of the
/// next heartbeat, so that images that come and go are written no more often than by a kubelet.
pub(crate) fn store(observed: &watch::Sender<ObservedState>, images: Vec<ContainerImage>) {
    observed.send_if_modified(|observed| {
        let first = observed.images.is_none();
        if observed.images.as_deref() != Some(&*images) {
            observed.images = Some(images.into());
        }
        first
    });
}

/// The runtime's images, through runtime-shim, which passes the answer on unchanged.
pub(crate) struct CriImages(Peer);

impl CriImages {
    pub(crate) fn new(ctx: &Context) -> Self {
        Self(ctx.peer(ServiceName::RuntimeShim))
    }
}

impl ImageLister for CriImages {
    async fn list(&self) -> Result<Vec<RuntimeImage>, Status> {
        let mut request = Request::new(cri::ListImagesRequest { filter: None });
        request.set_timeout(DEADLINE);
        let mut client =
            ImageServiceClient::new(self.0.channel()).max_decoding_message_size(MAX_ANSWER_BYTES);
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

    /// How many requests it got, and the sizes that it answers with, if it answers.
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

        fn requests(&self) -> u32 {
            std::mem::take(&mut self.0.lock().unwrap().0)
        }
    }

    struct Bench {
        ctx: Context,
        script: Script,
        observed: Arc<watch::Sender<ObservedState>>,
    }

    /// A node that lists up to `max_images` images, and a runtime that has reported its name if `known`.
    fn bench(max_images: i64, known: bool) -> Bench {
        let mut config = Config::default();
        config.node_status.max_images = max_images;
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let (script, observed) = (Script::default(), Arc::new(watch::Sender::new(ObservedState::default())));
        let bench = Bench { ctx, script, observed };
        if known {
            bench.runtime();
        }
        let (ctx, lister, observed) = (bench.ctx.clone(), bench.script.clone(), Arc::clone(&bench.observed));
        tokio::spawn(async move { run(&ctx, lister, observed).await });
        bench
    }

    impl Bench {
        fn runtime(&self) {
            let state = RuntimeState { name: "containerd".into(), ..RuntimeState::default() };
            self.observed.send_modify(|observed| observed.store_runtime(state, 0));
        }

        fn sizes(&self) -> Vec<i64> {
            let images = self.observed.borrow().images.clone();
            images.iter().flat_map(|images| &**images).filter_map(|image| image.size_bytes).collect()
        }

        fn condition(&self) -> Option<String> {
            let report = self.ctx.progress.report("");
            let images = report.conditions.into_iter().find(|c| c.name == "images");
            images.filter(|c| !c.ok).map(|c| c.message)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn images_are_listed_every_30_s_once_the_runtime_is_known() {
        let bench = bench(2, false);
        bench.script.has(Some(&[3, 9, 5]));
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!((bench.script.requests(), bench.observed.borrow().images.clone()), (0, None));

        bench.runtime();
        tokio::time::sleep(Duration::from_secs(29)).await;
        assert_eq!((bench.script.requests(), bench.sizes()), (1, vec![9, 5]));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(bench.script.requests(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_image_list_keeps_the_previous_images_and_sets_a_condition() {
        let bench = bench(-1, true);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let message = bench.condition().unwrap();
        assert!(message.contains("no socket"), "{message}");
        assert_eq!(bench.observed.borrow().images, None);

        bench.script.has(Some(&[1, 2, 3]));
        tokio::time::sleep(FIRST_RETRY).await;
        assert_eq!((bench.condition(), bench.sizes()), (None, vec![3, 2, 1]));

        bench.script.has(None);
        tokio::time::sleep(INTERVAL).await;
        assert!(bench.condition().is_some());
        assert_eq!(bench.sizes(), [3, 2, 1]);

        bench.script.has(Some(&[]));
        tokio::time::sleep(INTERVAL).await;
        assert_eq!((bench.condition(), bench.sizes()), (None, vec![]), "an empty list is an answer");
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_image_list_wakes_the_node_loop() {
        let bench = bench(-1, true);
        bench.script.has(Some(&[1, 2]));
        let mut seen = bench.observed.subscribe();
        assert!(!seen.has_changed().unwrap());
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(seen.has_changed().unwrap());
        let kept = seen.borrow_and_update().images.clone().unwrap();
        assert_eq!(kept.len(), 2);
        bench.script.has(Some(&[2, 1]));
        tokio::time::sleep(INTERVAL).await;
        assert!(Arc::ptr_eq(&kept, bench.observed.borrow().images.as_ref().unwrap()));
        bench.script.has(Some(&[2]));
        tokio::time::sleep(INTERVAL).await;
        assert_eq!(bench.sizes(), [2]);
        assert!(!seen.has_changed().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_node_status_max_images_applies_at_once() {
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
    async fn node_status_max_images_zero_lists_no_images() {
        let bench = bench(0, true);
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!(bench.script.requests(), 0);
        assert_eq!(
            bench.observed.borrow().images.as_deref(),
            Some(&[][..]),
            "the first Node does not wait for any"
        );
    }
}
