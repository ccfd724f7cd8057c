use keelson_pod_config_core::parse_file;
use keelson_pod_config_core::static_pod::StaticRules;
use serde_json::Value;

use super::*;

const TEXT: &str = "\
apiVersion: v1
kind: PersistentVolume
metadata: {name: disk}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  hostPath: {path: /data}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
";

/// The PersistentVolume `disk` and the claim `data`, which is bound to it and stored.
fn bound() -> (VolumeObjects, Objects, Objects) {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    let volumes = VolumeObjects::new(&config, Ok(Opened::default()));
    let file = parse_file(TEXT.as_bytes(), "a.yaml", &StaticRules::standalone("n1")).unwrap();
    let both: Objects = file.objects.into_iter().map(|object| (object.key.clone(), object)).collect();
    let mut volume_only = both.clone();
    volume_only.retain(|key, _| key.kind == Kind::PersistentVolume);
    volumes.update(both.clone(), BTreeSet::new(), true);
    volumes.stored(taken(&volumes));
    assert_eq!(phases(&volumes), ["Bound", "Bound"]);
    (volumes, both, volume_only)
}

/// The records that the loop takes to store them.
fn taken(volumes: &VolumeObjects) -> Records {
    match volumes.unstored() {
        Unstored::Records(records) => records,
        other => panic!("{other:?}"),
    }
}

fn phases(volumes: &VolumeObjects) -> Vec<String> {
    let kinds = [Kind::PersistentVolumeClaim, Kind::PersistentVolume].into_iter();
    let phase = |json: Arc<[u8]>| {
        serde_json::from_slice::<Value>(&json).unwrap()["status"]["phase"].as_str().unwrap().to_owned()
    };
    kinds.flat_map(|kind| volumes.list(kind)).map(phase).collect()
}

#[test]
fn a_binding_that_was_seen_is_not_hidden_by_the_write_of_an_earlier_decision() {
    let (volumes, both, volume_only) = bound();
    volumes.update(volume_only, BTreeSet::new(), true);
    assert_eq!(phases(&volumes), ["Released"]);
    let released = taken(&volumes);
    // The claim is back while the release is written.
    volumes.update(both, BTreeSet::new(), true);
    assert_eq!(phases(&volumes), ["Pending", "Available"]);
    volumes.stored(released);
    assert_eq!(phases(&volumes), ["Pending", "Available"]);
    volumes.stored(taken(&volumes));
    assert_eq!(phases(&volumes), ["Bound", "Bound"]);
    assert!(matches!(volumes.unstored(), Unstored::Nothing));
}

#[test]
fn a_decision_that_equals_the_stored_one_again_is_seen_at_once() {
    let (volumes, both, volume_only) = bound();
    volumes.update(volume_only, BTreeSet::new(), true);
    volumes.update(both, BTreeSet::new(), true);
    assert!(matches!(volumes.unstored(), Unstored::Nothing));
    assert_eq!(phases(&volumes), ["Bound", "Bound"]);
}

#[test]
fn a_failed_write_hides_nothing_that_was_seen_and_is_tried_again() {
    let (volumes, mut both, _) = bound();
    let text = TEXT.replace("name: d", "name: e");
    let file = parse_file(text.as_bytes(), "b.yaml", &StaticRules::standalone("n1")).unwrap();
    both.extend(file.objects.into_iter().map(|object| (object.key.clone(), object)));
    volumes.update(both, BTreeSet::new(), true);
    taken(&volumes);
    let messages = volumes.failed("the disk is full");
    assert_eq!(phases(&volumes), ["Bound", "Pending", "Bound", "Available"]);
    let texts: Vec<&String> = messages.values().collect();
    assert_eq!(texts, ["the claim default/eata is pending: the disk is full"]);
    volumes.stored(taken(&volumes));
    assert_eq!(phases(&volumes), ["Bound"; 4]);
}
