use std::io::Write as _;
use std::path::Path;

use k8s_cri::v1::ContainerState::{ContainerCreated, ContainerExited, ContainerRunning};
use keelson_config::Paths;

use super::*;
use crate::log_parts::BLOCK;
use crate::tests::fake_runtime::FakeRuntime;

/// The folder of the pods' logs in `dir`, with the files of one log.
fn log_of(dir: &Path, list: &[(&str, &str)]) -> (Files, LogSource) {
    let files = Files::new(Paths { pod_logs_dir: dir.join("logs"), ..Paths::default() });
    let folder = dir.join("logs/default_web_u/c");
    std::fs::create_dir_all(&folder).unwrap();
    for (name, content) in list {
        put(&folder.join(name), content);
    }
    (files, LogSource { uid: "u".into(), container_id: "c".into(), path: folder.join("0.log") })
}

fn put(path: &Path, content: &str) {
    let file = std::fs::File::create(path).unwrap();
    if path.extension().is_some_and(|e| e == "gz") {
        let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        encoder.write_all(content.as_bytes()).unwrap();
        encoder.finish().unwrap();
    } else {
        (&file).write_all(content.as_bytes()).unwrap();
    }
}

/// The output for a reader that does not follow.
fn drain(tail: &mut Tail) -> String {
    let mut out = Vec::new();
    loop {
        match tail.read_step().unwrap() {
            ReadStep::Data(data) => out.extend(data),
            ReadStep::MayGrow => std::thread::sleep(Duration::from_millis(10)),
            ReadStep::End => return String::from_utf8(out).unwrap(),
        }
    }
}

fn read(request: &pb::ReadLogsRequest, list: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (files, source) = log_of(dir.path(), list);
    drain(&mut Tail::open(files, source, request).unwrap())
}

fn reader(request: &pb::ReadLogsRequest, content: &str) -> String {
    read(request, &[("0.log", content)])
}

const LOG: &str =
    "2026-01-01T00:00:01Z stdout F one\n2026-01-01T00:00:02Z stderr P tw\n2026-01-01T00:00:02Z stderr F o\n";

#[test]
fn log_lines_are_shown_without_the_runtimes_prefix() {
    assert_eq!(reader(&pb::ReadLogsRequest::default(), LOG), "one\ntwo\n");
}

#[test]
fn timestamps_are_shown_once_per_line() {
    let request = pb::ReadLogsRequest { timestamps: true, ..Default::default() };
    let expected = "2026-01-01T00:00:01.000000000Z one\n2026-01-01T00:00:02.000000000Z two\n";
    assert_eq!(reader(&request, LOG), expected);
}

#[test]
fn since_leaves_out_older_lines() {
    let since = jiff::Timestamp::from_second(1_767_225_602).unwrap().as_nanosecond();
    let request =
        pb::ReadLogsRequest { since_unix_nanos: i64::try_from(since).unwrap(), ..Default::default() };
    assert_eq!(reader(&request, LOG), "two\n");
}

fn since(request: &str) -> pb::ReadLogsRequest {
    let at: jiff::Timestamp = request.parse().unwrap();
    pb::ReadLogsRequest { since_unix_nanos: i64::try_from(at.as_nanosecond()).unwrap(), ..Default::default() }
}

#[test]
fn since_compares_times_with_any_offset() {
    let log = "2026-01-01T01:59:59.9+02:00 stdout F before\n2026-01-01T02:00:00.5+02:00 stdout F in\n\
               2025-12-31T19:00:01-05:00 stdout F after\n";
    assert_eq!(reader(&since("2026-01-01T00:00:00Z"), log), "in\nafter\n");
    assert_eq!(reader(&since("2026-01-01T00:00:00.6Z"), log), "after\n");
    assert_eq!(reader(&since("2026-01-01T00:00:02Z"), log), "");
}

