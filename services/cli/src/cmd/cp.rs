//! `keelson cp`: copies files between this machine and a container, by the tar of the container's image.

mod archive;

use std::path::{Path, PathBuf};

use futures_util::stream::{self, StreamExt as _};
use keelson_proto::keelson::runtime::v1::ExecStart;
use keelson_proto::keelson::runtime::v1::exec_request::Item as RequestItem;
use keelson_proto::keelson::runtime::v1::exec_response::Item as ResponseItem;
use keelson_service_kit::status;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use self::archive::{ChannelReader, ChannelWriter, UnpackError, pack, unpack};
use super::exec::{self, ExecTarget, exec_request};
use crate::args::{ContainerArgs, CpArgs};
use crate::error::CliError;
use crate::output;
use crate::session::Session;

/// Chunks of an archive between the thread that reads or writes files and the call.
const BUFFERED_CHUNKS: usize = 8;
/// What is kept of the errors of a command in the container, in bytes.
const MAX_STDERR_BYTES: usize = 4096;

const USAGE: &str =
    "one of the two is POD:PATH: `keelson cp web:/data/file file`, or `keelson cp file web:/data/`";

/// What is copied.
#[derive(Debug, PartialEq, Eq)]
enum Direction<'a> {
    FromPod { pod: &'a str, path: &'a str, local: &'a str },
    ToPod { local: &'a str, pod: &'a str, path: &'a str },
}

/// Copies a file or folder.
pub(crate) async fn run(session: &Session, args: &CpArgs) -> Result<(), CliError> {
    match direction(&args.source, &args.target)? {
        Direction::FromPod { pod, path, local } => {
            Container::find(session, args, pod).await?.download(path, Path::new(local)).await
        }
        Direction::ToPod { local, pod, path } => {
            let local = Path::new(local);
            local.metadata().map_err(|source| CliError::Read { path: local.to_owned(), source })?;
            Container::find(session, args, pod).await?.upload(local, path).await
        }
    }
}

fn direction<'a>(source: &'a str, target: &'a str) -> Result<Direction<'a>, CliError> {
    let usage = |message: &str| CliError::Usage { message: message.to_owned(), hint: USAGE.to_owned() };
    let direction = match (in_pod(source), in_pod(target)) {
        (Some((pod, path)), None) => Direction::FromPod { pod, path, local: target },
        (None, Some((pod, path))) => Direction::ToPod { local: source, pod, path },
        (None, None) => return Err(usage("neither path is in a pod")),
        (Some(_), Some(_)) => return Err(usage("both paths are in pods")),
    };
    let (Direction::FromPod { path, local, .. } | Direction::ToPod { path, local, .. }) = direction;
    if path.is_empty() || local.is_empty() {
        return Err(usage("a path is empty"));
    }
    Ok(direction)
}

/// Pod and path of `POD:PATH`; `None` for a local path, which may have a colon behind a slash.
fn in_pod(text: &str) -> Option<(&str, &str)> {
    let (pod, path) = text.split_once(':')?;
    (!pod.is_empty() && !pod.contains('/')).then_some((pod, path))
}

/// The folder and the name of a path in a container: `/data/file` is `file` in `/data`. A path that ends in no name is the folder
/// itself, with the name `.`.
fn folder_and_name(path: &str) -> (String, String) {
    let trimmed = path.trim_end_matches('/');
    let (folder, name) = match trimmed.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((folder, name)) => (folder, name),
        None if trimmed.is_empty() => ("/", "."),
        None => (".", trimmed),
    };
    if matches!(name, "." | "..") {
        return (as_argument(trimmed), ".".to_owned());
    }
    (as_argument(folder), name.to_owned())
}

/// A path that no program takes for an option.
fn as_argument(path: &str) -> String {
    match path {
        "" => "/".to_owned(),
        path if path.starts_with('-') => format!("./{path}"),
        path => path.to_owned(),
    }
}

