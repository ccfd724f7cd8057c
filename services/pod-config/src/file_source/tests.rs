//! The loop of the source `file`, without its clock.

use std::sync::Arc;

use keelson_config::{Config, ServiceName};
use keelson_pod_config_core::desired_pod::DesiredPod;
use serde_json::json;

use super::*;
use crate::binding_store::Opened;
use crate::sent_pod::SentPod;

#[test]
fn only_file_rows_of_the_checkpoint_are_pruned_by_the_file_source() {
    assert!(is_file_key("/etc/kubernetes/manifests/web.yaml"));
    for other in ["https://h/pods", "api:pods/default/web", "api:node", &format!("{NODES}n/pods/a/b")] {
        assert!(!is_file_key(other), "{other}");
    }
}

fn pod(name: &str, image: &str) -> String {
    let spec = json!({"containers": [{"name": "c", "image": image}]});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// The records of all files, with the records that subscribers have.
fn records(source: &FileSource) -> Vec<(Arc<DesiredPod>, Arc<SentPod>)> {
    let pods = source.files.paths().flat_map(|path| &source.files.content(path).unwrap().pods);
    pods.map(|pod| (Arc::clone(pod), source.desired.pod(&pod.uid).unwrap())).collect()
}

#[tokio::test]
async fn an_edit_of_one_file_decodes_only_that_file_and_sends_only_its_pod() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    ["a", "b", "c"].iter().for_each(|name| write(name, pod(name, "one")));
    let config = Config { node_name: "n1".to_owned(), ..Config::default() };
    let ctx = Context::detached(ServiceName::PodConfig, config);
    let location = folder.path().display().to_string();
    let checkpoint = Checkpoint::default();
    let desired = DesiredState::new(
        &ctx,
        &[(FILE, location)],
        checkpoint.clone(),
        BTreeMap::new(),
        Ok(Opened::default()),
    );
    let (rows, owners) = (BTreeMap::new(), NameOwners::new());
    let mut source = FileSource::new(&ctx, folder.path(), desired, checkpoint, rows, owners);
    let changed = |names: &[&str]| Batch {
        changed: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Batch::default()
    };
    source.apply_batch(changed(&["a", "b", "c"])).await;
    let before = records(&source);
    assert!(before.iter().all(|(pod, sent)| Arc::ptr_eq(pod, &sent.pod)), "one record from file to wire");

    write("b", pod("b", "two"));
    write("a", "{".to_owned());
    source.apply_batch(changed(&["b"])).await;
    assert_eq!(source.files.assemble().errors, [], "a has not been read");
    let after = records(&source);
    let reused = |index: usize| {
        let ((old, old_sent), (new, new_sent)) = (&before[index], &after[index]);
        (Arc::ptr_eq(old, new), Arc::ptr_eq(old_sent, new_sent))
    };
    assert_eq!([reused(0), reused(1), reused(2)], [(true, true), (false, false), (true, true)]);
    assert!(Arc::ptr_eq(&after[1].0, &after[1].1.pod));
}
