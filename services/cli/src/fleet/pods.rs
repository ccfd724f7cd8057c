//! `keelson logs` and `keelson exec` with `--etcd`: what a pod on some node says, and commands in it.

use bytes::BytesMut;
use http_body_util::BodyExt as _;
use hyper::Method;
use hyper_util::rt::TokioIo;
use keelson_etcd::NodeKeys;
use keelson_kube_model::Pod;
use keelson_proto::keelson::runtime::v1::ExecResponse;
use keelson_service_kit::status;
use keelson_spdy::relay::{RelayError, relay};
use keelson_spdy::session::{self, Wanted};
use keelson_spdy::{PROTOCOL, STREAMS, STREAMS_HEADER};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::node_api::NodeApi;
use super::{Fleet, failure};
use crate::args::{ExecArgs, LogsArgs};
use crate::cmd::{Session, exec, logs};
use crate::error::Failure;
use crate::output::{Pump, Target};
use crate::pods::bare_name;

/// Pieces of output that wait for whoever reads them.
const WAITING: usize = 4;

/// A pod of the fleet.
struct OnNode {
    node: String,
    namespace: String,
    name: String,
    pod: Pod,
}

impl OnNode {
    /// The path of what is asked of one of its containers.
    fn path(&self, what: &str, container: &str, query: &[(&str, String)]) -> String {
        let mut text = format!("/{what}/{}/{}/{container}?", self.namespace, self.name);
        let pairs = query.iter().map(|(key, value)| (*key, value.as_str()));
        text.push_str(&form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish());
        text
    }
}

