//! What is found at the start, and binaries that are not there.

use super::*;

#[tokio::test]
async fn a_binary_that_goes_away_later_is_named() {
    let scene = Scene::new();
    scene.script("a", "true");
    let plugins = scene.plugins(&[provider("a", "1m")], PATIENCE);
    fs::remove_file(scene.path("a")).unwrap();
    let error = failure(&plugins).await;
    let path = scene.path("a").display().to_string();
    assert!(error.starts_with(&format!("cannot start {path}: No such file")), "{error}");
    let told = scene.trouble("credential provider a").unwrap();
    assert!(told.starts_with(&error), "{told}");
}

#[tokio::test]
async fn a_binary_that_is_missing_is_told_and_used_once_it_is_there() {
    let scene = Scene::new();
    scene.script("good", &answering("Image", "s.example", "bob"));
    scene.script("unset", "true");
    fs::set_permissions(scene.path("unset"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    let names = ["missing", "good", "unset", "folder"];
    let paths = scene.hand_over(&names.iter().map(|name| provider(name, "1m")).collect());
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    let told = |name: &str| scene.trouble(&format!("credential provider {name}"));
    for (name, wrong) in [("missing", "No such file"), ("unset", "not executable"), ("folder", "no file")] {
        let told = told(name).unwrap();
        assert!(told.contains(scene.path(name).to_str().unwrap()) && told.contains(wrong), "{told}");
    }
    assert_eq!(told("good"), None);
    assert_eq!(users(&plugins, "s.example/a").await, ["bob"], "the others are used");
    assert!(told("missing").unwrap().starts_with("cannot start "));
    scene.script("missing", &answering("Image", "r.example", "ann"));
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
    assert_eq!(told("missing"), None);
}

#[tokio::test]
async fn a_binary_that_others_may_write_is_told_and_used() {
    let scene = Scene::new();
    for name in ["good", "open"] {
        scene.script(name, &answering("Image", "s.example", name));
    }
    fs::set_permissions(scene.path("open"), fs::Permissions::from_mode(0o777)).unwrap();
    let load = async || {
        let progress = Progress::default();
        let paths = scene.hand_over(&json!([provider("good", "1m"), provider("open", "1m")]));
        let plugins = Plugins::load(&paths, &Metrics::new(), &progress).await.unwrap();
        let told = progress.report("0").conditions.into_iter().filter(|condition| !condition.ok);
        (plugins, told.map(|condition| (condition.name, condition.message)).collect::<Vec<_>>())
    };
    let (plugins, told) = load().await;
    let [(name, text)] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!(name, "writers of credential provider open");
    let start = format!("others than root may write {} (owner ", scene.path("open").display());
    assert!(text.starts_with(&start) && text.contains("mode 0777"), "{text}");
    assert_eq!(users(&plugins, "s.example/a").await.len(), 2);
    fs::set_permissions(scene.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (_, told) = load().await;
    assert_eq!(told.len(), 2, "whoever may write the folder may put another one there: {told:?}");
}

#[tokio::test]
async fn a_configuration_that_cannot_be_read_is_told_and_the_service_goes_on_without_plugins() {
    let scene = Scene::new();
    let paths = scene.hand_over(&json!([provider("a", "1m")]));
    let path = handover_path(&paths);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert!(plugins.find(REPO, &"default/web".into()).await.is_empty());
    let told = scene.trouble("credential providers").unwrap();
    assert!(told.starts_with(&format!("cannot read {}: ", path.display())), "{told}");
}

#[tokio::test]
async fn a_loader_that_does_not_come_to_its_end_is_not_taken_for_no_plugins() {
    let scene = Scene::new();
    let loaded = Plugins::load_by(|| panic!("as the test wants it"), &scene.metrics, &scene.progress).await;
    assert!(matches!(loaded, Err(NotUsable::Lost { .. })), "{loaded:?}");
}

#[tokio::test]
async fn the_start_tells_everything_that_is_wrong_with_the_configuration() {
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
async fn without_a_configuration_there_are_no_plugins_and_no_figures_of_them() {
    let scene = Scene::new();
    let paths = Paths { run_dir: scene.path("run"), ..Paths::default() };
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert!(plugins.find(REPO, &"default/web".into()).await.is_empty());
    assert!(!scene.metrics.text().contains("credential_provider"));
    // With one, those that cannot be used here are left out.
    let mut strict = provider("strict", "1m");
    strict["tokenAttributes"] = json!({
        "serviceAccountTokenAudience": "x", "cacheType": "Token", "requireServiceAccount": true,
    });
    scene.script("a", &answering("Image", "r.example", "ann"));
    let paths = scene.hand_over(&json!([strict, provider("a", "1m")]));
    let plugins = Plugins::load(&paths, &scene.metrics, &scene.progress).await.unwrap();
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
}
