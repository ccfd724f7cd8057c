//! ReadLogs: a container's log as its reader wants it.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log;
use tokio::sync::mpsc;
use tonic::Status;

use crate::files::Files;
use crate::log_parts::{Part, followers, parts};
use crate::observe::Observer;

/// Bytes per message.
const CHUNK: usize = 32 << 10;
/// How often a followed file is looked at.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);
/// A line that is longer is handed out in pieces.
const LONGEST_LINE: usize = 1 << 20;
/// By how much the time of a file and those of its lines may differ.
const SLACK: Duration = Duration::from_secs(2);

/// Where a container's log is and how to know that no more comes.
#[derive(Debug, Clone)]
pub struct Source {
    /// Pod UID.
    pub uid: String,
    /// Runtime id of the container.
    pub container_id: String,
    /// The log file.
    pub path: PathBuf,
}

/// Chooses the container that a request means.
///
/// # Errors
/// Why there is no such log, in the kubelet's words (runtime-and-resources.md §7.6).
pub fn source_of(pod: &pb::RuntimePod, request: &pb::ReadLogsRequest) -> Result<Source, String> {
    let name = &request.container;
    let mut records = pod.containers.iter().filter(|c| c.name == *name);
    let record = if request.previous {
        let exited = |c: &&pb::Container| c.state == pb::ContainerState::Exited as i32;
        // The newest record is the current instance unless it has exited and none followed.
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
    Ok(Source {
        uid: pod.uid.clone(),
        container_id: record.id.clone(),
        path: PathBuf::from(&record.log_path),
    })
}

/// Sends the log to `out` until its end, or with `follow` until the container has ended.
pub async fn stream(
    files: Files,
    observer: Observer,
    source: Source,
    request: pb::ReadLogsRequest,
    out: mpsc::Sender<Result<pb::ReadLogsResponse, Status>>,
) {
    if let Err(error) = copy(files, &observer, &source, request, &out).await {
        let text = format!("cannot read the log {}: {error}", source.path.display());
        let _ = out.send(Err(Status::internal(text))).await;
    }
}

/// What is read, by one blocking task after the other: a disk that hangs holds up its reader only.
struct Tail {
    files: Files,
    source: Source,
    /// What is still to be read, the one that is being read first; never empty.
    parts: VecDeque<Part>,
    reader: Reader,
}

/// What there is to be had.
enum Piece {
    Data(Vec<u8>),
    /// Nothing now: the file that was read to its end may still grow although there is a next one.
    Soon,
    /// The end of the newest file.
    End,
}

impl Tail {
    fn open(files: Files, source: Source, request: &pb::ReadLogsRequest) -> io::Result<Self> {
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

    fn piece(&mut self) -> io::Result<Piece> {
        while !self.reader.full() {
            let data = self.reader.chunk(&mut self.parts[0])?;
            if !data.is_empty() {
                return Ok(Piece::Data(data));
            }
            let Some(next) = self.parts.get(1) else { break };
            if self.parts[0].may_grow(next) {
                return Ok(Piece::Soon);
            }
            self.parts.pop_front();
            let rest = self.reader.rest();
            if !rest.is_empty() {
                return Ok(Piece::Data(rest));
            }
        }
        Ok(Piece::End)
    }

    /// Goes on with the files that have followed the newest one. Whether there are any.
    fn follow(&mut self) -> io::Result<bool> {
        let followers = followers(&self.files, &self.source.path, &self.parts[0])?;
        self.parts.extend(followers);
        Ok(self.parts.len() > 1)
    }
}

/// Leaves the last `lines` lines of all files together.
fn cut_to_tail(parts: &mut VecDeque<Part>, lines: usize) -> io::Result<()> {
    let mut left = lines;
    for index in (0..parts.len()).rev() {
        if parts[index].seek_tail(&mut left)? {
            parts.drain(..index);
            break;
        }
    }
    Ok(())
}

/// Runs `work` where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

async fn copy(
    files: Files,
    observer: &Observer,
    source: &Source,
    request: pb::ReadLogsRequest,
    out: &mpsc::Sender<Result<pb::ReadLogsResponse, Status>>,
) -> io::Result<()> {
    let (follow, from) = (request.follow, source.clone());
    let mut tail = blocking(move || Tail::open(files, from, &request)).await?;
    loop {
        // Whether the container has ended is asked before the read: what it wrote last is then in the file.
        let ended = !runs(observer, source);
        let (back, piece) = blocking(move || tail.piece().map(|piece| (tail, piece))).await?;
        tail = back;
        match piece {
            Piece::Data(data) => {
                if out.send(Ok(pb::ReadLogsResponse { data })).await.is_err() {
                    return Ok(());
                }
                continue;
            }
            Piece::Soon => {}
            Piece::End if tail.reader.full() || !follow => return Ok(()),
            Piece::End => {
                let (back, more) = blocking(move || tail.follow().map(|more| (tail, more))).await?;
                tail = back;
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

/// Whether more may come. A container that the observation has lost has ended; while the runtime is away the
/// last observation stands.
fn runs(observer: &Observer, source: &Source) -> bool {
    let Some(pod) = observer.cached(&source.uid) else { return false };
    pod.containers
        .iter()
        .find(|c| c.id == source.container_id)
        // One that has only been created is about to start, or its start has not been observed yet.
        .is_some_and(|c| matches!(c.state(), pb::ContainerState::Running | pb::ContainerState::Created))
}

struct Reader {
    timestamps: bool,
    since: Option<jiff::Timestamp>,
    left: Option<usize>,
    continued: bool,
    rest: Vec<u8>,
}

impl Reader {
    fn new(request: &pb::ReadLogsRequest) -> Self {
        Self {
            timestamps: request.timestamps,
            since: moment(request.since_unix_nanos),
            left: request.limit_bytes.map(|n| usize::try_from(n).unwrap_or(0)),
            continued: false,
            rest: Vec::new(),
        }
    }

    fn full(&self) -> bool {
        self.left == Some(0)
    }

    /// The next piece for the reader; empty when the file has no whole line more.
    fn chunk(&mut self, file: &mut impl io::Read) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut buffer = vec![0u8; CHUNK];
        while out.is_empty() && !self.full() {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            self.rest.extend_from_slice(&buffer[..n]);
            self.take_lines(&mut out);
        }
        Ok(out)
    }

    /// What has no newline at the end of a file that is not written to any more.
    fn rest(&mut self) -> Vec<u8> {
        let (rest, mut out) = (std::mem::take(&mut self.rest), Vec::new());
        if !rest.is_empty() {
            self.render(&rest, &mut out);
            self.cut(&mut out);
        }
        out
    }

    fn take_lines(&mut self, out: &mut Vec<u8>) {
        let rest = std::mem::take(&mut self.rest);
        for line in rest.split_inclusive(|b| *b == b'\n') {
            let Some(whole) = line.strip_suffix(b"\n") else {
                if line.len() < LONGEST_LINE {
                    self.rest = line.to_vec();
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
        if let Some(left) = &mut self.left {
            out.truncate(*left);
            *left -= out.len();
        }
    }

    fn render(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let line = log::parse(line);
        // Without a time it is as old as what stands around it, which is not worth finding out.
        let old = self.since.is_some_and(|since| written(&line).is_some_and(|at| at < since));
        if !old {
            log::render(&line, self.timestamps, self.continued, out);
        }
        self.continued = line.partial;
    }
}

/// The moment of a request; 0 is none.
fn moment(unix_nanos: i64) -> Option<jiff::Timestamp> {
    (unix_nanos > 0).then(|| jiff::Timestamp::from_nanosecond(i128::from(unix_nanos)).ok()).flatten()
}

/// When a line was written. containerd writes local time with its offset, so the texts do not compare.
fn written(line: &log::LogLine<'_>) -> Option<jiff::Timestamp> {
    std::str::from_utf8(line.timestamp).ok()?.parse().ok()
}

#[cfg(test)]
mod tests;
