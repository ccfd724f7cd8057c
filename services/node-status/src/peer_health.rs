//! Asks the services that a node depends on whether they make progress.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_node_status_core::{Progress, Watchdog};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{GetProgressRequest, GetProgressResponse};
use keelson_service_kit::{Backoff, Context, LoopHandle, Peer};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Request;

use crate::metrics::LastRenewal;

/// Without these a node is not ready (architecture §5).
const REQUIRED: [ServiceName; 4] = [
    ServiceName::PodSync,
    ServiceName::RuntimeShim,
    ServiceName::VolumeManager,
    ServiceName::ResourceManager,
];

/// Without this service, or its watch, a node is not ready either, but only after much longer: running pods continue. It is not
/// blamed for an absent control plane: a missing watch counts only while our own writes succeed.
const SOURCE_READER: ServiceName = ServiceName::PodConfig;

const WATCHED: [ServiceName; 5] = [REQUIRED[0], REQUIRED[1], REQUIRED[2], REQUIRED[3], SOURCE_READER];

/// The condition of pod-config that says whether its watch works.
const WATCH_CONDITION: &str = "control-plane";

/// Our writes count as succeeding while the last renewal of the lease is at most this old: two tries may have failed.
const WRITES_OK_WITHIN: Duration = Duration::from_secs(40);

/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(2);

/// Milliseconds since the start of this service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now_ms(self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn at(self, ms: u64) -> Instant {
        self.0 + Duration::from_millis(ms)
    }
}

/// Asks one service for its progress. The real one is [`Peers`].
pub(crate) trait Prober: Send + 'static {
    fn probe(&self, service: ServiceName) -> impl Future<Output = Progress> + Send;
}

/// A watchdog to which no service has answered yet.
pub(crate) fn watchdog() -> Watchdog {
    Watchdog::new(&REQUIRED.map(ServiceName::as_str)).with_source_reader(SOURCE_READER.as_str())
}

