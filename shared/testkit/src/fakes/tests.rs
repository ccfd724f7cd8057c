//! The fakes over real sockets, with the client stack of the services.

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1::{PodRef, SetComplete};
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::{
    EvictPodRequest, EvictPodResponse, ListPodsRequest, PodDocument, RetryPodRequest, RetryPodResponse,
    WatchPodsRequest, WatchPodsResponse, watch_pods_response,
};
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::runtime::v1::{
    GetPodRequest, GetPodResponse, PodDesire, SyncRequest, sync_request,
};
use keelson_service_kit::status::is_cut;
use keelson_service_kit::{Peer, PeerChannel, connect_foreign};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Code, Status};

use super::{
    FakeCriImages, FakeCriRuntime, FakePodSync, FakeRuntime, FakeServer, Recorder, StreamAnswer, cut_off,
};
use crate::Scratch;

/// A fake at its socket, in a folder of its own.
struct Served {
    scratch: Scratch,
    config: Config,
    server: FakeServer,
}

async fn serve(service: ServiceName, routes: Routes) -> Served {
    let scratch = Scratch::new().unwrap();
    let mut config = Config::default();
    config.paths.run_dir = scratch.path().join("run");
    let server = FakeServer::start(&config, service, routes).await.unwrap();
    Served { scratch, config, server }
}

impl Served {
    fn channel(&self, service: ServiceName) -> PeerChannel {
        Peer::service(&self.config.paths.run_dir, service).channel()
    }
}

async fn pod_sync(fake: &FakePodSync) -> (Served, PodSyncClient<PeerChannel>) {
    let served = serve(ServiceName::PodSync, Routes::new(fake.server())).await;
    let client = PodSyncClient::new(served.channel(ServiceName::PodSync));
    (served, client)
}

fn retry(name: &str) -> RetryPodRequest {
    RetryPodRequest { namespace: "default".into(), name: name.into() }
}

fn document(uid: &str) -> PodDocument {
    PodDocument { uid: uid.into(), ..PodDocument::default() }
}

fn gone(uid: &str) -> WatchPodsResponse {
    WatchPodsResponse { item: Some(watch_pods_response::Item::GoneUid(uid.into())) }
}

#[tokio::test]
async fn a_request_is_answered_only_after_its_answer_is_made() {
    let fake = FakePodSync::default();
    let (_served, mut client) = pod_sync(&fake).await;
    fake.retry_pod.answer(RetryPodResponse {});
    let gate = fake.retry_pod.hold();
    let call = tokio::spawn(async move { client.retry_pod(retry("a")).await });
    fake.retry_pod.requests().until_len(1).await;
    assert!(fake.retry_pod.answered().is_empty());
    gate.open();
    fake.retry_pod.answered().until_len(1).await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn unary_method_uses_queued_answers_before_the_standing_one() {
    let fake = FakePodSync::default();
    let (_served, mut client) = pod_sync(&fake).await;
    assert_eq!(client.retry_pod(retry("a")).await.unwrap_err().code(), Code::Unimplemented);
    fake.retry_pod.answer(RetryPodResponse {});
    fake.retry_pod.answer_once(Err(Status::not_found("no such pod")));
    assert_eq!(client.retry_pod(retry("b")).await.unwrap_err().message(), "no such pod");
    client.retry_pod(retry("c")).await.unwrap();
    fake.retry_pod.answer_with(|request| match request.name.as_str() {
        "d" => Ok(RetryPodResponse {}),
        other => Err(Status::internal(other)),
    });
    client.retry_pod(retry("d")).await.unwrap();
    assert_eq!(client.retry_pod(retry("e")).await.unwrap_err().message(), "e");
    let names: Vec<String> = fake.retry_pod.requests().take().into_iter().map(|r| r.name).collect();
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    assert!(fake.retry_pod.requests().is_empty());
    assert_eq!(fake.calls.all(), ["retry_pod"; 5]);
}

#[tokio::test]
async fn gate_holds_a_recorded_call_until_it_is_opened() {
    let fake = FakePodSync::default();
    let (_served, client) = pod_sync(&fake).await;
    let gate = fake.retry_pod.hold();
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { client.retry_pod(retry("a")).await }
    });
    fake.retry_pod.requests().until_len(1).await;
    other_calls_pass(&fake, client).await;
    fake.retry_pod.answer(RetryPodResponse {});
    gate.open();
    call.await.unwrap().expect("it is answered as set while it was held");
}

/// Makes a call to another method of `fake`. The server has one thread: a call that it received before and that no gate
/// holds is answered first.
async fn other_calls_pass(fake: &FakePodSync, mut client: PodSyncClient<PeerChannel>) {
    fake.evict_pod.answer(EvictPodResponse::default());
    client.evict_pod(EvictPodRequest::default()).await.unwrap();
}

