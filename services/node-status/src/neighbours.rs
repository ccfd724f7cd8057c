//! Asks the services that a node cannot do without whether they make progress.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_node_status_core::{Answer, Watchdog};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{GetProgressRequest, GetProgressResponse};
use keelson_service_kit::{Backoff, Context, LoopHandle, Peer};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Request;

use crate::metrics::Renewed;

/// Without these a node is not ready (architecture §5).
const NEEDED: [ServiceName; 4] = [
    ServiceName::PodSync,
    ServiceName::RuntimeShim,
    ServiceName::VolumeManager,
    ServiceName::ResourceManager,
];

/// Without this one, or its watch, a node is not ready either, but only after much longer: what runs goes on. An absent control
/// plane is not blamed on it: that it has no watch counts only while our own writes are taken.
const SOURCES: ServiceName = ServiceName::PodConfig;

const WATCHED: [ServiceName; 5] = [NEEDED[0], NEEDED[1], NEEDED[2], NEEDED[3], SOURCES];

/// The condition by which it says whether its watch works.
const WATCH_CONDITION: &str = "control-plane";

/// Our writes are taken while the lease was renewed so lately: two tries may have failed.
const WRITES_TAKEN: Duration = Duration::from_secs(40);

/// Bound of one question.
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

/// Asks one service. The real one is [`Peers`].
pub(crate) trait Prober: Send + 'static {
    fn probe(&self, service: ServiceName) -> impl Future<Output = Answer> + Send;
}

/// A watchdog to which no service has answered yet.
pub(crate) fn watchdog() -> Watchdog {
    Watchdog::new(&NEEDED.map(ServiceName::as_str)).with_sources_of(SOURCES.as_str())
}

/// Asks all services at each heartbeat, and more often while one of them is not well: a service that comes
/// back is seen within 2 s.
pub(crate) async fn run<P: Prober>(ctx: Context, clock: Clock, prober: P, health: watch::Sender<Watchdog>) {
    let handle = ctx.progress.register("neighbours");
    let mut again = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        handle.tick();
        let answers = join_all(WATCHED.map(|service| prober.probe(service))).await;
        let now = clock.now_ms();
        let mut all_turning = false;
        health.send_if_modified(|watchdog| {
            let before = (watchdog.errors(now), watchdog.all_asked(), watchdog.all_turning());
            for (service, answer) in WATCHED.iter().zip(answers) {
                watchdog.record(service.as_str(), answer, now);
            }
            all_turning = watchdog.all_turning();
            (watchdog.errors(now), watchdog.all_asked(), all_turning) != before
        });
        let pause = if all_turning {
            again.reset();
            LoopHandle::HEARTBEAT
        } else {
            again.next_delay()
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
    renewed: Renewed,
}

impl Peers {
    pub(crate) fn new(ctx: &Context, renewed: Renewed) -> Self {
        Self { peers: WATCHED.iter().map(|name| (*name, ctx.peer(*name))).collect(), renewed }
    }

    fn judge(&self, service: ServiceName, told: &GetProgressResponse) -> Answer {
        let turning =
            Answer::of_loops(told.loops.iter().map(|l| (l.name.as_str(), l.silent_ms, l.stuck_after_ms)));
        let mut conditions = told.conditions.iter();
        match conditions.find(|condition| condition.name == WATCH_CONDITION && !condition.ok) {
            Some(bad)
                if service == SOURCES
                    && turning == Answer::Turning
                    && self.renewed.is_within(WRITES_TAKEN) =>
            {
                Answer::Unwatched { message: bad.message.clone() }
            }
            _ => turning,
        }
    }
}

impl Prober for Peers {
    async fn probe(&self, service: ServiceName) -> Answer {
        let Some((_, peer)) = self.peers.iter().find(|(name, _)| *name == service) else {
            return Answer::None { error: "it is not watched".to_owned() };
        };
        let mut request = Request::new(GetProgressRequest {});
        request.set_timeout(DEADLINE);
        match AdminClient::new(peer.channel()).get_progress(request).await {
            Ok(response) => self.judge(service, response.get_ref()),
            Err(status) => Answer::None { error: status.message().to_owned() },
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
        async fn probe(&self, service: ServiceName) -> Answer {
            let mut script = self.0.lock().unwrap();
            if service != ServiceName::PodSync {
                return Answer::Turning;
            }
            script.1 += 1;
            script.0.clone().map_or(Answer::Turning, |error| Answer::None { error })
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
    async fn a_watch_that_fails_counts_while_our_own_writes_are_taken_and_of_the_service_that_reads_alone() {
        let ctx = Context::detached(ServiceName::NodeStatus, Config::default());
        let writer: Arc<dyn ControlPlaneWriter> = Arc::new(NoControlPlane::new(&ctx.metrics));
        let peers = Peers::new(&ctx, crate::metrics::register(&ctx.metrics, &writer));
        let told = |name: &str, ok: bool, silent_ms: u64| GetProgressResponse {
            loops: vec![Loop { name: "source".into(), silent_ms, stuck_after_ms: 0 }],
            conditions: vec![Condition {
                name: name.into(),
                ok,
                message: "forbidden".into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let unwatched = Answer::Unwatched { message: "forbidden".into() };
        let stuck = Answer::Stuck { loop_name: "source".into() };
        for (service, told, expected) in [
            (SOURCES, told(WATCH_CONDITION, false, 0), &unwatched),
            (SOURCES, told(WATCH_CONDITION, false, 40_000), &stuck),
            (SOURCES, told(WATCH_CONDITION, true, 0), &Answer::Turning),
            (SOURCES, told("static-pod-url", false, 0), &Answer::Turning),
            (ServiceName::PodSync, told(WATCH_CONDITION, false, 0), &Answer::Turning),
        ] {
            assert_eq!(peers.judge(service, &told), *expected, "{service} {told:?}");
        }
        peers.renewed.ago(Duration::from_secs(41));
        assert_eq!(peers.judge(SOURCES, &told(WATCH_CONDITION, false, 0)), Answer::Turning);
    }

    #[tokio::test(start_paused = true)]
    async fn well_services_are_asked_every_ten_seconds_and_a_silent_one_more_often() {
        let ctx = Context::detached(ServiceName::NodeStatus, Config::default());
        let script = Script::default();
        let clock = Clock::start();
        let (health, seen) = watch::channel(watchdog());
        let task = tokio::spawn(run(ctx.clone(), clock, script.clone(), health));
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert_eq!(script.asked(), 6);
        assert!(seen.borrow().all_turning());

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
