//! ReadLogs: reads a container's log with the options of the request.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log;
use tokio::sync::mpsc;
use tonic::Status;

use crate::files::Files;
use crate::log_parts::{Part, newer_parts, parts};
use crate::observe::Observer;

/// Bytes per message.
const CHUNK: usize = 32 << 10;
/// Poll interval of a followed file.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);
/// A longer line is sent in pieces.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum difference between the modification time of a file and the times of its lines.
const SLACK: Duration = Duration::from_secs(2);

/// A container's log, and the container that shows when it ends.
#[derive(Debug, Clone)]
pub struct LogSource {
    /// Pod UID.
    pub uid: String,
    /// Runtime id of the container.
    pub container_id: String,
    /// The log file.
    pub path: PathBuf,
}

/// Finds the container of a request.
///
/// # Errors
/// Why there is no such log, with the kubelet's message (runtime-and-resources.md §7.6).
pub fn source_of(pod: &pb::RuntimePod, request: &pb::ReadLogsRequest) -> Result<LogSource, String> {
    let name = &request.container;
    let mut records = pod.containers.iter().filter(|c| c.name == *name);
    let record = if request.previous {
        let exited = |c: &&pb::Container| c.state == pb::ContainerState::Exited as i32;
        // The newest record is the current instance, even if it has exited.
        records.next();
        records.find(exited).ok_or_else(|| {
            format!("previous terminated container {name:?} in pod {:?} not found", pod.name)
        })?
    } else {
        records.next().ok_or_else(|| {
            format!("container {name:?} in pod {:?} is waiting to start - no logs yet", pod.name)
        })?
    };
    if record.log_path.is_empty() {
        return Err(format!("container {name:?} in pod {:?} has no log file", pod.name));
    }
    Ok(LogSource {
        uid: pod.uid.clone(),
        container_id: record.id.clone(),
        path: PathBuf::from(&record.log_path),
    })
}

/// Sends the log to `out` until its end, or with `follow` until the container has ended.
pub async fn stream(
    files: Files,
    observer: Observer,
    source: LogSource,
    request: pb::ReadLogsRequest,
    out: mpsc::Sender<Result<pb::ReadLogsResponse, Status>>,
) {
    if let Err(error) = copy(files, &observer, &source, request, &out).await {
        let text = format!("cannot read the log {}: {error}", source.path.display());
        let _ = out.send(Err(Status::internal(text))).await;
    }
}

/// The state of a read. Each step runs in a blocking task, so a disk that hangs blocks only this reader.
struct Tail {
    files: Files,
    source: LogSource,
    /// The files that remain to be read, the current one first; never empty.
    parts: VecDeque<Part>,
    reader: Reader,
}

/// The result of one read step.
enum ReadStep {
    Data(Vec<u8>),
    /// No data now: the file was read to its end, but may still grow although there is a next one.
    MayGrow,
    /// The end of the newest file.
    End,
}

impl Tail {
    fn open(files: Files, source: LogSource, request: &pb::ReadLogsRequest) -> io::Result<Self> {
        let mut parts = VecDeque::from(parts(&files, &source.path, None)?);
        if let Some(lines) = request.tail_lines {
            cut_to_tail(&mut parts, usize::try_from(lines).unwrap_or(usize::MAX))?;
        }
        let reader = Reader::new(request);
        if let Some(since) = reader.since.and_then(|since| SystemTime::from(since).checked_sub(SLACK)) {
            while parts.len() > 1 && parts[0].ends_before(since) {
                parts.pop_front();
            }
        }
        Ok(Self { files, source, parts, reader })
    }

    fn read_step(&mut self) -> io::Result<ReadStep> {
        while !self.reader.limit_reached() {
            let data = self.reader.chunk(&mut self.parts[0])?;
            if !data.is_empty() {
                return Ok(ReadStep::Data(data));
            }
            let Some(next) = self.parts.get(1) else { break };
            if self.parts[0].may_grow(next) {
                return Ok(ReadStep::MayGrow);
            }
            self.parts.pop_front();
            let last_line = self.reader.last_line();
            if !last_line.is_empty() {
                return Ok(ReadStep::Data(last_line));
            }
        }
        Ok(ReadStep::End)
    }

    /// Adds the files that are newer than the last one. Returns whether there are any.
    fn follow(&mut self) -> io::Result<bool> {
        let newer_parts = newer_parts(&self.files, &self.source.path, &self.parts[0])?;
        self.parts.extend(newer_parts);
        Ok(self.parts.len() > 1)
    }
}

/// Keeps the last `lines` lines of all files together.
fn cut_to_tail(parts: &mut VecDeque<Part>, lines: usize) -> io::Result<()> {
    let mut lines_left = lines;
    for index in (0..parts.len()).rev() {
        if parts[index].seek_tail(&mut lines_left)? {
            parts.drain(..index);
            break;
        }
    }
    Ok(())
}

