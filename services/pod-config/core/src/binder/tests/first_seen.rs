//! When objects were first seen.

use super::*;

const FIRST: &str = "2026-01-01T00:00:00Z";
const LATER: &str = "2026-01-02T00:00:00Z";

fn times(entries: &[(&str, &str)]) -> FirstSeen {
    entries.iter().map(|(uid, time)| ((*uid).to_owned(), (*time).to_owned())).collect()
}

/// A PersistentVolume `v` and a claim `c`, with these UIDs.
fn seen(uids: &[&str], complete: bool) -> Manifests {
    let mut manifests = Manifests { complete, ..Manifests::default() };
    for uid in uids {
        if uid.starts_with('v') {
            let volume = Volume { uid: (*uid).to_owned(), ..Volume::default() };
            manifests.volumes.insert((*uid).to_owned(), volume);
        } else {
            let claim = Claim { uid: (*uid).to_owned(), ..Claim::default() };
            manifests.claims.insert(key(uid), claim);
        }
    }
    manifests
}

#[test]
fn objects_keep_the_time_at_which_they_were_first_seen() {
    let both = times(&[("v", FIRST), ("c", FIRST)]);
    for (present, complete, known, stored, expected) in [
        (&["v", "c"][..], true, times(&[]), None, times(&[("v", LATER), ("c", LATER)])),
        (&["v", "c"], true, both.clone(), None, both.clone()),
        (&["v", "c", "c2"], true, both.clone(), None, times(&[("v", FIRST), ("c", FIRST), ("c2", LATER)])),
        // One that has gone is forgotten, but not before all sources were read.
        (&["v"], true, both.clone(), Some(both.clone()), times(&[("v", FIRST)])),
        (&["v"], false, both.clone(), Some(both.clone()), both.clone()),
        // It is back, and the disk does not say yet that it was gone.
        (&["v", "c"], true, times(&[("v", FIRST)]), Some(both.clone()), both.clone()),
        (&["v", "c"], true, times(&[("v", FIRST)]), None, times(&[("v", FIRST), ("c", LATER)])),
        // Created again in etcd, with another UID.
        (&["v2"], true, times(&[("v", FIRST)]), None, times(&[("v2", LATER)])),
    ] {
        let found = first_seen(&seen(present, complete), &known, stored.as_ref(), LATER);
        assert_eq!(found, expected, "{present:?}");
    }
}

#[test]
fn records_with_times_and_those_of_older_and_newer_releases_are_read() {
    let records = Records { first_seen: times(&[("c", FIRST)]), ..Records::default() };
    assert_eq!(Records::decode(&records.encode()), Ok(records));
    let older = br#"{"version": 1, "bindings": {}, "lost": true}"#;
    assert_eq!(Records::decode(older), Ok(Records::lost()));
    let newer = br#"{"version": 1, "bindings": {}, "lost": true, "of_a_newer_release": {"c": "x"}}"#;
    assert_eq!(Records::decode(newer), Ok(Records::lost()));
}
