//! ReadNodeLogs: files below `/var/log`, and the journal of the node's services (node-and-api.md §8.8).
//!
//! This service reads them because it may read every file and node-api has few rights. Nothing outside of the folder is
//! reachable ([`beneath`]). A query runs journalctl without a shell ([`journal`]) for at most 30 s and 128 MiB.

mod beneath;
mod journal;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::node_log::{JournalQuery, NodeLogQueryError, files_of_service, part_of_file};
use keelson_service_kit::status::{chain, error as error_status};
use pb::read_node_logs_request::What;
use pb::read_node_logs_response::Item;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinError;
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
    Lost(#[source] JoinError),
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
                    logs.run_query(&query, &slot, &out).await;
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
        match self.open(path, &slot).await.map_err(NodeLogError::Lost)? {
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
                    send_file(file, head, &shown, &slot, &out).await;
                });
            }
            Err(OpenError::NotFound) => return Err(NodeLogError::NotFound { path: shown }),
            Err(OpenError::Refused(why)) => return Err(NodeLogError::Refused { path: shown, why }),
            Err(OpenError::Read(source)) => return Err(NodeLogError::Read { path: shown, source }),
        }
        Ok(())
    }

    async fn open(&self, path: Vec<u8>, slot: &Slot) -> Result<Result<Opened, OpenError>, JoinError> {
        let root = self.root.clone();
        in_thread(slot, move || open_beneath(&root, &path)).await
    }

    /// Writes the answer to a query. As in a kubelet, errors are lines of the text.
    async fn run_query(&self, query: &JournalQuery, slot: &Slot, out: &Messages) {
        let mut text = Text { out, left: self.most_bytes };
        // Cancel-safe: nothing is used after the time is over, and dropped commands are killed. A reader that has left ends
        // the query as well, although journalctl may write nothing for long.
        let ended = tokio::select! {
            ended = tokio::time::timeout(self.limit, self.answer(query, slot, &mut text)) => ended,
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

    async fn answer(&self, query: &JournalQuery, slot: &Slot, text: &mut Text<'_>) -> Result<(), TextEnd> {
        let units = match journal::units(&self.journalctl, self.limit).await {
            Ok(units) => units,
            Err(error) => {
                let error = chain(&error);
                text.line(&format!("\nerror: cannot list the units in the journal: {error}\n")).await?;
                // Only the journal supports options; which services it has is unknown.
                if query.has_options() {
                    return Ok(());
                }
                String::new()
            }
        };
        let (in_journal, others) = query.split_by_journal(&units);
        if !in_journal.is_empty() {
            match journal::start(&self.journalctl, &query.arguments(&in_journal)) {
                Ok(mut running) => text.copy(&mut running.output).await?,
                Err(error) => text.line(&format!("\nerror: journal output not available: {error}\n")).await?,
            }
        }
        if !others.is_empty() && query.has_options() {
            let names = others.join(" ");
            let hint = "options present and query resolved to log files for";
            return text.line(&format!("\n{hint} [{names}]\ntry without specifying options\n")).await;
        }
        for service in others {
            self.copy_log(service, slot, text).await?;
        }
        Ok(())
    }

    /// Copies the first of the files that may be the log of a service.
    async fn copy_log(&self, service: &str, slot: &Slot, text: &mut Text<'_>) -> Result<(), TextEnd> {
        for name in files_of_service(service) {
            let failed = match self.open(name.into_bytes(), slot).await {
                Ok(Ok(Opened::File { file, size, .. })) => {
                    return text.copy_file(&Arc::new(file), size, slot).await;
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

/// A slot of a reader or a query. It is free when the last copy is dropped.
type Slot = Arc<OwnedSemaphorePermit>;

fn slot(slots: &Arc<Semaphore>) -> Result<Slot, NodeLogError> {
    Arc::clone(slots).try_acquire_owned().map(Arc::new).map_err(|_| NodeLogError::TooMany)
}

/// Works on files in a thread of its own, since the disk may hang. The thread has a copy of the slot: when nobody waits for it any
/// more, the slot stays taken until the thread has ended. Otherwise requests that are cancelled could block any number of threads.
async fn in_thread<T: Send + 'static>(
    slot: &Slot,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let slot = Arc::clone(slot);
    let thread = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(slot);
        done
    });
    thread.await
}

/// Reads up to `most` bytes of a file at an offset, at most [`CHUNK`]; none at its end.
async fn read_at(file: &Arc<File>, offset: u64, most: u64, slot: &Slot) -> io::Result<Vec<u8>> {
    let file = Arc::clone(file);
    let read = in_thread(slot, move || {
        let mut data = vec![0; usize::try_from(most).unwrap_or(CHUNK).min(CHUNK)];
        let count = loop {
            match file.read_at(&mut data, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => break done?,
            }
        };
        data.truncate(count);
        Ok(data)
    });
    read.await.map_err(io::Error::other)?
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
async fn send_file(file: File, head: pb::NodeLogFile, path: &str, slot: &Slot, out: &Messages) {
    let (offset, length) = (head.offset, head.length);
    if out.send(message(Item::File(head))).await.is_err() {
        return;
    }
    let failed = match copy_part(&Arc::new(file), offset, length, slot, out).await {
        Ok(0) => return,
        Ok(missing) => format!("{path:?} has become shorter by {missing} bytes while it was read"),
        Err(error) => format!("cannot read {path:?}: {}", chain(&error)),
    };
    let _ = out.send(Err(error_status(Code::Aborted, "LOG_CHANGED", failed))).await;
}

/// Copies a part of a file: how many bytes are missing at its end, 0 also when the reader has left.
async fn copy_part(
    file: &Arc<File>,
    offset: u64,
    length: u64,
    slot: &Slot,
    out: &Messages,
) -> io::Result<u64> {
    let mut sent = 0;
    while sent < length {
        let data = read_at(file, offset + sent, length - sent, slot).await?;
        if data.is_empty() {
            break;
        }
        sent += data.len() as u64;
        if out.send(message(Item::Data(data))).await.is_err() {
            return Ok(0);
        }
    }
    Ok(length - sent)
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

    /// Copies the first `size` bytes of a file; an error is a line of the text.
    async fn copy_file(&mut self, file: &Arc<File>, size: u64, slot: &Slot) -> Result<(), TextEnd> {
        let mut offset = 0;
        while offset < size {
            match read_at(file, offset, size - offset, slot).await {
                Ok(data) if data.is_empty() => break,
                Ok(data) => {
                    offset += data.len() as u64;
                    self.send(data).await?;
                }
                Err(error) => return self.line(&format!("\n{error}\n")).await,
            }
        }
        Ok(())
    }

    /// Copies what a command writes; an error is a line of the text.
    async fn copy(&mut self, from: &mut (impl AsyncRead + Unpin)) -> Result<(), TextEnd> {
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
