//! Configuration files that change while init runs, with fake services.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Instant;

use common::{Init, PATIENCE, Scene, eventually, find, signal};
use keelson_config::{Config, Paths, ServiceName};
use keelson_proto::keelson::admin::v1::GetConfigRequest;
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::connect_unix;
use rustix::process::Signal;
use serde_json::Value;

const DROP_IN: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

struct World(Scene);

impl World {
    fn new() -> Self {
        let scene = Scene::new();
        fs::create_dir(scene.path("k.d")).unwrap();
        Self(scene)
    }

    fn start(&self) -> Init<'_> {
        let mut command = self.0.command();
        command.args(["--config-dir", &self.0.text("k.d")]);
        self.0.start_as(command)
    }

    fn drop_in(&self, fields: &str) {
        replace(&self.0.path("k.d/10.conf"), &format!("{DROP_IN}{fields}"));
    }

    /// The configuration that a service has in memory.
    async fn config_of(&self, service: ServiceName) -> Config {
        let socket = Paths::socket_below(&self.0.path("run"), service);
        let mut client = AdminClient::new(connect_unix(service.as_str(), &socket));
        let answer = client.get_config(GetConfigRequest {}).await.unwrap().into_inner();
        serde_json::from_slice(&answer.config_json).unwrap()
    }

    /// Waits until the configuration in a service's memory is as wanted.
    async fn until(&self, service: ServiceName, what: &str, good: impl Fn(&Config) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let config = self.config_of(service).await;
            if good(&config) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "timed out after {PATIENCE:?}: {service}: {what}: {config:#?}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// Waits until init has this state, with these parts in its message.
    async fn init_is(&self, state: &str, parts: &[&str]) -> Vec<pb::Service> {
        let is_so = |services: &[pb::Service]| {
            let own = services.iter().find(|service| service.name == "init");
            own.is_some_and(|own| own.state == state && parts.iter().all(|part| own.message.contains(part)))
        };
        self.0.wait(&format!("init is {state} with {parts:?}"), is_so).await
    }

    async fn restart(&self, service: ServiceName) {
        let request = pb::RestartServiceRequest { name: service.to_string() };
        self.0.client().restart_service(request).await.unwrap();
    }

    /// Kills a service and waits until it runs again.
    async fn kill(&self, service: ServiceName, pid: u32) {
        signal(pid, Signal::KILL);
        let again = |services: &[pb::Service]| {
            services.iter().any(|s| s.name == service.as_str() && s.pid != pid && s.state == "running")
        };
        self.0.wait("it is restarted", again).await;
    }

    fn file(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.0.path("run/config.json")).unwrap()).unwrap()
    }
}