#[test]
fn docker_log_lines_are_read_like_cri_log_lines() {
    let line = |log: &str, second: u8| {
        format!("{{\"log\":\"{log}\",\"stream\":\"stdout\",\"time\":\"2026-01-01T00:00:0{second}.5Z\"}}\n")
    };
    let log = [line("one\\n", 1), line("\\\"tw", 2), line("o\\\"\\n", 2), line("three\\n", 3)].concat();
    assert_eq!(reader(&pb::ReadLogsRequest::default(), &log), "one\n\"two\"\nthree\n");
    let request = pb::ReadLogsRequest { timestamps: true, ..since("2026-01-01T00:00:02Z") };
    let expected = "2026-01-01T00:00:02.500000000Z \"two\"\n2026-01-01T00:00:03.500000000Z three\n";
    assert_eq!(reader(&request, &log), expected);
    let request = pb::ReadLogsRequest { tail_lines: Some(1), ..Default::default() };
    assert_eq!(reader(&request, &log), "three\n");
}

#[test]
fn tail_is_found_at_any_block_boundary() {
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
async fn log_is_followed_across_a_rotation_until_the_reader_leaves() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "u", ContainerRunning);
    fake.observer.relist().await.unwrap();
    let path = fake.dir.path().join("logs/0.log");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, LOG).unwrap();
    let source = LogSource { uid: "u".into(), container_id: "c".into(), path: path.clone() };
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
fn tail_of_a_file_longer_than_a_block_is_found() {
    let content: String = (0..10_000).map(|i| format!("T stdout F line {i}\n")).collect();
    let request = pb::ReadLogsRequest { tail_lines: Some(2), ..Default::default() };
    assert_eq!(reader(&request, &content), "line 9998\nline 9999\n");
    let request = pb::ReadLogsRequest { tail_lines: Some(9_999), ..Default::default() };
    assert_eq!(reader(&request, &content).lines().count(), 9_999);
}

/// A log of nine lines in four files.
const ROTATED: [(&str, &str); 6] = [
    ("0.log.20260101-000001.gz", "T stdout F 1\nT stdout F 2\n"),
    ("0.log.20260101-000002.gz", "T stdout F 3\nT stdout F 4\nT stdout F 5\n"),
    ("0.log.20260101-000002.tmp", "half"),
    ("0.log.20260101-000003", "T stdout F 6\nT stdout F 7\n"),
    ("0.log", "T stdout F 8\nT stdout F 9\n"),
    ("1.log", "T stdout F of another instance\n"),
];

fn last(count: usize) -> String {
    (1..=9).skip(9 - count).map(|n| format!("{n}\n")).collect()
}

#[test]
fn rotated_files_are_read_as_one_log() {
    assert_eq!(read(&pb::ReadLogsRequest::default(), &ROTATED), last(9));
}

#[test]
fn tail_reaches_into_rotated_and_compressed_files() {
    for lines in 0..=9 {
        let request = pb::ReadLogsRequest { tail_lines: Some(lines), ..Default::default() };
        assert_eq!(read(&request, &ROTATED), last(usize::try_from(lines).unwrap()), "{lines}");
    }
    for lines in [10, i64::MAX] {
        let request = pb::ReadLogsRequest { tail_lines: Some(lines), ..Default::default() };
        assert_eq!(read(&request, &ROTATED), last(9));
    }
}

#[test]
fn limit_bytes_and_since_apply_across_rotated_files() {
    let request = pb::ReadLogsRequest { limit_bytes: Some(9), ..Default::default() };
    assert_eq!(read(&request, &ROTATED), "1\n2\n3\n4\n5");
    let list = [
        ("0.log.20260101-000001.gz", "2026-01-01T00:00:01Z stdout F a\n2026-01-01T00:00:02Z stdout F b\n"),
        ("0.log", "2026-01-01T00:00:03Z stdout F c\n"),
    ];
    assert_eq!(read(&since("2026-01-01T00:00:02Z"), &list), "b\nc\n");
}

