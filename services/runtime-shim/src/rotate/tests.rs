use k8s_cri::v1::ContainerState::{ContainerExited, ContainerRunning};
use keelson_config::Paths;
use keelson_runtime_shim_core::rotation::{Form, parse_rotated_name};
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::logs;
use crate::tests::fake_runtime::{FakeRuntime, refusal, until};

const CONFIG: ContainerLogs =
    ContainerLogs { max_size_bytes: Some(100), max_files: 4, max_workers: 2, monitor_interval_ms: 1 };

/// A running container with a log in a real folder.
struct World {
    fake: FakeRuntime,
    rotator: Rotator,
    path: PathBuf,
    written: u32,
}

impl World {
    async fn start() -> Self {
        let fake = FakeRuntime::start().await;
        fake.container("c", "u", ContainerRunning);
        let path = fake.dir.path().join("logs/default_u_u/c/0.log");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "").unwrap();
        fake.set_log_path("c", &path);
        fake.observer.relist().await.unwrap();
        let rotator = Self::rotator(&fake);
        Self { fake, rotator, path, written: 0 }
    }

    fn rotator(fake: &FakeRuntime) -> Rotator {
        Rotator::new(fake.cri.clone(), fake.observer.clone(), fake.files.clone(), &CONFIG)
    }

    fn folder(&self) -> LogDir {
        LogDir::open(&self.fake.files, &self.path).unwrap()
    }

    /// The container writes ten numbered lines, more than the limit, to the file that the runtime has open.
    fn write(&mut self, open: &Path) {
        let mut file = std::fs::File::options().append(true).open(open).unwrap();
        for _ in 0..10 {
            writeln!(file, "T stdout F {}", self.written).unwrap();
            self.written += 1;
        }
    }

    async fn round(&self) {
        self.rotator.rotate_due().await;
        let logs = std::mem::take(&mut self.rotator.state().needs_cleanup);
        clean_up_all(&self.fake.files, &logs);
    }

    /// The lines that a reader of the whole log gets.
    async fn lines(&self) -> Vec<u32> {
        let source = logs::LogSource { uid: "u".into(), container_id: "c".into(), path: self.path.clone() };
        let (out, mut pieces) = mpsc::channel(4);
        let (files, observer) = (self.fake.files.clone(), self.fake.observer.clone());
        tokio::spawn(logs::stream(files, observer, source, pb::ReadLogsRequest::default(), out));
        let mut text = Vec::new();
        while let Some(piece) = pieces.recv().await {
            text.extend(piece.unwrap().data);
        }
        numbers(&text)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.folder().list().unwrap().into_iter().map(|file| file.name).collect();
        names.sort();
        names
    }
}

