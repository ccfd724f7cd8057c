//! Which file lies over which (node-and-api.md §2.2, §2.3, §2.4).

use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::{Map, Value, json};

use crate::document::Document;
use crate::effective::with_paths_from;
use crate::flags::FieldFlag;
use crate::node_status::report_follows_update;
use crate::resolve::Inputs;

impl Inputs<'_> {
    /// The KubeletConfiguration with the files of `--config-dir` over it (node-and-api.md §2.4); none without any.
    pub(crate) fn files(&self) -> Option<Document> {
        if self.drop_ins.is_empty() {
            return self.kubelet.cloned();
        }
        let mut whole = self.kubelet.cloned().unwrap_or_else(flags_alone);
        for drop_in in self.drop_ins {
            whole.lay(&with_paths_from(&self.host.cwd, drop_in));
        }
        Some(whole)
    }

    /// The same with the flags over it (§2.3): a flag replaces what the files have, maps included, but for feature gates.
    pub(crate) fn laid(&self) -> Option<Document> {
        let mut files = self.files();
        if let Some(files) = &mut files {
            report_follows_update(files);
        }
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

/// A KubeletConfiguration for flags without a file (§2.2): the thresholds that a file would bring are not there.
fn flags_alone() -> Document {
    let mut root = Map::new();
    let mut set = |field: &str, value: Value| drop(root.insert(field.to_owned(), value));
    set("apiVersion", KUBELET_API_VERSION.into());
    set("kind", KUBELET_KIND.into());
    set("evictionHard", json!({}));
    Document { file: "command line".to_owned(), folder: "/".to_owned(), root, ..Document::default() }
}
