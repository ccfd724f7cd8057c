use serde_json::json;

use super::*;

fn file(path: &str, config: Value) -> ConfigFile {
    ConfigFile { path: path.into(), text: config.to_string(), config, lines: BTreeMap::new() }
}

fn provider(name: &str) -> Value {
    json!({
        "name": name,
        "matchImages": ["*.r.example"],
        "defaultCacheDuration": "12h",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
    })
}

fn config(providers: Value) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1",
        "kind": "CredentialProviderConfig",
        "providers": providers,
    })
}

/// A configuration with one valid provider in which `field` is `value`; `null`: the field is missing.
fn with(field: &str, value: Value) -> Value {
    let mut provider = provider("a");
    provider[field] = value;
    config(json!([provider]))
}

/// Field and message of each error.
fn errors_of(config: Value) -> Vec<(String, String)> {
    let errors = validate(&[file("/c.yaml", config)]).unwrap_err();
    errors.into_iter().map(|error| (error.field, error.message)).collect()
}

fn token(more: &[(&str, Value)]) -> Value {
    let mut attributes = json!({
        "serviceAccountTokenAudience": "r.example",
        "cacheType": "Token",
        "requireServiceAccount": false,
    });
    for (name, value) in more {
        attributes[name] = value.clone();
    }
    attributes
}

#[test]
fn a_provider_is_read_with_all_its_fields() {
    let whole = json!({
        "name": "ecr",
        "matchImages": ["*.r.example", "https://s.example:5000/team"],
        "defaultCacheDuration": "1h30m",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1",
        "args": ["get", "--quiet"],
        "env": [{"name": "REGION", "value": "north"}, {"name": "EMPTY"}],
        "tokenAttributes": null,
    });
    let found = validate(&[file("/c.yaml", config(json!([whole])))]).unwrap();
    assert!(found.skipped.is_empty());
    let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let expected = Provider {
        name: "ecr".into(),
        match_images: texts(&["*.r.example", "s.example:5000/team"]),
        default_cache: Duration::from_secs(5400),
        api_version: ApiVersion::V1Beta1,
        args: texts(&["get", "--quiet"]),
        env: vec![("REGION".into(), "north".into()), ("EMPTY".into(), String::new())],
    };
    assert_eq!(found.providers, [expected]);
}

#[test]
fn every_api_version_of_configuration_and_plugin_is_accepted() {
    for version in ["v1", "v1beta1", "v1alpha1"] {
        let mut config = with("apiVersion", format!("credentialprovider.kubelet.k8s.io/{version}").into());
        config["apiVersion"] = format!("kubelet.config.k8s.io/{version}").into();
        let found = validate(&[file("/c.yaml", config)]).unwrap();
        assert!(found.providers[0].api_version.text().ends_with(&format!("/{version}")));
    }
}

#[test]
fn plugin_matches_images_by_its_patterns() {
    let patterns = json!(["*.r.example", "http://s.example:5000/team", "docker.io", "t.example/v1/x"]);
    let found = validate(&[file("/c.yaml", with("matchImages", patterns))]).unwrap();
    for (repository, fits) in [
        ("a.r.example/x", true),
        ("r.example/x", false),
        ("a.b.r.example/x", false),
        ("s.example:5000/team/x", true),
        ("s.example:5000/other", false),
        ("s.example/team/x", false),
        ("docker.io/library/busybox", true),
        ("t.example/v1/x", true),
        ("t.example/x", false),
    ] {
        assert_eq!(found.providers[0].matches_image(repository), fits, "{repository}");
    }
}

#[test]
fn several_files_are_merged_in_order_and_duplicate_names_refused() {
    let files = [
        file("/1.yaml", config(json!([provider("b"), provider("a")]))),
        file("/2.yaml", config(json!([]))),
        file("/3.yaml", config(json!([provider("c")]))),
    ];
    let names: Vec<String> = validate(&files).unwrap().providers.into_iter().map(|p| p.name).collect();
    assert_eq!(names, ["b", "a", "c"]);
    let twice = [files[0].clone(), file("/4.yaml", config(json!([provider("a")])))];
    let errors: Vec<String> = validate(&twice).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(errors, ["/4.yaml: providers[0].name: \"a\" is already used (/1.yaml)"]);
}

