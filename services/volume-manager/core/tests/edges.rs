//! Limits at their exact values, and small functions that no other test covers.

use std::sync::Arc;

use keelson_volume_manager_core::desire::{
    Desire as _, DesireHeader, Medium, PodDesire, PodRef, Source, Volume, Want,
};
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::payload::{
    Content, File, FileError, Files, FilesKind, ObjectData, ObjectKind, ObjectLookup, clean_path,
};

#[test]
fn a_desire_returns_its_pod_and_revision() {
    let pod = PodRef { uid: "u".into(), namespace: "shop".into(), name: "web".into() };
    let desire = PodDesire::from(DesireHeader { pod: pod.clone(), revision: 7, want: Want::Forget });
    assert_eq!((&desire.header().pod, desire.header().revision), (&pod, 7));
}

#[test]
fn the_volume_key_contains_the_escaped_plugin_name() {
    let files =
        |kind| Source::Files(Files { kind, sources: Vec::new(), default_mode: None, nested: Vec::new() });
    for (source, plugin) in [
        (Source::EmptyDir { medium: Medium::Disk, size_limit: None }, Some("kubernetes.io~empty-dir")),
        (files(FilesKind::ConfigMap), Some("kubernetes.io~configmap")),
        (files(FilesKind::Secret), Some("kubernetes.io~secret")),
        (files(FilesKind::DownwardApi), Some("kubernetes.io~downward-api")),
        (files(FilesKind::Projected), Some("kubernetes.io~projected")),
        (Source::Unsupported("csi".into()), None),
    ] {
        let key = Volume {
            name: "v".into(),
            source: source.clone(),
            used: keelson_volume_manager_core::desire::VolumeUse::default(),
        }
        .key();
        let expected = plugin.map(|plugin| VolumeKey { plugin: plugin.into(), name: "v".into() });
        assert_eq!(key, expected, "{source:?}");
    }
}

#[test]
fn object_kinds_are_parsed_case_sensitively() {
    for (word, kind) in [
        ("ConfigMap", Some(ObjectKind::ConfigMap)),
        ("Secret", Some(ObjectKind::Secret)),
        ("secret", None),
        ("", None),
    ] {
        assert_eq!(ObjectKind::parse(word), kind, "{word:?}");
    }
}

#[test]
fn debug_output_shows_keys_and_sizes_but_no_content() {
    let bytes: Arc<[u8]> = Arc::from(b"hunter2".as_slice());
    let data = ObjectData::from([("password".to_owned(), Arc::clone(&bytes))]);
    for (lookup, shown) in [
        (ObjectLookup::Unknown, "Unknown"),
        (ObjectLookup::Missing, "Missing"),
        (ObjectLookup::Unreadable("no UTF-8".into()), "Unreadable(no UTF-8)"),
        (ObjectLookup::Present(Arc::new(data)), "{\"password\"}"),
    ] {
        assert_eq!(format!("{lookup:?}"), shown);
    }
    let file = File { bytes: Content::Shared(bytes), mode: 0o640, owner: None };
    assert_eq!(format!("{file:?}"), "7 bytes, 640");
}

#[test]
fn only_errors_that_another_object_cannot_fix_are_caused_by_the_spec() {
    let text = |text: &str| text.to_owned();
    let kind = ObjectKind::Secret;
    for (error, by_spec) in [
        (FileError::ObjectNotFound { kind, name: text("key") }, false),
        (FileError::KeyNotFound { kind, key: text("a") }, false),
        (FileError::UnreadableObject { kind, name: text("key"), why: text("invalid object") }, false),
        (FileError::InvalidPath { path: text(".."), why: "it contains .." }, false),
        (FileError::PathConflict { path: text("a/b"), parent_file: text("a") }, false),
        (FileError::NoMode { path: text("a") }, true),
        (FileError::NoValue { path: text("a"), why: text("no such label") }, true),
        (FileError::NoApiServer { field: text("serviceAccountToken") }, true),
        (FileError::TokenRefused { name: text("a"), why: text("b") }, false),
    ] {
        assert_eq!(error.is_caused_by_spec(), by_spec, "{error:?}");
    }
}

#[test]
fn a_path_may_be_4096_bytes_long_and_each_of_its_names_255() {
    let name = "n".repeat(255);
    assert_eq!(clean_path(&name), Ok(name.clone()));
    assert_eq!(clean_path(&format!("{name}n")), Err("one of its names is longer than 255 bytes"));
    // Sixteen names with a slash after each.
    let path = format!("{name}/").repeat(16);
    assert_eq!((path.len(), clean_path(&path).is_ok()), (4096, true));
    assert_eq!(clean_path(&format!("{path}/")), Err("it is longer than 4096 bytes"));
}
