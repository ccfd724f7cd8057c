//! The configuration under a node's key: `keelson apply -f`, `get config` and `delete config` with `--etcd`.

use keelson_config::{
    AssignedConfiguration, ConfigurationStatus, KUBELET_API_VERSION, KUBELET_FIELDS, KUBELET_KIND, Revision,
};
use keelson_etcd::{Entry, Expect, NodeKeys, Operation, Written};
use serde_json::{Value, json};

use super::{Fleet, failure};
use crate::args::Format;
use crate::cmd::Session;
use crate::cmd::manifests::ManifestFile;
use crate::error::Failure;
use crate::output;

/// Begins the last of the comments that `get config` puts before a text; the revision follows.
pub(super) const REVISION: &str = "# resourceVersion: ";

/// A text for the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Assigned {
    pub(super) text: Vec<u8>,
    /// The revision that its author has read.
    pub(super) read: Option<i64>,
}

/// The text for the key, when a manifest is a KubeletConfiguration; an error says what is wrong with it, a line for each.
///
/// It is taken as its author wrote it: the lines of a refusal are those of the file, but for what `get config` has put before.
pub(super) fn in_manifest(file: &ManifestFile, documents: &[Value]) -> Result<Option<Assigned>, String> {
    let is_one = |document: &Value| document["kind"] == KUBELET_KIND;
    if !documents.iter().any(is_one) {
        return Ok(None);
    }
    let [document] = documents else {
        return Err(format!("a {KUBELET_KIND} stands in a file of its own"));
    };
    let mut wrong = Vec::new();
    if document["apiVersion"] != KUBELET_API_VERSION {
        wrong.push(format!(
            "apiVersion: Invalid value: {}: must be {KUBELET_API_VERSION}",
            document["apiVersion"]
        ));
    }
    let known = |field: &str| ["apiVersion", "kind"].contains(&field) || KUBELET_FIELDS.contains(&field);
    for field in
        document.as_object().into_iter().flat_map(|fields| fields.keys()).filter(|field| !known(field))
    {
        wrong.push(format!("{field}: Unknown field: a {KUBELET_KIND} has none of this name"));
    }
    let assigned = without_head(&file.bytes)?;
    if let Some(problem) = AssignedConfiguration::new(0, assigned.text.clone()).problem {
        wrong.push(problem);
    }
    if wrong.is_empty() { Ok(Some(assigned)) } else { Err(wrong.join("\n")) }
}

/// A text without the comments that `get config` has put before it.
fn without_head(bytes: &[u8]) -> Result<Assigned, String> {
    let mut length = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n').take_while(|line| line.starts_with(b"#")) {
        length += line.len();
        if let Some(revision) = line.strip_prefix(REVISION.as_bytes()) {
            let written = String::from_utf8_lossy(revision);
            let written = written.trim();
            let read = written.parse().map_err(|_| {
                format!("{REVISION}{written}: leave the line out, or as `keelson get config` gave it")
            })?;
            return Ok(Assigned { text: bytes[length..].to_vec(), read: Some(read) });
        }
    }
    Ok(Assigned { text: bytes.to_vec(), read: None })
}

/// What stands under the key of a node, and what the node tells of it.
struct Found {
    node: String,
    alive: bool,
    entry: Option<Entry>,
    status: Option<ConfigurationStatus>,
}

impl Found {
    async fn of(fleet: &Fleet, node: &str, alive: bool) -> Result<Self, Failure> {
        let keys = NodeKeys::new(node);
        let entry = fleet.etcd.get(&keys.config()).await.map_err(failure)?;
        let told = fleet.etcd.get(&keys.config_status()).await.map_err(failure)?;
        let status = told.and_then(|told| serde_json::from_slice(&told.value).ok());
        Ok(Self { node: node.to_owned(), alive, entry, status })
    }

    /// `active@12`, `trial@12`, `refused@12: …`, or `pending@12` before the node has looked at it.
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

    /// As its author wrote it, behind lines that say what became of it and which revision it is.
    fn text(&self) -> Option<String> {
        let entry = self.entry.as_ref()?;
        let away = if self.alive { "" } else { ", as the node told when it was last there" };
        let mut text = format!("# {}: {}{away}\n", self.node, self.state());
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
        text.push_str(&format!("{REVISION}{}\n", entry.mod_revision));
        text.push_str(&String::from_utf8_lossy(&entry.value));
        if !text.ends_with('\n') {
            text.push('\n');
        }
        Some(text)
    }
}

/// Whether a node takes a configuration from its key at all, by what it has told.
pub(super) async fn is_taken(fleet: &Fleet, node: &str) -> Result<(), Failure> {
    let Found { status, .. } = Found::of(fleet, node, true).await?;
    status.and_then(|status| refusal(node, &status)).map_or(Ok(()), Err)
}

/// Why a node takes none, and the way out.
fn refusal(node: &str, status: &ConfigurationStatus) -> Option<Failure> {
    let error = status.error.as_deref().filter(|_| status.refuses_all())?;
    let (why, ways) = error.split_once('\n').unwrap_or((error, ""));
    let hint = ways.lines().collect::<Vec<_>>().join(", ");
    Some(Failure::Answer {
        message: format!("{node} refuses every configuration under its key: {why}"),
        hint: (!hint.is_empty()).then_some(hint),
    })
}

/// What became of the configuration of a node, in a word or a line.
pub(super) async fn state(fleet: &Fleet, node: &str) -> Result<String, Failure> {
    Ok(Found::of(fleet, node, true).await?.state())
}

