#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use tempfile::TempDir;
use tokio_stream::StreamExt as _;

use super::*;

/// A folder of logs in a folder that must not be reachable, and a journalctl.
struct Node {
    dir: TempDir,
    logs: NodeLogs,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        let (root, journalctl) = (dir.path().join("log"), dir.path().join("journalctl"));
        Self { dir, logs: NodeLogs { root, journalctl, ..NodeLogs::default() } }
    }

    fn root(&self) -> &Path {
        &self.logs.root
    }

    /// Installs a journalctl that lists the unit `kubelet.service`; otherwise it runs `body`.
    fn journalctl(&self, body: &str) {
        self.program(&format!(
            "if [ \"$1\" = --field ]; then echo kubelet.service; echo ssh.service; exit; fi\n{body}"
        ));
    }

    /// Installs a journalctl that runs `body`.
    fn program(&self, body: &str) {
        fs::write(&self.logs.journalctl, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&self.logs.journalctl, fs::Permissions::from_mode(0o755)).unwrap();
    }

    async fn start(
        &self,
        what: What,
        range: Option<pb::ByteRange>,
    ) -> Result<ReceiverStream<Result<pb::ReadNodeLogsResponse, Status>>, NodeLogError> {
        self.logs.start(pb::ReadNodeLogsRequest { what: Some(what), range }).await
    }

    async fn path(&self, path: impl AsRef<[u8]>) -> Result<Vec<Item>, NodeLogError> {
        self.part(path, None).await
    }

    async fn part(
        &self,
        path: impl AsRef<[u8]>,
        range: Option<pb::ByteRange>,
    ) -> Result<Vec<Item>, NodeLogError> {
        let stream = self.start(What::Path(path.as_ref().to_vec()), range).await?;
        Ok(stream.map(|item| item.unwrap().item.unwrap()).collect().await)
    }

    /// The content of a file; `None` if it is refused or not found.
    async fn content(&self, path: impl AsRef<[u8]>) -> Option<String> {
        self.path(path).await.ok().map(|items| text(&items))
    }

    async fn query(&self, query: pb::NodeLogQuery) -> Result<String, NodeLogError> {
        let stream = self.start(What::Query(query), None).await?;
        let items: Vec<Item> = stream.map(|item| item.unwrap().item.unwrap()).collect().await;
        Ok(text(&items))
    }

    async fn services(&self, names: &[&str]) -> String {
        self.query(query(names)).await.unwrap()
    }
}

fn query(names: &[&str]) -> pb::NodeLogQuery {
    pb::NodeLogQuery { services: names.iter().map(|s| (*s).to_owned()).collect(), ..Default::default() }
}

fn text(items: &[Item]) -> String {
    let data = items.iter().filter_map(|item| match item {
        Item::Data(data) => Some(data.as_slice()),
        Item::File(_) | Item::Folder(_) => None,
    });
    String::from_utf8(data.collect::<Vec<_>>().concat()).unwrap()
}

#[tokio::test]
async fn file_is_sent_with_its_size_and_a_part_of_it_by_range() {
    let node = Node::new();
    let content = "0123456789".repeat(10_000);
    fs::write(node.root().join("syslog"), &content).unwrap();
    let items = node.path("syslog").await.unwrap();
    let Item::File(head) = &items[0] else { panic!("no head: {:?}", items[0]) };
    assert_eq!((head.size_bytes, head.offset, head.length), (100_000, 0, 100_000));
    assert!(head.modified_unix_seconds > 1_700_000_000);
    assert_eq!(text(&items), content);
    let range = |first, last| Some(pb::ByteRange { first, last });
    let items = node.part("syslog", range(Some(5), Some(7))).await.unwrap();
    let Item::File(head) = &items[0] else { panic!("no head: {:?}", items[0]) };
    assert_eq!((head.size_bytes, head.offset, head.length), (100_000, 5, 3));
    assert_eq!(text(&items), "567");
    assert_eq!(text(&node.part("syslog", range(None, Some(2))).await.unwrap()), "89");
    let outside = node.part("syslog", range(Some(100_000), None)).await.unwrap_err();
    assert!(matches!(outside, NodeLogError::Range(100_000)), "{outside}");
}

