//! Facts about the node: its runtime, its machine, its Node object, its addresses.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{Config, ControlPlane, IdentityFiles};
use keelson_kube_model::node_ext::host_ips;
use keelson_kube_model::{Node, Quantity, ResourceList};
use keelson_pod_sync_core::admission::{AgentIds, KernelVersion};
use keelson_pod_sync_core::runtime_version::{ImageVolumeSupport, image_volume_support};
use keelson_proto::keelson::resource_manager::v1::Machine;
use keelson_service_kit::{Context, default_route_address};
use tokio::sync::watch;

use crate::error::SyncError;

/// How long a start waits for the machine's sizes, which may still be on their way right after this service has started.
const MACHINE_TIMEOUT: Duration = Duration::from_secs(10);

/// What is known of the node. Each part is updated by its stream.
#[derive(Debug)]
pub struct NodeState {
    context: Context,
    /// The container runtime.
    pub runtime: watch::Sender<RuntimeView>,
    /// The machine as resource-manager reports it; empty until the first report.
    pub machine: watch::Sender<Arc<Machine>>,
    /// The Node object; `None` until pod-config has sent it.
    pub object: watch::Sender<Option<Arc<Node>>>,
    /// Facts that do not change while this process runs.
    pub host: Host,
}

/// What the container runtime is able to do now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeView {
    /// `containerd`…
    pub name: String,
    /// As the runtime reports it.
    pub version: String,
    /// It can make sandboxes and containers.
    pub ready: bool,
    /// It can make pods with a network of their own.
    pub network_ready: bool,
    /// Why it is not ready.
    pub message: String,
    /// Its default handler supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// Its handlers that support user namespaces; the name of the default one is empty.
    pub user_namespace_handlers: BTreeSet<String>,
}

impl RuntimeView {
    /// How far it supports image volumes; CRI has no field for that.
    pub fn image_volumes(&self) -> ImageVolumeSupport {
        image_volume_support(&self.name, &self.version)
    }
}

/// Facts about the host that do not change while this process runs.
#[derive(Debug, Clone)]
pub struct Host {
    /// The running kernel.
    pub kernel: KernelVersion,
    /// AppArmor is enabled.
    pub apparmor: bool,
    /// SELinux is enabled.
    pub selinux: bool,
    /// User and group ids of the agent, which no pod may use.
    pub agent_ids: AgentIds,
    /// The id of the current boot; empty if it cannot be read.
    pub boot_id: String,
    /// Paths that containers do not see, beside the usual ones: `thermal_throttle` of each CPU that has one
    /// (runtime-and-resources.md §5).
    pub masked_paths: Vec<String>,
}

impl NodeState {
    /// Nothing is known yet except the host.
    pub fn new(context: &Context) -> Self {
        Self {
            runtime: watch::Sender::new(RuntimeView::default()),
            machine: watch::Sender::new(Arc::default()),
            object: watch::Sender::new(None),
            host: Host::read(&context.config),
            context: context.clone(),
        }
    }

    /// The node's addresses as pods see them: those of the Node object that a status shows, else those of `--node-ip`, else the
    /// address of the default route.
    pub fn addresses(&self) -> Vec<String> {
        let object = self.object.borrow();
        let addresses = object.as_ref().map(|node| node.status.addresses.as_slice()).unwrap_or_default();
        let published: Vec<String> = host_ips(addresses).iter().map(ToString::to_string).collect();
        if !published.is_empty() {
            return published;
        }
        let config = &self.context.config;
        let configured = config.node_status.node_ips.iter().filter(|ip| !ip.is_unspecified());
        let configured: Vec<String> = configured.map(ToString::to_string).collect();
        if !configured.is_empty() {
            return configured;
        }
        let name = config.node_name.parse().ok();
        name.or_else(default_route_address).map(|address| address.to_string()).into_iter().collect()
    }

    /// What pods may use of the machine; empty until resource-manager has reported.
    pub fn allocatable(&self) -> ResourceList {
        let machine = self.machine.borrow();
        machine.allocatable.iter().map(|(name, amount)| (name.clone(), quantity(name, *amount))).collect()
    }

