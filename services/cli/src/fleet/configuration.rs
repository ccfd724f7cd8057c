//! The configuration under a node's key: `keelson apply -f`, `get config` and `delete config` with `--etcd`.

use keelson_config::{
    AssignedConfiguration, ConfigurationStatus, KUBELET_API_VERSION, KUBELET_FIELDS, KUBELET_KIND, Revision,
};
use keelson_etcd::{Entry, Expect, NodeKeys, Operation, Written};
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::nodes::Fleet;
use crate::cmd::manifests::ManifestFile;
use crate::error::CliError;
use crate::output::{self, Format};
use crate::session::Session;

/// The prefix of the last comment that `get config` prints before a text; the revision follows.
pub(super) const REVISION_PREFIX: &str = "# resourceVersion: ";

/// A configuration to write under the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AssignedText {
    pub(super) text: Vec<u8>,
    /// The revision that the author of the text has read.
    pub(super) read: Option<i64>,
}

/// The text for the key, if a manifest is a KubeletConfiguration. An error has a line for each problem.
///
/// The text is stored unchanged, without the comments of `get config`, so that line numbers in a refusal match the file.
pub(super) fn in_manifest(file: &ManifestFile, documents: &[Value]) -> Result<Option<AssignedText>, String> {
    let is_one = |document: &Value| document["kind"] == KUBELET_KIND;
    if !documents.iter().any(is_one) {
        return Ok(None);
    }
    let [document] = documents else {
        return Err(format!("a {KUBELET_KIND} must be in a file of its own"));
    };
    let mut errors = Vec::new();
    if document["apiVersion"] != KUBELET_API_VERSION {
        errors.push(format!(
            "apiVersion: Invalid value: {}: must be {KUBELET_API_VERSION}",
            document["apiVersion"]
        ));
    }
    let is_known = |field: &str| ["apiVersion", "kind"].contains(&field) || KUBELET_FIELDS.contains(&field);
    for field in
        document.as_object().into_iter().flat_map(|fields| fields.keys()).filter(|field| !is_known(field))
    {
        errors.push(format!("{field}: Unknown field: a {KUBELET_KIND} has no field of this name"));
    }
    let assigned = strip_comments(&file.bytes)?;
    if let Some(problem) = AssignedConfiguration::new(0, assigned.text.clone()).problem {
        errors.push(problem);
    }
    if errors.is_empty() { Ok(Some(assigned)) } else { Err(errors.join("\n")) }
}

/// Removes the comments that `get config` prints before a text.
fn strip_comments(bytes: &[u8]) -> Result<AssignedText, String> {
    let mut length = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n').take_while(|line| line.starts_with(b"#")) {
        length += line.len();
        if let Some(revision) = line.strip_prefix(REVISION_PREFIX.as_bytes()) {
            let written = String::from_utf8_lossy(revision);
            let written = written.trim();
            let read = written.parse().map_err(|_| {
                format!("{REVISION_PREFIX}{written}: leave the line out, or keep the value of `keelson get config`")
            })?;
            return Ok(AssignedText { text: bytes[length..].to_vec(), read: Some(read) });
        }
    }
    Ok(AssignedText { text: bytes.to_vec(), read: None })
}

/// The configuration under the key of a node, and its status from the node.
struct NodeConfiguration {
    node: String,
    alive: bool,
    entry: Option<Entry>,
    status: Option<ConfigurationStatus>,
}

impl NodeConfiguration {
    async fn read(fleet: &Fleet, node: &str, alive: bool) -> Result<Self, CliError> {
        let keys = NodeKeys::new(node);
        let entry = fleet.etcd.get(&keys.config()).await.map_err(from_etcd_error)?;
        let reported = fleet.etcd.get(&keys.config_status()).await.map_err(from_etcd_error)?;
        let status = reported.and_then(|entry| serde_json::from_slice(&entry.value).ok());
        Ok(Self { node: node.to_owned(), alive, entry, status })
    }

    /// `active@12`, `trial@12`, `refused@12: …`, or `pending@12` before the node has read it.
    fn state(&self) -> String {
        let Some(entry) = &self.entry else { return "<none>".to_owned() };
        let now = Revision { revision: entry.mod_revision };
        match &self.status {
            Some(status) if status.assigned == Some(now) => status.to_string(),
            Some(status) if status.refuses_all() => {
                ConfigurationStatus { assigned: Some(now), ..status.clone() }.to_string()
            }
            _ => format!("pending@{}", entry.mod_revision),
        }
    }

    fn json(&self) -> Value {
        let entry = self.entry.as_ref();
        let text = entry.map(|entry| String::from_utf8_lossy(&entry.value).into_owned());
        json!({
            "node": self.node,
            "revision": entry.map(|entry| entry.mod_revision),
            "state": self.state(),
            "status": self.status,
            "text": text,
        })
    }

