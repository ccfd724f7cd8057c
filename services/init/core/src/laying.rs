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
    /// The KubeletConfiguration with the files of `--config-dir` over it (node-and-api.md §2.4); none without any.
    pub(crate) fn files(&self) -> Option<Document> {
        let mut whole = match self.kubelet {
            Some(file) => {
                let mut whole = file.clone();
                report_follows_update(&mut whole);
                whole
            }
            None if self.drop_ins.is_empty() => return None,
            None => flags_alone(),
        };
        for drop_in in self.drop_ins {
            lay_over(&mut whole, &with_paths_from(&self.host.cwd, drop_in));
        }
        Some(whole)
    }

    /// The same with the flags over it (§2.3): a flag replaces what the files have, maps included, but for feature gates.
    pub(crate) fn laid(&self) -> Option<Document> {
        let files = self.files();
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

/// Lays `over` on a file. The thresholds that a file has without naming any are there before (§2.2), so that who sets one of them
/// loses no other.
pub(crate) fn lay_over(file: &mut Document, over: &Document) {
    let says = |document: &Document| document.root.get(HARD).is_some_and(|value| !value.is_null());
    if !says(file) && says(over) {
        let defaults =
            DEFAULT_THRESHOLDS.iter().map(|(signal, amount)| ((*signal).to_owned(), (*amount).into()));
        file.root.insert(HARD.to_owned(), Value::Object(defaults.collect()));
    }
    file.lay(over);
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
