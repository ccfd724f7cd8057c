//! Concurrency limits, timeouts and cancellation of plugins.

use keelson_config::Config;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_service_kit::EventRing;
use tokio::sync::mpsc;

use super::*;
use crate::images::Images;
use crate::tests::fake_runtime::FakeRuntime;

#[tokio::test]
async fn four_plugin_processes_run_at_a_time_and_waiting_requests_use_cached_responses() {
    let waits = "while [ ! -e $DIR/go ]; do sleep 0.01; done\n";
    let script = answering("Registry", "r.example", "ann").replace("cat >", &format!("{waits}cat >"));
    let repositories = ["a", "b", "c", "d", "e", "f"].map(|name| format!("r.example/{name}"));
    for (cache, runs) in [("1m", 4), ("0s", 6)] {
        let scene = Scene::new();
        scene.script("a", &script);
        let plugins = scene.plugins(&[provider("a", cache)], PATIENCE);
        let all = join_all(repositories.iter().map(|repository| users(&plugins, repository)));
        let (found, ()) = tokio::join!(all, async {
            scene.until("four run", || scene.calls() >= 4).await;
            assert_eq!(plugins.list[0].turns.look().taken, 4);
            fs::write(scene.path("go"), "").unwrap();
        });
        assert!(found.iter().all(|users| *users == ["ann"]), "{found:?}");
        assert_eq!(scene.calls(), runs, "kept for {cache}");
    }
}

#[tokio::test]
async fn plugin_does_not_inherit_oom_score_adj() {
    const OWN: &str = "/proc/self/oom_score_adj";
    let before = fs::read_to_string(OWN).unwrap();
    let scene = Scene::new();
    // By then the plugin has read its request.
    let script = answering("Image", "r.example", "ann") + &format!("\ncat {OWN} > $DIR/adj");
    scene.script("a", &script);
    let plugins = scene.plugins(&[provider("a", "1m")], PATIENCE);
    fs::write(OWN, "7").unwrap();
    let found = users(&plugins, REPO).await;
    // Restoring it may fail: an unprivileged process may not lower the value.
    let _ = fs::write(OWN, before);
    assert_eq!(found, ["ann"]);
    assert_eq!(fs::read_to_string(scene.path("adj")).unwrap(), "0\n");
}

#[tokio::test]
async fn plugin_response_is_used_while_a_child_process_holds_its_pipes() {
    // Ends when the test's folder is removed.
    let left = "while [ -e \"$0\" ]; do sleep 0.1; done";
    let answer = answering("Image", "r.example", "ann");
    let scene = Scene::new();
    for held in ["", ">/dev/null", "2>/dev/null"] {
        scene.script("a", &format!("{answer}\n({left}) {held} &"));
        let plugins = scene.plugins(&[provider("a", "0s")], PATIENCE);
        assert_eq!(users(&plugins, REPO).await, ["ann"], "{held}");
    }
    scene.script("a", &format!("echo 'no role' >&2\n({left}) &\nexit 3"));
    let error = plugin_error(&scene.plugins(&[provider("a", "0s")], PATIENCE)).await;
    assert_eq!(error, "it has ended with exit status: 3: \"no role\"");
}

#[tokio::test]
async fn pull_reports_waiting_for_credentials_and_cancels_the_plugin_with_its_caller() {
    let (fake, scene) = (FakeRuntime::start().await, Scene::new());
    let alive = hanging(&scene);
    let plugins = scene.plugins(&[provider("a", "1m")], 10 * PATIENCE);
    let credentials = Credentials::none().with_plugins(plugins);
    let config =
        Config { paths: Paths { root_dir: scene.path("root"), ..Paths::default() }, ..Config::default() };
    let images = Images::new(fake.cri.clone(), EventRing::default(), 1).configured(
        &config,
        credentials,
        &Metrics::new(),
    );
    let request = pb::EnsureImageRequest {
        pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
        container: "c".into(),
        image: format!("{REPO}:1"),
        pull_policy: "Always".into(),
        ..Default::default()
    };
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn(async move { images.ensure(request, progress).await });
    scene.until("it runs", || scene.calls() == 1).await;
    let progress_message = messages.recv().await.unwrap().unwrap().item;
    let Some(Item::Progress(progress_message)) = progress_message else { panic!("{progress_message:?}") };
    assert_eq!(
        progress_message.detail,
        "waiting for credentials (imagePullSecrets, credential provider plugins)"
    );
    drop(messages);
    tokio::time::timeout(PATIENCE, pull).await.expect("it has ended with its caller").unwrap();
    scene.until("all of it has ended", || all_ended(&alive)).await;
    assert!(fake.pulled_as().is_empty());
}