    /// The text unchanged, after comments with its state and revision.
    fn text(&self) -> Option<String> {
        let entry = self.entry.as_ref()?;
        let suffix = if self.alive { "" } else { ", according to the last report of the node" };
        let mut text = format!("# {}: {}{suffix}\n", self.node, self.state());
        if let Some(status) = &self.status {
            let more = status.error.iter().flat_map(|error| error.lines().skip(1));
            more.for_each(|line| text.push_str(&format!("#   {line}\n")));
            let in_force = status.active.map(|active| active.revision);
            if in_force != Some(entry.mod_revision) {
                let what = in_force.map_or_else(
                    || "the files of the node alone".to_owned(),
                    |revision| format!("revision {revision}"),
                );
                text.push_str(&format!("# in force: {what}\n"));
            }
        }
        text.push_str(&format!("{REVISION_PREFIX}{}\n", entry.mod_revision));
        text.push_str(&String::from_utf8_lossy(&entry.value));
        if !text.ends_with('\n') {
            text.push('\n');
        }
        Some(text)
    }
}

/// Fails if the node's status says that it accepts no configuration from its key.
pub(super) async fn check_accepted(fleet: &Fleet, node: &str) -> Result<(), CliError> {
    let NodeConfiguration { status, .. } = NodeConfiguration::read(fleet, node, true).await?;
    status.and_then(|status| refusal_error(node, &status)).map_or(Ok(()), Err)
}

/// The error for a node that refuses every configuration.
fn refusal_error(node: &str, status: &ConfigurationStatus) -> Option<CliError> {
    let error = status.error.as_deref().filter(|_| status.refuses_all())?;
    let (reason, remedies) = error.split_once('\n').unwrap_or((error, ""));
    let hint = remedies.lines().collect::<Vec<_>>().join(", ");
    Some(CliError::Failed {
        message: format!("{node} refuses every configuration under its key: {reason}"),
        hint: (!hint.is_empty()).then_some(hint),
    })
}

/// The state of a node's configuration in one line.
pub(super) async fn state(fleet: &Fleet, node: &str) -> Result<String, CliError> {
    Ok(NodeConfiguration::read(fleet, node, true).await?.state())
}