/// The container, as exec finds it.
struct Container<'a> {
    session: &'a Session,
    args: ContainerArgs,
    target: ExecTarget,
}

/// How a command in the container has ended.
struct Ended {
    code: i32,
    stderr: String,
}

impl Ended {
    fn failure(&self) -> CliError {
        let stderr = self.stderr.trim().replace('\n', "; ");
        CliError::Failed {
            message: format!("tar in the container ended with exit code {}: {stderr}", self.code),
            hint: None,
        }
    }
}

impl<'a> Container<'a> {
    async fn find(session: &'a Session, args: &CpArgs, pod: &str) -> Result<Self, CliError> {
        let args = ContainerArgs { pod: pod.to_owned(), container: args.container.clone() };
        let target = exec::find(session, &args).await?;
        Ok(Self { session, args, target })
    }

    async fn download(&self, path: &str, local: &Path) -> Result<(), CliError> {
        let (folder, name) = folder_and_name(path);
        let target = match name.as_str() {
            "." => local.to_owned(),
            name if local.is_dir() => local.join(name),
            _ => local.to_owned(),
        };
        let (sender, receiver) = mpsc::channel(BUFFERED_CHUNKS);
        let unpacking = {
            let (name, target) = (name.clone(), target.clone());
            tokio::task::spawn_blocking(move || unpack(ChannelReader::new(receiver), &name, &target))
        };
        let command = ["tar", "cf", "-", "-C", &folder, &format!("./{name}")].map(str::to_owned);
        let ended = self.run(command.into(), None, Some(sender)).await.map_err(needs_tar);
        let unpacked = unpacking.await;
        let ended = ended?;
        let unpacked = unpacked.map_err(|error| local_failure(&error))?;
        if ended.code != 0 {
            return Err(ended.failure());
        }
        let left_out = unpacked.map_err(|error: UnpackError| local_failure(&error))?;
        for path in left_out {
            output::notice(&format!("{} is a link or a special file and was not copied.", path.display()));
        }
        Ok(())
    }

    async fn upload(&self, local: &Path, path: &str) -> Result<(), CliError> {
        let own_name = local.file_name().map_or(".".into(), |name| name.to_string_lossy().into_owned());
        let (folder, name) = if path.ends_with('/') || self.is_folder(path).await? {
            (as_argument(path), own_name)
        } else {
            folder_and_name(path)
        };
        let (sender, receiver) = mpsc::channel(BUFFERED_CHUNKS);
        let packing = {
            let local: PathBuf = local.to_owned();
            tokio::task::spawn_blocking(move || pack(&local, &name, ChannelWriter(sender)))
        };
        let command = ["tar", "-xmf", "-", "-C", &folder].map(str::to_owned);
        let ended = self.run(command.into(), Some(receiver), None).await.map_err(needs_tar);
        let packed = packing.await;
        let ended = ended?;
        match packed.map_err(|error| local_failure(&error))? {
            // The command has ended without reading everything: its own error says why.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(CliError::Read { path: local.to_owned(), source: error })
            }
            _ if ended.code != 0 => Err(ended.failure()),
            Err(error) => Err(local_failure(&error)),
            Ok(()) => Ok(()),
        }
    }

    /// Whether a path in the container is a folder. Without test(1) in its image nothing is.
    async fn is_folder(&self, path: &str) -> Result<bool, CliError> {
        let command = ["test", "-d", &as_argument(path)].map(str::to_owned);
        match self.run(command.into(), None, None).await {
            Ok(ended) => Ok(ended.code == 0),
            Err(CopyError::NoProgram(_)) => Ok(false),
            Err(CopyError::Other(error)) => Err(error),
        }
    }

    /// Runs a command in the container, with an input and with a reader of its output. It is abandoned if that reader has ended.
    async fn run(
        &self,
        command: Vec<String>,
        input: Option<mpsc::Receiver<Vec<u8>>>,
        output: Option<mpsc::Sender<Vec<u8>>>,
    ) -> Result<Ended, CopyError> {
        let start = ExecStart { command, stdin: input.is_some(), ..self.target.start.clone() };
        let input = stream::iter(input).flat_map(ReceiverStream::new).map(RequestItem::Stdin);
        let first = stream::iter([RequestItem::Start(start)]);
        let last = stream::iter([RequestItem::CloseStdin(true)]);
        // The end of the requests would end the command.
        let requests = first.chain(input).chain(last).map(exec_request).chain(stream::pending());
        let agent = &self.session.agent;
        let answers = agent.runtime().exec(agent.request(requests)).await;
        let mut answers = answers.map_err(|status| self.error(status, false))?.into_inner();
        let mut stderr = Vec::new();
        let mut started = false;
        while let Some(answer) = answers.next().await {
            match answer.map_err(|status| self.error(status, started))?.item {
                Some(ResponseItem::Started(_)) => started = true,
                Some(ResponseItem::Stdout(bytes)) => {
                    if let Some(output) = &output
                        && output.send(bytes).await.is_err()
                    {
                        return Ok(Ended { code: 0, stderr: String::new() });
                    }
                }
                Some(ResponseItem::Stderr(bytes)) => {
                    let room = MAX_STDERR_BYTES.saturating_sub(stderr.len());
                    stderr.extend(bytes.into_iter().take(room));
                }
                Some(ResponseItem::ExitCode(code)) => {
                    return Ok(Ended { code, stderr: String::from_utf8_lossy(&stderr).into_owned() });
                }
                None => {}
            }
        }
        let status = Status::unavailable("runtime-shim ended the stream without an exit code");
        Err(self.error(status, started))
    }

    fn error(&self, status: Status, started: bool) -> CopyError {
        let is_missing = status::reason(&status).as_deref() == Some("COMMAND_FAILED");
        let error = exec::remote_error(self.session, &self.args, &self.target, status, started);
        if is_missing { CopyError::NoProgram(error) } else { CopyError::Other(error) }
    }
}