/// The pod of that name, of which there has to be one alone.
async fn find(session: &Session, fleet: &Fleet, name: &str) -> Result<OnNode, Failure> {
    let name = bare_name(name);
    let namespace = &session.global.namespace;
    let mut found = Vec::new();
    for node in fleet.chosen().await?.names() {
        let key = NodeKeys::new(&node).pod_status(namespace, name);
        if let Some(entry) = fleet.etcd.get(&key).await.map_err(failure)? {
            found.push((node, entry));
        }
    }
    match found.as_slice() {
        [] => Err(Failure::NotFound {
            what: format!("no node tells of a pod {name:?} in the namespace {namespace}"),
            hint: "`keelson get pods -A --etcd …` shows what runs where".into(),
        }),
        [(node, entry)] => {
            let pod = serde_json::from_slice(&entry.value).map_err(|error| Failure::Answer {
                message: format!("what the node {node} tells of the pod {name} is no Pod: {error}"),
                hint: None,
            })?;
            Ok(OnNode { node: node.clone(), namespace: namespace.clone(), name: name.to_owned(), pod })
        }
        several => Err(Failure::Usage {
            message: format!("several nodes have a pod {name}"),
            hint: format!(
                "--node with one of: {}",
                several.iter().map(|(node, _)| node.as_str()).collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// Streams the log of a container to standard output.
pub(super) async fn logs(session: &Session, fleet: &Fleet, args: &LogsArgs) -> Result<(), Failure> {
    let pod = find(session, fleet, &args.pod).await?;
    let container = logs::choose(&pod.pod, args.container.as_deref())?;
    let mut query = Vec::new();
    for (key, is_set) in
        [("follow", args.follow), ("previous", args.previous), ("timestamps", args.timestamps)]
    {
        if is_set {
            query.push((key, "true".to_owned()));
        }
    }
    query.extend(args.tail.map(|lines| ("tailLines", lines.to_string())));
    query.extend(args.limit_bytes.map(|bytes| ("limitBytes", bytes.to_string())));
    query.extend(args.since.map(|age| ("sinceSeconds", age.as_secs().max(1).to_string())));
    let api = NodeApi::of(fleet, &session.global.etcd, &pod.node).await?;
    let path = pod.path("containerLogs", &container, &query);
    let mut body = api.ask(Method::GET, &path, &[]).await?.into_body();
    let mut pump = Pump::start()?;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => pump.write(Target::Stdout, frame.into_data().unwrap_or_default().into()).await?,
            Err(error) => {
                pump.finish().await?;
                return Err(Failure::NodeAway {
                    message: format!("the log broke on its way from the node {}: {error}", pod.node),
                    hint: "ask again; --since leaves out what was read".into(),
                });
            }
        }
    }
    pump.finish().await
}

/// Runs a command in a container and ends with its exit code.
pub(super) async fn exec(session: &Session, fleet: &Fleet, args: &ExecArgs) -> Result<(), Failure> {
    let pod = find(session, fleet, &args.pod).await?;
    let container = logs::choose(&pod.pod, args.container.as_deref())?;
    let api = NodeApi::of(fleet, &session.global.etcd, &pod.node).await?;
    let begin = async |tty: bool| {
        let mut query: Vec<(&str, String)> =
            args.command.iter().map(|part| ("command", part.clone())).collect();
        let streams = [("input", args.stdin), ("output", true), ("error", !tty), ("tty", tty)];
        query.extend(streams.into_iter().filter(|(_, on)| *on).map(|(key, _)| (key, "1".to_owned())));
        let path = pod.path("exec", &container, &query);
        streams_of(&api, &path, args.stdin, tty).await.map_err(exec::Broken::from)
    };
    match exec::attended(args, begin).await {
        Ok(code) => exec::ended(code),
        Err(exec::Broken::Local(failure)) => Err(failure),
        Err(exec::Broken::Remote { status, started }) => Err(explain(&pod.node, &status, started)),
    }
}

/// The streams of the command, as the agent of this machine would give them.
async fn streams_of(
    api: &NodeApi,
    path: &str,
    stdin: bool,
    tty: bool,
) -> Result<ReceiverStream<Result<ExecResponse, Status>>, Failure> {
    let mut messages = Box::pin(exec::input(stdin, tty)?);
    let headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", PROTOCOL),
        (STREAMS_HEADER, STREAMS),
        ("Content-Length", "0"),
    ];
    let answer = api.ask(Method::POST, path, &headers).await?;
    let broken = |error: String| Failure::NodeAway {
        message: format!("the node does not give the command's streams: {error}"),
        hint: "try again; `keelson get services` on the node shows how it is".into(),
    };
    let upgraded = hyper::upgrade::on(answer).await.map_err(|error| broken(error.to_string()))?;
    let (reader, writer) = tokio::io::split(TokioIo::new(upgraded));
    let opened = session::open(reader, writer, BytesMut::new(), Wanted::all(stdin, tty)).await;
    let opened = opened.map_err(|error| broken(status::chain(&error)))?;
    let size = if tty { crate::terminal::size() } else { None };
    let (answers, stream) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        if let Err(error) = relay(opened, "", size, &mut messages, &answers).await {
            let _ = answers.send(Err(status_of(&error))).await;
        }
    });
    Ok(ReceiverStream::new(stream))
}

fn status_of(error: &RelayError) -> Status {
    let (code, reason) = match error {
        RelayError::BadRequest(_) | RelayError::Caller(_) => (Code::InvalidArgument, "BAD_REQUEST"),
        RelayError::Lost { .. } => (Code::Unavailable, "RUNTIME_LOST"),
        RelayError::Failed(_) | RelayError::Unclear(_) => (Code::Unknown, "COMMAND_FAILED"),
    };
    status::error(code, reason, status::chain(error))
}

/// What a person is told of a command that could not be run, or not to its end.
fn explain(node: &str, status: &Status, started: bool) -> Failure {
    let message = status.message().to_owned();
    match status::reason(status).as_deref() {
        Some("COMMAND_FAILED") => Failure::Answer {
            message,
            hint: Some("the command must be there in the container's image".into()),
        },
        _ if started => Failure::Answer {
            message: format!("the connection to the node {node} broke while the command ran: {message}"),
            hint: Some(
                "how it ended is not known, and it may still run: look before you run it again".into(),
            ),
        },
        _ => Failure::Answer { message, hint: None },
    }
}
