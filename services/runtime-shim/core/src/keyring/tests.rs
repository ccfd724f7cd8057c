use super::*;

fn user(name: &str) -> Credential {
    Credential { username: name.into(), password: "p".into(), ..Credential::default() }
}

/// A keyring with one entry per key; the user name is the key.
fn keyring(keys: &[&str]) -> Keyring {
    let entry = |key: &&str| format!("{key:?}: {{\"username\": {key:?}, \"password\": \"p\"}}");
    let entries: Vec<String> = keys.iter().map(entry).collect();
    let mut keyring = Keyring::default();
    let text = format!("{{\"auths\": {{{}}}}}", entries.join(", "));
    keyring.add(text.as_bytes(), ConfigFormat::Json, &Origin::Node).unwrap();
    keyring
}

fn users(keyring: &Keyring, image: &str) -> Vec<String> {
    keyring.lookup(&repository_of(image)).into_iter().map(|(credential, _)| credential.username).collect()
}

#[test]
fn registry_key_matches_host_port_and_path() {
    for (key, image, fits) in [
        ("r.example", "r.example/a/b:1", true),
        ("r.example", "r.example:5000/a:1", false),
        ("r.example:5000", "r.example:5000/a:1", true),
        ("r.example:5000", "r.example/a:1", false),
        ("r.example/team", "r.example/team/a:1", true),
        ("r.example/team", "r.example/other/a:1", false),
        ("r.example/team/a", "r.example/team/a@sha256:00", true),
        ("*.example", "r.example/a:1", true),
        ("*.example", "x.r.example/a:1", false),
        ("*.*.example", "x.r.example/a:1", true),
        ("r*y.example", "registry.example/a:1", true),
        ("r*y.example", "registries.example/a:1", false),
        ("a*b*c.example", "axbxc.example/a:1", true),
        ("a*b*c.example", "axc.example/a:1", false),
        // Each part is searched behind the one before it.
        ("*ab*b*.example", "xab.example/a:1", false),
        ("*ab*b*.example", "xxab.example/a:1", false),
        ("*ab*b*.example", "xabb.example/a:1", true),
        ("r*", "r:5000/a:1", false),
        ("[::*]", "[::1]/a:1", true),
        ("[::1]:5000", "[::1]:5000/a:1", true),
        ("https://r.example/v2/", "r.example/a:1", true),
        ("http://r.example/v1/team", "r.example/team/a:1", true),
        ("https://r.example", "r.example/a:1", true),
        ("r.example/", "r.example/a:1", true),
        ("127.0.0.1:5000", "127.0.0.1:5000/a:1", true),
    ] {
        assert_eq!(!users(&keyring(&[key]), image).is_empty(), fits, "{key} {image}");
    }
}

#[test]
fn all_matching_credentials_are_returned_most_specific_key_first() {
    let ring = keyring(&["*.example", "r.example", "r.example/team", "other.example"]);
    assert_eq!(users(&ring, "r.example/team/a:1"), ["r.example/team", "r.example", "*.example"]);
}

#[test]
fn image_without_a_host_uses_docker_hub_credentials() {
    assert_eq!(repository_of("busybox:1"), "docker.io/library/busybox");
    assert_eq!(repository_of("team/a"), "docker.io/team/a");
    assert_eq!(repository_of("localhost/a:1"), "localhost/a");
    assert_eq!(repository_of("localhost:5000/a"), "localhost:5000/a");
    assert_eq!(repository_of("r.example/a:1@sha256:00"), "r.example/a");
    let ring = keyring(&["https://index.docker.io/v1/"]);
    for image in ["busybox", "team/a:1", "docker.io/team/a:1", "index.docker.io/team/a"] {
        assert_eq!(users(&ring, image), ["https://index.docker.io/v1/"], "{image}");
    }
    assert!(users(&ring, "r.example/a").is_empty());
    // A key that matches takes precedence over that rule.
    assert_eq!(users(&keyring(&["index.docker.io", "docker.io"]), "busybox"), ["docker.io"]);
}