#[tokio::test]
async fn gate_holds_a_stream_until_it_is_opened() {
    let fake = FakePodSync::default();
    let (_served, client) = pod_sync(&fake).await;
    let gate = fake.list_pods.hold();
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { client.list_pods(ListPodsRequest {}).await }
    });
    fake.list_pods.requests().until_len(1).await;
    other_calls_pass(&fake, client).await;
    fake.list_pods.list([document("u1")]);
    gate.open();
    let mut pods = call.await.unwrap().expect("it is answered as set while it was held").into_inner();
    assert_eq!(pods.message().await.unwrap().unwrap().uid, "u1");
}

#[tokio::test]
async fn gate_holds_a_stream_in_both_directions_until_it_is_opened() {
    let fake = FakeRuntime::default();
    let served = serve(ServiceName::RuntimeShim, Routes::new(fake.server())).await;
    let mut client = RuntimeClient::new(served.channel(ServiceName::RuntimeShim));
    let gate = fake.sync.hold();
    let (requests, stream) = mpsc::channel(4);
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { client.sync(ReceiverStream::new(stream)).await }
    });
    fake.calls.until(|calls| calls == ["sync"]).await;
    fake.get_pod.answer(GetPodResponse::default());
    client.get_pod(GetPodRequest::default()).await.unwrap();
    fake.sync.acknowledge_sets();
    gate.open();
    let mut acks = call.await.unwrap().expect("it is handled as set while it was held").into_inner();
    let complete = sync_request::Item::Complete(SetComplete { epoch: 3, sources_ready: true });
    requests.try_send(SyncRequest { item: Some(complete) }).unwrap();
    assert_eq!(acks.message().await.unwrap().unwrap().epoch, 3);
}

#[tokio::test]
async fn answer_may_change_the_script_of_its_own_method() {
    let fake = FakePodSync::default();
    let (_served, mut client) = pod_sync(&fake).await;
    let method = fake.retry_pod.clone();
    fake.retry_pod.answer_with(move |request| {
        method.fail(Status::aborted(request.name));
        Ok(RetryPodResponse {})
    });
    client.retry_pod(retry("a")).await.unwrap();
    assert_eq!(client.retry_pod(retry("b")).await.unwrap_err().message(), "a");
}

#[tokio::test]
async fn call_that_is_cut_off_breaks_without_a_status() {
    let (fake, scratch) = (FakeCriRuntime::default(), Scratch::new().unwrap());
    let socket = scratch.path().join("cri.sock");
    let _server = FakeServer::at(&socket, Routes::new(fake.server())).await.unwrap();
    let mut client = RuntimeServiceClient::new(connect_foreign("the fake", &socket));
    fake.get_container_events.answer_once(Err(cut_off()));
    let cut = client.get_container_events(cri::GetEventsRequest {}).await.unwrap_err();
    assert!(is_cut(&cut), "{cut:?}");
    let refused = client.get_container_events(cri::GetEventsRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented, "only the first call was cut off");
}

#[tokio::test]
async fn list_ends_after_its_messages_or_with_its_error() {
    let fake = FakePodSync::default();
    let (_served, mut client) = pod_sync(&fake).await;
    fake.list_pods.list([document("u1"), document("u2")]);
    let mut pods = client.list_pods(ListPodsRequest {}).await.unwrap().into_inner();
    assert_eq!(pods.message().await.unwrap().unwrap().uid, "u1");
    assert_eq!(pods.message().await.unwrap().unwrap().uid, "u2");
    assert_eq!(pods.message().await.unwrap(), None);
    let broken = StreamAnswer::items([document("u3")]).then_fail(Status::unavailable("gone"));
    fake.list_pods.answer_once(Ok(broken));
    let mut pods = client.list_pods(ListPodsRequest {}).await.unwrap().into_inner();
    assert_eq!(pods.message().await.unwrap().unwrap().uid, "u3");
    assert_eq!(pods.message().await.unwrap_err().message(), "gone");
}

#[tokio::test]
async fn watch_replays_then_sends_pushed_messages_until_it_is_broken() {
    let fake = FakePodSync::default();
    let (_served, mut client) = pod_sync(&fake).await;
    fake.watch_pods.replay([gone("u1")]);
    let mut first = client.watch_pods(WatchPodsRequest::default()).await.unwrap().into_inner();
    let mut second = client.watch_pods(WatchPodsRequest::default()).await.unwrap().into_inner();
    fake.watch_pods.until_open(|open| open == 2).await;
    fake.watch_pods.push(gone("u2"));
    for stream in [&mut first, &mut second] {
        assert_eq!(stream.message().await.unwrap(), Some(gone("u1")));
        assert_eq!(stream.message().await.unwrap(), Some(gone("u2")));
    }
    drop(second);
    fake.watch_pods.until_open(|open| open == 1).await;
    fake.watch_pods.break_streams(Status::unavailable("restart"));
    assert_eq!(first.message().await.unwrap_err().message(), "restart");
    fake.watch_pods.until_open(|open| open == 0).await;
}

