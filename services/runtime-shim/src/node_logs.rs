//! ReadNodeLogs: files below `/var/log`, and the journal of the node's services (node-and-api.md §8.8).
//!
//! This service reads them because it may read every file and node-api has few rights. Nothing outside of the folder is
//! reachable ([`beneath`]). A query runs journalctl without a shell ([`journal`]) for at most 30 s and 128 MiB.

mod beneath;
mod journal;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::node_log::{JournalQuery, NodeLogQueryError, files_of_service, part_of_file};
use keelson_service_kit::status::{chain, error as error_status};
use pb::read_node_logs_request::What;
use pb::read_node_logs_response::Item;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncSeekExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use beneath::{OpenError, Opened, open_beneath};

/// The folder of the node's logs.
const FOLDER: &str = "/var/log";
/// The command that reads the journal.
const JOURNALCTL: &str = "journalctl";
/// How long a query may take (node-and-api.md §8.8).
const QUERY_LIMIT: Duration = Duration::from_secs(30);
/// How much a query may write.
const QUERY_BYTES: u64 = 128 << 20;
/// Bytes per message.
const CHUNK: usize = 32 << 10;
/// Entries per message of a folder.
const ENTRIES: usize = 1000;
/// Files and folders that are read at a time.
const MAX_READERS: usize = 32;
/// Queries that run at a time.
const MAX_QUERIES: usize = 4;

type Messages = mpsc::Sender<Result<pb::ReadNodeLogsResponse, Status>>;

