//! The content of a `clusterTrustBundle` file.

use std::sync::Arc;

use keelson_kube_model::base64;
use serde_json::{Value, json};

use super::super::{
    FileSource, Files, FilesKind, ObjectKind, ObjectLookup, ObjectName, SourceCache, collect,
};
use super::*;
use crate::pod_certificate::{CertificateLookup, CertificateName};
use crate::token::{TokenLookup, TokenName};

const SIGNER: &str = "example.com/ca";

/// The JSON of bundles by name: the signer, labels and text of each.
fn bundles(list: &[(&str, &str, Value, &str)]) -> ObjectData {
    let one = |(name, signer, labels, text): &(&str, &str, Value, &str)| {
        let json = json!({"metadata": {"name": name, "labels": labels}, "spec": {"signerName": signer, "trustBundle": text}});
        ((*name).to_owned(), Arc::from(json.to_string().into_bytes()))
    };
    list.iter().map(one).collect()
}

fn file(bundles: Bundles) -> TrustBundleFile {
    TrustBundleFile { bundles, optional: false, path: "ca.pem".to_owned(), mode: None, owner: None }
}

fn named(name: &str) -> TrustBundleFile {
    file(Bundles::Name(name.to_owned()))
}

/// Of [`SIGNER`], with a selector as in a pod; null for none.
fn signed(selector: Value) -> TrustBundleFile {
    file(Bundles::Signer { signer: SIGNER.to_owned(), labels: serde_json::from_value(selector).unwrap() })
}

fn text(file: &TrustBundleFile, found: &ObjectData) -> Result<String, String> {
    file.content(found).map(|bytes| String::from_utf8(bytes).unwrap())
}

/// A block with these bytes in one line.
fn block(der: &[u8]) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", base64::encode(der))
}

#[test]
fn anchors_are_written_once_each_without_headers_and_comments() {
    let other = "-----BEGIN TRUSTED-----\r\nProc: x\nmore: y\n\nZHVv\r\n-----END TRUSTED-----";
    let messy = format!("# the first\n{}between\n{}{other}", block(b"one"), block(b"one"));
    let found = bundles(&[("a", "", json!(null), &messy)]);
    assert_eq!(text(&named("a"), &found).unwrap(), block(b"duo") + &block(b"one"));
    let long = [7_u8; 100];
    let encoded = base64::encode(&long);
    let in_one_line = format!("-----BEGIN CERTIFICATE-----\n{encoded}\n-----END CERTIFICATE-----");
    let lines = format!("{}\n{}\n{}", &encoded[..64], &encoded[64..128], &encoded[128..]);
    let expected = format!("-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n");
    assert_eq!(text(&named("a"), &bundles(&[("a", "", json!({}), &in_one_line)])).unwrap(), expected);
}

#[test]
fn blocks_that_are_not_valid_are_left_out_and_later_ones_kept() {
    let good = block(b"good");
    for bad in [
        "-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nZHVv\n",
        "-----BEGIN CERTIFICATE-----\nZHVv\n-----END KEY-----\n",
        "-----BEGIN CERTIFICATE\nZHVv\n-----END CERTIFICATE-----\n",
        "no block at all\n",
    ] {
        let found = bundles(&[("a", "", json!({}), &format!("{bad}{good}"))]);
        assert_eq!(text(&named("a"), &found).unwrap(), good, "{bad}");
        assert_eq!(text(&named("a"), &bundles(&[("a", "", json!({}), bad)])).unwrap(), "", "{bad}");
    }
}

#[test]
fn a_selector_chooses_bundles_of_its_signer_and_null_chooses_none() {
    let found = bundles(&[
        ("a", SIGNER, json!({"tier": "front", "new": ""}), &block(b"a")),
        ("b", SIGNER, json!({"tier": "back"}), &block(b"b")),
        ("c", SIGNER, json!(null), &(block(b"c") + &block(b"a"))),
        ("d", "example.com/other", json!({"tier": "front"}), &block(b"d")),
    ]);
    let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "tier", "operator": operator, "values": values}]});
    for (selector, expected) in [
        (json!({}), "abc"),
        (json!({"matchLabels": {"tier": "front"}}), "a"),
        (json!({"matchLabels": {"tier": "front", "new": "x"}}), ""),
        (expression("In", json!(["back", "front"])), "ab"),
        (expression("NotIn", json!(["back"])), "ac"),
        (expression("Exists", json!(null)), "ab"),
        (expression("DoesNotExist", json!([])), "ac"),
        (json!(null), ""),
    ] {
        let chosen = signed(selector.clone());
        let expected: String = expected.bytes().map(|name| block(&[name])).collect();
        match text(&chosen, &found) {
            Ok(written) => assert_eq!(written, expected, "{selector}"),
            Err(why) => {
                assert_eq!(
                    why,
                    "combination of signerName and labelSelector matched zero ClusterTrustBundles"
                );
                assert_eq!(expected, "", "{selector}");
                let optional = TrustBundleFile { optional: true, ..chosen };
                assert_eq!(text(&optional, &found).unwrap(), "", "{selector}");
            }
        }
    }
}