/// Why a command in the container has no exit code.
enum CopyError {
    /// The image does not have the program.
    NoProgram(CliError),
    Other(CliError),
}

fn needs_tar(error: CopyError) -> CliError {
    match error {
        CopyError::NoProgram(error) => CliError::Failed {
            message: error.to_string(),
            hint: Some("cp runs tar in the container, so the container's image must have it".into()),
        },
        CopyError::Other(error) => error,
    }
}

fn local_failure(error: &dyn std::error::Error) -> CliError {
    CliError::Failed { message: error.to_string(), hint: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_side_of_cp_is_in_a_pod() {
        let of = |source, target| direction(source, target).map_err(|error| error.to_string());
        let from = Direction::FromPod { pod: "web", path: "/a:b", local: "here" };
        assert_eq!(of("web:/a:b", "here"), Ok(from));
        assert_eq!(
            of("./a:b", "web:data"),
            Ok(Direction::ToPod { local: "./a:b", pod: "web", path: "data" })
        );
        for (source, target, why) in [
            ("a", "b", "neither path is in a pod"),
            (":a", "/b:c", "neither path is in a pod"),
            ("a:b", "c:d", "both paths are in pods"),
            ("a:", "b", "a path is empty"),
            ("", "a:b", "a path is empty"),
        ] {
            assert_eq!(of(source, target), Err(why.to_owned()), "{source} {target}");
        }
    }

    #[test]
    fn paths_in_a_container_are_a_folder_and_a_name() {
        for (path, folder, name) in [
            ("/data/file", "/data", "file"),
            ("/data/", "/", "data"),
            ("/file", "/", "file"),
            ("file", ".", "file"),
            ("a/b", "a", "b"),
            ("/", "/", "."),
            ("..", "..", "."),
            ("/data/..", "/data/..", "."),
            (".", ".", "."),
            ("-x/y", "./-x", "y"),
        ] {
            assert_eq!(folder_and_name(path), (folder.to_owned(), name.to_owned()), "{path}");
        }
    }
}