/// Asks all services at each heartbeat, and more often while one of them is not healthy: a recovered service is noticed within 2
/// s.
pub(crate) async fn run<P: Prober>(ctx: Context, clock: Clock, prober: P, health: watch::Sender<Watchdog>) {
    let handle = ctx.progress.register("neighbours");
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        handle.tick();
        let answers = join_all(WATCHED.map(|service| prober.probe(service))).await;
        let now = clock.now_ms();
        let mut all_healthy = false;
        health.send_if_modified(|watchdog| {
            let before = (watchdog.errors(now), watchdog.all_asked(), watchdog.all_healthy());
            for (service, answer) in WATCHED.iter().zip(answers) {
                watchdog.record(service.as_str(), answer, now);
            }
            all_healthy = watchdog.all_healthy();
            (watchdog.errors(now), watchdog.all_asked(), all_healthy) != before
        });
        let pause = if all_healthy {
            backoff.reset();
            LoopHandle::HEARTBEAT
        } else {
            backoff.next_delay()
        };
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// The services at their sockets.
pub(crate) struct Peers {
    peers: Vec<(ServiceName, Peer)>,
    last_renewal: LastRenewal,
}

impl Peers {
    pub(crate) fn new(ctx: &Context, last_renewal: LastRenewal) -> Self {
        Self { peers: WATCHED.iter().map(|name| (*name, ctx.peer(*name))).collect(), last_renewal }
    }

    fn progress_of(&self, service: ServiceName, response: &GetProgressResponse) -> Progress {
        let progress = Progress::from_loops(
            response.loops.iter().map(|l| (l.name.as_str(), l.silent_ms, l.stuck_after_ms)),
        );
        let mut conditions = response.conditions.iter();
        match conditions.find(|condition| condition.name == WATCH_CONDITION && !condition.ok) {
            Some(bad)
                if service == SOURCE_READER
                    && progress == Progress::Healthy
                    && self.last_renewal.is_within(WRITES_OK_WITHIN) =>
            {
                Progress::WatchFailing { message: bad.message.clone() }
            }
            _ => progress,
        }
    }
}

impl Prober for Peers {
    async fn probe(&self, service: ServiceName) -> Progress {
        let Some((_, peer)) = self.peers.iter().find(|(name, _)| *name == service) else {
            return Progress::NoAnswer { error: "the service is not watched".to_owned() };
        };
        let mut request = Request::new(GetProgressRequest {});
        request.set_timeout(DEADLINE);
        match AdminClient::new(peer.channel()).get_progress(request).await {
            Ok(response) => self.progress_of(service, response.get_ref()),
            Err(status) => Progress::NoAnswer { error: status.message().to_owned() },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use keelson_config::Config;
    use keelson_proto::keelson::admin::v1::{Condition, Loop};

    use super::*;
    use crate::writer::{ControlPlaneWriter, NoControlPlane};

    #[derive(Clone, Default)]
    struct Script(Arc<Mutex<(Option<String>, u32)>>);

    impl Prober for Script {
        async fn probe(&self, service: ServiceName) -> Progress {
            let mut script = self.0.lock().unwrap();
            if service != ServiceName::PodSync {
                return Progress::Healthy;
            }
            script.1 += 1;
            script.0.clone().map_or(Progress::Healthy, |error| Progress::NoAnswer { error })
        }
    }

    impl Script {
        fn silence(&self, silent: bool) {
            self.0.lock().unwrap().0 = silent.then(|| "no socket".to_owned());
        }

        fn asked(&self) -> u32 {
            std::mem::take(&mut self.0.lock().unwrap().1)
        }
    }

    #[tokio::test]
    async fn a_failing_watch_of_pod_config_counts_only_while_our_writes_succeed() {
        let ctx = Context::detached(ServiceName::NodeStatus, Config::default());
        let writer: Arc<dyn ControlPlaneWriter> = Arc::new(NoControlPlane::new(&ctx.metrics));
        let peers = Peers::new(&ctx, crate::metrics::register(&ctx.metrics, &writer));
        let answer = |name: &str, ok: bool, silent_ms: u64| GetProgressResponse {
            loops: vec![Loop { name: "source".into(), silent_ms, stuck_after_ms: 0 }],
            conditions: vec![Condition {
                name: name.into(),
                ok,
                message: "forbidden".into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let watch_failing = Progress::WatchFailing { message: "forbidden".into() };
        let stuck = Progress::Stuck { loop_name: "source".into() };
        for (service, answer, expected) in [
            (SOURCE_READER, answer(WATCH_CONDITION, false, 0), &watch_failing),
            (SOURCE_READER, answer(WATCH_CONDITION, false, 40_000), &stuck),
            (SOURCE_READER, answer(WATCH_CONDITION, true, 0), &Progress::Healthy),
            (SOURCE_READER, answer("static-pod-url", false, 0), &Progress::Healthy),
            (ServiceName::PodSync, answer(WATCH_CONDITION, false, 0), &Progress::Healthy),
        ] {
            assert_eq!(peers.progress_of(service, &answer), *expected, "{service} {answer:?}");
        }
        peers.last_renewal.set_age(Duration::from_secs(41));
        assert_eq!(peers.progress_of(SOURCE_READER, &answer(WATCH_CONDITION, false, 0)), Progress::Healthy);
    }

    #[tokio::test(start_paused = true)]
    async fn progress_is_probed_every_ten_seconds_and_more_often_on_silence() {
        let ctx = Context::detached(ServiceName::NodeStatus, Config::default());
        let script = Script::default();
        let clock = Clock::start();
        let (health, seen) = watch::channel(watchdog());
        let task = tokio::spawn(run(ctx.clone(), clock, script.clone(), health));
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert_eq!(script.asked(), 6);
        assert!(seen.borrow().all_healthy());

        script.silence(true);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(script.asked() > 8);
        assert!(seen.borrow().errors(clock.now_ms()).is_empty(), "a restart is not seen");
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(seen.borrow().errors(clock.now_ms()).len(), 1);

        script.silence(false);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(seen.borrow().errors(clock.now_ms()).is_empty());
        ctx.shutdown.cancel();
        task.await.unwrap();
    }
}
