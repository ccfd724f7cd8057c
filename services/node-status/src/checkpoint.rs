//! The state that node-status restores after a restart.

use std::collections::BTreeMap;

use keelson_config::{Config, ServiceName};
use keelson_kube_model::NodeCondition;
use keelson_node_status_core::Cursor;
use keelson_service_kit::{StateFile, StoredState};
use serde::{Deserialize, Serialize};

/// The content of the state file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Checkpoint {
    /// When the configuration of the last recorded start of the agent was resolved, unix nanoseconds.
    pub(crate) agent_start: i64,
    /// The ID of the last known boot.
    pub(crate) boot_id: String,
    /// The conditions of the last Node, without heartbeat times.
    pub(crate) conditions: Vec<NodeCondition>,
    /// The cursor of each service's event ring.
    pub(crate) cursors: BTreeMap<String, Cursor>,
    /// The name of the last built Node.
    pub(crate) node_name: String,
    /// When the first Node of this name was built, unix seconds; 0: never.
    pub(crate) node_created: i64,
    /// Whether the Node was last recorded as cordoned.
    pub(crate) unschedulable: bool,
}

impl Checkpoint {
    /// When the Node of this name was first built, unix seconds: `now` for an unknown name.
    pub(crate) fn created(&mut self, name: &str, now: i64) -> i64 {
        if self.node_name != name || self.node_created == 0 {
            name.clone_into(&mut self.node_name);
            self.node_created = now;
        }
        self.node_created
    }
}

impl StoredState for Checkpoint {
    const VERSION: u64 = 1;
    const CONSEQUENCE_OF_LOSS: &'static str =
        "some events are then reported twice, and the node counts as new";
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str = "the folder must be writable by the user of node-status";
}

/// `<state-dir>/node-status/report.json`.
pub(crate) fn state_file(config: &Config) -> StateFile<Checkpoint> {
    StateFile::at(config.paths.state(ServiceName::NodeStatus).join("report.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_creation_time_is_that_of_the_first_node_of_the_name() {
        let mut checkpoint = Checkpoint::default();
        for (name, now, created) in
            [("a", 5, 5), ("a", 9, 5), ("a", 3, 5), ("b", 9, 9), ("b", 10, 9), ("a", 11, 11)]
        {
            assert_eq!(checkpoint.created(name, now), created, "{name} at {now}");
        }
    }

    #[tokio::test]
    async fn a_stored_checkpoint_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.state_dir = dir.path().to_owned();
        let file = state_file(&config);
        assert_eq!(file.load().await.unwrap(), Checkpoint::default());
        let mut checkpoint = Checkpoint { boot_id: "b".into(), ..Checkpoint::default() };
        checkpoint.cursors.insert("pod-sync".into(), Cursor { ring_id: "r".into(), sequence: 9 });
        file.store(checkpoint.clone()).await.unwrap();
        assert_eq!(file.load().await.unwrap(), checkpoint);
    }
}
