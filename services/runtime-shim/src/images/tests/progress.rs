//! Pulls that take long: their progress, stalls and limits.

use std::time::Duration;

use keelson_runtime_shim_core::pull_rate::PullRate;
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::pull_watch::PullWatcher;

/// Receives progress of a held pull until its detail is `expected`.
async fn progress_detail(
    messages: &mut mpsc::Receiver<Result<pb::EnsureImageResponse, Status>>,
    expected: &str,
) -> pb::ImageProgress {
    let found = async {
        loop {
            if let Some(Item::Progress(progress)) = messages.recv().await.unwrap().unwrap().item
                && progress.detail == expected
            {
                return progress;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found)
        .await
        .unwrap_or_else(|_| panic!("{expected} was not reported"))
}

fn watched(fake: &FakeRuntime, limit: Duration) -> Images {
    let mut images = images(fake);
    images.puller.watcher = PullWatcher::new(fake.cri.clone(), images.puller.clock.clone(), limit);
    images.puller.watcher.period = Duration::from_millis(10);
    images
}

#[tokio::test]
async fn pull_reports_progress_and_is_cancelled_when_stalled() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.images.pull_image.hold();
    fake.set_blobs(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "pulling: waiting for the registry").await;
    for bytes in [10, 20] {
        images.puller.clock.advance(59, 0);
        fake.set_blobs(&[("layer-a", bytes), ("layer-b", 5)]);
        let far = progress_detail(
            &mut messages,
            &format!("pulling: {}.0 B of 200.0 B (2 layers on their way)", bytes + 5),
        )
        .await;
        assert_eq!((far.step.as_str(), far.bytes, far.total_bytes), ("pulling", bytes as u64 + 5, 200));
    }
    images.puller.clock.advance(60, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    let failure = failed(last.unwrap());
    assert_eq!(failure.reason, "ErrImagePull");
    let text = "Failed to pull image \"busybox:1\": no progress within 1m0s: 25.0 B of 200.0 B (2 layers on their way)";
    assert!(failure.message.starts_with(text), "{failure:?}");
    assert!(failure.next_retry_unix_nanos > 0, "it is retried after the back-off");
    assert_eq!(failed(end(&images, request("Always")).await).reason, "ImagePullBackOff");
}

#[tokio::test]
async fn pull_has_no_limit_when_the_runtime_reports_no_progress() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::ZERO);
    let held = fake.images.pull_image.hold();
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn(async move { images.ensure(request("Always"), progress).await });
    fake.images.pull_image.requests().until_len(1).await;
    assert_eq!(fake.content.list_statuses.requests().len(), 1);
    held.open();
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    assert!(matches!(last, Some(Item::Done(_))));
}

#[tokio::test]
async fn runtime_that_hangs_during_a_pull_is_unavailable() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.images.pull_image.hold();
    fake.set_blobs(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "pulling: waiting for the registry").await;
    fake.content.list_statuses.fail(cut_off());
    images.puller.clock.advance(61, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = Some(message);
    }
    assert_eq!(last.unwrap().unwrap_err().code(), Code::Unavailable);
    assert!(events_of(&images).await.iter().all(|e| e.r#type == "Normal"));
}

#[tokio::test]
async fn pull_beyond_the_rate_waits_and_reports_it() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    *images.puller.rate.lock().unwrap() = PullRate::new(1, 1);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    let (progress, mut messages) = mpsc::channel(8);
    let begun = std::time::Instant::now();
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "waiting for its turn (registryPullQPS)").await;
    assert_eq!(fake.pulled_as().len(), 1);
    pull.await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(900) && fake.pulled_as().len() == 2);
    // A cancelled pull returns its token.
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "waiting for its turn (registryPullQPS)").await;
    drop(messages);
    pull.await.unwrap();
    images.puller.clock.advance(2, 0);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
}