#[tokio::test]
async fn folder_is_listed_by_name_and_links_to_folders_count_as_folders() {
    let node = Node::new();
    fs::create_dir(node.root().join("pods")).unwrap();
    fs::write(node.root().join("b<1>"), "").unwrap();
    symlink("pods", node.root().join("a")).unwrap();
    symlink(node.dir.path(), node.root().join("c")).unwrap();
    let entry = |name: &[u8], is_folder| pb::NodeLogEntry { name: name.to_vec(), is_folder };
    let entries = vec![entry(b"a", true), entry(b"b<1>", false), entry(b"c", false), entry(b"pods", true)];
    assert_eq!(node.path("").await.unwrap(), [Item::Folder(pb::NodeLogFolder { entries })]);
    let none = Item::Folder(pb::NodeLogFolder::default());
    assert_eq!(node.path("pods/").await.unwrap(), [none], "an empty folder is one message");
    for n in 0..2001 {
        fs::write(node.root().join(format!("pods/{n}")), "").unwrap();
    }
    assert_eq!(node.path("pods").await.unwrap().len(), 3, "a large folder comes in several messages");
}

#[tokio::test]
async fn nothing_outside_of_the_folder_of_logs_can_be_read() {
    let node = Node::new();
    let secret = node.dir.path().join("secret");
    fs::create_dir(node.root().join("d")).unwrap();
    symlink(&secret, node.root().join("absolute")).unwrap();
    symlink("../secret", node.root().join("relative")).unwrap();
    symlink("../../secret", node.root().join("d/deep")).unwrap();
    symlink("..", node.root().join("up")).unwrap();
    symlink("absolute", node.root().join("indirect")).unwrap();
    symlink("/proc/self/environ", node.root().join("proc")).unwrap();
    symlink(format!("{}x/../secret", node.root().display()), node.root().join("prefix")).unwrap();
    symlink(format!("{}/../secret", node.root().display()), node.root().join("back")).unwrap();
    symlink("round", node.root().join("round")).unwrap();
    for path in [
        "../secret",
        "d/../../secret",
        "/etc/passwd",
        "absolute",
        "relative",
        "d/deep",
        "up/secret",
        "up",
        "indirect",
        "proc",
        "prefix",
        "back",
        "round",
        "..",
    ] {
        let error = node.path(path).await.unwrap_err();
        assert!(matches!(error, NodeLogError::Refused { .. }), "{path}: {error}");
    }
    for path in ["none", "d/none", "absolute/x", "a\0b", &"x".repeat(5000)] {
        let error = node.path(path).await.unwrap_err();
        assert!(matches!(error, NodeLogError::NotFound { .. } | NodeLogError::Refused { .. }), "{error}");
    }
}

#[tokio::test]
async fn links_that_stay_in_the_folder_of_logs_are_followed() {
    let node = Node::new();
    fs::create_dir_all(node.root().join("pods/p")).unwrap();
    fs::create_dir(node.root().join("containers")).unwrap();
    fs::write(node.root().join("pods/p/0.log"), "line").unwrap();
    symlink(node.root().join("pods/p/0.log"), node.root().join("containers/c.log")).unwrap();
    symlink("../pods", node.root().join("containers/r")).unwrap();
    symlink(node.root(), node.root().join("self")).unwrap();
    for path in
        ["containers/c.log", "containers/r/p/0.log", "self/self/containers/c.log", "pods/../pods/p/0.log"]
    {
        assert_eq!(node.content(path).await.as_deref(), Some("line"), "{path}");
    }
}

#[tokio::test]
async fn only_regular_files_are_opened() {
    let node = Node::new();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        node.root().join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = UnixListener::bind(node.root().join("socket")).unwrap();
    for path in ["fifo", "socket"] {
        let error = node.path(path).await.unwrap_err();
        assert!(error.to_string().contains("neither a regular file nor a folder"), "{path}: {error}");
    }
}