#[test]
fn rotated_files_older_than_since_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let (files, source) = log_of(dir.path(), &ROTATED);
    // Not a valid gzip file: reading it would fail.
    let old = source.path.with_file_name("0.log.20260101-000001.gz");
    std::fs::write(&old, "broken").unwrap();
    let request = pb::ReadLogsRequest { since_unix_nanos: 1_767_225_600_000_000_000, ..Default::default() };
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_000);
    std::fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    assert_eq!(drain(&mut Tail::open(files, source, &request).unwrap()).lines().count(), 7);
}

#[test]
fn rotated_file_and_its_compression_are_read_once() {
    let list = [
        ("0.log.20260101-000001.gz", "T stdout F 1\n"),
        ("0.log.20260101-000001", "T stdout F 1\n"),
        ("0.log", "T stdout F 2\n"),
    ];
    assert_eq!(read(&pb::ReadLogsRequest::default(), &list), "1\n2\n");
}

#[test]
fn log_is_read_completely_between_renaming_and_reopening() {
    let list = [("0.log.20260101-000001", "T stdout F 1\n"), ("0.log.20260101-000002", "T stdout F 2\n")];
    assert_eq!(read(&pb::ReadLogsRequest::default(), &list), "1\n2\n");
    let request = pb::ReadLogsRequest { tail_lines: Some(1), ..Default::default() };
    assert_eq!(read(&request, &list), "2\n");
}

#[test]
fn line_truncated_by_a_rotation_stays_its_own_line() {
    let list = [("0.log.20260101-000001", "T stdout F torn"), ("0.log", "T stdout F whole\n")];
    assert_eq!(read(&pb::ReadLogsRequest::default(), &list), "torn\nwhole\n");
}

#[test]
fn symlink_next_to_a_log_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let (files, source) = log_of(dir.path(), &[("0.log", "T stdout F 1\n")]);
    let link = source.path.with_file_name("0.log.20260101-000001");
    std::os::unix::fs::symlink("/etc/passwd", link).unwrap();
    let tail = Tail::open(files, source, &pb::ReadLogsRequest::default());
    assert_eq!(drain(&mut tail.unwrap()), "1\n");
}

#[test]
fn files_rotated_compressed_and_removed_during_a_read_are_still_read() {
    let dir = tempfile::tempdir().unwrap();
    let (files, source) = log_of(dir.path(), &ROTATED);
    let at = |name: &str| source.path.with_file_name(name);
    let mut tail = Tail::open(files, source.clone(), &pb::ReadLogsRequest::default()).unwrap();
    std::fs::remove_file(at("0.log.20260101-000001.gz")).unwrap();
    std::fs::remove_file(at("0.log.20260101-000003")).unwrap();
    put(&at("0.log.20260101-000003.gz"), "T stdout F 6\nT stdout F 7\n");
    std::fs::rename(at("0.log"), at("0.log.20260101-000004")).unwrap();
    put(&at("0.log"), "T stdout F 10\n");
    assert_eq!(drain(&mut tail), last(9));
}

#[test]
fn reader_waits_for_a_rotated_file_that_may_still_grow() {
    let dir = tempfile::tempdir().unwrap();
    let list = [("0.log.20260101-000001", "T stdout F 1\n"), ("0.log", "T stdout F 3\n")];
    let (files, source) = log_of(dir.path(), &list);
    let mut tail = Tail::open(files, source.clone(), &pb::ReadLogsRequest::default()).unwrap();
    assert!(matches!(tail.read_step().unwrap(), ReadStep::Data(data) if data == b"1\n"));
    // The runtime has opened the next file but still writes pending output to this one.
    let late = source.path.with_file_name("0.log.20260101-000001");
    std::fs::File::options().append(true).open(late).unwrap().write_all(b"T stdout F 2\n").unwrap();
    assert_eq!(drain(&mut tail), "2\n3\n");
}

