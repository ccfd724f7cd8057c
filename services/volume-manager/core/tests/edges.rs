//! Limits at their exact value, and what no other test asks for.

use std::sync::Arc;

use keelson_volume_manager_core::desire::{Desire as _, Medium, PodDesire, PodRef, Source, Volume};
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::payload::{Data, Fault, File, Files, FilesKind, Lookup, ObjectKind, clean};

#[test]
fn a_desire_says_whose_it_is_and_which_of_several_it_is() {
    let pod = PodRef { uid: "u".into(), namespace: "shop".into(), name: "web".into() };
    let desire = PodDesire { revision: 7, ..PodDesire::forget(pod.clone()) };
    assert_eq!((desire.pod(), desire.revision()), (&pod, 7));
}

#[test]
fn what_a_volume_holds_lies_below_its_plugin() {
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
        let key = Volume { name: "v".into(), source: source.clone() }.key();
        let expected = plugin.map(|plugin| VolumeKey { plugin: plugin.into(), name: "v".into() });
        assert_eq!(key, expected, "{source:?}");
    }
}

#[test]
fn a_kind_of_object_is_read_by_its_word() {
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
fn what_is_shown_for_debugging_names_keys_and_sizes_and_never_a_byte_of_them() {
    let bytes: Arc<[u8]> = Arc::from(b"hunter2".as_slice());
    let data = Data::from([("password".to_owned(), Arc::clone(&bytes))]);
    for (lookup, shown) in [
        (Lookup::Unknown, "Unknown"),
        (Lookup::Missing, "Missing"),
        (Lookup::Unreadable("no UTF-8".into()), "Unreadable(no UTF-8)"),
        (Lookup::Present(Arc::new(data)), "{\"password\"}"),
    ] {
        assert_eq!(format!("{lookup:?}"), shown);
    }
    assert_eq!(format!("{:?}", File { bytes, mode: 0o640, owner: None }), "7 bytes, 640");
}

#[test]
fn only_what_another_object_cannot_mend_is_a_fault_of_the_spec() {
    let text = |text: &str| text.to_owned();
    let kind = ObjectKind::Secret;
    for (fault, of_the_spec) in [
        (Fault::NoObject { kind, name: text("key") }, false),
        (Fault::NoKey { kind, key: text("a") }, false),
        (Fault::Unreadable { kind, name: text("key"), why: text("no object") }, false),
        (Fault::Path { path: text(".."), why: "it contains .." }, false),
        (Fault::Below { path: text("a/b"), above: text("a") }, false),
        (Fault::NoMode { path: text("a") }, true),
        (Fault::Field { path: text("a"), why: text("no such label") }, true),
        (Fault::NoApiServer { field: text("serviceAccountToken") }, true),
        (Fault::Token { name: text("a"), why: text("b") }, false),
    ] {
        assert_eq!(fault.is_of_the_spec(), of_the_spec, "{fault:?}");
    }
}

#[test]
fn a_path_may_be_4096_bytes_long_and_each_of_its_names_255() {
    let name = "n".repeat(255);
    assert_eq!(clean(&name), Ok(name.clone()));
    assert_eq!(clean(&format!("{name}n")), Err("one of its names is longer than 255 bytes"));
    // Sixteen names with a slash after each.
    let path = format!("{name}/").repeat(16);
    assert_eq!((path.len(), clean(&path).is_ok()), (4096, true));
    assert_eq!(clean(&format!("{path}/")), Err("it is longer than 4096 bytes"));
}
