//! The plugins of this version, with what they work with.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{ControlPlane, ServiceName};
use keelson_plugin_watcher::PluginWatcher;
use keelson_service_kit::{CancellationToken, Context, Progress, spawn};
use tokio::sync::watch;

use crate::csi::client::CsiMetrics;
use crate::csi::drivers::Drivers;
use crate::csi::limits::Limits;
use crate::csi::node_info::CsiNodes;
use crate::csi::registration::{CsiRegistration, KIND};
use crate::live_objects::LiveObjects;
use crate::mounter::Mounter;
use crate::plugins::csi::{Csi, CsiParts, NoApiServer, Objects};
use crate::plugins::fc::Fc;
use crate::plugins::flexvolume::{FlexSettings, FlexVolume};
use crate::plugins::host::Host;
use crate::plugins::host_path::HostPath;
use crate::plugins::iscsi::Iscsi;
use crate::plugins::local::Local;
use crate::plugins::nfs::Nfs;
use crate::plugins::secrets::{PodConfigSecrets, Secrets};
use crate::plugins::{Plugin, Plugins};
use crate::tokens::TokenClient;

/// The pause before the CSINode is tried again.
const CSI_NODE_RETRY: Duration = Duration::from_secs(30);

/// The plugins, and what is asked for of CSI alone.
#[derive(Debug, Clone)]
pub(crate) struct PluginSet {
    pub(crate) plugins: Plugins,
    pub(crate) csi: Arc<Csi>,
    pub(crate) drivers: Drivers,
}

/// Creates the plugins, and starts what registers CSI drivers.
pub(crate) fn start(ctx: &Context, mounter: &Mounter, live: &LiveObjects, tokens: &TokenClient) -> PluginSet {
    let config = &ctx.config;
    let root = &config.paths.root_dir;
    let pod_config = ctx.peer(ServiceName::PodConfig);
    let run_dir = &config.paths.run_dir;
    // The paths of volumes are resolved before they are compared with it.
    let run_dir = std::fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.clone());
    let host = || Host::new(root.clone(), mounter);
    let secrets: Arc<dyn Secrets> = Arc::new(PodConfigSecrets::new(pod_config));
    let drivers = start_registration(ctx, root, live);
    let csi = Arc::new(Csi::new(CsiParts {
        root: root.clone(),
        node: config.node_name.clone(),
        drivers: drivers.clone(),
        mounts: Arc::new(mounter.clone()),
        secrets: Arc::clone(&secrets),
        objects: objects(ctx, live),
        tokens: Arc::new(tokens.clone()),
    }));
    let flex = FlexSettings::new(config.volumes.plugin_dir.clone(), config.node_name.clone());
    let flex = FlexVolume::new(host(), Arc::clone(&secrets), flex);
    ctx.spawn("flexVolume drivers", flex.clone().watch(ctx.progress.clone(), ctx.shutdown.clone()));
    let plugins: Vec<Arc<dyn Plugin>> = vec![
        Arc::new(Local::new(root.clone(), run_dir.clone(), mounter.clone(), ctx.events.clone())),
        Arc::new(HostPath::new(root.clone(), run_dir, mounter.clone())),
        Arc::new(Nfs::new(root.clone(), mounter.clone())),
        Arc::new(Iscsi::new(host(), Arc::clone(&secrets))),
        Arc::new(Fc::new(host())),
        Arc::<Csi>::clone(&csi),
        Arc::new(flex),
    ];
    PluginSet { plugins: Plugins::new(plugins), csi, drivers }
}

/// What CSI volumes need of the control plane. Without an API server nobody attaches volumes, so no driver needs that.
fn objects(ctx: &Context, live: &LiveObjects) -> Arc<dyn Objects> {
    match ctx.config.control_plane {
        ControlPlane::Kubernetes(_) => Arc::new(live.clone()),
        ControlPlane::None | ControlPlane::Etcd(_) => Arc::new(NoApiServer),
    }
}

/// Registers the CSI drivers of the node, also those that were registered before a restart.
fn start_registration(ctx: &Context, root: &Path, live: &LiveObjects) -> Drivers {
    let registry = root.join("plugins_registry");
    let drivers = Drivers::new(CsiMetrics::register(&ctx.metrics), &registry);
    let csi_nodes = CsiNodes::new(ctx.peer(ServiceName::PodConfig), &ctx.config.node_name);
    spawn("CSINode", initialize_csi_node(csi_nodes.clone(), ctx.progress.clone(), ctx.shutdown.clone()));
    let registration = CsiRegistration::new(drivers.clone(), csi_nodes);
    let watcher = PluginWatcher::new(&registry, &ctx.metrics).with(KIND, registration.handler());
    let handle = ctx.progress.register("plugin registration");
    ctx.spawn("plugin registration", watcher.run(ctx.shutdown.clone(), handle));
    let limits = Limits::new(drivers.clone(), registration, live.clone());
    let handle = ctx.progress.register("limits of CSI drivers");
    ctx.spawn("limits of CSI drivers", limits.follow(ctx.shutdown.clone(), handle));
    drivers
}

/// Creates or updates the CSINode of this node, and shows in a condition whether that has succeeded.
///
/// Parity: a kubelet ends when this fails for more than two minutes. Pods without CSI volumes do not need it, so here it is
/// only tried again.
async fn initialize_csi_node(csi_nodes: CsiNodes, progress: Progress, shutdown: CancellationToken) {
    let ready = watch::Sender::new(Ok(()));
    let mut changes = ready.subscribe();
    let report = async {
        while changes.changed().await.is_ok() {
            let state: Result<(), String> = changes.borrow_and_update().clone();
            progress.condition("csi-node", state);
        }
    };
    let initialize = async {
        while csi_nodes.initialize(&ready, &shutdown).await.is_err() && !shutdown.is_cancelled() {
            tokio::time::sleep(CSI_NODE_RETRY).await;
        }
    };
    // Cancel-safe: the report changes nothing else.
    tokio::select! {
        () = initialize => progress.condition("csi-node", ready.borrow().clone()),
        () = report => {}
    }
}