fn numbers(text: &[u8]) -> Vec<u32> {
    std::str::from_utf8(text).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[tokio::test]
async fn growing_log_is_rotated_compressed_and_limited() {
    let mut world = World::start().await;
    world.round().await;
    assert_eq!(world.names(), ["0.log"]);
    for round in 1..=6 {
        world.write(&world.path.clone());
        world.round().await;
        let names = world.names();
        assert_eq!(names.len(), 4.min(round + 1), "{names:?}");
        let forms: Vec<Form> =
            names.iter().filter_map(|name| parse_rotated_name("0.log", name)).map(|(_, form)| form).collect();
        let (newest, older) = forms.split_last().unwrap();
        assert_eq!(*newest, Form::Plain);
        assert!(older.iter().all(|form| *form == Form::Compressed), "{names:?}");
    }
    let kept: Vec<u32> = (30..60).collect();
    assert_eq!(world.lines().await, kept);
    assert_eq!(world.fake.runtime.reopen_container_log.requests().len(), 6);
}

#[tokio::test]
async fn log_below_the_size_limit_causes_no_runtime_call() {
    let world = World::start().await;
    std::fs::write(&world.path, "T stdout F 0\n").unwrap();
    world.round().await;
    assert!(world.fake.runtime.reopen_container_log.requests().is_empty());
    assert_eq!(world.names(), ["0.log"]);
}

#[tokio::test]
async fn log_of_an_exited_container_is_not_rotated() {
    let mut world = World::start().await;
    world.write(&world.path.clone());
    world.fake.container("c", "u", ContainerExited);
    world.fake.observer.relist().await.unwrap();
    world.round().await;
    assert_eq!(world.names(), ["0.log"]);
}

#[tokio::test]
async fn rotation_is_undone_if_the_runtime_does_not_reopen_the_log() {
    let mut world = World::start().await;
    world.write(&world.path.clone());
    world.fake.runtime.reopen_container_log.answer_once(Err(refusal(Code::Unknown)));
    world.round().await;
    assert_eq!(world.names(), ["0.log"]);
    assert!(world.rotator.state().failing_containers.contains("c"));
    world.round().await;
    assert_eq!(world.names().len(), 2);
    assert!(world.rotator.state().failing_containers.is_empty());
    assert_eq!(world.lines().await, (0..10).collect::<Vec<u32>>());
}

#[tokio::test]
async fn log_reopened_despite_an_error_is_not_overwritten() {
    let mut world = World::start().await;
    world.write(&world.path.clone());
    let renamed =
        rename_for_rotation(&world.fake.files, &world.path, world.rotator.limits.unwrap()).unwrap().unwrap();
    std::fs::write(&world.path, "T stdout F 10\n").unwrap();
    assert!(undo_rename(&world.fake.files, &world.path, renamed.name.as_deref()).is_err());
    assert_eq!(world.lines().await, (0..=10).collect::<Vec<u32>>());
}

#[tokio::test]
async fn without_max_size_no_log_is_rotated() {
    let mut world = World::start().await;
    world.rotator.limits = None;
    world.write(&world.path.clone());
    world.round().await;
    assert_eq!(world.names(), ["0.log"]);
}

/// Carries out a rotation, including the runtime's part, up to `kill` steps. With `half`, the last step is left
/// incomplete if it is a compression. Returns the file that the runtime has open then, and whether all steps were done.
fn killed_after(world: &World, kill: usize, half: bool) -> (PathBuf, bool) {
    let (folder, mut open) = (world.folder(), world.path.clone());
    let mut done = 0;
    let limits = world.rotator.limits.unwrap();
    for plan in [0, 1] {
        let list = folder.list().unwrap();
        let steps = match plan {
            0 => plan_rotation("0.log", &list, limits, 1_800_000_000),
            _ => plan_cleanup("0.log", &list),
        };
        for step in steps {
            if done == kill {
                return (open, false);
            }
            done += 1;
            match &step {
                Step::Reopen => {
                    std::fs::write(&world.path, "").unwrap();
                    open.clone_from(&world.path);
                }
                Step::Rename { from, to } if from == "0.log" => {
                    folder.rename(from, to).unwrap();
                    open = world.path.with_file_name(to);
                }
                Step::Compress { to, .. } if half && done == kill => {
                    folder.create(to, 0o640).unwrap().write_all(b"\x1f\x8b\x08half").unwrap();
                }
                other => assert!(carry_out(&folder, other).unwrap()),
            }
        }
    }
    (open, true)
}

#[tokio::test]
async fn rotation_killed_after_any_step_is_completed_at_the_next_start() {
    for half in [false, true] {
        for kill in 0.. {
            let mut world = World::start().await;
            // Three complete rotations: two compressed files and a plain one.
            for _ in 0..3 {
                world.write(&world.path.clone());
                world.round().await;
            }
            world.write(&world.path.clone());
            let (open, complete) = killed_after(&world, kill, half);
            world.write(&open);
            // The next start.
            world.rotator = World::rotator(&world.fake);
            world.round().await;
            let (names, lines) = (world.names(), world.lines().await);
            assert!(names.len() <= 4 && names[0] == "0.log", "{kill} {names:?}");
            assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{kill} {names:?}");
            // Only whole files were removed, because of the limit; no other line is missing or duplicated.
            let first = lines[0];
            assert!(first <= 20 && first % 10 == 0, "{kill} {lines:?}");
            assert_eq!(lines, (first..50).collect::<Vec<u32>>(), "{kill} {names:?}");
            if complete {
                assert!(kill >= 6, "expected at least that many steps: {kill}");
                break;
            }
        }
    }
}

#[test]
fn rotated_file_removed_before_compression_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::new(Paths { pod_logs_dir: dir.path().to_owned(), ..Paths::default() });
    std::fs::write(dir.path().join("0.log"), "").unwrap();
    let folder = LogDir::open(&files, &dir.path().join("0.log")).unwrap();
    assert!(!compress(&folder, "0.log.20260101-000001", "0.log.20260101-000001.tmp").unwrap());
    assert_eq!(folder.list().unwrap().len(), 1);
}