/// Replaces a file, as an editor does.
fn replace(path: &Path, text: &str) {
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

fn pids(services: &[pb::Service]) -> BTreeMap<String, u32> {
    services.iter().map(|service| (service.name.clone(), service.pid)).collect()
}

#[tokio::test]
async fn live_values_are_applied_without_restart_and_invalid_files_ignored() {
    let world = World::new();
    let _init = world.start();
    let before = pids(&world.0.all_running().await);
    let files = |count| move |config: &Config| config.container_logs.max_files == count;

    world.drop_in("containerLogMaxFiles: 9\nlogging: {verbosity: 4}\n");
    world.until(ServiceName::RuntimeShim, "nine files", files(9)).await;
    for service in ServiceName::supervised() {
        world.until(service, "another level", |config| config.logging.level != "info").await;
    }
    assert_eq!(pids(&world.0.all_running().await), before, "no service was restarted");
    let file = world.file();
    assert_eq!(file["kubeletConfiguration"]["containerLogMaxFiles"], 9);
    let origin = file["provenance"]["kubeletConfiguration.containerLogMaxFiles"].as_str().unwrap();
    assert!(origin.contains("10.conf"), "{origin}");
    assert_eq!(file.get("waiting"), None);

    world.drop_in("containerLogMaxFiles: 1\n");
    world
        .init_is(
            "degraded",
            &["10.conf", "containerLogMaxFiles", "the previous configuration stays in force"],
        )
        .await;
    assert_eq!(world.file(), file);
    world.kill(ServiceName::RuntimeShim, before["runtime-shim"]).await;
    assert_eq!(world.config_of(ServiceName::RuntimeShim).await.container_logs.max_files, 9);

    world.drop_in("containerLogMaxFiles: 8\n");
    world.until(ServiceName::RuntimeShim, "eight files", files(8)).await;
    world.init_is("running", &[]).await;
    fs::remove_file(world.0.path("k.d/10.conf")).unwrap();
    world.until(ServiceName::RuntimeShim, "the default", files(5)).await;
    world.until(ServiceName::PodSync, "the default level", |config| config.logging.level == "info").await;
}

#[tokio::test]
async fn pending_changes_are_reported_and_applied_for_all_readers_at_once() {
    let world = World::new();
    let _init = world.start();
    let before = pids(&world.0.all_running().await);
    world.drop_in("maxPods: 5\ncontainerLogMaxFiles: 7\n");
    let parts = ["a restart of", "resource-manager", "maxPods", "`keelson services restart"];
    world.init_is("degraded", &parts).await;
    world.until(ServiceName::RuntimeShim, "seven files", |config| config.container_logs.max_files == 7).await;
    assert_eq!(world.file()["waiting"]["kubeletConfiguration.maxPods"], 5);
    assert_eq!(world.file()["kubeletConfiguration"]["maxPods"], 110);

    // A service that dies meanwhile gets the same values as the others.
    world.kill(ServiceName::PodSync, before["pod-sync"]).await;
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        // Each service applies it in its own time.
        world.until(service, "seven files", |config| config.container_logs.max_files == 7).await;
        assert_eq!(world.config_of(service).await.resources.max_pods, 110, "{service}");
    }
    // A service that does not read the value does not apply it.
    world.restart(ServiceName::RuntimeShim).await;
    world.init_is("degraded", &parts).await;

    let before = pids(&world.0.wait("all are there", |s| s.iter().all(|s| s.pid != 0)).await);
    world.restart(ServiceName::PodSync).await;
    world.init_is("running", &[]).await;
    let after = pids(&world.0.all_running().await);
    for service in ["pod-sync", "resource-manager", "node-status", "volume-manager", "pod-config", "node-api"]
    {
        assert_ne!(after[service], before[service], "{service} reads maxPods");
    }
    assert_eq!(after["runtime-shim"], before["runtime-shim"], "runtime-shim does not read maxPods");
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        assert_eq!(world.config_of(service).await.resources.max_pods, 5, "{service}");
    }
    let file = world.file();
    assert_eq!((file.get("waiting"), &file["kubeletConfiguration"]["maxPods"]), (None, &Value::from(5)));

    // A change that is reverted before a restart is not pending any more.
    world.drop_in("maxPods: 6\n");
    world.init_is("degraded", &["maxPods"]).await;
    world.drop_in("maxPods: 5\n");
    world.init_is("running", &[]).await;
    assert_eq!(world.file().get("waiting"), None);
}

#[tokio::test]
async fn agent_level_changes_and_all_others_wait_for_an_agent_restart() {
    let world = World::new();
    let mut init = world.start();
    let before = pids(&world.0.all_running().await);
    world.0.write_config("manageHost: false\nstartParallelism: 3\n");
    let parts = ["a restart of the agent: manageHost, runtime.startParallelism"];
    world.init_is("degraded", &parts).await;
    world.restart(ServiceName::PodSync).await;
    let config = world.config_of(ServiceName::PodSync).await;
    assert!(config.manage_host && config.runtime.start_parallelism == 8, "{config:?}");
    world.init_is("degraded", &parts).await;

    init.signal(Signal::KILL);
    init.ended().await;
    drop(init);
    let _init = world.start();
    let services = world.0.all_running().await;
    assert_ne!(find(&services, ServiceName::NodeApi).pid, before["node-api"]);
    let config = world.config_of(ServiceName::PodSync).await;
    assert!(!config.manage_host && config.runtime.start_parallelism == 3, "{config:?}");
}

