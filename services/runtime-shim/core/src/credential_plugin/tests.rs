use super::*;

const SECOND: i64 = 1_000_000_000;
const REPO: &str = "r.example:5000/team/a";

fn response_json(more: &[(&str, Value)]) -> Value {
    let mut json = json!({
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Image",
        "auth": {"r.example:5000": {"username": "ann", "password": "hunter2"}},
    });
    for (name, value) in more {
        json[name] = value.clone();
    }
    json
}

fn parse(json: &Value) -> Result<Response, ResponseError> {
    parse_response(ApiVersion::V1, json.to_string().as_bytes())
}

fn response(key_type: CacheKeyType, cache: Option<u64>, user: &str) -> Response {
    let credential = Credential { username: user.into(), ..Credential::default() };
    let auth = Arc::from([("r.example".to_owned(), credential)]);
    Response { key_type, cache: cache.map(Duration::from_secs), auth }
}

fn user(auth: Option<Auth>) -> Option<String> {
    auth.map(|auth| auth[0].1.username.clone())
}

#[test]
fn request_has_the_image_and_the_api_version_of_the_plugin() {
    for version in [ApiVersion::V1, ApiVersion::V1Beta1, ApiVersion::V1Alpha1] {
        let found: Value = serde_json::from_slice(&request(version, REPO)).unwrap();
        let expected =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version.text(), "image": REPO});
        assert_eq!(found, expected);
    }
}

#[test]
fn response_is_parsed_in_every_api_version() {
    for version in [ApiVersion::V1, ApiVersion::V1Beta1, ApiVersion::V1Alpha1] {
        let json = response_json(&[("apiVersion", version.text().into())]);
        let found = parse_response(version, json.to_string().as_bytes()).unwrap();
        assert_eq!((found.key_type, found.cache, found.auth.len()), (CacheKeyType::Image, None, 1));
        let (key, credential) = &found.auth[0];
        assert_eq!((key.as_str(), credential.username.as_str()), ("r.example:5000", "ann"));
        assert_eq!(credential.password, "hunter2");
    }
}

#[test]
fn optional_fields_of_a_response_are_parsed() {
    let key = |text: &str| parse(&response_json(&[("cacheKeyType", text.into())])).unwrap().key_type;
    assert_eq!(key("Registry"), CacheKeyType::Registry);
    assert_eq!(key("Global"), CacheKeyType::Global);
    for (text, seconds) in [("6h0m0s", 21_600), ("0s", 0), ("-5m", 0)] {
        let found = parse(&response_json(&[("cacheDuration", text.into())])).unwrap();
        assert_eq!(found.cache, Some(Duration::from_secs(seconds)), "{text}");
    }
    for none in [json!(null), json!({})] {
        assert!(parse(&response_json(&[("auth", none)])).unwrap().auth.is_empty());
    }
    let half = json!({"r.example": {"password": "p", "username": null}});
    let found = parse(&response_json(&[("auth", half)])).unwrap();
    assert_eq!((found.auth[0].1.username.as_str(), found.auth[0].1.password.as_str()), ("", "p"));
    assert!(parse(&response_json(&[("more", json!(1))])).is_ok(), "a newer plugin may add fields");
}

#[test]
fn invalid_response_is_refused_and_its_content_not_repeated() {
    let cases = [
        (json!("hunter2"), ResponseError::NotJson),
        (json!({"password": "hunter2"}), ResponseError::Kind),
        (response_json(&[("kind", "CredentialProviderRequest".into())]), ResponseError::Kind),
        (response_json(&[("apiVersion", "hunter2".into())]), ResponseError::ApiVersion(ApiVersion::V1)),
        (
            response_json(&[("apiVersion", ApiVersion::V1Beta1.text().into())]),
            ResponseError::ApiVersion(ApiVersion::V1),
        ),
        (response_json(&[("cacheKeyType", json!(null))]), ResponseError::KeyType),
        (response_json(&[("cacheKeyType", "hunter2".into())]), ResponseError::KeyType),
        (response_json(&[("cacheDuration", "hunter2".into())]), ResponseError::Duration),
        (response_json(&[("cacheDuration", json!(60))]), ResponseError::Duration),
        (response_json(&[("auth", "hunter2".into())]), ResponseError::Auth),
        (response_json(&[("auth", json!({"r.example": "hunter2"}))]), ResponseError::Auth),
        (response_json(&[("auth", json!({"r.example": {"password": ["hunter2"]}}))]), ResponseError::Auth),
    ];
    for (json, expected) in cases {
        let error = parse(&json).unwrap_err();
        assert_eq!(error, expected, "{json}");
        assert!(!format!("{error} {error:?}").contains("hunter"));
    }
    assert_eq!(parse_response(ApiVersion::V1, b"hunter2"), Err(ResponseError::NotJson));
}