#[test]
fn a_configuration_without_providers_is_refused() {
    for config in [config(json!([])), config(json!(null))] {
        let expected = ("providers".to_owned(), "there must be at least one provider".to_owned());
        assert_eq!(errors_of(config), [expected]);
    }
}

/// Asserts that each configuration has exactly one invalid field, which is named.
fn assert_invalid_fields(cases: impl IntoIterator<Item = (Value, &'static str)>) {
    for (config, field) in cases {
        let fields: Vec<String> = errors_of(config.clone()).into_iter().map(|(field, _)| field).collect();
        assert_eq!(fields, [field], "{config}");
    }
}

#[test]
fn every_invalid_field_is_reported_by_name() {
    assert_invalid_fields([
        (json!({"kind": "CredentialProviderConfig", "providers": [provider("a")]}), "apiVersion"),
        (json!({"kind": "KubeletConfiguration"}), "kind"),
        (json!([]), "kind"),
        (config(json!({})), "providers"),
        (config(json!(["a"])), "providers"),
        (with("name", json!(null)), "providers[0].name"),
        (with("name", json!("")), "providers[0].name"),
        (with("name", json!(7)), "providers[0].name"),
        (with("name", json!("a/b")), "providers[0].name"),
        (with("name", json!("a b")), "providers[0].name"),
        (with("name", json!(".")), "providers[0].name"),
        (with("name", json!("..")), "providers[0].name"),
        (with("matchImages", json!(null)), "providers[0].matchImages"),
        (with("matchImages", json!([])), "providers[0].matchImages"),
        (with("matchImages", json!("r.example")), "providers[0].matchImages"),
        (with("matchImages", json!([7])), "providers[0].matchImages"),
        (with("matchImages", json!([""])), "providers[0].matchImages"),
        (with("matchImages", json!(["https://"])), "providers[0].matchImages"),
        (with("matchImages", json!(["r.example:x/a"])), "providers[0].matchImages"),
        (with("matchImages", json!(["r.example /a"])), "providers[0].matchImages"),
        (with("defaultCacheDuration", json!(null)), "providers[0].defaultCacheDuration"),
        (with("defaultCacheDuration", json!("-1s")), "providers[0].defaultCacheDuration"),
        (with("defaultCacheDuration", json!("soon")), "providers[0].defaultCacheDuration"),
        (with("defaultCacheDuration", json!(60)), "providers[0].defaultCacheDuration"),
        (with("apiVersion", json!(null)), "providers[0].apiVersion"),
        (with("apiVersion", json!("v1")), "providers[0].apiVersion"),
        (with("args", json!("get")), "providers[0].args"),
        (with("args", json!(["a\0b"])), "providers[0].args"),
        (with("env", json!({"A": "b"})), "providers[0].env"),
        (with("env", json!([{"value": "b"}])), "providers[0].env[0].name"),
        (with("env", json!([{"name": "A=B", "value": "b"}])), "providers[0].env[0].name"),
        (with("env", json!([{"name": "A", "value": 1}])), "providers[0].env[0].value"),
        (with("env", json!([{"name": "A", "valueFrom": {}}])), "providers[0].env[0].valueFrom"),
        (with("matchImage", json!(["r.example"])), "providers[0].matchImage"),
        (with("tokenAttributes", json!("x")), "providers[0].tokenAttributes"),
    ]);
}

#[test]
fn every_invalid_token_attribute_is_reported_by_name() {
    let keys = |keys: &[&str]| json!(keys);
    let (required, optional) =
        ("requiredServiceAccountAnnotationKeys", "optionalServiceAccountAnnotationKeys");
    assert_invalid_fields([
        (
            with("tokenAttributes", token(&[("serviceAccountTokenAudience", json!(""))])),
            "providers[0].tokenAttributes.serviceAccountTokenAudience",
        ),
        (
            with("tokenAttributes", token(&[("cacheType", json!("Pod"))])),
            "providers[0].tokenAttributes.cacheType",
        ),
        (
            with("tokenAttributes", token(&[("requireServiceAccount", json!(null))])),
            "providers[0].tokenAttributes.requireServiceAccount",
        ),
        (
            with("tokenAttributes", token(&[(required, keys(&["a.example/b"]))])),
            "providers[0].tokenAttributes.requireServiceAccount",
        ),
        (with("tokenAttributes", token(&[("x", json!(1))])), "providers[0].tokenAttributes.x"),
        (
            with(
                "tokenAttributes",
                token(&[
                    ("requireServiceAccount", json!(true)),
                    (required, keys(&["a", "b"])),
                    (optional, keys(&["b"])),
                ]),
            ),
            "providers[0].tokenAttributes.optionalServiceAccountAnnotationKeys",
        ),
    ]);
}

#[test]
fn token_attributes_need_plugin_api_version_v1() {
    let mut config = with("apiVersion", json!("credentialprovider.kubelet.k8s.io/v1beta1"));
    config["providers"][0]["tokenAttributes"] = token(&[]);
    assert_eq!(errors_of(config)[0].0, "providers[0].tokenAttributes");
}

#[test]
fn plugin_that_requires_a_service_account_is_skipped() {
    let mut strict = provider("strict");
    strict["tokenAttributes"] = token(&[("requireServiceAccount", json!(true))]);
    let mut lenient = provider("lenient");
    lenient["tokenAttributes"] = token(&[]);
    let found = validate(&[file("/c.yaml", config(json!([strict, lenient])))]).unwrap();
    assert_eq!(found.skipped, ["strict"]);
    assert_eq!(found.providers.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["lenient"]);
}

#[test]
fn all_configuration_errors_are_reported_at_once_with_their_lines() {
    let lines = [("kind", 2), ("providers", 3), ("providers[0].name", 4), ("providers[0].args", 5)];
    let mut bad = file("/b.yaml", config(json!([{"name": "a b", "args": 7}])));
    bad.lines = lines.into_iter().map(|(field, line)| (field.to_owned(), line)).collect();
    let errors = validate(&[file("/a.yaml", json!({})), bad]).unwrap_err();
    let places: Vec<(&str, &str)> =
        errors.iter().map(|error| (error.location.as_str(), error.field.as_str())).collect();
    let expected = [
        ("/a.yaml", "kind"),
        ("/b.yaml:4", "providers[0].name"),
        ("/b.yaml:4", "providers[0].apiVersion"),
        ("/b.yaml:4", "providers[0].matchImages"),
        ("/b.yaml:4", "providers[0].defaultCacheDuration"),
        ("/b.yaml:5", "providers[0].args"),
    ];
    assert_eq!(places, expected);
    assert_eq!(errors[2].to_string(), "/b.yaml:4: providers[0].apiVersion: this is required");
}

#[test]
fn config_hash_covers_length_and_text_of_each_file() {
    let with_text = |text: &str| ConfigFile {
        text: text.into(),
        ..file("/c.yaml", config(json!([provider(&format!("p{}", text.len()))])))
    };
    let hash = |texts: &[&str]| {
        validate(&texts.iter().map(|text| with_text(text)).collect::<Vec<_>>()).unwrap().hash
    };
    assert_eq!(hash(&["ab"]), format!("sha256:{}", sha256_hex(b"\0\0\0\0\0\0\0\x02ab")));
    assert_eq!(
        hash(&["a", "bc"]),
        format!("sha256:{}", sha256_hex(b"\0\0\0\0\0\0\0\x01a\0\0\0\0\0\0\0\x02bc"))
    );
}

#[test]
fn nothing_secret_is_shown() {
    let secret = with("env", json!([{"name": "TOKEN", "value": "hunter2"}]));
    let good = file("/c.yaml", secret);
    assert!(!format!("{good:?}").contains("hunter"));
    assert!(!format!("{:?}", validate(&[good]).unwrap()).contains("hunter"));
    for entry in [json!({"value": "hunter2"}), json!({"name": "A", "value": ["hunter2"]}), json!("hunter2")] {
        let errors = validate(&[file("/c.yaml", with("env", json!([entry])))]).unwrap_err();
        assert!(!format!("{errors:?}").contains("hunter"), "{errors:?}");
    }
}