/// Headers are not in the configuration file, and so not in what is read back from it.
#[tokio::test]
async fn manifest_url_headers_survive_other_changes() {
    let world = World::new();
    let url = "staticPodURL: http://127.0.0.1:1/pods\nstaticPodURLHeader: {X-Key: [hidden]}\n";
    world.drop_in(url);
    let _init = world.start();
    world.0.all_running().await;
    let copied = world.0.path("run/credentials/pod-config/manifest-url-headers.json");
    let before = fs::read_to_string(&copied).unwrap();
    assert!(before.contains("hidden"), "{before}");
    world.drop_in(&format!("{url}containerLogMaxFiles: 9\n"));
    let taken = |config: &Config| config.container_logs.max_files == 9;
    world.until(ServiceName::RuntimeShim, "nine files", taken).await;
    assert_eq!(fs::read_to_string(&copied).unwrap(), before);
    world.drop_in(&format!("{}containerLogMaxFiles: 9\n", url.replace("hidden", "rotated")));
    eventually("the new headers are copied", || {
        fs::read_to_string(&copied).is_ok_and(|now| now.contains("rotated"))
    })
    .await;
}

#[tokio::test]
async fn pending_changes_are_dropped_while_files_are_invalid() {
    let world = World::new();
    let _init = world.start();
    world.0.all_running().await;
    world.drop_in("maxPods: 5\n");
    world.init_is("degraded", &["maxPods"]).await;
    world.drop_in("maxPods: many\n");
    world.init_is("degraded", &["many"]).await;
    assert_eq!(world.file().get("waiting"), None);
    world.restart(ServiceName::PodSync).await;
    assert_eq!(world.config_of(ServiceName::PodSync).await.resources.max_pods, 110);
    world.drop_in("maxPods: 5\n");
    world.init_is("degraded", &["a restart of", "maxPods"]).await;
    world.restart(ServiceName::PodSync).await;
    world.until(ServiceName::PodSync, "five pods", |config| config.resources.max_pods == 5).await;
}

#[tokio::test]
async fn changed_credential_provider_config_is_pending_for_runtime_shim() {
    let world = World::new();
    let scene = &world.0;
    fs::create_dir(scene.path("plugins")).unwrap();
    let add_plugin = |name: &str| {
        let path = scene.path("plugins").join(name);
        fs::write(&path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    let provider = |name: &str| {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders: [{{name: {name}}}]\n"
        )
    };
    let config = scene.path("providers.yaml");
    fs::write(&config, provider("plugin-one")).unwrap();
    add_plugin("plugin-one");
    let mut command = scene.command();
    command.arg("--image-credential-provider-config").arg(&config);
    command.arg("--image-credential-provider-bin-dir").arg(scene.path("plugins"));
    let _init = scene.start_as(command);
    let before = pids(&scene.all_running().await);
    let copied = scene.path("run/credentials/runtime-shim/image-credential-providers.json");
    let has = |name: &str| fs::read_to_string(&copied).unwrap().contains(name);

    replace(&config, &provider("plugin-two"));
    world.init_is("degraded", &["plugins/plugin-two", "the previous configuration stays in force"]).await;
    // The plugin is looked for again, although the file has not changed.
    add_plugin("plugin-two");
    let parts =
        ["a restart of runtime-shim", "`keelson services restart", "--image-credential-provider-config"];
    world.init_is("degraded", &parts).await;
    assert!(has("plugin-one") && !has("plugin-two"));
    world.restart(ServiceName::RuntimeShim).await;
    assert!(has("plugin-two"));
    world.init_is("running", &[]).await;
    let after = pids(&scene.all_running().await);
    assert_ne!(after["runtime-shim"], before["runtime-shim"]);
    assert_eq!(after["pod-sync"], before["pod-sync"], "pod-sync does not read it");
}
