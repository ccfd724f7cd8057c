//! Files of the configuration that change while init runs, with fake services.
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

    /// What a service has in memory.
    async fn config_of(&self, service: ServiceName) -> Config {
        let socket = Paths::socket_below(&self.0.path("run"), service);
        let mut client = AdminClient::new(connect_unix(service.as_str(), &socket));
        let answer = client.get_config(GetConfigRequest {}).await.unwrap().into_inner();
        serde_json::from_slice(&answer.config_json).unwrap()
    }

    /// Waits until a service has in memory what is wanted.
    async fn until(&self, service: ServiceName, what: &str, good: impl Fn(&Config) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let config = self.config_of(service).await;
            if good(&config) {
                return;
            }
            assert!(Instant::now() < deadline, "{service}: {what}: not within {PATIENCE:?}: {config:#?}");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// Waits until init shows itself so.
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
        self.0.wait("it is started again", again).await;
    }

    fn file(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.0.path("run/config.json")).unwrap()).unwrap()
    }
}

/// Puts a file in the place of another, as an editor does.
fn replace(path: &Path, text: &str) {
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

fn pids(services: &[pb::Service]) -> BTreeMap<String, u32> {
    services.iter().map(|service| (service.name.clone(), service.pid)).collect()
}

#[tokio::test]
async fn what_may_change_is_taken_by_services_that_run_on_and_a_wrong_file_changes_nothing() {
    let world = World::new();
    let _init = world.start();
    let before = pids(&world.0.all_running().await);
    let files = |count| move |config: &Config| config.container_logs.max_files == count;

    world.drop_in("containerLogMaxFiles: 9\nlogging: {verbosity: 4}\n");
    world.until(ServiceName::RuntimeShim, "nine files", files(9)).await;
    for service in ServiceName::supervised() {
        world.until(service, "another level", |config| config.logging.level != "info").await;
    }
    assert_eq!(pids(&world.0.all_running().await), before, "nobody was started again");
    let file = world.file();
    assert_eq!(file["kubeletConfiguration"]["containerLogMaxFiles"], 9);
    let origin = file["provenance"]["kubeletConfiguration.containerLogMaxFiles"].as_str().unwrap();
    assert!(origin.contains("10.conf"), "{origin}");
    assert_eq!(file.get("waiting"), None);

    world.drop_in("containerLogMaxFiles: 1\n");
    world.init_is("degraded", &["10.conf", "containerLogMaxFiles", "what was in force goes on"]).await;
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
async fn what_waits_is_named_and_comes_into_force_for_all_its_readers_at_once() {
    let world = World::new();
    let _init = world.start();
    let before = pids(&world.0.all_running().await);
    world.drop_in("maxPods: 5\ncontainerLogMaxFiles: 7\n");
    let parts = ["a restart of", "resource-manager", "maxPods", "`keelson services restart"];
    world.init_is("degraded", &parts).await;
    world.until(ServiceName::RuntimeShim, "seven files", |config| config.container_logs.max_files == 7).await;
    assert_eq!(world.file()["waiting"]["kubeletConfiguration.maxPods"], 5);
    assert_eq!(world.file()["kubeletConfiguration"]["maxPods"], 110);

    // Who dies meanwhile has what its neighbours have.
    world.kill(ServiceName::PodSync, before["pod-sync"]).await;
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        // Each service takes it in its own time.
        world.until(service, "seven files", |config| config.container_logs.max_files == 7).await;
        assert_eq!(world.config_of(service).await.resources.max_pods, 110, "{service}");
    }
    // It is nobody's who does not read it.
    world.restart(ServiceName::RuntimeShim).await;
    world.init_is("degraded", &parts).await;

    let before = pids(&world.0.wait("all are there", |s| s.iter().all(|s| s.pid != 0)).await);
    world.restart(ServiceName::PodSync).await;
    world.init_is("running", &[]).await;
    let after = pids(&world.0.all_running().await);
    for service in ["pod-sync", "resource-manager", "node-status", "volume-manager", "pod-config", "node-api"]
    {
        assert_ne!(after[service], before[service], "{service} reads it");
    }
    assert_eq!(after["runtime-shim"], before["runtime-shim"], "it does not");
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        assert_eq!(world.config_of(service).await.resources.max_pods, 5, "{service}");
    }
    let file = world.file();
    assert_eq!((file.get("waiting"), &file["kubeletConfiguration"]["maxPods"]), (None, &Value::from(5)));

    // What is taken back before anybody was started again waits no more.
    world.drop_in("maxPods: 6\n");
    world.init_is("degraded", &["maxPods"]).await;
    world.drop_in("maxPods: 5\n");
    world.init_is("running", &[]).await;
    assert_eq!(world.file().get("waiting"), None);
}

#[tokio::test]
async fn what_hangs_on_init_waits_for_the_agent_with_all_that_was_written_beside_it() {
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

/// They stand in no file that everybody reads, and so they are not in what is read back of it.
#[tokio::test]
async fn headers_of_a_url_stay_when_another_value_changes() {
    let world = World::new();
    let url = "staticPodURL: http://127.0.0.1:1/pods\nstaticPodURLHeader: {X-Key: [hidden]}\n";
    world.drop_in(url);
    let _init = world.start();
    world.0.all_running().await;
    let handed = world.0.path("run/credentials/pod-config/manifest-url-headers.json");
    let before = fs::read_to_string(&handed).unwrap();
    assert!(before.contains("hidden"), "{before}");
    world.drop_in(&format!("{url}containerLogMaxFiles: 9\n"));
    let taken = |config: &Config| config.container_logs.max_files == 9;
    world.until(ServiceName::RuntimeShim, "nine files", taken).await;
    assert_eq!(fs::read_to_string(&handed).unwrap(), before);
    world.drop_in(&format!("{}containerLogMaxFiles: 9\n", url.replace("hidden", "rotated")));
    eventually("other headers are handed over", || {
        fs::read_to_string(&handed).is_ok_and(|now| now.contains("rotated"))
    })
    .await;
}

#[tokio::test]
async fn what_waited_is_forgotten_when_the_files_do_not_do_any_more_and_they_are_looked_at_again() {
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
async fn another_configuration_of_credential_providers_waits_for_runtime_shim_once_its_plugin_is_there() {
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
    let handed = scene.path("run/credentials/runtime-shim/image-credential-providers.json");
    let has = |name: &str| fs::read_to_string(&handed).unwrap().contains(name);

    replace(&config, &provider("plugin-two"));
    world.init_is("degraded", &["plugins/plugin-two", "what was in force goes on"]).await;
    // It is looked for again, although the file stays as it is.
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
    assert_eq!(after["pod-sync"], before["pod-sync"], "it does not read it");
}