#[test]
fn a_missing_bundle_is_an_error_or_an_empty_file() {
    let found = bundles(&[("other", SIGNER, json!({}), &block(b"x"))]);
    let why = text(&named("ca"), &found).unwrap_err();
    let expected =
        "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"ca\" not found";
    assert_eq!(why, expected);
    let optional = TrustBundleFile { optional: true, ..named("ca") };
    assert_eq!(text(&optional, &found).unwrap(), "");
    assert_eq!(text(&optional, &ObjectData::new()).unwrap(), "");
}

#[test]
fn a_selector_that_is_not_valid_or_too_long_is_refused_even_if_the_file_is_optional() {
    let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "k", "operator": operator, "values": values}]});
    for (selector, why) in [
        (
            expression("Near", json!([])),
            "while parsing label selector: \"Near\" is not a valid label selector operator",
        ),
        (expression("In", json!([])), "while parsing label selector: the operator In of \"k\" needs values"),
        (
            expression("Exists", json!(["v"])),
            "while parsing label selector: the operator Exists of \"k\" takes no values",
        ),
        (
            expression("In", json!(["v".repeat(102_394), "w"])),
            "label selector length (102403) is larger than 102400",
        ),
    ] {
        let optional = TrustBundleFile { optional: true, ..signed(selector) };
        assert_eq!(text(&optional, &ObjectData::new()).unwrap_err(), why);
    }
    let longest =
        TrustBundleFile { optional: true, ..signed(expression("In", json!(["v".repeat(102_393)]))) };
    assert_eq!(longest.content(&ObjectData::new()), Ok(Vec::new()), "its length is 102400");
}

#[test]
fn the_length_of_a_selector_is_that_of_its_text() {
    for (selector, text) in [
        (json!({}), ""),
        (json!({"matchLabels": {"a": "b", "c": ""}}), "a=b,c="),
        (json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b", "cd"]}]}), "a in (b,cd)"),
        (json!({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}), "a notin (b)"),
        (
            json!({"matchLabels": {"x": "y"}, "matchExpressions": [{"key": "a", "operator": "Exists"},
                {"key": "b", "operator": "DoesNotExist"}]}),
            "a,!b,x=y",
        ),
    ] {
        let parsed: LabelSelector = serde_json::from_value(selector).unwrap();
        assert_eq!(parsed.text_length(), text.len(), "{text}");
    }
}

/// One lookup for every object.
struct Lookup(ObjectLookup);

impl SourceCache for Lookup {
    fn object(&self, _: &ObjectName) -> ObjectLookup {
        self.0.clone()
    }

    fn token(&self, name: &TokenName) -> TokenLookup {
        TokenLookup::Pending(name.to_string())
    }

    fn certificate(&self, name: &CertificateName) -> CertificateLookup {
        unreachable!("{name:?}")
    }
}

#[test]
fn a_volume_refers_to_a_bundle_of_the_cluster_and_has_its_file_with_mode_and_owner() {
    let by_name = TrustBundleFile { mode: Some(0o600), owner: Some(7), ..named("ca") };
    let missing_signer = "matched zero ClusterTrustBundles";
    for (source, refers_to, missing) in [
        (by_name, "ClusterTrustBundle ca", "clustertrustbundle.certificates.k8s.io \"ca\" not found"),
        (signed(json!({})), "ClusterTrustBundleList example.com/ca", missing_signer),
    ] {
        let (mode, owner) = (source.mode.unwrap_or(0o644), source.owner);
        let files = Files {
            kind: FilesKind::Projected,
            sources: vec![FileSource::TrustBundle(source)],
            default_mode: Some(0o644),
            nested: Vec::new(),
        };
        let names: Vec<String> =
            super::super::referenced_objects(&files, "ns").map(|name| name.to_string()).collect();
        assert_eq!(names, [refers_to]);
        let found = bundles(&[("ca", SIGNER, json!({}), &block(b"x"))]);
        let payload = collect(&files, "ns", &Lookup(ObjectLookup::Present(Arc::new(found)))).unwrap();
        let written = &payload.files["ca.pem"];
        assert_eq!((written.mode, written.owner, &*written.bytes), (mode, owner, block(b"x").as_bytes()));
        let error = |lookup| collect(&files, "ns", &Lookup(lookup)).unwrap_err().to_string();
        assert!(error(ObjectLookup::Unknown).contains(refers_to));
        let text = error(ObjectLookup::Missing);
        assert!(text.contains(missing), "{text}");
        assert!(error(ObjectLookup::Unreadable("bad".to_owned())).contains("bad"));
    }
    assert!(!ObjectKind::ClusterTrustBundle.has_keys() && ObjectKind::Secret.has_keys());
}
