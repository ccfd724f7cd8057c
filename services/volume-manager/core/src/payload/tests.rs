use std::sync::Arc;

use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;
use crate::pod_certificate::{CertificateLookup, CertificateName};
use crate::token::{TokenLookup, TokenName};

fn data(pairs: &[(&str, &str)]) -> ObjectLookup {
    let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), Arc::from(value.as_bytes())));
    ObjectLookup::Present(Arc::new(pairs.collect()))
}

fn object(kind: ObjectKind, name: &str, items: &[(&str, &str, Option<u32>)]) -> ObjectFiles {
    let item = |(key, path, mode): &(&str, &str, Option<u32>)| KeyFile {
        key: (*key).to_owned(),
        path: (*path).to_owned(),
        mode: *mode,
    };
    ObjectFiles { kind, name: name.to_owned(), items: items.iter().map(item).collect(), optional: false }
}

fn volume(kind: FilesKind, sources: Vec<FileSource>) -> Files {
    Files { kind, sources, default_mode: Some(0o644), nested: Vec::new() }
}

fn config_map(items: &[(&str, &str, Option<u32>)]) -> Files {
    volume(FilesKind::ConfigMap, vec![FileSource::Object(object(ObjectKind::ConfigMap, "conf", items))])
}

fn field(path: &str, value: DownwardValue) -> FileSource {
    FileSource::Downward(vec![DownwardFile { path: path.to_owned(), mode: None, value }])
}

/// A source cache with objects from a function, and without tokens.
struct Objects<F>(F);

impl<F: Fn(&ObjectName) -> ObjectLookup> SourceCache for Objects<F> {
    fn object(&self, name: &ObjectName) -> ObjectLookup {
        (self.0)(name)
    }

    fn token(&self, name: &TokenName) -> TokenLookup {
        TokenLookup::Pending(name.to_string())
    }

    fn certificate(&self, name: &CertificateName) -> CertificateLookup {
        unreachable!("{name:?}")
    }
}

fn collect(
    files: &Files,
    namespace: &str,
    lookup: impl Fn(&ObjectName) -> ObjectLookup,
) -> Result<Payload, PayloadError> {
    super::collect(files, namespace, &Objects(lookup))
}

/// The path, text and mode of each file.
fn contents(payload: &Payload) -> Vec<(&str, String, u32)> {
    let text = |file: &File| String::from_utf8_lossy(&file.bytes).into_owned();
    payload.files.iter().map(|(path, file)| (path.as_str(), text(file), file.mode)).collect()
}

fn optional(mut files: Files) -> Files {
    for source in &mut files.sources {
        if let FileSource::Object(object) = source {
            object.optional = true;
        }
    }
    files
}