/// Shows the configurations under the keys.
pub(super) async fn get(session: &Session, fleet: &Fleet) -> Result<(), CliError> {
    let nodes = fleet.selected_nodes().await?;
    let mut found = Vec::new();
    for node in nodes.names() {
        found.push(NodeConfiguration::read(fleet, &node, nodes.is_alive(&node)).await?);
    }
    found.retain(|one| one.entry.is_some());
    if session.format() == Some(Format::Json) {
        let items: Vec<Value> = found.iter().map(NodeConfiguration::json).collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    let texts: Vec<String> = found.iter().filter_map(NodeConfiguration::text).collect();
    if texts.is_empty() {
        let place = super::get::place(fleet);
        output::notice(&format!("There is no configuration under the key of {place}."));
        return Ok(());
    }
    output::print(&texts.join("---\n"))
}

/// Deletes the configuration under the key; the node then uses its files.
pub(super) async fn delete(fleet: &Fleet) -> Result<(), CliError> {
    let node = fleet.target_node("", &mut None).await?;
    let key = NodeKeys::new(&node).config();
    let Some(entry) = fleet.etcd.get(&key).await.map_err(from_etcd_error)? else {
        return Err(CliError::NotFound {
            what: format!("there is no configuration under the key of {node}"),
            hint: "`keelson get config --etcd …` shows those of all nodes".into(),
        });
    };
    let expected = [(key.clone(), Expect::Revision(entry.mod_revision))];
    match fleet.etcd.write(&expected, &[Operation::Delete { key }]).await.map_err(from_etcd_error)? {
        Written::Done(_) => output::print(&format!("config deleted on {node}\n")),
        Written::Conflict(_) => Err(CliError::Failed {
            message: format!("the configuration of {node} was changed during the deletion"),
            hint: Some("check the change, then delete it again".into()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::ConfigurationState;

    use super::*;
    use crate::cmd::manifests;

    fn value(text: &str) -> Result<Option<AssignedText>, String> {
        let file = ManifestFile { path: "config.yaml".into(), bytes: text.into() };
        in_manifest(&file, &manifests::documents(&file).unwrap())
    }

    #[test]
    fn kubelet_configuration_is_stored_unchanged() {
        let text =
            "# ours\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n";
        let as_it_is = AssignedText { text: text.into(), read: None };
        assert_eq!(value(text).unwrap(), Some(as_it_is));
        assert_eq!(value("kind: Pod\napiVersion: v1\n").unwrap(), None);
    }

    #[test]
    fn output_of_get_config_is_applied_without_its_comments() {
        let text =
            "# ours\nkind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nmaxPods: 7\n";
        let entry =
            Entry { key: "k".into(), value: text.into(), create_revision: 3, mod_revision: 12, lease: 0 };
        let status = ConfigurationStatus::refusing_all("no init\nchange its files".into());
        let found =
            NodeConfiguration { node: "n1".into(), alive: false, entry: Some(entry), status: Some(status) };
        let shown = found.text().unwrap();
        let expected = AssignedText { text: text.into(), read: Some(12) };
        assert_eq!(value(&shown).unwrap(), Some(expected), "{shown}");
        // A comment further down has no meaning.
        let late = format!("{text}# resourceVersion: 3\n");
        assert_eq!(value(&late).unwrap().unwrap().read, None);
        let odd = value(&format!("# resourceVersion: new\n{text}")).unwrap_err();
        assert_eq!(
            odd,
            "# resourceVersion: new: leave the line out, or keep the value of `keelson get config`"
        );
    }

    #[test]
    fn invalid_kubelet_configuration_is_refused_before_it_is_stored() {
        for (text, expected) in [
            (
                "kind: KubeletConfiguration\napiVersion: v1\n",
                "apiVersion: Invalid value: \"v1\": must be kubelet.config",
            ),
            ("kind: KubeletConfiguration\nmaxPod: 7\n", "maxPod: Unknown field"),
            ("kind: KubeletConfiguration\n---\nkind: Pod\n", "must be in a file of its own"),
        ] {
            let error = value(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let long = format!("kind: KubeletConfiguration\n# {}\n", "x".repeat(1 << 20));
        assert!(value(&long).unwrap_err().contains("at most 1048576"));
    }

    #[test]
    fn configuration_state_is_of_the_current_revision() {
        let entry = Entry {
            key: "k".into(),
            value: b"maxPods: 7".to_vec(),
            create_revision: 3,
            mod_revision: 12,
            lease: 0,
        };
        let revision = |revision| Some(Revision { revision });
        let status = ConfigurationStatus {
            assigned: revision(12),
            active: revision(9),
            last_known_good: revision(9),
            state: ConfigurationState::Refused,
            error: Some("line 3\nline 4".into()),
        };
        let mut found =
            NodeConfiguration { node: "n1".into(), alive: true, entry: Some(entry), status: Some(status) };
        assert_eq!(found.state(), "refused@12: line 3");
        let text = found.text().unwrap();
        assert_eq!(
            text,
            "# n1: refused@12: line 3\n#   line 4\n# in force: revision 9\n# resourceVersion: 12\nmaxPods: 7\n"
        );
        found.status.as_mut().unwrap().assigned = revision(11);
        assert_eq!(found.state(), "pending@12");
        found.status = None;
        found.alive = false;
        assert_eq!(
            found.text().unwrap(),
            "# n1: pending@12, according to the last report of the node\n# resourceVersion: 12\nmaxPods: 7\n"
        );
        found.entry = None;
        assert_eq!((found.state().as_str(), found.text()), ("<none>", None));
    }

    #[test]
    fn node_that_refuses_all_configurations_is_reported() {
        let entry = Entry {
            key: "k".into(),
            value: b"maxPods: 7".to_vec(),
            create_revision: 3,
            mod_revision: 12,
            lease: 0,
        };
        let status = ConfigurationStatus::refusing_all("no init\nchange its files\nor start one".into());
        let error = refusal_error("n1", &status).unwrap();
        assert_eq!(error.to_string(), "n1 refuses every configuration under its key: no init");
        assert_eq!(error.hint().unwrap(), "change its files, or start one");
        assert_eq!(error.exit_code(), 1);
        let found = NodeConfiguration {
            node: "n1".into(),
            alive: true,
            entry: Some(entry),
            status: Some(status.clone()),
        };
        assert_eq!(found.state(), "refused@12: no init");
        let text = found.text().unwrap();
        assert!(text.contains("\n#   change its files\n"), "{text}");
        assert!(text.contains("\n# in force: the files of the node alone\n"), "{text}");
        assert_eq!(NodeConfiguration { entry: None, ..found }.state(), "<none>");
        // A refusal of one revision does not refuse later ones.
        let own = ConfigurationStatus { assigned: Some(Revision { revision: 12 }), ..status };
        assert!(refusal_error("n1", &own).is_none());
        assert!(refusal_error("n1", &ConfigurationStatus::default()).is_none());
    }
}
