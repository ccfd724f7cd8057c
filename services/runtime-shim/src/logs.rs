//! ReadLogs: a container's log as its reader wants it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log;
use tokio::sync::mpsc;
use tonic::Status;

use crate::files::Files;
use crate::observe::Observer;

/// Bytes per message.
const CHUNK: usize = 32 << 10;
/// How often a followed file is looked at.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);
/// A line that is longer is handed out in pieces.
const LONGEST_LINE: usize = 1 << 20;

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
    if let Err(error) = copy(&files, &observer, &source, &request, &out).await {
        let text = format!("cannot read the log {}: {error}", source.path.display());
        let _ = out.send(Err(Status::internal(text))).await;
    }
}

async fn copy(
    files: &Files,
    observer: &Observer,
    source: &Source,
    request: &pb::ReadLogsRequest,
    out: &mpsc::Sender<Result<pb::ReadLogsResponse, Status>>,
) -> io::Result<()> {
    let mut file = files.open_log(&source.path)?;
    if let Some(lines) = request.tail_lines {
        seek_to_tail(&mut file, usize::try_from(lines).unwrap_or(usize::MAX))?;
    }
    let mut reader = Reader::new(request);
    loop {
        // Whether the container has ended is asked before the read: what it wrote last is then in the file.
        let ended = !runs(observer, source);
        loop {
            let data = reader.chunk(&mut file)?;
            if data.is_empty() {
                break;
            }
            if out.send(Ok(pb::ReadLogsResponse { data })).await.is_err() {
                return Ok(());
            }
        }
        if reader.full() || !request.follow || ended {
            return Ok(());
        }
        if let Some(next) = rotated(files, source, &file) {
            file = next;
            continue;
        }
        tokio::select! {
            () = out.closed() => return Ok(()),
            () = tokio::time::sleep(FOLLOW_EVERY) => {}
        }
    }
}

/// An unknown container is taken for running: the runtime may be away.
fn runs(observer: &Observer, source: &Source) -> bool {
    let Some(pod) = observer.cached(&source.uid) else { return false };
    pod.containers
        .iter()
        .find(|c| c.id == source.container_id)
        .is_some_and(|c| c.state == pb::ContainerState::Running as i32)
}

/// The file that now stands where `file` was opened, when it is another one.
fn rotated(files: &Files, source: &Source, file: &File) -> Option<File> {
    let next = files.open_log(&source.path).ok()?;
    let (a, b) = (file.metadata().ok()?, next.metadata().ok()?);
    (a.ino() != b.ino() || a.dev() != b.dev()).then_some(next)
}

/// Moves to the beginning of the last `lines` lines, reading from the end in growing steps.
fn seek_to_tail(file: &mut File, lines: usize) -> io::Result<()> {
    let size = file.metadata()?.len();
    let mut window: u64 = 64 << 10;
    loop {
        let start = size.saturating_sub(window);
        file.seek(SeekFrom::Start(start))?;
        let mut tail = Vec::new();
        (&mut *file).take(size - start).read_to_end(&mut tail)?;
        if let Some(offset) = log::tail_start(&tail, lines) {
            file.seek(SeekFrom::Start(start + offset as u64))?;
            return Ok(());
        }
        if start == 0 {
            file.seek(SeekFrom::Start(0))?;
            return Ok(());
        }
        window *= 4;
    }
}

struct Reader {
    timestamps: bool,
    since: Option<String>,
    left: Option<usize>,
    continued: bool,
    rest: Vec<u8>,
}

impl Reader {
    fn new(request: &pb::ReadLogsRequest) -> Self {
        Self {
            timestamps: request.timestamps,
            since: (request.since_unix_nanos > 0).then(|| rfc3339(request.since_unix_nanos)),
            left: request.limit_bytes.map(|n| usize::try_from(n).unwrap_or(0)),
            continued: false,
            rest: Vec::new(),
        }
    }

    fn full(&self) -> bool {
        self.left == Some(0)
    }

    /// The next piece for the reader; empty when the file has no whole line more.
    fn chunk(&mut self, file: &mut File) -> io::Result<Vec<u8>> {
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
        if let Some(left) = &mut self.left {
            out.truncate(*left);
            *left -= out.len();
        }
    }

    fn render(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let line = log::parse(line);
        // Both are RFC 3339 in UTC with the year first: bytes compare as moments do.
        let old =
            self.since.as_ref().is_some_and(|s| !line.timestamp.is_empty() && line.timestamp < s.as_bytes());
        if !old {
            log::render(&line, self.timestamps, self.continued, out);
        }
        self.continued = line.partial;
    }
}

fn rfc3339(unix_nanos: i64) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(unix_nanos)).map(|t| t.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(request: &pb::ReadLogsRequest, content: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, content).unwrap();
        let mut file = File::open(path).unwrap();
        if let Some(lines) = request.tail_lines {
            seek_to_tail(&mut file, usize::try_from(lines).unwrap()).unwrap();
        }
        let mut reader = Reader::new(request);
        let mut out = Vec::new();
        loop {
            let data = reader.chunk(&mut file).unwrap();
            if data.is_empty() {
                break;
            }
            out.extend(data);
        }
        String::from_utf8(out).unwrap()
    }

    const LOG: &str = "2026-01-01T00:00:01Z stdout F one\n2026-01-01T00:00:02Z stderr P tw\n2026-01-01T00:00:02Z stderr F o\n";

    #[test]
    fn lines_come_without_the_runtimes_prefix() {
        assert_eq!(reader(&pb::ReadLogsRequest::default(), LOG), "one\ntwo\n");
    }

    #[test]
    fn timestamps_stand_once_per_line() {
        let request = pb::ReadLogsRequest { timestamps: true, ..Default::default() };
        assert_eq!(reader(&request, LOG), "2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n");
    }

    #[test]
    fn since_leaves_out_what_is_older() {
        let since = jiff::Timestamp::from_second(1_767_225_602).unwrap().as_nanosecond();
        let request =
            pb::ReadLogsRequest { since_unix_nanos: i64::try_from(since).unwrap(), ..Default::default() };
        assert_eq!(reader(&request, LOG), "two\n");
    }

    #[test]
    fn limit_bytes_cuts_the_output() {
        let request = pb::ReadLogsRequest { limit_bytes: Some(5), ..Default::default() };
        assert_eq!(reader(&request, LOG), "one\nt");
    }

    #[test]
    fn tail_of_a_file_longer_than_the_window_is_found() {
        let content: String = (0..10_000).map(|i| format!("T stdout F line {i}\n")).collect();
        let request = pb::ReadLogsRequest { tail_lines: Some(2), ..Default::default() };
        assert_eq!(reader(&request, &content), "line 9998\nline 9999\n");
        let request = pb::ReadLogsRequest { tail_lines: Some(9_999), ..Default::default() };
        assert_eq!(reader(&request, &content).lines().count(), 9_999);
    }
}
