use std::sync::Arc;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::{PodReport, ReportedStatus};

use super::*;

fn pod(uid: &str, json: &str) -> Job {
    let status = ReportedStatus { json: json.as_bytes().into(), ..ReportedStatus::default() };
    let name = PodFullName::new("web", "default");
    Job::again(&Arc::new(PodReport { uid: uid.into(), name, status, ..PodReport::default() }))
}

fn drain(queue: &mut Queue) -> Vec<Job> {
    std::iter::from_fn(|| queue.take()).map(|pending| pending.job).collect()
}

#[test]
fn the_latest_pod_status_replaces_earlier_ones_and_urgent_ones_go_first() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    let after = |ms| now + Duration::from_millis(ms);
    queue.put(pod("a", "1"), true, Span::none(), now);
    queue.put(Job::Node(b"n".to_vec()), false, Span::none(), after(1));
    queue.put(pod("b", "1"), false, Span::none(), after(2));
    queue.put(pod("c", "1"), true, Span::none(), after(3));
    // No longer urgent by itself, but the change before it is not written yet.
    queue.put(pod("a", "2"), false, Span::none(), after(4));
    assert_eq!((queue.len(), queue.oldest()), (4, Some(now)));
    let expected = vec![pod("a", "2"), pod("c", "1"), Job::Node(b"n".to_vec()), pod("b", "1")];
    assert_eq!(drain(&mut queue), expected);
    assert_eq!(queue.oldest(), None);
}

#[test]
fn a_failed_job_is_queued_again_unless_a_later_one_waits() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    queue.put(pod("a", "1"), true, Span::none(), now);
    queue.put(pod("b", "1"), false, Span::none(), now);
    let (a, b) = (queue.take().unwrap(), queue.take().unwrap());
    let remove = Job::RemovePod { uid: "a".into(), name: PodFullName::new("web", "default") };
    queue.put(remove.clone(), false, Span::none(), now + Duration::from_secs(1));
    queue.put_back(a);
    queue.put_back(b);
    assert_eq!(queue.oldest(), Some(now));
    assert_eq!(drain(&mut queue), [remove, pod("b", "1")]);
}

#[test]
fn a_refused_job_is_retried_after_others_with_back_off() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    queue.put(pod("a", "1"), true, Span::none(), now);
    let refused = queue.take_at(now).unwrap();
    queue.defer(refused, JobError::ThisJob, now);
    queue.put(pod("b", "1"), false, Span::none(), now);
    assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
    assert!(queue.take_at(now).is_none());
    let first = queue.due().unwrap();
    let retry = queue.take_at(first).unwrap();
    queue.defer(retry, JobError::ThisJob, first);
    assert!(queue.due().unwrap() - first > first - now);
    // A newer state need not wait for it.
    queue.put(pod("a", "2"), false, Span::none(), now);
    assert_eq!(queue.take_at(now).unwrap().job, pod("a", "2"));
}

#[test]
fn the_node_precedes_older_and_urgent_jobs_unless_it_was_refused() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    let node = Job::Node(b"n".to_vec());
    queue.put(pod("a", "1"), true, Span::none(), now);
    queue.put(node.clone(), false, Span::none(), now + Duration::from_secs(1));
    let taken = queue.take_node_at(now).unwrap();
    assert_eq!(taken.job, node);
    assert!(queue.take_node_at(now).is_none());
    queue.defer(taken, JobError::ThisJob, now);
    assert!(queue.take_node_at(now).is_none() && queue.take_at(now).unwrap().job == pod("a", "1"));
    assert!(queue.take_at(now).is_none());
    queue.retry_all_now();
    assert_eq!(queue.take_at(now).unwrap().job, node);
}