/// Shows what stands under the keys.
pub(super) async fn get(session: &Session, fleet: &Fleet) -> Result<(), Failure> {
    let nodes = fleet.chosen().await?;
    let mut found = Vec::new();
    for node in nodes.names() {
        found.push(Found::of(fleet, &node, nodes.is_alive(&node)).await?);
    }
    found.retain(|one| one.entry.is_some());
    if session.format() == Some(Format::Json) {
        let items: Vec<Value> = found.iter().map(Found::json).collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    let texts: Vec<String> = found.iter().filter_map(Found::text).collect();
    if texts.is_empty() {
        let place = fleet.node.as_ref().map_or_else(|| "any node".into(), |node| format!("the node {node}"));
        output::notice(&format!("No configuration stands under the key of {place}."));
        return Ok(());
    }
    output::print(&texts.join("---\n"))
}

/// Removes what stands under the key; the node goes back to its files.
pub(super) async fn delete(fleet: &Fleet) -> Result<(), Failure> {
    let node = fleet.target("", &mut None).await?;
    let key = NodeKeys::new(&node).config();
    let Some(entry) = fleet.etcd.get(&key).await.map_err(failure)? else {
        return Err(Failure::NotFound {
            what: format!("no configuration stands under the key of {node}"),
            hint: "`keelson get config --etcd …` shows those of all nodes".into(),
        });
    };
    let expected = [(key.clone(), Expect::Revision(entry.mod_revision))];
    match fleet.etcd.write(&expected, &[Operation::Delete { key }]).await.map_err(failure)? {
        Written::Done(_) => output::print(&format!("config deleted on {node}\n")),
        Written::Conflict(_) => Err(Failure::Answer {
            message: format!("the configuration of {node} was changed while it was to be deleted"),
            hint: Some("look at it, then delete it again".into()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::ConfigurationState;

    use super::*;
    use crate::cmd::manifests;

    fn value(text: &str) -> Result<Option<Assigned>, String> {
        let file = ManifestFile { path: "config.yaml".into(), bytes: text.into() };
        in_manifest(&file, &manifests::documents(&file).unwrap())
    }

    #[test]
    fn a_configuration_is_taken_as_it_was_written_and_other_manifests_are_none() {
        let text =
            "# ours\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n";
        let as_it_is = Assigned { text: text.into(), read: None };
        assert_eq!(value(text).unwrap(), Some(as_it_is));
        assert_eq!(value("kind: Pod\napiVersion: v1\n").unwrap(), None);
    }

    #[test]
    fn what_get_has_shown_is_applied_without_its_comments_and_with_the_revision_that_was_read() {
        let text =
            "# ours\nkind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nmaxPods: 7\n";
        let entry =
            Entry { key: "k".into(), value: text.into(), create_revision: 3, mod_revision: 12, lease: 0 };
        let status = ConfigurationStatus::refusing_all("no init\nchange its files".into());
        let found = Found { node: "n1".into(), alive: false, entry: Some(entry), status: Some(status) };
        let shown = found.text().unwrap();
        let expected = Assigned { text: text.into(), read: Some(12) };
        assert_eq!(value(&shown).unwrap(), Some(expected), "{shown}");
        // A comment further down says nothing.
        let late = format!("{text}# resourceVersion: 3\n");
        assert_eq!(value(&late).unwrap().unwrap().read, None);
        let odd = value(&format!("# resourceVersion: new\n{text}")).unwrap_err();
        assert_eq!(odd, "# resourceVersion: new: leave the line out, or as `keelson get config` gave it");
    }

    #[test]
    fn what_no_node_would_take_is_refused_here() {
        for (text, expected) in [
            (
                "kind: KubeletConfiguration\napiVersion: v1\n",
                "apiVersion: Invalid value: \"v1\": must be kubelet.config",
            ),
            ("kind: KubeletConfiguration\nmaxPod: 7\n", "maxPod: Unknown field"),
            ("kind: KubeletConfiguration\n---\nkind: Pod\n", "stands in a file of its own"),
        ] {
            let error = value(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let long = format!("kind: KubeletConfiguration\n# {}\n", "x".repeat(1 << 20));
        assert!(value(&long).unwrap_err().contains("at most 1048576"));
    }

    #[test]
    fn the_state_is_of_what_stands_there_now() {
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
        let mut found = Found { node: "n1".into(), alive: true, entry: Some(entry), status: Some(status) };
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
            "# n1: pending@12, as the node told when it was last there\n# resourceVersion: 12\nmaxPods: 7\n"
        );
        found.entry = None;
        assert_eq!((found.state().as_str(), found.text()), ("<none>", None));
    }

    #[test]
    fn a_node_that_refuses_all_refuses_what_stands_there_and_what_may_come() {
        let entry = Entry {
            key: "k".into(),
            value: b"maxPods: 7".to_vec(),
            create_revision: 3,
            mod_revision: 12,
            lease: 0,
        };
        let status = ConfigurationStatus::refusing_all("no init\nchange its files\nor start one".into());
        let failure = refusal("n1", &status).unwrap();
        assert_eq!(failure.to_string(), "n1 refuses every configuration under its key: no init");
        assert_eq!(failure.hint().unwrap(), "change its files, or start one");
        assert_eq!(failure.exit_code(), 1);
        let found =
            Found { node: "n1".into(), alive: true, entry: Some(entry), status: Some(status.clone()) };
        assert_eq!(found.state(), "refused@12: no init");
        let text = found.text().unwrap();
        assert!(text.contains("\n#   change its files\n"), "{text}");
        assert!(text.contains("\n# in force: the files of the node alone\n"), "{text}");
        assert_eq!(Found { entry: None, ..found }.state(), "<none>");
        // What was refused for itself keeps nothing back.
        let own = ConfigurationStatus { assigned: Some(Revision { revision: 12 }), ..status };
        assert!(refusal("n1", &own).is_none());
        assert!(refusal("n1", &ConfigurationStatus::default()).is_none());
    }
}
