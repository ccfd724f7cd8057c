//! Which file lies over which (node-and-api.md §2.2, §2.3, §2.4).

use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::{Map, Value, json};

use crate::document::Document;
use crate::effective::with_paths_from;
use crate::flags::FieldFlag;
use crate::node_status::report_follows_update;
use crate::reserved::DEFAULT_THRESHOLDS;
use crate::resolve::Inputs;

/// The hard thresholds of evictions.
const HARD: &str = "evictionHard";

impl Inputs<'_> {
    /// The KubeletConfiguration with the files of `--config-dir` over it (node-and-api.md §2.4), and over all of them `assigned`,
    /// which a node without files takes for its file; none without any.
    fn files(&self, assigned: Option<&Document>) -> Option<Document> {
        let mut whole = match self.kubelet {
            Some(file) => loaded(file.clone()),
            None if self.drop_ins.is_empty() => return assigned.map(|assigned| loaded(alone(assigned))),
            None => flags_alone(),
        };
        for drop_in in self.drop_ins {
            lay_over(&mut whole, &with_paths_from(&self.host.cwd, drop_in));
        }
        if let Some(assigned) = assigned {
            lay_over(&mut whole, assigned);
        }
        Some(whole)
    }

    /// The same with the flags over it (§2.3): a flag replaces what the files have, maps included, but for feature gates.
    pub(crate) fn laid(&self, assigned: Option<&Document>) -> Option<Document> {
        let files = self.files(assigned);
        if self.flags.fields.is_empty() {
            return files;
        }
        let mut whole = files.unwrap_or_else(flags_alone);
        for FieldFlag { flag, path, value } in &self.flags.fields {
            whole.set(path, value, flag, *path == "featureGates");
        }
        Some(whole)
    }
}

/// The file of `--config` with the defaults that hang on what it says itself, and on nothing that is laid over it.
fn loaded(mut file: Document) -> Document {
    report_follows_update(&mut file);
    if merges_defaults(&file) {
        add_default_thresholds(&mut file);
    }
    file
}

/// Lays `over` on a file. The thresholds that a file has without naming any are there before (§2.2), so that who sets one of them
/// loses no other.
fn lay_over(file: &mut Document, over: &Document) {
    if let Some(set) = over.root.get(HARD).and_then(Value::as_object) {
        if file.root.get(HARD).is_none_or(Value::is_null) {
            file.root.insert(HARD.to_owned(), Value::Object(Map::new()));
            add_default_thresholds(file);
        }
        for signal in set.keys() {
            file.elsewhere.remove(&format!("{HARD}.{signal}"));
        }
    }
    file.lay(over);
    if merges_defaults(over) {
        add_default_thresholds(file);
    }
}

fn merges_defaults(document: &Document) -> bool {
    document.root.get("mergeDefaultEvictionSettings").and_then(Value::as_bool).unwrap_or(false)
}

/// Adds the defaults that are missing beside the thresholds that are set; where none are, all of them hold without that. What
/// is from nowhere is a default.
fn add_default_thresholds(file: &mut Document) {
    let Some(Value::Object(thresholds)) = file.root.get_mut(HARD) else { return };
    for (signal, amount) in DEFAULT_THRESHOLDS {
        if !thresholds.contains_key(*signal) {
            thresholds.insert((*signal).to_owned(), (*amount).into());
            file.elsewhere.insert(format!("{HARD}.{signal}"), String::new());
        }
    }
}

/// What stands under a key as the file of a node that has none.
fn alone(assigned: &Document) -> Document {
    let mut whole = Document { folder: "/".to_owned(), ..Document::default() };
    whole.lay(assigned);
    whole
}

/// A KubeletConfiguration for flags without a file (§2.2): the thresholds that a file would bring are not there.
fn flags_alone() -> Document {
    let mut root = Map::new();
    let mut set = |field: &str, value: Value| drop(root.insert(field.to_owned(), value));
    set("apiVersion", KUBELET_API_VERSION.into());
    set("kind", KUBELET_KIND.into());
    set(HARD, json!({}));
    Document { file: "command line".to_owned(), folder: "/".to_owned(), root, ..Document::default() }
}

#[cfg(test)]
#[path = "laying_tests.rs"]
mod tests;
