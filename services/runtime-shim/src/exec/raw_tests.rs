use keelson_service_kit::status::chain;
use pb::stream_request::Item as RequestItem;
use pb::stream_response::Item as ResponseItem;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::tests::fake_runtime::FakeRuntime;
use crate::tests::fake_streaming_server::soon;

struct World {
    runtime: FakeRuntime,
    server: TcpListener,
    execs: Execs,
    progress: Progress,
}

struct Caller {
    request_sender: mpsc::Sender<Result<pb::StreamRequest, Status>>,
    pieces: mpsc::Receiver<Result<pb::StreamResponse, Status>>,
    end: JoinHandle<Result<(), ExecError>>,
}

fn start() -> pb::StreamStart {
    let exec = pb::StreamExec {
        container: "c".into(),
        command: vec!["cat".into()],
        stdin: true,
        stdout: true,
        ..Default::default()
    };
    let header = |name: &str, value: &str| pb::HttpHeader { name: name.into(), value: value.into() };
    pb::StreamStart {
        namespace: "default".into(),
        name: "u".into(),
        what: Some(pb::stream_start::What::Exec(exec)),
        method: "GET".into(),
        headers: vec![
            header("host", "node:10250"),
            header("authorization", "Bearer secret"),
            header("upgrade", "websocket"),
            header("connection", "Upgrade"),
        ],
        ..Default::default()
    }
}

impl World {
    async fn new() -> Self {
        let (runtime, server) = (FakeRuntime::start().await, TcpListener::bind("127.0.0.1:0").await.unwrap());
        runtime.sandbox("s-u", "u", true);
        runtime.container("c", "u", cri::ContainerState::ContainerRunning);
        runtime.set_exec_url(&format!("http://{}/exec/token", server.local_addr().unwrap()));
        let progress = Progress::default();
        let execs = Execs::new(runtime.cri.clone(), &Metrics::new(), progress.clone());
        Self { runtime, server, execs, progress }
    }

    async fn call(&self, first: pb::StreamStart) -> Caller {
        let (request_sender, requests) = mpsc::channel(1);
        let (to_caller, pieces) = mpsc::channel(4);
        let execs = self.execs.clone();
        let end = tokio::spawn(async move { execs.stream(ReceiverStream::new(requests), &to_caller).await });
        let caller = Caller { request_sender, pieces, end };
        caller.say(RequestItem::Start(first)).await;
        caller
    }

    /// The runtime's side of a connection: the head of the request, and the socket after sending `answer`.
    async fn accept(&self, answer: &str) -> (String, TcpStream) {
        let (mut socket, _) = soon(self.server.accept()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(soon(socket.read_u8()).await.unwrap());
        }
        socket.write_all(answer.as_bytes()).await.unwrap();
        (String::from_utf8(head).unwrap(), socket)
    }
}

impl Caller {
    async fn say(&self, item: RequestItem) {
        soon(self.request_sender.send(Ok(pb::StreamRequest { item: Some(item) }))).await.unwrap();
    }

    async fn next(&mut self) -> Option<ResponseItem> {
        soon(self.pieces.recv()).await.map(|piece| piece.unwrap().item.unwrap())
    }

    async fn error_text(self) -> String {
        chain(&soon(self.end).await.unwrap().unwrap_err())
    }
}

const CHANGED: &str =
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-A: b\r\n\r\nfirst";

#[tokio::test]
async fn bytes_after_the_upgrade_are_passed_through_unchanged() {
    let world = World::new().await;
    let mut caller = world.call(start()).await;
    let (head, mut socket) = world.accept(CHANGED).await;
    assert!(head.starts_with("GET /exec/token HTTP/1.1\r\nHost: 127.0.0.1:"), "{head}");
    assert!(head.contains("\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"), "{head}");
    assert!(!head.contains("secret") && !head.contains("10250"), "{head}");
    let exec = world.runtime.last_exec();
    assert_eq!((exec.stdin, exec.stdout, exec.stderr, exec.tty), (true, true, false, false));

    let Some(ResponseItem::Head(head)) = caller.next().await else { panic!("the head comes first") };
    assert_eq!(head.status, 101);
    assert!(head.headers.iter().any(|h| h.name == "X-A" && h.value == "b"), "{:?}", head.headers);
    assert_eq!(
        caller.next().await,
        Some(ResponseItem::Data(b"first".to_vec())),
        "bytes received with the head"
    );
    let odd = vec![0, 255, 13, 10, 13, 10];
    caller.say(RequestItem::Data(odd.clone())).await;
    let mut heard = vec![0; odd.len()];
    soon(socket.read_exact(&mut heard)).await.unwrap();
    assert_eq!(heard, odd);
    soon(socket.write_all(&odd)).await.unwrap();
    assert_eq!(caller.next().await, Some(ResponseItem::Data(odd)));
    // The runtime ends the connection.
    drop(socket);
    assert_eq!(caller.next().await, None);
    soon(caller.end).await.unwrap().unwrap();
}

