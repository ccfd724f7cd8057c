use keelson_config::Config;
use keelson_node_status_core::Ended;

use super::writing::{AGAIN, LONGEST_PAUSE};
use super::*;

fn writer_of(settings: &Settings) -> Arc<KubernetesWriter> {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    KubernetesWriter::new(&Context::detached(ServiceName::NodeStatus, config), settings)
}

fn writer() -> Arc<KubernetesWriter> {
    let writer = writer_of(&Settings::of("/none".into()));
    writer.registered("u", Value::Null);
    writer
}

fn pod(name: &str) -> Job {
    Job::Pod(queue::Pod {
        uid: name.into(),
        name: PodFullName::new(name, "default"),
        seen: String::new(),
        json: Vec::new(),
        is_static: false,
        ended: Ended::default(),
    })
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

/// Tries what is next, which fails. What it was, and how long all wait then.
fn fails(writer: &KubernetesWriter, error: KubeError, pause: &mut Duration) -> (Job, Duration) {
    let pending = writer.next_job().unwrap();
    let job = pending.job.clone();
    (job, writer.finish(pending, Err(error), false, pause))
}

/// Tries what is next until the client gives it up, while the lease is renewed. What it was, and how long all wait then.
async fn hangs(writer: &KubernetesWriter) -> (Job, Duration) {
    let pending = writer.next_job().unwrap();
    let job = pending.job.clone();
    tokio::time::sleep(Duration::from_secs(15)).await;
    writer.hear(&Ok(()));
    tokio::time::sleep(Duration::from_secs(15)).await;
    (job, writer.finish(pending, Err(unanswered()), false, &mut Duration::default()))
}

/// What is next, which goes well.
fn goes_well(writer: &KubernetesWriter) -> Job {
    let pending = writer.next_job().unwrap();
    writer.hear(&Ok(()));
    writer.queue().went_well();
    pending.job
}

#[tokio::test(start_paused = true)]
async fn a_write_that_hangs_is_given_up_in_time() {
    let api = KubeApi::new("/nowhere".into(), "test");
    let began = Instant::now();
    let hangs = std::future::pending::<Result<(), KubeError>>();
    let error = in_time(&api, "the Node", Duration::from_secs(10), hangs).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    assert!(error.code().is_none() && chain(&error).contains("no answer within 10 s"), "{error}");
    let done = in_time(&api, "the Node", Duration::from_secs(10), async { Ok(7) }).await;
    assert_eq!(done.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn the_node_and_pods_that_get_through_wait_for_no_more_than_one_that_hangs() {
    let writer = writer();
    for name in ["a", "b"] {
        writer.put(pod(name), true);
    }
    assert_eq!(hangs(&writer).await, (pod("a"), Duration::ZERO));
    writer.put(node(), false);
    writer.put(pod("c"), false);
    assert_eq!(goes_well(&writer), node());
    assert_eq!(hangs(&writer).await, (pod("b"), Duration::ZERO));
    assert_eq!(goes_well(&writer), pod("c"));
    // Both are due again, and have something new to tell.
    tokio::time::sleep(Duration::from_secs(60)).await;
    writer.put(pod("a"), true);
    writer.put(node(), false);
    writer.put(pod("d"), false);
    assert_eq!((goes_well(&writer), goes_well(&writer)), (node(), pod("d")));
    assert_eq!(hangs(&writer).await.0, pod("a"));
    writer.put(pod("d"), false);
    assert_eq!(goes_well(&writer), pod("d"));
}

#[tokio::test(start_paused = true)]
async fn where_the_server_answers_nobody_all_wait_in_their_places_for_ten_seconds_at_most() {
    let writer = writer();
    writer.put(pod("b"), false);
    writer.put(pod("a"), true);
    let mut pause = AGAIN;
    for _ in 0..12 {
        let (job, wait) = fails(&writer, unanswered(), &mut pause);
        assert_eq!(job, pod("a"));
        assert!(!wait.is_zero() && wait <= LONGEST_PAUSE, "{wait:?}");
        tokio::time::sleep(wait).await;
    }
    assert_eq!((goes_well(&writer), goes_well(&writer)), (pod("a"), pod("b")));
}

#[tokio::test(start_paused = true)]
async fn what_a_server_in_trouble_refuses_is_told_within_ten_seconds_of_its_end() {
    for (code, longest) in [(401, 10), (403, 10), (500, 10), (503, 10), (400, 60), (422, 60)] {
        let writer = writer();
        writer.put(pod("a"), true);
        let mut waited = Duration::ZERO;
        for _ in 0..8 {
            let mut pause = AGAIN;
            assert_eq!(fails(&writer, refused(code, 0), &mut pause), (pod("a"), Duration::ZERO));
            let due = writer.queue().due().unwrap();
            waited = due - Instant::now();
            tokio::time::sleep_until(due).await;
        }
        assert_eq!(waited, Duration::from_secs(longest), "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn how_long_the_server_has_asked_to_wait_and_calls_have_waited_for_each_other_is_told() {
    let writer = writer_of(&Settings { qps: 1, burst: 1, ..Settings::of("/none".into()) });
    writer.put(node(), true);
    let told = |seconds: f64| (writer.state().throttled_seconds - seconds).abs() < 0.001;
    assert!(told(0.0));
    for (error, wait, seconds) in [
        (refused(429, 3), 3, 3.0),
        // Whatever it asks for, somebody looks after a minute.
        (refused(429, 100_000), 60, 63.0),
        (refused(503, 2), 2, 65.0),
    ] {
        let mut pause = AGAIN;
        assert_eq!(fails(&writer, error, &mut pause), (node(), Duration::from_secs(wait)));
        assert!(told(seconds) && writer.state().queued == 1, "{:?}", writer.state());
    }
    writer.limiter.take();
    writer.limiter.take();
    assert!(told(66.0), "{:?}", writer.state());
}
