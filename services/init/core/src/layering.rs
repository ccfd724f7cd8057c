//! The order in which files are merged (node-and-api.md §2.2, §2.3, §2.4).

use keelson_config::{DEFAULT_THRESHOLDS, KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::{Map, Value, json};

use crate::defaults::EVICTION_HARD;
use crate::document::Document;
use crate::effective::with_paths_from;
use crate::flags::FieldFlag;
use crate::groups::node_status::report_follows_update;
use crate::inputs::Inputs;

impl Inputs<'_> {
    /// The KubeletConfiguration merged from `--config`, the files of `--config-dir` (node-and-api.md §2.4) and `assigned`, in
    /// this order. On a node without files, `assigned` is the whole file. `None` if there is none of these.
    fn merged_files(&self, assigned: Option<&Document>) -> Option<Document> {
        let mut merged = match self.kubelet {
            Some(file) => with_file_defaults(file.clone()),
            None if self.drop_ins.is_empty() => {
                return assigned.map(|assigned| with_file_defaults(assigned_alone(assigned)));
            }
            None => empty_kubelet_config(),
        };
        for drop_in in self.drop_ins {
            merge_file(&mut merged, &with_paths_from(&self.host.cwd, drop_in));
        }
        if let Some(assigned) = assigned {
            merge_file(&mut merged, assigned);
        }
        Some(merged)
    }

    /// The merged files with the flags applied (§2.3). A flag replaces the whole value of its field, maps included; only
    /// feature gates are merged.
    pub(crate) fn merged_kubelet_config(&self, assigned: Option<&Document>) -> Option<Document> {
        let files = self.merged_files(assigned);
        if self.flags.fields.is_empty() {
            return files;
        }
        let mut merged = files.unwrap_or_else(empty_kubelet_config);
        for FieldFlag { flag, path, value } in &self.flags.fields {
            merged.set(path, value, flag, *path == "featureGates");
        }
        Some(merged)
    }
}

/// The file of `--config` with the defaults that depend on its own content only, not on what is merged over it.
fn with_file_defaults(mut file: Document) -> Document {
    report_follows_update(&mut file);
    if merges_default_thresholds(&file) {
        add_default_thresholds(&mut file);
    }
    file
}

/// Merges `over` into a file. The default thresholds are added first if the file sets none (§2.2), so that a drop-in that
/// sets one threshold keeps the others.
fn merge_file(file: &mut Document, over: &Document) {
    if let Some(set) = over.root.get(EVICTION_HARD).and_then(Value::as_object) {
        if file.root.get(EVICTION_HARD).is_none_or(Value::is_null) {
            file.root.insert(EVICTION_HARD.to_owned(), Value::Object(Map::new()));
            add_default_thresholds(file);
        }
        for signal in set.keys() {
            file.other_origins.remove(&format!("{EVICTION_HARD}.{signal}"));
        }
    }
    file.merge_from(over);
    if merges_default_thresholds(over) {
        add_default_thresholds(file);
    }
}

fn merges_default_thresholds(document: &Document) -> bool {
    document.root.get("mergeDefaultEvictionSettings").and_then(Value::as_bool).unwrap_or(false)
}

/// Adds the defaults of missing thresholds to a file that sets some; without any, the defaults apply anyway. An empty origin
/// marks a default.
fn add_default_thresholds(file: &mut Document) {
    let Some(Value::Object(thresholds)) = file.root.get_mut(EVICTION_HARD) else { return };
    for (signal, amount) in DEFAULT_THRESHOLDS {
        if !thresholds.contains_key(*signal) {
            thresholds.insert((*signal).to_owned(), (*amount).into());
            file.other_origins.insert(format!("{EVICTION_HARD}.{signal}"), String::new());
        }
    }
}

/// The assigned configuration as the file of a node that has none.
fn assigned_alone(assigned: &Document) -> Document {
    let mut merged = Document { folder: "/".to_owned(), ..Document::default() };
    merged.merge_from(assigned);
    merged
}

/// An empty KubeletConfiguration for flags without a file (§2.2): it has no default thresholds.
fn empty_kubelet_config() -> Document {
    let mut root = Map::new();
    let mut set = |field: &str, value: Value| drop(root.insert(field.to_owned(), value));
    set("apiVersion", KUBELET_API_VERSION.into());
    set("kind", KUBELET_KIND.into());
    set(EVICTION_HARD, json!({}));
    Document { file: "command line".to_owned(), folder: "/".to_owned(), root, ..Document::default() }
}

#[cfg(test)]
#[path = "layering_tests.rs"]
mod tests;