#[test]
fn compressed_log_has_the_same_lines_and_mode() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::new(Paths { pod_logs_dir: dir.path().to_owned(), ..Paths::default() });
    let text: String = (0..50_000).map(|n| format!("T stdout F line {n}\n")).collect();
    for name in ["0.log", "0.log.20260101-000001", "0.log.20260101-000002"] {
        std::fs::write(dir.path().join(name), &text).unwrap();
    }
    clean_up(&files, &dir.path().join("0.log")).unwrap();
    let compressed = File::open(dir.path().join("0.log.20260101-000001.gz")).unwrap();
    let metadata = compressed.metadata().unwrap();
    assert!(metadata.len() < text.len() as u64 / 3);
    assert_eq!(metadata.mode(), dir.path().join("0.log").metadata().unwrap().mode());
    let mut back = String::new();
    flate2::read::GzDecoder::new(compressed).read_to_string(&mut back).unwrap();
    assert_eq!(back, text);
    assert!(!dir.path().join("0.log.20260101-000001").exists());
    assert!(dir.path().join("0.log.20260101-000002").exists(), "the newest one is not compressed");
}

#[tokio::test]
async fn following_reader_gets_each_line_once_across_rotations() {
    let mut world = World::start().await;
    let source = logs::LogSource { uid: "u".into(), container_id: "c".into(), path: world.path.clone() };
    let (out, mut pieces) = mpsc::channel(4);
    let (files, observer) = (world.fake.files.clone(), world.fake.observer.clone());
    let request = pb::ReadLogsRequest { follow: true, ..Default::default() };
    let follow = tokio::spawn(logs::stream(files, observer, source, request, out));
    let mut lines: Vec<u32> = Vec::new();
    for _ in 0..12 {
        world.write(&world.path.clone());
        world.round().await;
        // The writer stays close enough to the reader that the files it needs are still kept.
        while lines.len() + 20 < world.written as usize {
            lines.extend(numbers(&pieces.recv().await.unwrap().unwrap().data));
        }
    }
    world.fake.container("c", "u", ContainerExited);
    world.fake.observer.relist().await.unwrap();
    while let Some(piece) = pieces.recv().await {
        lines.extend(numbers(&piece.unwrap().data));
    }
    follow.await.unwrap();
    assert_eq!(lines, (0..120).collect::<Vec<u32>>());
}

#[tokio::test]
async fn rotation_loops_rotate_compress_and_stop_at_shutdown() {
    let mut world = World::start().await;
    let config = keelson_config::Config { container_logs: CONFIG, ..Default::default() };
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, config);
    let loops = [
        tokio::spawn(world.rotator.clone().run(context.clone())),
        tokio::spawn(world.rotator.clone().run_cleanup(context.clone())),
    ];
    for files in 2..=3 {
        world.write(&world.path.clone());
        until("one more file", || {
            world.names().iter().filter(|name| !name.ends_with(".tmp")).count() == files
        })
        .await;
    }
    until("a compressed file", || world.names().iter().any(|name| name.ends_with(".gz"))).await;
    context.shutdown.cancel();
    for ended in loops {
        ended.await.unwrap();
    }
    assert_eq!(world.lines().await, (0..20).collect::<Vec<u32>>());
}

#[tokio::test]
async fn changed_rotation_limits_apply_at_once() {
    let mut world = World::start().await;
    let container_logs = ContainerLogs { max_size_bytes: None, ..CONFIG };
    let mut config = keelson_config::Config { container_logs, ..keelson_config::Config::default() };
    world.rotator.configure(&config.container_logs);
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, config.clone());
    world.write(&world.path.clone());
    let running = tokio::spawn(world.rotator.clone().run(context.clone()));
    config.container_logs = CONFIG;
    assert!(context.live.take(&config));
    until("a rotated file", || world.names().len() > 1).await;
    context.shutdown.cancel();
    running.await.unwrap();
}
