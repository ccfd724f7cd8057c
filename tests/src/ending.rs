//! Pods that show when they are ended, and end when a test lets them.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_testkit::{Agent, BUSYBOX_IMAGE, eventually};
use serde_json::Value;

use crate::{LIMIT, pods};

/// A pod with this priority. On SIGTERM it adds its name to the file `ended` of the folder `marks`, and ends when the file
/// `let-<name>` is there, at the latest after ten minutes. At its start it adds its name to `started`.
pub fn ending_pod(marks: &Path, name: &str, priority: i32) -> String {
    let script = format!(
        "trap 'echo {name} >> /marks/ended; while [ ! -e /marks/let-{name} ]; do sleep 0.1; done; exit 0' TERM; \
         echo {name} >> /marks/started; while :; do sleep 0.1; done"
    );
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  priority: {priority}\n  \
         terminationGracePeriodSeconds: 600\n  containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    \
         imagePullPolicy: IfNotPresent\n    command: [\"/bin/sh\", \"-c\", {}]\n    \
         volumeMounts: [{{name: marks, mountPath: /marks}}]\n  volumes:\n  - name: marks\n    \
         hostPath: {{path: {}}}\n",
        Value::from(script),
        marks.display()
    )
}

/// The folder in which pods record their ends.
#[derive(Debug)]
pub struct Marks(PathBuf);

impl Marks {
    /// A new folder below this one.
    ///
    /// # Panics
    /// It cannot be created.
    pub fn below(dir: &Path) -> Self {
        let marks = dir.join("marks");
        fs::create_dir(&marks).unwrap();
        Self(marks)
    }

    /// As [`ending_pod`], with this folder.
    pub fn pod(&self, name: &str, priority: i32) -> String {
        ending_pod(&self.0, name, priority)
    }

    /// Lets a pod end.
    ///
    /// # Panics
    /// The folder is gone.
    pub fn let_end(&self, name: &str) {
        fs::write(self.0.join(format!("let-{name}")), "").unwrap();
    }

    /// A pod that starts from now on waits again when it is ended.
    ///
    /// # Panics
    /// The pod has not been let end before.
    pub fn hold(&self, name: &str) {
        fs::remove_file(self.0.join(format!("let-{name}"))).unwrap();
    }

    /// The pods that got SIGTERM so far, in this order.
    pub fn ended(&self) -> Vec<String> {
        self.lines("ended")
    }

    /// The pods that have started so far, in this order.
    pub fn started(&self) -> Vec<String> {
        self.lines("started")
    }

    fn lines(&self, file: &str) -> Vec<String> {
        let text = fs::read_to_string(self.0.join(file)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until exactly these pods got SIGTERM, in this order.
    ///
    /// # Panics
    /// They have not within [`LIMIT`].
    pub async fn until_ended(&self, agent: &Agent, names: &[&str]) {
        let ended = eventually(LIMIT, format!("SIGTERM for {names:?}"), async || self.ended() == names);
        ended.await.unwrap_or_else(|e| panic!("{e:#}: {:?}\n{}", self.ended(), agent.log_tail()));
    }
}

/// A pod as the agent shows it, by the name in its manifest; null if it shows none.
pub async fn pod(agent: &Agent, name: &str) -> Value {
    let full = format!("{name}-{}", agent.spec().node_name);
    pods(agent).await.unwrap_or_default().remove(&full).unwrap_or_default()
}

/// Waits until a pod satisfies `wanted`.
///
/// # Panics
/// It does not within [`LIMIT`].
pub async fn until_pod(agent: &Agent, name: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let reached = eventually(LIMIT, format!("{name} {what}"), async || {
        last = pod(agent, name).await;
        wanted(&last)
    });
    reached.await.unwrap_or_else(|e| panic!("{e:#}: {last:#}\n{}", agent.log_tail()));
    last
}

/// Waits until the node satisfies `wanted`.
///
/// # Panics
/// It does not within [`LIMIT`].
pub async fn until_node(agent: &Agent, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let reached = eventually(LIMIT, format!("the node {what}"), async || {
        last = agent.keelson_json(&["get", "node", "-o", "json"]).await.unwrap_or_default();
        wanted(&last)
    });
    reached.await.unwrap_or_else(|e| panic!("{e:#}: {last:#}\n{}", agent.log_tail()));
    last
}

/// A condition of a pod or node; null if it has none of this type.
pub fn condition<'a>(object: &'a Value, type_: &str) -> &'a Value {
    let conditions = object["status"]["conditions"].as_array();
    conditions.into_iter().flatten().find(|found| found["type"] == type_).unwrap_or(&Value::Null)
}