#[tokio::test]
async fn connection_to_the_runtime_closes_when_the_caller_ends_or_leaves() {
    let world = World::new().await;
    for ends in [true, false] {
        let mut caller = world.call(start()).await;
        let (_, mut socket) = world.accept(CHANGED).await;
        assert!(matches!(caller.next().await, Some(ResponseItem::Head(_))));
        if ends {
            drop(caller.request_sender);
        } else {
            drop(caller.pieces);
        }
        assert_eq!(soon(socket.read(&mut [0; 8])).await.unwrap(), 0, "the connection ends");
        soon(caller.end).await.unwrap().unwrap();
    }
    let free = || world.execs.streams.taken() == 0;
    crate::tests::fake_runtime::until("their places are free", free).await;
}

#[tokio::test]
async fn pod_with_many_open_streams_leaves_places_to_other_pods_and_operators() {
    let world = World::new().await;
    let mut callers = Vec::new();
    for _ in 0..MAX_STREAMS / 2 {
        callers.push(world.call(start()).await);
    }
    crate::tests::fake_runtime::until("all are being served", || {
        world.execs.streams.taken() == MAX_STREAMS / 2
    })
    .await;
    let error_text = world.call(start()).await.error_text().await;
    assert!(
        error_text.contains("pod default/u has 64 of 128, and gets no more while 64 are free"),
        "{error_text}"
    );
    let condition = || {
        let conditions = world.progress.report("").conditions;
        conditions.into_iter().find(|condition| condition.name == "streams into containers").unwrap()
    };
    assert!(!condition().ok && condition().message.contains("default/u has 64"), "{:?}", condition());
    let other = pb::StreamStart { namespace: "other".into(), pod_uid: String::new(), ..start() };
    let error_text = world.call(other).await.error_text().await;
    assert!(error_text.contains("pod does not exist"), "it got a place: {error_text}");
    assert_eq!(world.execs.permits.available_permits(), MAX_EXECS);
    drop(callers);
    crate::tests::fake_runtime::until("their places are free", || world.execs.streams.taken() == 0).await;
    assert!(condition().ok);
}

#[tokio::test]
async fn response_without_upgrade_is_passed_on_with_its_body() {
    let world = World::new().await;
    let mut caller = world.call(start()).await;
    let (_, _socket) = world.accept("HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nno!\nrest").await;
    assert!(matches!(caller.next().await, Some(ResponseItem::Head(head)) if head.status == 403));
    assert_eq!(caller.next().await, Some(ResponseItem::Data(b"no!".to_vec())));
    assert_eq!(caller.next().await, None);
}

#[tokio::test]
async fn invalid_stream_request_is_refused_before_connecting_to_the_runtime() {
    let world = World::new().await;
    let changed = |change: &dyn Fn(&mut pb::StreamStart)| {
        let mut start = start();
        change(&mut start);
        start
    };
    let odd = pb::HttpHeader { name: "x".into(), value: "a\r\nhost: b".into() };
    for (first, text) in [
        (changed(&|s| s.method = "PUT".into()), "`method` must be GET or POST"),
        (changed(&|s| s.headers.push(odd.clone())), "the header \"x\" contains control characters"),
        (changed(&|s| s.name.clear()), "the pod must be named"),
        (changed(&|s| s.what = None), "does not say what to connect to"),
        (changed(&|s| s.name = "none".into()), "pod does not exist"),
    ] {
        assert!(world.call(first).await.error_text().await.contains(text), "{text}");
    }
    // Connections are accepted in their order, so one of a refused request would come before that of this one.
    let mut caller = world.call(start()).await;
    let (_, _socket) = world.accept(CHANGED).await;
    assert!(matches!(caller.next().await, Some(ResponseItem::Head(_))));
    caller.say(RequestItem::Start(start())).await;
    drop(caller.next().await);
    assert!(caller.error_text().await.contains("`start` has come a second time"));
}