#[tokio::test]
async fn file_that_becomes_shorter_while_it_is_read_ends_with_an_error() {
    let node = Node::new();
    let path = node.root().join("big");
    fs::write(&path, vec![b'x'; 10 * CHUNK]).unwrap();
    let mut stream = node.start(What::Path(b"big".to_vec()), None).await.unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    fs::write(&path, "").unwrap();
    let mut last = stream.next().await;
    while let Some(Ok(_)) = last {
        last = stream.next().await;
    }
    let status = last.unwrap().unwrap_err();
    assert!(status.message().contains("has become shorter"), "{status:?}");
}

#[tokio::test]
async fn query_runs_journalctl_without_a_shell() {
    let node = Node::new();
    node.journalctl("for a in \"$@\"; do echo \"<$a>\"; done; echo error >&2; env");
    let text = node
        .query(pb::NodeLogQuery {
            pattern: "$(touch x); `id` 'a'".into(),
            tail_lines: Some(3),
            ..query(&["kubelet", "ssh.service"])
        })
        .await
        .unwrap();
    for argument in
        ["<--unit=kubelet>", "<--unit=ssh.service>", "<--lines=3>", "<--grep=$(touch x); `id` 'a'>"]
    {
        assert!(text.contains(argument), "{argument}: {text}");
    }
    assert!(text.contains("\nerror\n"), "standard error is a part of the answer: {text}");
    assert!(!text.contains("CARGO"), "the environment is not inherited: {text}");
}

#[tokio::test]
async fn service_outside_of_the_journal_is_looked_up_as_a_file() {
    let node = Node::new();
    node.journalctl("echo journal");
    fs::write(node.root().join("one.log"), "one\n").unwrap();
    fs::create_dir(node.root().join("two")).unwrap();
    fs::write(node.root().join("two/two.log"), "two\n").unwrap();
    symlink("../secret", node.root().join("bad")).unwrap();
    assert_eq!(node.services(&["one", "two", "three"]).await, "one\ntwo\n\nlog not found for three\n");
    assert_eq!(node.services(&["kubelet", "one"]).await, "journal\none\n");
    assert!(node.services(&["bad"]).await.starts_with("\nerror getting log for bad: a link"));
    assert_eq!(
        node.services(&[".."]).await,
        "\nerror getting log for ..: a link or .. leads out of the folder of logs\n"
    );
    let options = pb::NodeLogQuery { tail_lines: Some(1), ..query(&["one", "two"]) };
    let refused =
        "\noptions present and query resolved to log files for [one two]\ntry without specifying options\n";
    assert_eq!(node.query(options).await.unwrap(), refused);
}

#[tokio::test]
async fn query_on_a_node_without_journal_reads_files_only() {
    let node = Node::new();
    fs::write(node.root().join("kubelet.log"), "file\n").unwrap();
    assert_eq!(node.services(&["kubelet"]).await, "file\n");
}

#[tokio::test]
async fn failed_list_of_units_is_a_part_of_the_answer() {
    let node = Node::new();
    node.program("echo broken journal >&2; exit 3");
    let failed = "\nerror: cannot list the units in the journal: it has ended with exit status: 3: \"broken journal\"\n";
    assert_eq!(node.services(&["kubelet"]).await, format!("{failed}\nlog not found for kubelet\n"));
    fs::write(node.root().join("kubelet.log"), "file\n").unwrap();
    assert_eq!(node.services(&["kubelet"]).await, format!("{failed}file\n"));
    let options = pb::NodeLogQuery { tail_lines: Some(1), ..query(&["kubelet"]) };
    assert_eq!(node.query(options).await.unwrap(), failed, "only the journal could have answered");
}

#[tokio::test]
async fn list_of_units_may_be_longer_than_a_mebibyte() {
    let node = Node::new();
    node.program(
        "if [ $1 = --field ]; then yes run-u1234567.scope | head -c 2000000; echo; echo kubelet.service; exit; fi\n\
         echo journal",
    );
    assert_eq!(node.services(&["kubelet"]).await, "journal\n");
}

