//! ReadLogs: a container's log as its reader wants it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log;
use tokio::sync::mpsc;
use tonic::Status;

use crate::files::Files;
use crate::observe::Observer;

/// Bytes that are looked at at once in search of the last lines.
const BLOCK: usize = 64 << 10;
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
    if let Err(error) = copy(files, &observer, &source, request, &out).await {
        let text = format!("cannot read the log {}: {error}", source.path.display());
        let _ = out.send(Err(Status::internal(text))).await;
    }
}

/// What is read, by one blocking task after the other: a disk that hangs holds up its reader only.
struct Tail {
    files: Files,
    source: Source,
    file: File,
    reader: Reader,
}

impl Tail {
    fn open(files: Files, source: Source, request: &pb::ReadLogsRequest) -> io::Result<Self> {
        let mut file = files.open_log(&source.path)?;
        if let Some(lines) = request.tail_lines {
            seek_to_tail(&mut file, usize::try_from(lines).unwrap_or(usize::MAX))?;
        }
        Ok(Self { files, source, file, reader: Reader::new(request) })
    }

    fn chunk(&mut self) -> io::Result<Vec<u8>> {
        self.reader.chunk(&mut self.file)
    }

    /// Goes on with the file that now stands where this one was opened. Whether there is another one.
    fn rotated(&mut self) -> bool {
        match rotated(&self.files, &self.source, &self.file) {
            Some(next) => {
                self.file = next;
                true
            }
            None => false,
        }
    }
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
        loop {
            let (back, data) = blocking(move || tail.chunk().map(|data| (tail, data))).await?;
            tail = back;
            if data.is_empty() {
                break;
            }
            if out.send(Ok(pb::ReadLogsResponse { data })).await.is_err() {
                return Ok(());
            }
        }
        if tail.reader.full() || !follow || ended {
            return Ok(());
        }
        let (back, rotated) = blocking(move || {
            let rotated = tail.rotated();
            Ok((tail, rotated))
        })
        .await?;
        tail = back;
        if rotated {
            continue;
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
        .is_some_and(|c| c.state == pb::ContainerState::Running as i32)
}

/// The file that now stands where `file` was opened, when it is another one.
fn rotated(files: &Files, source: &Source, file: &File) -> Option<File> {
    let next = files.open_log(&source.path).ok()?;
    let (a, b) = (file.metadata().ok()?, next.metadata().ok()?);
    (a.ino() != b.ino() || a.dev() != b.dev()).then_some(next)
}

/// Moves to the beginning of the last `lines` lines, looking for newlines from the end, a block at a time.
fn seek_to_tail(file: &mut File, lines: usize) -> io::Result<()> {
    let size = file.metadata()?.len();
    if lines == 0 {
        file.seek(SeekFrom::Start(size))?;
        return Ok(());
    }
    let (mut left, mut end) = (lines, size);
    let mut block = vec![0u8; BLOCK];
    while end > 0 {
        let length = usize::try_from(end).unwrap_or(BLOCK).min(BLOCK);
        let start = end - length as u64;
        let block = &mut block[..length];
        if let Err(error) = file.read_exact_at(block, start) {
            // Cut meanwhile: what is left is the tail.
            if error.kind() == io::ErrorKind::UnexpectedEof {
                break;
            }
            return Err(error);
        }
        let looked_at = if end == size { block.strip_suffix(b"\n").unwrap_or(block) } else { block };
        if let Some(offset) = log::line_start_from_end(looked_at, &mut left) {
            file.seek(SeekFrom::Start(start + offset as u64))?;
            return Ok(());
        }
        end = start;
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(())
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
mod tests {
    use super::*;
    use crate::fake::FakeRuntime;

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

    fn since(request: &str) -> pb::ReadLogsRequest {
        let at: jiff::Timestamp = request.parse().unwrap();
        pb::ReadLogsRequest {
            since_unix_nanos: i64::try_from(at.as_nanosecond()).unwrap(),
            ..Default::default()
        }
    }

    #[test]
    fn since_compares_moments_in_any_offset_and_takes_in_its_whole_second() {
        let log = "2026-01-01T01:59:59.9+02:00 stdout F before\n2026-01-01T02:00:00.5+02:00 stdout F in\n\
                   2025-12-31T19:00:01-05:00 stdout F after\n";
        assert_eq!(reader(&since("2026-01-01T00:00:00Z"), log), "in\nafter\n");
        assert_eq!(reader(&since("2026-01-01T00:00:00.6Z"), log), "after\n");
        assert_eq!(reader(&since("2026-01-01T00:00:02Z"), log), "");
    }

    #[test]
    fn the_tail_is_found_wherever_the_blocks_of_the_search_begin() {
        for length in [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK] {
            // Three lines, with the newline of the first near the beginning of the last block.
            let content = format!("one\n{}\nthree\n", "x".repeat(length - "three\n".len()));
            for (lines, expected) in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (i64::MAX, 3)] {
                let request = pb::ReadLogsRequest { tail_lines: Some(lines), ..Default::default() };
                assert_eq!(reader(&request, &content).lines().count(), expected, "{length} {lines}");
            }
        }
    }

    #[tokio::test]
    async fn a_log_is_followed_over_a_rotation_until_its_reader_leaves() {
        let fake = FakeRuntime::start().await;
        fake.container("c", "u", k8s_cri::v1::ContainerState::ContainerRunning);
        fake.observer.relist().await.unwrap();
        let path = fake.dir.path().join("logs/0.log");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, LOG).unwrap();
        let source = Source { uid: "u".into(), container_id: "c".into(), path: path.clone() };
        let request = pb::ReadLogsRequest { follow: true, tail_lines: Some(3), ..Default::default() };
        let (out, mut lines) = mpsc::channel(4);
        let follow = tokio::spawn(stream(fake.files.clone(), fake.observer.clone(), source, request, out));
        assert_eq!(lines.recv().await.unwrap().unwrap().data, b"one\ntwo\n");
        std::fs::write(fake.dir.path().join("next"), "T stdout F three\n").unwrap();
        std::fs::rename(fake.dir.path().join("next"), &path).unwrap();
        assert_eq!(lines.recv().await.unwrap().unwrap().data, b"three\n");
        drop(lines);
        follow.await.unwrap();
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
