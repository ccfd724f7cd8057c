//! What node-status remembers across restarts.

use std::collections::BTreeMap;

use keelson_config::{Config, ServiceName};
use keelson_kube_model::NodeCondition;
use keelson_node_status_core::Cursor;
use keelson_service_kit::{Kept, StateFile};
use serde::{Deserialize, Serialize};

/// The content of the state file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Saved {
    /// When the configuration of the last start that was told was resolved, unix nanoseconds.
    pub(crate) agent_start: i64,
    /// Of the last boot that was seen.
    pub(crate) boot_id: String,
    /// Of the last Node, without heartbeat times.
    pub(crate) conditions: Vec<NodeCondition>,
    /// Per service: the last event that was taken.
    pub(crate) cursors: BTreeMap<String, Cursor>,
    /// The name of the Node that was built last.
    pub(crate) node_name: String,
    /// When the first of this name was, unix seconds; 0: none was.
    pub(crate) node_created: i64,
    /// Whether it was told last that the Node is cordoned.
    pub(crate) unschedulable: bool,
}

impl Saved {
    /// When the Node of this name was built first, unix seconds, which is `now` for one that is not known.
    pub(crate) fn created(&mut self, name: &str, now: i64) -> i64 {
        if self.node_name != name || self.node_created == 0 {
            name.clone_into(&mut self.node_name);
            self.node_created = now;
        }
        self.node_created
    }
}

impl Kept for Saved {
    const VERSION: u64 = 1;
    const WITHOUT: &'static str = "some events are then reported twice, and the node counts as new";
    const UNWRITTEN: &'static str = "the folder must be writable by the user of node-status";
}

/// `<state-dir>/node-status/report.json`.
pub(crate) fn state_file(config: &Config) -> StateFile<Saved> {
    StateFile::at(config.paths.state(ServiceName::NodeStatus).join("report.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_as_old_as_the_first_of_its_name() {
        let mut saved = Saved::default();
        for (name, now, created) in
            [("a", 5, 5), ("a", 9, 5), ("a", 3, 5), ("b", 9, 9), ("b", 10, 9), ("a", 11, 11)]
        {
            assert_eq!(saved.created(name, now), created, "{name} at {now}");
        }
    }

    #[tokio::test]
    async fn what_is_stored_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.state_dir = dir.path().to_owned();
        let file = state_file(&config);
        assert_eq!(file.load().await.unwrap(), Saved::default());
        let mut saved = Saved { boot_id: "b".into(), ..Saved::default() };
        saved.cursors.insert("pod-sync".into(), Cursor { ring_id: "r".into(), sequence: 9 });
        file.store(saved.clone()).await.unwrap();
        assert_eq!(file.load().await.unwrap(), saved);
    }
}