#[tokio::test]
async fn slow_reader_follows_across_several_rotations() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "u", ContainerRunning);
    fake.observer.relist().await.unwrap();
    let (_, source) = log_of(fake.dir.path(), &[("0.log", "T stdout F 0\n")]);
    let at = |name: String| source.path.with_file_name(name);
    let request = pb::ReadLogsRequest { follow: true, ..Default::default() };
    let (out, mut pieces) = mpsc::channel(4);
    let reads = stream(fake.files.clone(), fake.observer.clone(), source.clone(), request, out);
    let follow = tokio::spawn(reads);
    let mut text = String::new();
    let mut until = async |text: &mut String, end: &str| {
        while !text.ends_with(end) {
            text.push_str(std::str::from_utf8(&pieces.recv().await.unwrap().unwrap().data).unwrap());
        }
    };
    until(&mut text, "0\n").await;
    // Three rotations between two polls of the reader; the second file is compressed, the first removed.
    let mut current = std::fs::File::options().append(true).open(&source.path).unwrap();
    for n in 1..=3 {
        current.write_all(format!("T stdout F {n}\n").as_bytes()).unwrap();
        std::fs::rename(&source.path, at(format!("0.log.20260101-00000{n}"))).unwrap();
        current = std::fs::File::create(&source.path).unwrap();
    }
    put(&at("whole.gz".into()), "T stdout F 2\n");
    std::fs::rename(at("whole.gz".into()), at("0.log.20260101-000002.gz".into())).unwrap();
    std::fs::remove_file(at("0.log.20260101-000002".into())).unwrap();
    std::fs::remove_file(at("0.log.20260101-000001".into())).unwrap();
    current.write_all(b"T stdout F 4\n").unwrap();
    until(&mut text, "4\n").await;
    fake.container("c", "u", ContainerExited);
    fake.observer.read("u").await.unwrap();
    assert!(pieces.recv().await.is_none(), "the log ends with its container");
    follow.await.unwrap();
    assert_eq!(text, "0\n1\n2\n3\n4\n");
}

#[tokio::test]
async fn undone_rotation_is_not_read_twice() {
    let fake = FakeRuntime::start().await;
    let (files, source) = log_of(fake.dir.path(), &[("0.log", "T stdout F 1\n")]);
    let mut tail = Tail::open(files, source.clone(), &pb::ReadLogsRequest::default()).unwrap();
    assert_eq!(drain(&mut tail), "1\n");
    assert!(!tail.follow().unwrap());
    let away = source.path.with_file_name("0.log.20260101-000001");
    std::fs::rename(&source.path, &away).unwrap();
    assert!(!tail.follow().unwrap(), "nothing has followed yet");
    std::fs::rename(&away, &source.path).unwrap();
    assert!(!tail.follow().unwrap());
    let mut log = std::fs::File::options().append(true).open(&source.path).unwrap();
    log.write_all(b"T stdout F 2\n").unwrap();
    assert_eq!(drain(&mut tail), "2\n");
}

#[tokio::test]
async fn log_of_a_container_whose_start_is_not_observed_yet_is_followed() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "u", ContainerCreated);
    fake.observer.relist().await.unwrap();
    let (_, source) = log_of(fake.dir.path(), &[("0.log", "T stdout F 1\n")]);
    let request = pb::ReadLogsRequest { follow: true, ..Default::default() };
    let (out, mut pieces) = mpsc::channel(4);
    let reads = stream(fake.files.clone(), fake.observer.clone(), source.clone(), request, out);
    let follow = tokio::spawn(reads);
    assert_eq!(pieces.recv().await.unwrap().unwrap().data, b"1\n");
    let nothing = tokio::time::timeout(3 * FOLLOW_EVERY, pieces.recv()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    put(&source.path, "T stdout F 1\nT stdout F 2\n");
    assert_eq!(pieces.recv().await.unwrap().unwrap().data, b"2\n");
    fake.container("c", "u", ContainerExited);
    fake.observer.read("u").await.unwrap();
    assert!(pieces.recv().await.is_none());
    follow.await.unwrap();
}
