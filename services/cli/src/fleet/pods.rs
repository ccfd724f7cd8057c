//! `keelson logs` and `keelson exec` with `--etcd`: the log of a pod on a remote node, and commands in it.

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

use super::etcd_error::from_etcd_error;
use super::node_api::NodeApi;
use super::nodes::Fleet;
use crate::args::{ExecArgs, LogsArgs};
use crate::cmd::{exec, logs};
use crate::error::CliError;
use crate::output::{OutputWriter, Target};
use crate::pods::bare_name;
use crate::session::Session;

/// The number of output messages that are buffered for a slow reader.
const BUFFERED_MESSAGES: usize = 4;

/// A pod of the fleet.
struct RemotePod {
    node: String,
    namespace: String,
    name: String,
    pod: Pod,
}

impl RemotePod {
    /// The path of a request for one of its containers.
    fn path(&self, what: &str, container: &str, query: &[(&str, String)]) -> String {
        let mut text = format!("/{what}/{}/{}/{container}?", self.namespace, self.name);
        let pairs = query.iter().map(|(key, value)| (*key, value.as_str()));
        text.push_str(&form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish());
        text
    }
}

/// Finds the pod of that name; it must be on exactly one node.
async fn find(session: &Session, fleet: &Fleet, name: &str) -> Result<RemotePod, CliError> {
    let name = bare_name(name);
    let namespace = &session.global.namespace;
    let mut found = Vec::new();
    for node in fleet.selected_nodes().await?.names() {
        let key = NodeKeys::new(&node).pod_status(namespace, name);
        if let Some(entry) = fleet.etcd.get(&key).await.map_err(from_etcd_error)? {
            found.push((node, entry));
        }
    }
    match found.as_slice() {
        [] => Err(CliError::NotFound {
            what: format!("no node reports a pod {name:?} in the namespace {namespace}"),
            hint: "`keelson get pods -A --etcd …` lists all pods with their nodes".into(),
        }),
        [(node, entry)] => {
            let pod = serde_json::from_slice(&entry.value).map_err(|error| CliError::Failed {
                message: format!("the status of the pod {name} from the node {node} is not a Pod: {error}"),
                hint: None,
            })?;
            Ok(RemotePod { node: node.clone(), namespace: namespace.clone(), name: name.to_owned(), pod })
        }
        several => Err(CliError::Usage {
            message: format!("several nodes have a pod {name}"),
            hint: format!(
                "add --node with one of: {}",
                several.iter().map(|(node, _)| node.as_str()).collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// Streams the log of a container to standard output.
pub(super) async fn logs(session: &Session, fleet: &Fleet, args: &LogsArgs) -> Result<(), CliError> {
    let pod = find(session, fleet, &args.target.pod).await?;
    let container = logs::choose_container(&pod.pod, args.target.container.as_deref())?;
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
    let mut body = api.request(Method::GET, &path, &[]).await?.into_body();
    let mut writer = OutputWriter::start()?;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => writer.write(Target::Stdout, frame.into_data().unwrap_or_default().into()).await?,
            Err(error) => {
                writer.finish().await?;
                return Err(CliError::NodeUnreachable {
                    message: format!("the stream of the log from the node {} broke: {error}", pod.node),
                    hint: "run it again; --since skips the lines already read".into(),
                });
            }
        }
    }
    writer.finish().await
}

/// Runs a command in a container and ends with its exit code.
pub(super) async fn exec(session: &Session, fleet: &Fleet, args: &ExecArgs) -> Result<(), CliError> {
    let pod = find(session, fleet, &args.target.pod).await?;
    let container = logs::choose_container(&pod.pod, args.target.container.as_deref())?;
    let api = NodeApi::of(fleet, &session.global.etcd, &pod.node).await?;
    let begin = async |tty: bool| {
        let mut query: Vec<(&str, String)> =
            args.command.iter().map(|part| ("command", part.clone())).collect();
        let streams = [("input", args.stdin), ("output", true), ("error", !tty), ("tty", tty)];
        query.extend(streams.into_iter().filter(|(_, on)| *on).map(|(key, _)| (key, "1".to_owned())));
        let path = pod.path("exec", &container, &query);
        exec_streams(&api, &path, args.stdin, tty).await.map_err(exec::ExecError::from)
    };
    match exec::run_attached(args.stdin, args.tty, begin).await {
        Ok(code) => exec::exit_with(code),
        Err(exec::ExecError::Local(error)) => Err(error),
        Err(exec::ExecError::Remote { status, started }) => Err(remote_error(&pod.node, &status, started)),
    }
}

/// The streams of the command, in the messages of the runtime API.
async fn exec_streams(
    api: &NodeApi,
    path: &str,
    stdin: bool,
    tty: bool,
) -> Result<ReceiverStream<Result<ExecResponse, Status>>, CliError> {
    let mut messages = Box::pin(exec::input(stdin, tty)?);
    let headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", PROTOCOL),
        (STREAMS_HEADER, STREAMS),
        ("Content-Length", "0"),
    ];
    let answer = api.request(Method::POST, path, &headers).await?;
    let broken = |error: String| CliError::NodeUnreachable {
        message: format!("the node did not open the command's streams: {error}"),
        hint: "try again; `keelson get services` on the node shows its state".into(),
    };
    let upgraded = hyper::upgrade::on(answer).await.map_err(|error| broken(error.to_string()))?;
    let (reader, writer) = tokio::io::split(TokioIo::new(upgraded));
    let opened = session::open(reader, writer, BytesMut::new(), Wanted::all(stdin, tty)).await;
    let opened = opened.map_err(|error| broken(status::chain(&error)))?;
    let size = if tty { crate::terminal::size() } else { None };
    let (answers, stream) = mpsc::channel(BUFFERED_MESSAGES);
    keelson_service_kit::spawn("relay", async move {
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

/// The error for a command that could not be run, or not to its end.
fn remote_error(node: &str, status: &Status, started: bool) -> CliError {
    let message = status.message().to_owned();
    match status::reason(status).as_deref() {
        Some("COMMAND_FAILED") => {
            CliError::Failed { message, hint: Some("the command must exist in the container's image".into()) }
        }
        _ if started => CliError::Failed {
            message: format!("the connection to the node {node} broke while the command ran: {message}"),
            hint: Some(
                "its exit code is unknown, and it may still run: check before you run it again".into(),
            ),
        },
        _ => CliError::Failed { message, hint: None },
    }
}