#[test]
fn a_hanging_job_and_its_next_state_are_taken_after_others() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.put(pod("hangs", "1"), true, Span::none(), now);
    queue.put(pod("b", "1"), false, Span::none(), now);
    let hangs = queue.take_at(now).unwrap();
    assert!(!queue.put_back_unanswered(hangs, after(30)), "no job was answered");
    let hangs = queue.take_at(after(30)).unwrap();
    assert_eq!(hangs.job, pod("hangs", "1"), "it has kept its place");
    queue.record_answer(after(40));
    queue.put(pod("hangs", "2"), true, Span::none(), after(50));
    assert!(queue.put_back_unanswered(hangs, after(60)));
    assert_eq!(queue.take_at(after(60)).unwrap().job, pod("b", "1"));
    queue.record_success();
    assert!(queue.take_at(after(60)).is_none(), "the success of others does not release it");
    queue.put(pod("hangs", "3"), true, Span::none(), after(61));
    assert!(queue.take_at(after(61)).is_none());
    queue.put(pod("c", "1"), false, Span::none(), after(90));
    assert_eq!(queue.take_at(after(90)).unwrap().job, pod("c", "1"), "although it is not urgent");
    assert_eq!(queue.take_at(after(90)).unwrap().job, pod("hangs", "3"));
}

#[test]
fn a_slowly_refused_job_is_taken_after_others() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.put(pod("slow", "1"), true, Span::none(), now);
    let slow = queue.take_at(now).unwrap();
    queue.defer(slow, JobError::ControlPlane, after(10));
    for job in [pod("b", "1"), Job::Node(b"n".to_vec())] {
        queue.put(job, false, Span::none(), after(20));
    }
    assert!(queue.take_node_at(after(20)).is_some());
    assert_eq!(queue.take_at(after(20)).unwrap().job, pod("b", "1"));
    assert_eq!(queue.take_at(after(20)).unwrap().job, pod("slow", "1"));
}

#[test]
fn back_off_grows_to_a_minute_per_job_and_to_ten_seconds_for_the_server() {
    type PutBack = fn(&mut Queue, Pending, Instant);
    let unanswered: PutBack = |queue, pending, now| {
        queue.put_back_unanswered(pending, now);
    };
    let refused: PutBack = |queue, pending, now| queue.defer(pending, JobError::ThisJob, now);
    let control_plane_fails: PutBack =
        |queue, pending, now| queue.defer(pending, JobError::ControlPlane, now);
    let node = Job::Node(b"n".to_vec());
    for (job, try_seconds, put_back, longest) in [
        (pod("a", "1"), 0, refused, 60),
        (pod("a", "1"), 0, control_plane_fails, 10),
        (pod("a", "1"), 30, control_plane_fails, 10),
        (pod("a", "1"), 30, unanswered, 60),
        (pod("a", "1"), 0, unanswered, 10),
        (node, 10, unanswered, 10),
    ] {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.put(job.clone(), false, Span::none(), now);
        for number in 1..=9 {
            let taken = queue.take_at(now).unwrap();
            queue.record_answer(now + Duration::from_nanos(1));
            now += Duration::from_secs(try_seconds);
            put_back(&mut queue, taken, now);
            let pause = queue.due().unwrap() - now;
            assert_eq!(pause.as_secs(), longest.min(1 << number), "{job:?}, {number}");
            now += pause;
        }
    }
}

#[test]
fn a_hanging_node_write_is_taken_after_pods() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.put(Job::Node(b"n".to_vec()), true, Span::none(), now);
    let node = queue.take_node_at(now).unwrap();
    queue.record_answer(after(5));
    assert!(queue.put_back_unanswered(node, after(10)));
    queue.put(pod("a", "1"), false, Span::none(), after(20));
    assert!(queue.take_node_at(after(20)).is_none());
    assert_eq!(queue.take_at(after(20)).unwrap().job, pod("a", "1"));
    assert_eq!(queue.take_at(after(20)).unwrap().job, Job::Node(b"n".to_vec()));
}