    /// Waits until the sizes of the machine are known.
    ///
    /// # Errors
    /// resource-manager has not reported them within ten seconds.
    pub async fn await_machine(&self) -> Result<(), SyncError> {
        let mut machine = self.machine.subscribe();
        let known = machine.wait_for(|machine| is_complete(machine));
        match tokio::time::timeout(MACHINE_TIMEOUT, known).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(SyncError::unavailable("resource-manager has not reported the machine's sizes")),
        }
    }
}

/// Whether a container can be configured: the memory size is known, for its OOM score, and the cgroup version that its limits are
/// written for. When the container runtime was slow to start, resource-manager reports the version after the sizes.
fn is_complete(machine: &Machine) -> bool {
    machine.capacity.contains_key("memory") && !machine.cgroup_version.is_empty()
}

/// Whether the node belongs to a cluster.
pub fn has_cluster(config: &Config) -> bool {
    matches!(config.control_plane, ControlPlane::Kubernetes(_))
}

/// The sizes of huge pages that the machine supports, such as `2Mi`.
pub fn huge_page_sizes(machine: &Machine) -> Vec<String> {
    let names = machine.capacity.keys().filter_map(|name| name.strip_prefix("hugepages-"));
    names.map(ToOwned::to_owned).collect()
}

/// An amount as resource-manager counts it: CPU in thousandths of a core, everything else in whole units.
fn quantity(name: &str, amount: i64) -> Quantity {
    if name == "cpu" {
        Quantity::from_milli(amount)
    } else {
        Quantity::from_bytes(u64::try_from(amount).unwrap_or(0))
    }
}

impl Host {
    /// Reads /proc and /sys. A fact that cannot be read counts as old or absent.
    pub fn read(config: &Config) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            kernel: KernelVersion::parse(text("/proc/sys/kernel/osrelease").trim()),
            apparmor: text("/sys/module/apparmor/parameters/enabled").starts_with('Y'),
            selinux: keelson_service_kit::selinux_is_enabled(),
            agent_ids: AgentIds::new(&config.users, rustix::process::geteuid().as_raw()),
            boot_id: boot_id(&config.resources.identity_files),
            masked_paths: thermal_throttle_paths(Path::new("/sys/devices/system/cpu")),
        }
    }
}

/// The id of the current boot: the content of the first file that has one, else empty.
pub fn boot_id(files: &IdentityFiles) -> String {
    let texts = files.boot_id.iter().filter_map(|file| fs::read_to_string(file).ok());
    texts.map(|text| text.trim().to_owned()).find(|id| !id.is_empty()).unwrap_or_default()
}

/// `thermal_throttle` of each CPU in this folder, in the order of CPU numbers.
fn thermal_throttle_paths(cpus: &Path) -> Vec<String> {
    let entries = fs::read_dir(cpus).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok()).collect();
    numbers.sort_unstable();
    let paths = numbers.into_iter().map(|number| cpus.join(format!("cpu{number}/thermal_throttle")));
    paths.filter(|path| path.exists()).map(|path| path.to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A panic fails the test.

    use super::*;

    #[test]
    fn thermal_throttle_is_masked_for_each_cpu_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["cpu10/thermal_throttle", "cpu2/thermal_throttle", "cpu3", "cpufreq/thermal_throttle"]
        {
            fs::create_dir_all(at(folder)).unwrap();
        }
        let paths = [at("cpu2/thermal_throttle"), at("cpu10/thermal_throttle")];
        assert_eq!(thermal_throttle_paths(dir.path()), paths.map(|path| path.to_string_lossy().into_owned()));
        assert_eq!(thermal_throttle_paths(&at("nowhere")), Vec::<String>::new());
    }

    #[test]
    fn a_machine_is_complete_with_its_memory_and_its_cgroup_version() {
        for (resource, cgroup_version, complete) in
            [("memory", "v2", true), ("memory", "v1", true), ("memory", "", false), ("cpu", "v2", false)]
        {
            let capacity = [(resource.to_owned(), 1)].into();
            let cgroup_version = cgroup_version.to_owned();
            let machine = Machine { capacity, cgroup_version, ..Machine::default() };
            assert_eq!(is_complete(&machine), complete, "{machine:?}");
        }
    }
}