#[test]
fn cache_key_type_is_image_registry_or_global() {
    let images = [REPO, "r.example:5000/b", "r.example/team/a"];
    for (key_type, known) in [
        (CacheKeyType::Image, [true, false, false]),
        (CacheKeyType::Registry, [true, true, false]),
        (CacheKeyType::Global, [true, true, true]),
    ] {
        let mut cache = Cache::default();
        cache.put(REPO, &response(key_type, Some(60), "ann"), Duration::ZERO, 0);
        let found = images.map(|image| cache.get(image, SECOND).is_some());
        assert_eq!(found, known, "{key_type:?}");
    }
}

#[test]
fn cached_image_credentials_take_precedence_over_registry_and_global() {
    let mut cache = Cache::default();
    let minute = Duration::from_secs(60);
    cache.put(REPO, &response(CacheKeyType::Global, None, "global"), minute, 0);
    assert_eq!(user(cache.get(REPO, 1)).unwrap(), "global");
    cache.put(REPO, &response(CacheKeyType::Registry, None, "registry"), minute, 0);
    assert_eq!(user(cache.get(REPO, 1)).unwrap(), "registry");
    cache.put(REPO, &response(CacheKeyType::Image, Some(30), "image"), minute, 0);
    assert_eq!(user(cache.get(REPO, 1)).unwrap(), "image");
    assert_eq!(user(cache.get(REPO, 31 * SECOND)).unwrap(), "registry");
}

#[test]
fn cache_duration_of_the_response_overrides_the_configured_default() {
    for (own, default, seconds) in
        [(Some(10), 60, 10), (None, 60, 60), (Some(0), 60, 0), (None, 0, 0), (Some(90), 0, 90)]
    {
        let mut cache = Cache::default();
        cache.put(REPO, &response(CacheKeyType::Image, own, "ann"), Duration::from_secs(default), 5 * SECOND);
        if seconds > 0 {
            assert!(cache.get(REPO, (5 + seconds) * SECOND - 1).is_some(), "{own:?} {default}");
        }
        assert!(cache.get(REPO, (5 + seconds) * SECOND).is_none(), "{own:?} {default}");
        assert!(cache.entries.is_empty(), "an expired entry is removed");
    }
    let mut cache = Cache::default();
    cache.put(REPO, &response(CacheKeyType::Image, Some(u64::MAX), "ann"), Duration::ZERO, SECOND);
    assert!(cache.get(REPO, i64::MAX - 1).is_some(), "nothing overflows");
}

#[test]
fn expired_cache_entries_are_purged_every_quarter_of_an_hour() {
    let mut cache = Cache::default();
    let minute = 60 * SECOND;
    cache.put("a.example/a", &response(CacheKeyType::Image, Some(60), "ann"), Duration::ZERO, 0);
    cache.put("b.example/b", &response(CacheKeyType::Image, Some(3600), "bob"), Duration::ZERO, 0);
    assert!(cache.get("c.example/c", 15 * minute - 1).is_none());
    assert_eq!(cache.entries.len(), 2);
    assert!(cache.get("c.example/c", 15 * minute).is_none());
    assert_eq!(cache.entries.len(), 1);
    cache.put("c.example/c", &response(CacheKeyType::Image, Some(60), "cyd"), Duration::ZERO, 70 * minute);
    assert_eq!(cache.entries.len(), 1, "adding a response purges the cache as well");
}

#[test]
fn nothing_secret_is_shown() {
    let found = parse(&response_json(&[])).unwrap();
    let mut cache = Cache::default();
    cache.put(REPO, &found, Duration::from_secs(1), 0);
    assert!(!cache.entries.is_empty());
    assert!(!format!("{found:?} {cache:?}").contains("hunter"));
}
