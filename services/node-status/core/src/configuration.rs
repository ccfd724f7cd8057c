//! The event of a changed node configuration, which etcd has under the node's key.

use keelson_config::{ConfigurationState, ConfigurationStatus};

use crate::conditions::NodeEvent;

/// The event of the node `name` when its configuration has become `status`; `None`: the key has no value any more.
///
/// A node that refuses every configuration has no event: it is set up that way, and nobody has changed anything.
pub fn configuration_event(name: &str, status: Option<&ConfigurationStatus>) -> Option<NodeEvent> {
    if status.is_some_and(ConfigurationStatus::refuses_all) {
        return None;
    }
    let report = status.map(|status| (status, status.assigned.map_or(0, |assigned| assigned.revision)));
    let in_force = |status: &ConfigurationStatus| match status.active {
        Some(active) => format!("revision {} is in force", active.revision),
        None => "the files of the node are in force alone".to_owned(),
    };
    let (reason, message) = match report {
        None => ("NodeConfigRemoved", format!("Node {name} is configured by its files alone")),
        Some((status, revision)) => match status.state {
            ConfigurationState::Trial => {
                ("NodeConfigTried", format!("Node {name} tries the configuration of revision {revision}"))
            }
            ConfigurationState::Refused => {
                let why = status.error.as_deref().unwrap_or_default();
                let now = in_force(status);
                let text =
                    format!("Node {name} refuses the configuration of revision {revision}, {now}: {why}");
                ("NodeConfigRefused", text)
            }
            ConfigurationState::Active | ConfigurationState::None => {
                ("NodeConfigApplied", format!("Node {name} has the configuration of revision {revision}"))
            }
        },
    };
    Some(NodeEvent { warning: reason == "NodeConfigRefused", reason, message })
}

#[cfg(test)]
mod tests {
    use keelson_config::Revision;

    use super::*;

    #[test]
    fn each_configuration_state_has_its_event_and_only_refused_is_a_warning() {
        let revision = |revision| Some(Revision { revision });
        let status = |state, active: i64, error: Option<&str>| ConfigurationStatus {
            assigned: revision(12),
            active: revision(active).filter(|active| active.revision != 0),
            last_known_good: None,
            state,
            error: error.map(ToOwned::to_owned),
        };
        for (status, reason, message) in [
            (None, "NodeConfigRemoved", "Node n1 is configured by its files alone"),
            (
                Some(status(ConfigurationState::Trial, 12, None)),
                "NodeConfigTried",
                "Node n1 tries the configuration of revision 12",
            ),
            (
                Some(status(ConfigurationState::Active, 12, None)),
                "NodeConfigApplied",
                "Node n1 has the configuration of revision 12",
            ),
            (
                Some(status(ConfigurationState::Refused, 9, Some("line 3"))),
                "NodeConfigRefused",
                "Node n1 refuses the configuration of revision 12, revision 9 is in force: line 3",
            ),
            (
                Some(status(ConfigurationState::Refused, 0, Some("line 3"))),
                "NodeConfigRefused",
                "Node n1 refuses the configuration of revision 12, the files of the node are in force alone: line 3",
            ),
        ] {
            let event = configuration_event("n1", status.as_ref()).unwrap();
            assert_eq!((event.reason, event.message.as_str()), (reason, message));
            assert_eq!(event.warning, reason == "NodeConfigRefused");
        }
    }

    #[test]
    fn a_node_that_refuses_every_configuration_has_no_event() {
        let status = ConfigurationStatus::refusing_all("no init".into());
        assert_eq!(configuration_event("n1", Some(&status)).map(|event| event.reason), None);
    }
}
