//! Loading of the configuration at the start, and missing binaries.

use super::*;

#[tokio::test]
async fn plugin_binary_removed_later_is_reported() {
    let scene = Scene::new();
    scene.script("a", "true");
    let plugins = scene.plugins(&[provider("a", "1m")], PATIENCE);
    fs::remove_file(scene.path("a")).unwrap();
    let error = plugin_error(&plugins).await;
    let path = scene.path("a").display().to_string();
    assert!(error.starts_with(&format!("cannot start {path}: No such file")), "{error}");
    let message = scene.failed_condition("credential provider a").unwrap();
    assert!(message.starts_with(&error), "{message}");
}

#[tokio::test]
async fn missing_plugin_binary_is_a_condition_and_used_once_present() {
    let scene = Scene::new();
    scene.script("good", &answering("Image", "s.example", "bob"));
    scene.script("unset", "true");
    fs::set_permissions(scene.path("unset"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    let names = ["missing", "good", "unset", "folder"];
    let paths = scene.hand_over(&names.iter().map(|name| provider(name, "1m")).collect());
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    let message_of = |name: &str| scene.failed_condition(&format!("credential provider {name}"));
    for (name, wrong) in [("missing", "No such file"), ("unset", "not executable"), ("folder", "not a file")]
    {
        let message = message_of(name).unwrap();
        assert!(message.contains(scene.path(name).to_str().unwrap()) && message.contains(wrong), "{message}");
    }
    assert_eq!(message_of("good"), None);
    assert_eq!(users(&plugins, "s.example/a").await, ["bob"], "the others are used");
    assert!(message_of("missing").unwrap().starts_with("cannot start "));
    scene.script("missing", &answering("Image", "r.example", "ann"));
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
    assert_eq!(message_of("missing"), None);
}

#[tokio::test]
async fn plugin_binary_writable_by_others_is_a_condition_and_still_used() {
    let scene = Scene::new();
    for name in ["good", "open"] {
        scene.script(name, &answering("Image", "s.example", name));
    }
    fs::set_permissions(scene.path("open"), fs::Permissions::from_mode(0o777)).unwrap();
    let load = async || {
        let progress = Progress::default();
        let paths = scene.hand_over(&json!([provider("good", "1m"), provider("open", "1m")]));
        let plugins = Plugins::load(&paths, &Metrics::new(), &progress).await.unwrap();
        let conditions = progress.report("0").conditions.into_iter().filter(|condition| !condition.ok);
        (plugins, conditions.map(|condition| (condition.name, condition.message)).collect::<Vec<_>>())
    };
    let (plugins, conditions) = load().await;
    let [(name, text)] = conditions.as_slice() else { panic!("{conditions:?}") };
    assert_eq!(name, "writers of credential provider open");
    let start = format!("users other than root may write {} (owner ", scene.path("open").display());
    assert!(text.starts_with(&start) && text.contains("mode 0777"), "{text}");
    assert_eq!(users(&plugins, "s.example/a").await.len(), 2);
    fs::set_permissions(scene.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (_, conditions) = load().await;
    assert_eq!(conditions.len(), 2, "users who may write the folder may replace the binary: {conditions:?}");
}

#[tokio::test]
async fn unreadable_plugin_configuration_is_a_condition_and_the_service_starts() {
    let scene = Scene::new();
    let paths = scene.hand_over(&json!([provider("a", "1m")]));
    let path = handover_path(&paths);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert!(plugins.find(REPO, &"default/web".into()).await.is_empty());
    let message = scene.failed_condition("credential providers").unwrap();
    assert!(message.starts_with(&format!("cannot read {}: ", path.display())), "{message}");
}

#[tokio::test]
async fn panic_while_loading_plugins_is_an_error() {
    let scene = Scene::new();
    let loaded = Plugins::load_by(|| panic!("as the test wants it"), &scene.metrics, &scene.progress).await;
    assert!(matches!(loaded, Err(HandoverError::Lost { .. })), "{loaded:?}");
}

#[tokio::test]
async fn invalid_plugin_configuration_fails_the_start_with_all_errors() {
    let scene = Scene::new();
    let paths = scene.hand_over(&json!([{"name": "a/b"}, {"apiVersion": "v1"}]));
    let error = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap_err().to_string();
    for field in ["providers[0].name", "providers[0].matchImages", "providers[1].apiVersion"] {
        assert!(error.contains(&format!("/etc/c.yaml: {field}: ")), "{error}");
    }
    fs::write(handover_path(&paths), "{\"binDir\": [\"hunter2\"]}").unwrap();
    let error = chain(&Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap_err());
    assert!(error.contains("is not what keelson-init writes") && !error.contains("hunter2"), "{error}");
}

#[tokio::test]
async fn without_configuration_there_are_no_plugins_and_no_plugin_metrics() {
    let scene = Scene::new();
    let paths = Paths { run_dir: scene.path("run"), ..Paths::default() };
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert!(plugins.find(REPO, &"default/web".into()).await.is_empty());
    assert!(!scene.metrics.text().contains("credential_provider"));
    // With a configuration, plugins that cannot be used are skipped.
    let mut strict = provider("strict", "1m");
    strict["tokenAttributes"] = json!({
        "serviceAccountTokenAudience": "x", "cacheType": "Token", "requireServiceAccount": true,
    });
    scene.script("a", &answering("Image", "r.example", "ann"));
    let paths = scene.hand_over(&json!([strict, provider("a", "1m")]));
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
}