#[test]
fn a_job_put_last_follows_all_others_and_is_retried_within_ten_seconds() {
    let (mut queue, mut now) = (Queue::default(), Instant::now());
    queue.put(pod("a", "1"), true, Span::none(), now);
    for refused in 1..9 {
        let a = queue.take_at(now).unwrap();
        assert_eq!(a.job, pod("a", "1"));
        queue.put_last(a, now);
        assert!(queue.has(&pod("a", "1").slot()) && queue.take_at(now).is_none());
        let due = queue.due().unwrap();
        assert_eq!(due - now, Duration::from_secs(1 << refused).min(Duration::from_secs(10)));
        now = due;
        queue.put(pod("b", "1"), false, Span::none(), now);
        assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
    }
}

#[test]
fn the_first_success_retries_all_jobs_refused_by_a_failing_control_plane() {
    let now = Instant::now();
    let after = |error: JobError| {
        let mut queue = Queue::default();
        for uid in ["a", "b", "c"] {
            queue.put(pod(uid, "1"), false, Span::none(), now);
            let taken = queue.take_at(now).unwrap();
            queue.defer(taken, error, now);
        }
        let c = queue.take_at(queue.due().unwrap()).unwrap();
        queue.record_success();
        drop(c);
        std::iter::from_fn(|| queue.take_at(now)).count()
    };
    assert_eq!((after(JobError::ControlPlane), after(JobError::ThisJob)), (2, 0));
}

#[test]
fn a_job_refused_while_others_succeed_is_not_retried_with_each_success() {
    let (mut queue, mut now) = (Queue::default(), Instant::now());
    for uid in ["gone-1", "gone-2", "gone-3"] {
        queue.put(pod(uid, "1"), false, Span::none(), now);
    }
    let mut tries = 0;
    for _ in 0..60 {
        queue.put(pod("good", "1"), false, Span::none(), now);
        while let Some(taken) = queue.take_at(now) {
            if taken.job == pod("good", "1") {
                queue.record_success();
            } else {
                tries += 1;
                queue.defer(taken, JobError::ControlPlane, now);
            }
        }
        now += Duration::from_secs(1);
    }
    // The first try, the one after another job's success, and those after 4, 8, 16 and 32 s.
    assert!((9..=21).contains(&tries), "{tries}");
}

#[test]
fn a_pod_report_in_progress_is_not_begun_twice_and_delays_no_other() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    queue.put(pod("a", "1"), true, Span::none(), now);
    queue.put(pod("b", "1"), false, Span::none(), now);
    let first = queue.begin_at(now).unwrap();
    queue.put(pod("a", "2"), true, Span::none(), now);
    assert_eq!(queue.begin_at(now).unwrap().job, pod("b", "1"));
    assert!(queue.begin_at(now).is_none(), "both are being written");
    queue.finish(&first.job.slot());
    assert_eq!(queue.begin_at(now).unwrap().job, pod("a", "2"));
}

#[test]
fn many_refused_jobs_delay_no_new_one_and_are_retried_at_a_bounded_rate() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    for number in 0..255 {
        queue.put(pod(&format!("bad-{number}"), "1"), true, Span::none(), now);
        let bad = queue.take_at(now).unwrap();
        queue.defer(bad, JobError::ThisJob, now);
    }
    let later = now + Duration::from_secs(120);
    queue.put(pod("good", "1"), false, Span::none(), later);
    assert_eq!(queue.take_at(later).unwrap().job, pod("good", "1"));
    let (mut retries, mut at) = (0, later);
    while at < later + Duration::from_secs(10) {
        while let Some(bad) = queue.take_at(at) {
            retries += 1;
            queue.defer(bad, JobError::ThisJob, at);
        }
        at = queue.due().unwrap();
    }
    assert_eq!(retries, 100);
}

#[test]
fn stale_pods_are_removed_before_new_ones_are_written() {
    let (mut queue, now) = (Queue::default(), Instant::now());
    queue.put(pod("a", "1"), false, Span::none(), now);
    queue.put(Job::Retain(BTreeSet::new()), false, Span::none(), now);
    assert_eq!(drain(&mut queue), [Job::Retain(BTreeSet::new()), pod("a", "1")]);
}