#[tokio::test]
async fn sync_stream_is_recorded_and_each_set_acknowledged() {
    let fake = FakeRuntime::default();
    fake.sync.acknowledge_sets();
    let served = serve(ServiceName::RuntimeShim, Routes::new(fake.server())).await;
    let mut client = RuntimeClient::new(served.channel(ServiceName::RuntimeShim));
    let (requests, stream) = mpsc::channel(4);
    let mut acks = client.sync(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let send = |item| requests.try_send(SyncRequest { item: Some(item) }).unwrap();
    send(sync_request::Item::DroppedUid("u1".into()));
    send(sync_request::Item::Complete(SetComplete { epoch: 3, sources_ready: true }));
    assert_eq!(acks.message().await.unwrap().unwrap().epoch, 3);
    let dropped = SyncRequest { item: Some(sync_request::Item::DroppedUid("u1".into())) };
    assert_eq!(fake.sync.messages().all()[0], dropped);
    assert_eq!(fake.sync.messages().len(), 2);
    fake.sync.break_streams(Status::unavailable("restart"));
    assert_eq!(acks.message().await.unwrap_err().message(), "restart");
}

#[test]
fn last_desire_of_a_pod_is_the_newest_unless_it_was_dropped() {
    let messages = Recorder::default();
    let record = |item| messages.record(SyncRequest { item: Some(item) });
    let desire = |uid: &str, revision| {
        let pod = Some(PodRef { uid: uid.into(), ..PodRef::default() });
        sync_request::Item::Pod(PodDesire { pod, revision, ..PodDesire::default() })
    };
    let revision = |uid: &str| messages.last_desire(uid).map(|desire| desire.revision);
    record(desire("u1", 1));
    record(desire("u2", 2));
    record(desire("u1", 3));
    record(sync_request::Item::Complete(SetComplete::default()));
    assert_eq!([revision("u1"), revision("u2"), revision("u3")], [Some(3), Some(2), None]);
    record(sync_request::Item::DroppedUid("u1".into()));
    assert_eq!([revision("u1"), revision("u2")], [None, Some(2)]);
    record(desire("u1", 4));
    assert_eq!(revision("u1"), Some(4));
}

#[tokio::test]
async fn runtime_and_image_service_of_cri_share_a_socket() {
    let (runtime, images) = (FakeCriRuntime::default(), FakeCriImages::default());
    let routes = Routes::new(runtime.server()).add_service(images.server());
    let served = serve(ServiceName::RuntimeShim, routes).await;
    runtime.version.answer(cri::VersionResponse { runtime_name: "fake".into(), ..Default::default() });
    images.list_images.fail(Status::unknown("no images"));
    let channel = served.channel(ServiceName::RuntimeShim);
    let version = RuntimeServiceClient::new(channel.clone()).version(cri::VersionRequest::default()).await;
    assert_eq!(version.unwrap().into_inner().runtime_name, "fake");
    let listed = ImageServiceClient::new(channel).list_images(cri::ListImagesRequest::default()).await;
    assert_eq!(listed.unwrap_err().message(), "no images");
    let request = cri::RemoveImageRequest::default();
    let removed =
        ImageServiceClient::new(served.channel(ServiceName::RuntimeShim)).remove_image(request).await;
    let error = removed.unwrap_err();
    assert_eq!(error.message(), "the test has set no answer for ImageService.remove_image");
}

#[tokio::test]
async fn killed_server_breaks_its_streams_and_can_be_started_again() {
    let fake = FakePodSync::default();
    let (served, mut client) = pod_sync(&fake).await;
    fake.watch_pods.replay([gone("u1")]);
    let mut watch = client.watch_pods(WatchPodsRequest::default()).await.unwrap().into_inner();
    watch.message().await.unwrap();
    let Served { scratch: _scratch, config, server } = served;
    server.kill();
    assert!(watch.message().await.is_err());
    fake.watch_pods.until_open(|open| open == 0).await;
    let server = FakeServer::start(&config, ServiceName::PodSync, Routes::new(fake.server())).await.unwrap();
    let mut client = PodSyncClient::new(Peer::service(&config.paths.run_dir, ServiceName::PodSync).channel());
    client.watch_pods(WatchPodsRequest::default()).await.unwrap();
    server.stop().await.unwrap();
}