#[test]
fn both_docker_configuration_formats_are_parsed() {
    let mut ring = Keyring::default();
    // "ann:pa:ss", with and without padding, and plain.
    let legacy = br#"{"a.example": {"auth": "YW5uOnBhOnNz", "email": "x"}, "b.example": {"username": "bob", "password": "p"}}"#;
    ring.add(legacy, ConfigFormat::Legacy, &Origin::Node).unwrap();
    let json = br#"{"auths": {"c.example": {"auth": "Yzpw"}, "d.example": {"auth": "ZGQ6cA"}, "e.example": {"identitytoken": "t"}}, "credsStore": "x"}"#;
    ring.add(json, ConfigFormat::Json, &Origin::Node).unwrap();
    let found = |image: &str| ring.lookup(image).remove(0).0;
    assert_eq!(found("a.example/x"), Credential { password: "pa:ss".into(), ..user("ann") });
    assert_eq!(found("b.example/x"), user("bob"));
    assert_eq!(found("c.example/x"), user("c"));
    assert_eq!(found("d.example/x"), user("dd"));
    assert_eq!(found("e.example/x").identity_token, "t");
    let mut none = Keyring::default();
    none.add(b"{\"credsStore\": \"x\"}", ConfigFormat::Json, &Origin::Node).unwrap();
    assert!(none.lookup("a.example/x").is_empty());
}

#[test]
fn invalid_docker_configuration_is_refused_and_its_content_not_repeated() {
    for (text, form, error) in [
        ("hunter2", ConfigFormat::Json, DockerConfigError::NotJson),
        ("[]", ConfigFormat::Json, DockerConfigError::NotJson),
        (r#"{"auths": []}"#, ConfigFormat::Json, DockerConfigError::NotJson),
        (r#"{"a.example": "hunter2"}"#, ConfigFormat::Legacy, DockerConfigError::Entry),
        (
            r#"{"auths": {"a.example": {}, "b.example": {"auth": "hunter2!"}}}"#,
            ConfigFormat::Json,
            DockerConfigError::Auth,
        ),
        (
            r#"{"auths": {"a.example": {"auth": "aHVudGVyMg=="}}}"#,
            ConfigFormat::Json,
            DockerConfigError::Auth,
        ),
        (r#"{"auths": {"a.example": {"auth": "//79"}}}"#, ConfigFormat::Json, DockerConfigError::Auth),
        (r#"{"auths": {"a.example": {"password": 7}}}"#, ConfigFormat::Json, DockerConfigError::Entry),
    ] {
        let mut ring = Keyring::default();
        assert_eq!(ring.add(text.as_bytes(), form, &Origin::Node), Err(error), "{text}");
        assert!(ring.lookup("a.example/x").is_empty());
        assert!(!error.to_string().contains("hunter2"));
    }
}

#[test]
fn nothing_secret_is_shown() {
    let secret = Credential { identity_token: "hunter3".into(), ..user("hunter2") };
    let mut ring = Keyring::default();
    ring.add(
        br#"{"a.example": {"username": "u", "password": "hunter2"}}"#,
        ConfigFormat::Legacy,
        &Origin::Node,
    )
    .unwrap();
    assert_eq!(format!("{secret:?}"), "Credential(…)");
    assert!(!format!("{ring:?}").contains("hunter"));
}

#[test]
fn credential_hash_depends_only_on_the_credential() {
    assert_eq!(user("a").hash(), user("a").hash());
    assert_ne!(user("a").hash(), user("b").hash());
    assert_ne!(user("a").hash(), Credential { identity_token: "t".into(), ..user("a") }.hash());
    // sha256 of {"username":"a","password":"p"}
    assert_eq!(user("a").hash(), sha256_hex(br#"{"username":"a","password":"p"}"#));
    assert_eq!(sha256_hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

#[test]
fn credentials_of_one_key_keep_their_insertion_order() {
    let mut ring = keyring(&["r.example"]);
    ring.insert("https://r.example/v2/", user("second"), Origin::Node);
    ring.insert("r.example/team", user("first"), Origin::Node);
    assert_eq!(users(&ring, "r.example/team/a"), ["first", "r.example", "second"]);
}