/// Why a log of the node cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NodeLogError {
    /// The request has neither a path nor a query.
    #[error("the request has neither a path nor a query")]
    Empty,
    /// The query is invalid.
    #[error(transparent)]
    Query(#[from] NodeLogQueryError),
    /// There is no such file.
    #[error("{path:?} does not exist below {FOLDER}")]
    NotFound {
        /// The requested path.
        path: String,
    },
    /// The path leads out of the folder or is a special file.
    #[error("{path:?} is not served: {why}")]
    Refused {
        /// The requested path.
        path: String,
        /// Why.
        why: &'static str,
    },
    /// The range selects nothing; the size of the file.
    #[error("the range is outside of the file, which has {0} bytes")]
    Range(u64),
    /// The file cannot be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The requested path.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// All slots for readers are taken.
    #[error("too many logs of the node are being read; try again when one of them has ended")]
    TooMany,
    /// The thread that opens files has ended.
    #[error("the reader of the log has ended")]
    Lost(#[source] tokio::task::JoinError),
}

/// Reads the logs of the node.
#[derive(Debug, Clone)]
pub struct NodeLogs {
    root: PathBuf,
    journalctl: PathBuf,
    limit: Duration,
    most_bytes: u64,
    readers: Arc<Semaphore>,
    queries: Arc<Semaphore>,
}

impl Default for NodeLogs {
    fn default() -> Self {
        Self {
            root: FOLDER.into(),
            journalctl: JOURNALCTL.into(),
            limit: QUERY_LIMIT,
            most_bytes: QUERY_BYTES,
            readers: Arc::new(Semaphore::new(MAX_READERS)),
            queries: Arc::new(Semaphore::new(MAX_QUERIES)),
        }
    }
}

impl NodeLogs {
    /// Starts to answer a request. The answer ends when the reader drops the stream.
    ///
    /// # Errors
    /// Errors before the first message; later ones are in the stream.
    pub async fn start(
        &self,
        request: pb::ReadNodeLogsRequest,
    ) -> Result<ReceiverStream<Result<pb::ReadNodeLogsResponse, Status>>, NodeLogError> {
        let (out, stream) = mpsc::channel(4);
        match request.what.ok_or(NodeLogError::Empty)? {
            What::Path(path) => self.start_path(path, request.range, out).await?,
            What::Query(query) => {
                let query = journal_query(query);
                query.check()?;
                let slot = slot(&self.queries)?;
                let logs = self.clone();
                keelson_service_kit::spawn("query a log of the node", async move {
                    logs.run_query(&query, &out).await;
                    drop(slot);
                });
            }
        }
        Ok(ReceiverStream::new(stream))
    }

    async fn start_path(
        &self,
        path: Vec<u8>,
        range: Option<pb::ByteRange>,
        out: Messages,
    ) -> Result<(), NodeLogError> {
        let slot = slot(&self.readers)?;
        let shown = String::from_utf8_lossy(&path).into_owned();
        match self.open(path).await.map_err(NodeLogError::Lost)? {
            Ok(Opened::Folder(entries)) => {
                keelson_service_kit::spawn("list a folder of logs", async move {
                    send_entries(&entries, &out).await;
                    drop(slot);
                });
            }
            Ok(Opened::File { file, size, modified }) => {
                let range = range.unwrap_or_default();
                let (offset, length) =
                    part_of_file(size, range.first, range.last).ok_or(NodeLogError::Range(size))?;
                let head =
                    pb::NodeLogFile { size_bytes: size, modified_unix_seconds: modified, offset, length };
                keelson_service_kit::spawn("read a file of logs", async move {
                    send_file(file, head, &shown, &out).await;
                    drop(slot);
                });
            }
            Err(OpenError::NotFound) => return Err(NodeLogError::NotFound { path: shown }),
            Err(OpenError::Refused(why)) => return Err(NodeLogError::Refused { path: shown, why }),
            Err(OpenError::Read(source)) => return Err(NodeLogError::Read { path: shown, source }),
        }
        Ok(())
    }

    /// Opens a path in a thread of its own, since the disk may hang.
    async fn open(&self, path: Vec<u8>) -> Result<Result<Opened, OpenError>, tokio::task::JoinError> {
        let root = self.root.clone();
        tokio::task::spawn_blocking(move || open_beneath(&root, &path)).await
    }

    /// Writes the answer to a query. As in a kubelet, errors are lines of the text.
    async fn run_query(&self, query: &JournalQuery, out: &Messages) {
        let mut text = Text { out, left: self.most_bytes };
        // Cancel-safe: nothing is used after the time is over, and dropped commands are killed. A reader that has left ends
        // the query as well, although journalctl may write nothing for long.
        let ended = tokio::select! {
            ended = tokio::time::timeout(self.limit, self.answer(query, &mut text)) => ended,
            () = out.closed() => return,
        };
        match ended {
            Ok(Ok(()) | Err(TextEnd::ReaderLeft)) => {}
            Ok(Err(TextEnd::TooLong)) => {
                text.close(&format!("\nthe answer is cut after {} bytes\n", self.most_bytes)).await;
            }
            Err(_) => text.close(&format!("\nthe answer is cut after {:?}\n", self.limit)).await,
        }
    }

    async fn answer(&self, query: &JournalQuery, text: &mut Text<'_>) -> Result<(), TextEnd> {
        let units = journal::units(&self.journalctl, self.limit).await;
        let (in_journal, others) = query.split_by_journal(&units);
        if !in_journal.is_empty() {
            match journal::start(&self.journalctl, &query.arguments(&in_journal)) {
                Ok(mut running) => text.copy(&mut running.output, u64::MAX).await?,
                Err(error) => text.line(&format!("\nerror: journal output not available: {error}\n")).await?,
            }
        }
        if !others.is_empty() && query.has_options() {
            let names = others.join(" ");
            let hint = "options present and query resolved to log files for";
            return text.line(&format!("\n{hint} [{names}]\ntry without specifying options\n")).await;
        }
        for service in others {
            self.copy_files(service, text).await?;
        }
        Ok(())
    }

    /// Copies the first of the files that may be the log of a service.
    async fn copy_files(&self, service: &str, text: &mut Text<'_>) -> Result<(), TextEnd> {
        for name in files_of_service(service) {
            let failed = match self.open(name.into_bytes()).await {
                Ok(Ok(Opened::File { file, size, .. })) => {
                    return text.copy(&mut tokio::fs::File::from_std(file), size).await;
                }
                Ok(Ok(Opened::Folder(_)) | Err(OpenError::NotFound)) => continue,
                Ok(Err(OpenError::Refused(why))) => why.to_owned(),
                Ok(Err(OpenError::Read(error))) => error.to_string(),
                Err(error) => error.to_string(),
            };
            return text.line(&format!("\nerror getting log for {service}: {failed}\n")).await;
        }
        text.line(&format!("\nlog not found for {service}\n")).await
    }
}

fn slot(slots: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, NodeLogError> {
    Arc::clone(slots).try_acquire_owned().map_err(|_| NodeLogError::TooMany)
}

fn journal_query(query: pb::NodeLogQuery) -> JournalQuery {
    JournalQuery {
        services: query.services,
        since: query.since_unix_seconds,
        until: query.until_unix_seconds,
        tail_lines: query.tail_lines,
        boot: query.boot,
        pattern: query.pattern,
    }
}

fn message(item: Item) -> Result<pb::ReadNodeLogsResponse, Status> {
    Ok(pb::ReadNodeLogsResponse { item: Some(item) })
}

/// Sends the entries of a folder; an empty folder is one message, too.
async fn send_entries(entries: &[(Vec<u8>, bool)], out: &Messages) {
    let mut pages: Vec<&[(Vec<u8>, bool)]> = entries.chunks(ENTRIES).collect();
    if pages.is_empty() {
        pages.push(&[]);
    }
    for page in pages {
        let entry = |(name, is_folder): &(Vec<u8>, bool)| pb::NodeLogEntry {
            name: name.clone(),
            is_folder: *is_folder,
        };
        let folder = pb::NodeLogFolder { entries: page.iter().map(entry).collect() };
        if out.send(message(Item::Folder(folder))).await.is_err() {
            return;
        }
    }
}

/// Sends the announced part of a file. If the file has become shorter, the stream ends with an error.
async fn send_file(file: File, head: pb::NodeLogFile, path: &str, out: &Messages) {
    let (offset, length) = (head.offset, head.length);
    if out.send(message(Item::File(head))).await.is_err() {
        return;
    }
    let failed = match copy_part(file, offset, length, out).await {
        Ok(0) => return,
        Ok(missing) => format!("{path:?} has become shorter by {missing} bytes while it was read"),
        Err(error) => format!("cannot read {path:?}: {}", chain(&error)),
    };
    let _ = out.send(Err(error_status(Code::Aborted, "LOG_CHANGED", failed))).await;
}

/// Copies a part of a file: how many bytes are missing at its end, 0 also when the reader has left.
async fn copy_part(file: File, offset: u64, length: u64, out: &Messages) -> io::Result<u64> {
    let mut file = tokio::fs::File::from_std(file);
    file.seek(SeekFrom::Start(offset)).await?;
    let mut file = file.take(length);
    while file.limit() > 0 {
        let mut data = Vec::with_capacity(CHUNK);
        if file.read_buf(&mut data).await? == 0 {
            break;
        }
        if out.send(message(Item::Data(data))).await.is_err() {
            return Ok(0);
        }
    }
    Ok(file.limit())
}

/// Why a text ends early.
enum TextEnd {
    ReaderLeft,
    TooLong,
}

/// The text of an answer.
struct Text<'a> {
    out: &'a Messages,
    /// How many bytes may still be sent.
    left: u64,
}

impl Text<'_> {
    async fn send(&mut self, mut data: Vec<u8>) -> Result<(), TextEnd> {
        let fits = usize::try_from(self.left).unwrap_or(usize::MAX).min(data.len());
        let is_cut = fits < data.len();
        data.truncate(fits);
        self.left -= fits as u64;
        self.out.send(message(Item::Data(data))).await.map_err(|_| TextEnd::ReaderLeft)?;
        if is_cut { Err(TextEnd::TooLong) } else { Ok(()) }
    }

    async fn line(&mut self, line: &str) -> Result<(), TextEnd> {
        self.send(line.as_bytes().to_vec()).await
    }

    /// Copies up to `most` bytes; an error of the reader is a line of the text.
    async fn copy(&mut self, from: &mut (impl AsyncRead + Unpin), most: u64) -> Result<(), TextEnd> {
        let mut from = from.take(most);
        loop {
            let mut data = Vec::with_capacity(CHUNK);
            match from.read_buf(&mut data).await {
                Ok(0) => return Ok(()),
                Ok(_) => self.send(data).await?,
                Err(error) => return self.line(&format!("\n{error}\n")).await,
            }
        }
    }

    /// Sends the last line, unless the reader does not take it.
    async fn close(&self, line: &str) {
        let last = self.out.send(message(Item::Data(line.as_bytes().to_vec())));
        let _ = tokio::time::timeout(Duration::from_secs(1), last).await;
    }
}