/// Runs `work` in a blocking task.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

async fn copy(
    files: Files,
    observer: &Observer,
    source: &LogSource,
    request: pb::ReadLogsRequest,
    out: &mpsc::Sender<Result<pb::ReadLogsResponse, Status>>,
) -> io::Result<()> {
    let (follow, from) = (request.follow, source.clone());
    let mut tail = blocking(move || Tail::open(files, from, &request)).await?;
    loop {
        // Checked before the read, so that the last output of an ended container is already in the file.
        let ended = !may_write(observer, source);
        let (returned, read_step) =
            blocking(move || tail.read_step().map(|read_step| (tail, read_step))).await?;
        tail = returned;
        match read_step {
            ReadStep::Data(data) => {
                if out.send(Ok(pb::ReadLogsResponse { data })).await.is_err() {
                    return Ok(());
                }
                continue;
            }
            ReadStep::MayGrow => {}
            ReadStep::End if tail.reader.limit_reached() || !follow => return Ok(()),
            ReadStep::End => {
                let (returned, more) = blocking(move || tail.follow().map(|more| (tail, more))).await?;
                tail = returned;
                if more {
                    continue;
                }
                if ended {
                    return Ok(());
                }
            }
        }
        // Both arms are cancel-safe.
        tokio::select! {
            () = out.closed() => return Ok(()),
            () = tokio::time::sleep(FOLLOW_EVERY) => {}
        }
    }
}

/// Whether the container may still write. A container that is no longer observed has ended; while the runtime is
/// down, the last observation stays in effect.
fn may_write(observer: &Observer, source: &LogSource) -> bool {
    let Some(pod) = observer.cached(&source.uid) else { return false };
    pod.containers
        .iter()
        .find(|c| c.id == source.container_id)
        // A created container is about to start, or its start has not been observed yet.
        .is_some_and(|c| matches!(c.state(), pb::ContainerState::Running | pb::ContainerState::Created))
}

struct Reader {
    timestamps: bool,
    since: Option<jiff::Timestamp>,
    bytes_left: Option<usize>,
    continued: bool,
    partial_line: Vec<u8>,
}

impl Reader {
    fn new(request: &pb::ReadLogsRequest) -> Self {
        Self {
            timestamps: request.timestamps,
            since: since_time(request.since_unix_nanos),
            bytes_left: request.limit_bytes.map(|n| usize::try_from(n).unwrap_or(0)),
            continued: false,
            partial_line: Vec::new(),
        }
    }

    fn limit_reached(&self) -> bool {
        self.bytes_left == Some(0)
    }

    /// The next data for the reader; empty if the file has no further complete line.
    fn chunk(&mut self, file: &mut impl io::Read) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut buffer = vec![0u8; CHUNK];
        while out.is_empty() && !self.limit_reached() {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            self.partial_line.extend_from_slice(&buffer[..n]);
            self.take_lines(&mut out);
        }
        Ok(out)
    }

    /// The last line, without a newline, of a file that is no longer written to.
    fn last_line(&mut self) -> Vec<u8> {
        let (last_line, mut out) = (std::mem::take(&mut self.partial_line), Vec::new());
        if !last_line.is_empty() {
            self.render(&last_line, &mut out);
            self.cut(&mut out);
        }
        out
    }

    fn take_lines(&mut self, out: &mut Vec<u8>) {
        let pending = std::mem::take(&mut self.partial_line);
        for line in pending.split_inclusive(|b| *b == b'\n') {
            let Some(whole) = line.strip_suffix(b"\n") else {
                if line.len() < MAX_LINE_BYTES {
                    self.partial_line = line.to_vec();
                    break;
                }
                self.render(line, out);
                break;
            };
            self.render(whole, out);
        }
        self.cut(out);
    }

    fn cut(&mut self, out: &mut Vec<u8>) {
        if let Some(bytes_left) = &mut self.bytes_left {
            out.truncate(*bytes_left);
            *bytes_left -= out.len();
        }
    }

    fn render(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let line = log::parse(line);
        // A line without a time is never left out.
        let old = self.since.is_some_and(|since| line_time(&line).is_some_and(|at| at < since));
        if !old {
            log::render(&line, self.timestamps, self.continued, out);
        }
        self.continued = line.partial;
    }
}

/// The `since` time of a request; 0: none.
fn since_time(unix_nanos: i64) -> Option<jiff::Timestamp> {
    (unix_nanos > 0).then(|| jiff::Timestamp::from_nanosecond(i128::from(unix_nanos)).ok()).flatten()
}

/// The time of a line. containerd writes local time with an offset, so times cannot be compared as text.
fn line_time(line: &log::LogLine<'_>) -> Option<jiff::Timestamp> {
    std::str::from_utf8(line.timestamp).ok()?.parse().ok()
}

#[cfg(test)]
mod tests;