#[tokio::test]
async fn commands_do_not_have_the_oom_protection_of_this_service() {
    const OWN: &str = "/proc/self/oom_score_adj";
    // The protected score of a service may not be available to a test; any other one shows the same.
    let protected = if fs::write(OWN, "-7").is_ok() { "-7" } else { "7" };
    fs::write(OWN, protected).unwrap();
    let node = Node::new();
    node.journalctl("while [ \"$(cat /proc/$$/oom_score_adj)\" = \"$OLD\" ]; do sleep 0.01; done; cat /proc/$$/oom_score_adj");
    let script = fs::read_to_string(&node.logs.journalctl).unwrap();
    fs::write(&node.logs.journalctl, script.replace("$OLD", protected)).unwrap();
    assert_eq!(node.services(&["kubelet"]).await, "0\n");
}

#[tokio::test]
async fn slot_stays_taken_until_the_thread_of_a_cancelled_reader_has_ended() {
    let slots = Arc::new(Semaphore::new(1));
    let taken = slot(&slots).unwrap();
    let (start, started) = tokio::sync::oneshot::channel();
    let (finish, hang) = std::sync::mpsc::channel::<()>();
    let reader = tokio::spawn(async move {
        let work = move || {
            start.send(()).unwrap();
            let _ = hang.recv();
        };
        in_thread(&taken, work).await
    });
    started.await.unwrap();
    reader.abort();
    assert!(reader.await.unwrap_err().is_cancelled());
    assert!(matches!(slot(&slots), Err(NodeLogError::TooMany)), "its thread hangs");
    drop(finish);
    drop(slots.acquire().await.unwrap());
}

#[tokio::test]
async fn invalid_query_is_refused_before_anything_runs() {
    let node = Node::new();
    node.journalctl(&format!("touch {}/ran", node.dir.path().display()));
    for names in [&[][..], &["a;b"], &["a/b"], &["a", "b", "c", "d", "e"]] {
        let error = node.query(query(names)).await.unwrap_err();
        assert!(matches!(error, NodeLogError::Query(_)), "{names:?}: {error}");
    }
    let empty = node.logs.start(pb::ReadNodeLogsRequest::default()).await;
    assert!(matches!(empty, Err(NodeLogError::Empty)));
    assert!(!node.dir.path().join("ran").exists());
}

#[tokio::test]
async fn query_ends_after_its_time_and_after_its_bytes() {
    let mut node = Node::new();
    node.journalctl("echo begin; exec sleep 600");
    node.logs.limit = Duration::from_millis(500);
    let text = node.services(&["kubelet"]).await;
    // On a busy machine the command may not have begun.
    assert!(
        ["", "begin\n"].contains(&text.strip_suffix("\nthe answer is cut after 500ms\n").unwrap()),
        "{text}"
    );
    node.logs.limit = QUERY_LIMIT;
    node.logs.most_bytes = 7;
    node.journalctl("exec yes");
    assert_eq!(node.services(&["kubelet"]).await, "y\ny\ny\ny\nthe answer is cut after 7 bytes\n");
}

#[tokio::test]
async fn command_is_killed_when_the_reader_leaves() {
    let node = Node::new();
    let pid_file = node.dir.path().join("pid");
    node.journalctl(&format!("echo $$ > {}; echo begin; exec sleep 600", pid_file.display()));
    let mut stream = node.start(What::Query(query(&["kubelet"])), None).await.unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    let pid = fs::read_to_string(&pid_file).unwrap();
    let process = Path::new("/proc").join(pid.trim()).join("comm");
    let runs = |name: &str| fs::read_to_string(&process).is_ok_and(|comm| comm.trim() == name);
    while !runs("sleep") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(stream);
    while runs("sleep") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn readers_and_queries_are_limited_separately() {
    let mut node = Node::new();
    node.journalctl("exec sleep 600");
    fs::write(node.root().join("syslog"), vec![b'x'; 10 * CHUNK]).unwrap();
    (node.logs.readers, node.logs.queries) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(1)));
    let _read = node.start(What::Path(b"syslog".to_vec()), None).await.unwrap();
    let second = node.start(What::Path(b"syslog".to_vec()), None).await;
    assert!(matches!(second, Err(NodeLogError::TooMany)));
    let _query = node.start(What::Query(query(&["kubelet"])), None).await.unwrap();
    let second = node.start(What::Query(query(&["kubelet"])), None).await;
    assert!(matches!(second, Err(NodeLogError::TooMany)));
}