fn error_text(files: &Files, found: &ObjectLookup) -> String {
    match collect(files, "ns", |_| found.clone()) {
        Err(error @ PayloadError::Invalid(_)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_items_every_key_is_a_file_with_the_default_mode() {
    let payload = collect(&config_map(&[]), "ns", |_| data(&[("b", "2"), ("a", "1")])).unwrap();
    assert_eq!(contents(&payload), [("a", "1".to_owned(), 0o644), ("b", "2".to_owned(), 0o644)]);
}

#[test]
fn items_choose_keys_paths_and_modes() {
    let files = config_map(&[("a", "deep//./er/file", Some(0o400)), ("b", "b", None)]);
    let payload = collect(&files, "ns", |_| data(&[("a", "1"), ("b", "2"), ("c", "3")])).unwrap();
    assert_eq!(contents(&payload), [("b", "2".to_owned(), 0o644), ("deep/er/file", "1".to_owned(), 0o400)]);
    assert_eq!(payload.top_names().into_iter().collect::<Vec<_>>(), ["b", "deep"]);
}

#[test]
fn objects_are_those_of_the_pods_namespace() {
    let files = volume(
        FilesKind::Projected,
        vec![
            FileSource::Object(object(ObjectKind::Secret, "key", &[])),
            field("name", DownwardValue::Content(b"n".to_vec())),
            FileSource::Object(object(ObjectKind::ConfigMap, "conf", &[])),
        ],
    );
    let named: Vec<String> = referenced_objects(&files, "shop").map(|name| name.to_string()).collect();
    assert_eq!(named, ["Secret shop/key", "ConfigMap shop/conf"]);
    let payload = collect(&files, "shop", |name| {
        assert_eq!(name.namespace, "shop");
        data(&[(name.kind.as_str(), &name.name)])
    });
    assert_eq!(payload.unwrap().files.len(), 3);
}

#[test]
fn a_missing_object_or_key_has_the_kubelets_error_message() {
    let secret = |items: &[(&str, &str, Option<u32>)]| {
        volume(FilesKind::Secret, vec![FileSource::Object(object(ObjectKind::Secret, "key", items))])
    };
    let some = data(&[("a", "1")]);
    for (files, found, text) in [
        (config_map(&[]), &ObjectLookup::Missing, "configmap \"conf\" not found"),
        (secret(&[]), &ObjectLookup::Missing, "secret \"key\" not found"),
        (config_map(&[("x", "p", None)]), &some, "configmap references non-existent config key: x"),
        (secret(&[("x", "p", None)]), &some, "references non-existent secret key: x"),
    ] {
        assert_eq!(error_text(&files, found), text);
        let Err(PayloadError::Invalid(errors)) = collect(&files, "ns", |_| found.clone()) else { panic!() };
        assert!(errors.iter().all(|error| !error.is_caused_by_spec()), "{errors:?}");
    }
}

#[test]
fn optional_objects_and_keys_may_be_missing() {
    assert_eq!(collect(&optional(config_map(&[])), "ns", |_| ObjectLookup::Missing), Ok(Payload::default()));
    let files = optional(config_map(&[("x", "x", None), ("a", "p", None)]));
    let payload = collect(&files, "ns", |_| data(&[("a", "1")])).unwrap();
    assert_eq!(contents(&payload), [("p", "1".to_owned(), 0o644)]);
}

#[test]
fn an_object_that_is_not_yet_known_is_pending_even_when_it_is_optional() {
    let files = optional(config_map(&[]));
    let error = collect(&files, "ns", |_| ObjectLookup::Unknown).unwrap_err();
    assert_eq!(error, PayloadError::Pending(vec!["pod-config to send the ConfigMap ns/conf".to_owned()]));
    let sizes = volume(
        FilesKind::DownwardApi,
        vec![field("cpu", DownwardValue::Pending("the sizes of the machine".into()))],
    );
    let error = collect(&sizes, "ns", |_| ObjectLookup::Unknown).unwrap_err();
    assert_eq!(error.to_string(), "waiting for the sizes of the machine");
}

#[test]
fn of_two_projected_sources_with_one_path_the_later_one_wins() {
    let field = |text: &str| field("./same", DownwardValue::Content(text.as_bytes().to_vec()));
    let first = FileSource::Object(object(ObjectKind::ConfigMap, "conf", &[("a", "same", None)]));
    let payload =
        |sources| collect(&volume(FilesKind::Projected, sources), "ns", |_| data(&[("a", "map")])).unwrap();
    assert_eq!(contents(&payload(vec![first.clone(), field("pod")])), [("same", "pod".to_owned(), 0o644)]);
    assert_eq!(contents(&payload(vec![field("pod"), first])), [("same", "map".to_owned(), 0o644)]);
}

#[test]
fn a_file_path_below_another_file_is_refused_in_either_order() {
    for paths in [["a", "a/b/c"], ["a/b/c", "a"]] {
        let sources = paths.map(|path| field(path, DownwardValue::Content(Vec::new()))).to_vec();
        let text = error_text(&volume(FilesKind::Projected, sources), &ObjectLookup::Missing);
        assert!(text.contains("\"a/b/c\" lies below \"a\""), "{text}");
    }
    let siblings = ["a", "a.b", "ab/c"].map(|path| field(path, DownwardValue::Content(Vec::new()))).to_vec();
    assert_eq!(
        collect(&volume(FilesKind::Projected, siblings), "ns", |_| ObjectLookup::Missing)
            .unwrap()
            .files
            .len(),
        3
    );
}

#[test]
fn each_payload_error_is_listed_once() {
    let files = volume(
        FilesKind::Projected,
        vec![
            FileSource::Object(object(ObjectKind::Secret, "key", &[])),
            FileSource::Object(object(ObjectKind::Secret, "key", &[])),
            FileSource::Unsupported("serviceAccountToken".into()),
            field("f", DownwardValue::Invalid("no such field".into())),
        ],
    );
    let text = error_text(&files, &ObjectLookup::Missing);
    assert!(text.starts_with("[secret \"key\" not found, serviceAccountToken needs an API server"), "{text}");
    assert!(text.ends_with("the file \"f\" has no value: no such field]"), "{text}");
    assert_eq!(text.matches("not found").count(), 1);
}

struct WithToken(TokenLookup);

impl SourceCache for WithToken {
    fn object(&self, _: &ObjectName) -> ObjectLookup {
        ObjectLookup::Missing
    }

    fn token(&self, _: &TokenName) -> TokenLookup {
        self.0.clone()
    }

    fn certificate(&self, name: &CertificateName) -> CertificateLookup {
        unreachable!("{name:?}")
    }
}

#[test]
fn a_token_file_has_its_mode_and_owner_and_may_be_pending_or_refused() {
    let name = TokenName { service_account: "web".into(), audience: String::new(), expiration_seconds: 3600 };
    let file = |mode, owner| {
        let token = TokenFile { name: name.clone(), path: "t".into(), mode, owner };
        volume(FilesKind::Projected, vec![FileSource::Token(token)])
    };
    let present = TokenLookup::Present(Arc::from(b"x".as_slice()));
    for (mode, owner, expected) in [(None, None, 0o644), (Some(0o600), Some(7), 0o600)] {
        let payload = super::collect(&file(mode, owner), "ns", &WithToken(present.clone())).unwrap();
        assert_eq!(contents(&payload), [("t", "x".to_owned(), expected)]);
        assert_eq!(payload.files["t"].owner, owner);
    }
    let pending = super::collect(&file(None, None), "ns", &WithToken(TokenLookup::Pending("it".into())));
    assert_eq!(pending, Err(PayloadError::Pending(vec!["it".into()])));
    let refused = super::collect(&file(None, None), "ns", &WithToken(TokenLookup::Refused("no".into())));
    let error = refused.unwrap_err();
    assert_eq!(error.to_string(), "failed to fetch token: token of the service account \"web\": no");
    assert!(matches!(error, PayloadError::Invalid(errors) if !errors[0].is_caused_by_spec()));
}

#[test]
fn a_file_without_any_mode_is_refused() {
    let files = Files { default_mode: None, ..config_map(&[]) };
    assert!(error_text(&files, &data(&[("a", "1")])).contains("defaultMode"));
    let own = Files { default_mode: None, ..config_map(&[("a", "a", Some(0o440))]) };
    assert_eq!(contents(&collect(&own, "ns", |_| data(&[("a", "1")])).unwrap())[0].2, 0o440);
}

#[test]
fn paths_are_kept_inside_the_volume() {
    let long = "x".repeat(256);
    let far = "x/".repeat(2049);
    for (path, why) in [
        ("", "it is empty"),
        ("./", "it is empty"),
        ("/etc", "it is not relative"),
        ("a/../b", "it contains .."),
        ("..", "it contains .."),
        ("..data", "it begins with .."),
        ("..2026/x", "it begins with .."),
        ("a\0b", "zero byte"),
        (&long, "longer than 255"),
        (&far, "longer than 4096"),
    ] {
        assert!(clean_path(path).unwrap_err().contains(why), "{path:?}");
    }
    for (path, same) in [("a", "a"), ("a//b/./c/", "a/b/c"), ("a/..b", "a/..b"), (".hidden", ".hidden")] {
        assert_eq!(clean_path(path).as_deref(), Ok(same));
    }
    let text = error_text(&config_map(&[]), &data(&[("..data", "x")]));
    assert!(text.contains("\"..data\""), "{text}");
    let nested = Files { nested: vec!["../x".into()], ..config_map(&[]) };
    assert!(error_text(&nested, &data(&[])).contains("\"../x\""));
}

#[test]
fn debug_output_of_a_payload_contains_no_file_content() {
    let payload = collect(&config_map(&[]), "ns", |_| data(&[("a", "hunter2")])).unwrap();
    assert!(!format!("{payload:?}").contains("hunter2"));
    assert!(!format!("{:?}", data(&[("a", "hunter2")])).contains("hunter2"));
}

/// For all sources, every path of a payload is clean, below no other file, and never one of the agent's own names.
#[test]
fn a_payload_has_only_paths_that_can_be_written() {
    let reached = &Reached::default();
    let path = prop_oneof!["[a.]{0,3}(/[a.]{0,3}){0,3}", "[ab]{1,2}(/[ab]{1,2}){0,2}"];
    let paths = prop::collection::vec(path, 0..6);
    proptest!(ProptestConfig::with_cases(1024), |(paths in paths)| {
        let sources = paths.iter().map(|path| field(path, DownwardValue::Content(Vec::new()))).collect();
        let collected = collect(&volume(FilesKind::Projected, sources), "ns", |_| ObjectLookup::Missing);
        let below = |a: &String, b: &String| a.starts_with(&format!("{b}/"));
        let written: Vec<String> = paths.iter().filter_map(|path| clean_path(path).ok()).collect();
        reached.case([
            ("no file", paths.is_empty()),
            ("several files", collected.as_ref().is_ok_and(|payload| payload.files.len() > 1)),
            ("a path that is cleaned", collected.is_ok() && written != paths),
            ("a path that cannot be written", written.len() < paths.len()),
            ("all can be written", written.len() == paths.len()),
            ("a path below another", written.iter().any(|a| written.iter().any(|b| below(a, b)))),
        ]);
        if let Ok(payload) = collected {
            for path in payload.files.keys() {
                prop_assert_eq!(clean_path(path), Ok(path.clone()));
                prop_assert!(!path.split('/').any(|part| part == ".." || part == "." || part.is_empty()));
                let below = format!("{path}/");
                prop_assert!(!payload.files.keys().any(|other| other.starts_with(&below)));
            }
            prop_assert_eq!(payload.files.is_empty(), paths.is_empty());
        }
    });
    // The rarest: "a path below another", in one case of 10.
    reached.assert_each();
}
