use super::*;

const SECOND: i64 = 1_000_000_000;
const REPO: &str = "r.example:5000/team/a";

fn answer(more: &[(&str, Value)]) -> Value {
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

fn parse(json: &Value) -> Result<Response, BadResponse> {
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
fn a_request_names_the_image_in_the_version_of_the_plugin() {
    for version in [ApiVersion::V1, ApiVersion::V1Beta1, ApiVersion::V1Alpha1] {
        let found: Value = serde_json::from_slice(&request(version, REPO)).unwrap();
        let expected =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version.text(), "image": REPO});
        assert_eq!(found, expected);
    }
}

#[test]
fn an_answer_is_read_in_every_version() {
    for version in [ApiVersion::V1, ApiVersion::V1Beta1, ApiVersion::V1Alpha1] {
        let json = answer(&[("apiVersion", version.text().into())]);
        let found = parse_response(version, json.to_string().as_bytes()).unwrap();
        assert_eq!((found.key_type, found.cache, found.auth.len()), (CacheKeyType::Image, None, 1));
        let (key, credential) = &found.auth[0];
        assert_eq!((key.as_str(), credential.username.as_str()), ("r.example:5000", "ann"));
        assert_eq!(credential.password, "hunter2");
    }
}

#[test]
fn the_fields_of_an_answer_that_may_vary_are_read() {
    let key = |text: &str| parse(&answer(&[("cacheKeyType", text.into())])).unwrap().key_type;
    assert_eq!(key("Registry"), CacheKeyType::Registry);
    assert_eq!(key("Global"), CacheKeyType::Global);
    for (text, seconds) in [("6h0m0s", 21_600), ("0s", 0), ("-5m", 0)] {
        let found = parse(&answer(&[("cacheDuration", text.into())])).unwrap();
        assert_eq!(found.cache, Some(Duration::from_secs(seconds)), "{text}");
    }
    for none in [json!(null), json!({})] {
        assert!(parse(&answer(&[("auth", none)])).unwrap().auth.is_empty());
    }
    let half = json!({"r.example": {"password": "p", "username": null}});
    let found = parse(&answer(&[("auth", half)])).unwrap();
    assert_eq!((found.auth[0].1.username.as_str(), found.auth[0].1.password.as_str()), ("", "p"));
    assert!(parse(&answer(&[("more", json!(1))])).is_ok(), "a newer plugin may say more");
}

#[test]
fn an_answer_that_is_none_is_refused_and_not_repeated() {
    let cases = [
        (json!("hunter2"), BadResponse::NotJson),
        (json!({"password": "hunter2"}), BadResponse::Kind),
        (answer(&[("kind", "CredentialProviderRequest".into())]), BadResponse::Kind),
        (answer(&[("apiVersion", "hunter2".into())]), BadResponse::ApiVersion(ApiVersion::V1)),
        (
            answer(&[("apiVersion", ApiVersion::V1Beta1.text().into())]),
            BadResponse::ApiVersion(ApiVersion::V1),
        ),
        (answer(&[("cacheKeyType", json!(null))]), BadResponse::KeyType),
        (answer(&[("cacheKeyType", "hunter2".into())]), BadResponse::KeyType),
        (answer(&[("cacheDuration", "hunter2".into())]), BadResponse::Duration),
        (answer(&[("cacheDuration", json!(60))]), BadResponse::Duration),
        (answer(&[("auth", "hunter2".into())]), BadResponse::Auth),
        (answer(&[("auth", json!({"r.example": "hunter2"}))]), BadResponse::Auth),
        (answer(&[("auth", json!({"r.example": {"password": ["hunter2"]}}))]), BadResponse::Auth),
    ];
    for (json, expected) in cases {
        let error = parse(&json).unwrap_err();
        assert_eq!(error, expected, "{json}");
        assert!(!format!("{error} {error:?}").contains("hunter"));
    }
    assert_eq!(parse_response(ApiVersion::V1, b"hunter2"), Err(BadResponse::NotJson));
}

#[test]
fn an_answer_is_good_for_its_image_its_registry_or_all() {
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
fn what_is_known_of_the_image_goes_before_what_is_known_of_more() {
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
fn an_answer_is_kept_as_long_as_it_says_and_else_as_the_configuration_says() {
    for (own, default, seconds) in
        [(Some(10), 60, 10), (None, 60, 60), (Some(0), 60, 0), (None, 0, 0), (Some(90), 0, 90)]
    {
        let mut cache = Cache::default();
        cache.put(REPO, &response(CacheKeyType::Image, own, "ann"), Duration::from_secs(default), 5 * SECOND);
        if seconds > 0 {
            assert!(cache.get(REPO, (5 + seconds) * SECOND - 1).is_some(), "{own:?} {default}");
        }
        assert!(cache.get(REPO, (5 + seconds) * SECOND).is_none(), "{own:?} {default}");
        assert!(cache.entries.is_empty(), "what is out of date is dropped");
    }
    let mut cache = Cache::default();
    cache.put(REPO, &response(CacheKeyType::Image, Some(u64::MAX), "ann"), Duration::ZERO, SECOND);
    assert!(cache.get(REPO, i64::MAX - 1).is_some(), "and nothing overflows");
}

#[test]
fn what_nobody_asks_for_any_more_is_dropped_within_a_quarter_of_an_hour_of_use() {
    let mut cache = Cache::default();
    let minute = 60 * SECOND;
    cache.put("a.example/a", &response(CacheKeyType::Image, Some(60), "ann"), Duration::ZERO, 0);
    cache.put("b.example/b", &response(CacheKeyType::Image, Some(3600), "bob"), Duration::ZERO, 0);
    assert!(cache.get("c.example/c", 15 * minute - 1).is_none());
    assert_eq!(cache.entries.len(), 2);
    assert!(cache.get("c.example/c", 15 * minute).is_none());
    assert_eq!(cache.entries.len(), 1);
    cache.put("c.example/c", &response(CacheKeyType::Image, Some(60), "cyd"), Duration::ZERO, 70 * minute);
    assert_eq!(cache.entries.len(), 1, "an answer that is put in has the same effect");
}

#[test]
fn nothing_secret_is_shown() {
    let found = parse(&answer(&[])).unwrap();
    let mut cache = Cache::default();
    cache.put(REPO, &found, Duration::from_secs(1), 0);
    assert!(!cache.entries.is_empty());
    assert!(!format!("{found:?} {cache:?}").contains("hunter"));
}
