use keelson_config::Config;

use super::write_loop::{LONGEST_PAUSE, RETRY_PAUSE};
use super::*;

fn writer_of(settings: &Settings) -> Arc<KubernetesWriter> {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    KubernetesWriter::new(&Context::detached(ServiceName::NodeStatus, config), settings)
}

fn writer() -> Arc<KubernetesWriter> {
    let writer = writer_of(&Settings::of("/none".into()));
    writer.set_registered("u", Value::Null);
    writer
}

fn pod(name: &str) -> Job {
    let (uid, full_name) = (name.to_owned(), PodFullName::new(name, "default"));
    Job::again(&Arc::new(PodReport { uid, name: full_name, source: API.into(), ..PodReport::default() }))
}

fn node() -> Job {
    Job::Node(b"n".to_vec())
}

fn refused(code: u16, retry_after: u32) -> KubeError {
    let (server, what, reason, message) = ("s".into(), "w".into(), "R".into(), "m".into());
    KubeError::Refused { server, what, code, reason, message, retry_after }
}

fn unanswered() -> KubeError {
    KubeError::Unreachable { server: "s".into(), what: "w".into(), message: "m".into(), retry_after: 0 }
}

/// Tries the next job, which fails. Returns it, and how long all jobs wait then.
fn fails(writer: &KubernetesWriter, error: KubeError, pause: &mut Duration) -> (Job, Duration) {
    let pending = writer.next_job().unwrap();
    let job = pending.job.clone();
    (job, writer.finish(pending, Err(error), false, pause))
}

/// Tries the next job until the client gives up, while the lease is renewed. Returns it, and how long all jobs wait then.
async fn hangs(writer: &KubernetesWriter) -> (Job, Duration) {
    let pending = writer.next_job().unwrap();
    let job = pending.job.clone();
    tokio::time::sleep(Duration::from_secs(15)).await;
    writer.record_answer(&Ok(()));
    tokio::time::sleep(Duration::from_secs(15)).await;
    (job, writer.finish(pending, Err(unanswered()), false, &mut Duration::default()))
}

/// The next job, which succeeds.
fn succeeds(writer: &KubernetesWriter) -> Job {
    let pending = writer.next_job().unwrap();
    writer.record_answer(&Ok(()));
    writer.queue().record_success();
    pending.job
}

#[tokio::test(start_paused = true)]
async fn a_hanging_write_times_out() {
    let api = KubeApi::new("/nowhere".into(), "test");
    let began = Instant::now();
    let hangs = std::future::pending::<Result<(), KubeError>>();
    let error = with_timeout(&api, "the Node", Duration::from_secs(10), hangs).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    assert!(error.code().is_none() && chain(&error).contains("no answer within 10 s"), "{error}");
    let done = with_timeout(&api, "the Node", Duration::from_secs(10), async { Ok(7) }).await;
    assert_eq!(done.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_pod_write_delays_others_only_once() {
    let writer = writer();
    for name in ["a", "b"] {
        writer.put(pod(name), true);
    }
    assert_eq!(hangs(&writer).await, (pod("a"), Duration::ZERO));
    writer.put(node(), false);
    writer.put(pod("c"), false);
    assert_eq!(succeeds(&writer), node());
    assert_eq!(hangs(&writer).await, (pod("b"), Duration::ZERO));
    assert_eq!(succeeds(&writer), pod("c"));
    // Both are due again, and have a new state to report.
    tokio::time::sleep(Duration::from_secs(60)).await;
    writer.put(pod("a"), true);
    writer.put(node(), false);
    writer.put(pod("d"), false);
    assert_eq!((succeeds(&writer), succeeds(&writer)), (node(), pod("d")));
    assert_eq!(hangs(&writer).await.0, pod("a"));
    writer.put(pod("d"), false);
    assert_eq!(succeeds(&writer), pod("d"));
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_server_keeps_the_order_and_is_retried_within_ten_seconds() {
    let writer = writer();
    writer.put(pod("b"), false);
    writer.put(pod("a"), true);
    let mut pause = RETRY_PAUSE;
    for _ in 0..12 {
        let (job, wait) = fails(&writer, unanswered(), &mut pause);
        assert_eq!(job, pod("a"));
        assert!(!wait.is_zero() && wait <= LONGEST_PAUSE, "{wait:?}");
        tokio::time::sleep(wait).await;
    }
    assert_eq!((succeeds(&writer), succeeds(&writer)), (pod("a"), pod("b")));
}

#[tokio::test(start_paused = true)]
async fn reports_refused_by_a_failing_server_are_retried_within_ten_seconds() {
    for (code, longest) in [(401, 10), (403, 10), (500, 10), (503, 10), (400, 60), (422, 60)] {
        let writer = writer();
        writer.put(pod("a"), true);
        let mut waited = Duration::ZERO;
        for _ in 0..8 {
            let mut pause = RETRY_PAUSE;
            assert_eq!(fails(&writer, refused(code, 0), &mut pause), (pod("a"), Duration::ZERO));
            let due = writer.queue().due().unwrap();
            waited = due - Instant::now();
            tokio::time::sleep_until(due).await;
        }
        assert_eq!(waited, Duration::from_secs(longest), "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn throttled_seconds_add_retry_after_and_rate_limit_waits() {
    let writer = writer_of(&Settings { qps: 1, burst: 1, ..Settings::of("/none".into()) });
    writer.put(node(), true);
    let is_throttled_for = |seconds: f64| (writer.state().throttled_seconds - seconds).abs() < 0.001;
    assert!(is_throttled_for(0.0));
    for (error, wait, seconds) in [
        (refused(429, 3), 3, 3.0),
        // Retry-After is limited to a minute.
        (refused(429, 100_000), 60, 63.0),
        (refused(503, 2), 2, 65.0),
    ] {
        let mut pause = RETRY_PAUSE;
        assert_eq!(fails(&writer, error, &mut pause), (node(), Duration::from_secs(wait)));
        assert!(is_throttled_for(seconds) && writer.state().queued == 1, "{:?}", writer.state());
    }
    writer.limiter.take();
    writer.limiter.take();
    assert!(is_throttled_for(66.0), "{:?}", writer.state());
}
