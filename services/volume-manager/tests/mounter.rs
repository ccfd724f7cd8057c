//! The helper process, as the service starts it: this program with the argument `volume-helper`.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

/// A helper. It is killed with the test.
struct Helper(Child);

impl Helper {
    fn start(request: &str, stdout: Stdio) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-volume-manager"));
        command.arg("volume-helper").stdin(Stdio::piped()).stdout(stdout).stderr(Stdio::piped());
        let mut helper = Self(command.spawn().unwrap());
        helper.0.stdin.as_mut().unwrap().write_all(format!("{request}\n").as_bytes()).unwrap();
        helper
    }

    /// The lines of the answer, and whether it succeeded.
    fn answer(mut self) -> (Vec<Value>, bool) {
        let stdout = BufReader::new(self.0.stdout.take().unwrap());
        let lines = stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        (lines, self.0.wait().unwrap().success())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ask(request: &Value) -> Vec<Value> {
    Helper::start(&request.to_string(), Stdio::piped()).answer().0
}

#[test]
fn the_helper_answers_with_lines_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b");
    let create = json!({"createFolders": {"path": path, "mode": 0o750}});
    assert_eq!(ask(&create), [json!({"done": "nothing"})]);
    let walk = json!({"applyFsGroup": {"path": dir.path(), "group": 4711, "read_only": false, "on_root_mismatch": false}});
    assert_eq!(ask(&walk), [json!({"files": 3}), json!({"done": "nothing"})]);
    let found = ask(&json!({"inspect": {"path": path}}));
    assert_eq!(found[0]["done"]["file"]["group"], 4711);
    let missing = ask(&json!({"flags": {"path": dir.path().join("missing")}}));
    assert_eq!(missing[0]["failed"]["errno"], 2);
    assert!(missing[0]["failed"]["message"].as_str().unwrap().starts_with("No such file"));
}

#[test]
fn the_helper_refuses_a_request_that_it_does_not_know() {
    let (lines, succeeded) = Helper::start("{\"removeEverything\":{}}", Stdio::piped()).answer();
    assert_eq!((lines, succeeded), (Vec::<Value>::new(), false));
}

#[test]
fn the_helper_ends_with_the_service_even_in_the_middle_of_its_work() {
    // The answer does not fit into the pipe, so the helper blocks.
    let (_reader, mut writer) = std::io::pipe().unwrap();
    let size = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
    writer.write_all(&vec![b'x'; size]).unwrap();
    let request = json!({"inspect": {"path": "/"}}).to_string();
    let mut helper = Helper::start(&request, writer.into());
    drop(helper.0.stdin.take());
    assert_eq!(helper.0.wait().unwrap().code(), Some(70));
}
