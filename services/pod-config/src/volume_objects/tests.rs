use futures_util::FutureExt as _;
use keelson_pod_config_core::parse_file;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_service_kit::WatchItem;
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

/// Whether a report would be confirmed now.
fn is_recorded(volumes: &VolumeObjects) -> bool {
    volumes.reports_recorded().now_or_never().is_some()
}

#[test]
fn a_report_is_confirmed_once_the_disk_says_that_the_next_one_is_to_be_awaited() {
    let (volumes, both, volume_only) = bound();
    let (stream, _) = volumes.begin_reports();
    assert!(matches!(volumes.unstored(), Unstored::Nothing), "nothing was reported yet");
    assert!(volumes.take_report(stream, Report::default()).is_some());
    assert!(!is_recorded(&volumes));
    let records = taken(&volumes);
    assert!(records.reported);
    volumes.failed("the disk is full");
    assert!(!is_recorded(&volumes));
    volumes.stored(taken(&volumes));
    assert!(is_recorded(&volumes));
    // Later writes leave it on the disk.
    volumes.update(volume_only.clone(), BTreeSet::new(), true);
    drop(taken(&volumes));
    assert!(is_recorded(&volumes));
    assert_eq!(phases(&volumes), ["Released"]);

    let config = Config { node_name: "n1".into(), ..Config::default() };
    for is_stored in [true, false] {
        let opened = Opened { records: records.clone(), is_stored };
        let restarted = VolumeObjects::new(&config, Ok(opened));
        assert_eq!(is_recorded(&restarted), is_stored);
        restarted.update(both.clone(), BTreeSet::new(), true);
        restarted.update(volume_only.clone(), BTreeSet::new(), true);
        if let Unstored::Records(records) = restarted.unstored() {
            restarted.stored(records);
        }
        assert_eq!(phases(&restarted), ["Bound", "Bound"], "held until the first report");
        let (earlier, _) = restarted.begin_reports();
        let (stream, _) = restarted.begin_reports();
        assert!(restarted.take_report(earlier, Report::default()).is_none(), "of an earlier stream");
        assert_eq!(phases(&restarted), ["Bound", "Bound"]);
        assert!(restarted.take_report(stream, Report::default()).is_some());
        assert_eq!(phases(&restarted), ["Released"]);
    }
}

/// The times of creation of the claims and the PersistentVolumes.
fn created(volumes: &VolumeObjects) -> Vec<Option<String>> {
    let kinds = [Kind::PersistentVolumeClaim, Kind::PersistentVolume].into_iter();
    let time = |json: Arc<[u8]>| {
        let object: Value = serde_json::from_slice(&json).unwrap();
        object["metadata"]["creationTimestamp"].as_str().map(ToOwned::to_owned)
    };
    kinds.flat_map(|kind| volumes.list(kind)).map(time).collect()
}

#[test]
fn an_object_was_created_when_it_was_first_seen_also_after_a_restart() {
    const FIRST: &str = "2020-01-01T00:00:00Z";
    let (volumes, both, volume_only) = bound();
    assert!(created(&volumes).iter().all(|time| time.as_deref().is_some_and(|time| time > FIRST)));
    // As if it were long ago.
    let mut records = volumes.state().stored.clone().unwrap();
    assert_eq!(records.first_seen.len(), 2);
    records.first_seen.values_mut().for_each(|time| FIRST.clone_into(time));

    let config = Config { node_name: "n1".into(), ..Config::default() };
    let restarted = VolumeObjects::new(&config, Ok(Opened { records, is_stored: true }));
    restarted.update(Objects::new(), BTreeSet::new(), false);
    restarted.update(both.clone(), BTreeSet::new(), true);
    assert_eq!(created(&restarted), [Some(FIRST.into()), Some(FIRST.into())]);
    assert!(matches!(restarted.unstored(), Unstored::Nothing));
    // A claim that is deleted and created again is new.
    restarted.update(volume_only, BTreeSet::new(), true);
    restarted.stored(taken(&restarted));
    restarted.update(both.clone(), BTreeSet::new(), true);
    assert_eq!(created(&restarted)[1].as_deref(), Some(FIRST));
    assert!(created(&restarted)[0].as_deref().is_some_and(|time| time > FIRST));

    let unknown = VolumeObjects::new(&config, Err("the disk is broken".into()));
    unknown.update(both, BTreeSet::new(), true);
    assert_eq!(created(&unknown), [None, None]);
}

#[test]
fn subscribers_get_objects_and_changes_and_synced_after_all_sources_were_read() {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    let volumes = VolumeObjects::new(&config, Ok(Opened::default()));
    let mut subscription = volumes.subscribe();
    let mut next = || match subscription.try_next()? {
        WatchItem::Set(key, json) => {
            let object: Value = serde_json::from_slice(&json).unwrap();
            Some(format!("{} {}", key.name, object["status"]["phase"].as_str().unwrap()))
        }
        WatchItem::Gone(key) => Some(format!("{} gone", key.name)),
        WatchItem::Synced => Some("synced".to_owned()),
    };
    let file = parse_file(TEXT.as_bytes(), "a.yaml", &StaticRules::standalone("n1")).unwrap();
    let both: Objects = file.objects.into_iter().map(|object| (object.key.clone(), object)).collect();
    let mut volume_only = both.clone();
    volume_only.retain(|key, _| key.kind == Kind::PersistentVolume);
    volumes.update(volume_only.clone(), BTreeSet::new(), false);
    assert_eq!((next(), next()), (Some("disk Available".into()), None));
    volumes.update(both.clone(), BTreeSet::new(), true);
    assert_eq!((next(), next(), next()), (Some("data Pending".into()), Some("synced".into()), None));
    volumes.stored(taken(&volumes));
    let mut changed = [next().unwrap(), next().unwrap()];
    changed.sort();
    assert_eq!((changed, next()), (["data Bound".into(), "disk Bound".into()], None));
    volumes.update(both, BTreeSet::new(), true);
    assert_eq!(next(), None, "nothing has changed");
    volumes.update(volume_only, BTreeSet::new(), true);
    let mut changed = [next().unwrap(), next().unwrap()];
    changed.sort();
    assert_eq!((changed, next()), (["data gone".into(), "disk Released".into()], None));
}
