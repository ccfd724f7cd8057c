//! The Kubernetes API as the control plane.

use keelson_config::{ControlPlane, Kubernetes, ObjectsBy, Taint};

use super::taints;
use crate::document::Sourced;
use crate::inputs::given;
use crate::outcome::{Level, Outcome};
use crate::paths::absolute;
use crate::reader::Reader;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct KubernetesApi {
    objects_by: Option<Sourced<String>>,
    register_node: Option<Sourced<bool>>,
    taints: Option<Sourced<Vec<Taint>>>,
    provider_id: Option<Sourced<String>>,
    qps: Option<Sourced<u32>>,
    burst: Option<Sourced<u32>>,
}

impl KubernetesApi {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            objects_by: reader.choice_field("configMapAndSecretChangeDetectionStrategy"),
            register_node: reader.boolean("registerNode"),
            taints: taints::read(reader),
            provider_id: reader.text_field("providerID"),
            qps: reader.client_qps("kubeAPIQPS"),
            burst: reader.client_burst("kubeAPIBurst"),
        }
    }

    /// Makes the Kubernetes API the control plane if `--kubeconfig` is given and the KeelsonConfiguration does not choose
    /// another by `name`. Returns whether the control plane is decided.
    pub(super) fn resolve(
        self,
        out: &mut Outcome<'_>,
        name: Option<&Sourced<String>>,
        lease_seconds: Option<Sourced<u32>>,
    ) -> bool {
        let file = |name: &str| {
            let path = out.flags.others.get(name).filter(|path| !path.is_empty());
            given(&format!("--{name}"), path).map(|path| path.map(|path| absolute(&out.host.cwd, &path)))
        };
        let (kubeconfig, bootstrap) = (file("kubeconfig"), file("bootstrap-kubeconfig"));
        match (kubeconfig, name.map(|name| name.value.as_str())) {
            (Some(kubeconfig), None | Some("kubernetes")) => {
                self.apply(out, kubeconfig, lease_seconds);
                true
            }
            (Some(kubeconfig), Some("etcd")) => {
                out.refuse(
                    &kubeconfig,
                    "controlPlane is etcd, and a node has one control plane; remove one of the two",
                );
                true
            }
            (Some(_), _) => {
                out.note(Level::Info, "controlPlane is none, so --kubeconfig is ignored");
                true
            }
            (None, Some("kubernetes")) => {
                if let Some(name) = name {
                    out.refuse(name, "--kubeconfig, which tells how to reach the API server, is missing");
                }
                true
            }
            (None, _) => {
                if let Some(bootstrap) = bootstrap {
                    out.refuse(&bootstrap, "this flag works only with --kubeconfig, which is missing");
                }
                false
            }
        }
    }

    fn apply(self, out: &mut Outcome<'_>, kubeconfig: Sourced<String>, lease_seconds: Option<Sourced<u32>>) {
        let Self { objects_by, register_node, taints, provider_id, qps, burst } = self;
        out.set("controlPlane.kubernetes.kubeconfig", Some(kubeconfig), |c, v| {
            c.control_plane = ControlPlane::Kubernetes(Kubernetes::of(v.into()));
        });
        set_field(out, lease_seconds, |api, v| api.lease_seconds = v);
        set_field(out, objects_by, |api, v| {
            api.objects_by = match v.as_str() {
                "Get" => ObjectsBy::Get,
                "Cache" => ObjectsBy::Cache,
                // The reader accepts no other value.
                _ => ObjectsBy::Watch,
            };
        });
        set_field(out, provider_id, |api, v| api.provider_id = Some(v));
        let taints = all_taints(out, taints);
        set_field(out, taints, |api, v| api.taints = v);
        set_field(out, register_node, |api, v| api.register_node = v);
        set_field(out, qps, |api, v| api.qps = v);
        set_field(out, burst, |api, v| api.burst = v);
    }
}

/// Applies a field to the settings of the API server.
fn set_field<T>(out: &mut Outcome<'_>, value: Option<Sourced<T>>, apply: impl FnOnce(&mut Kubernetes, T)) {
    out.set_field(value, |config, value| {
        if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
            apply(api, value);
        }
    });
}

/// The taints of the files, and the one of a cloud provider.
fn all_taints(out: &Outcome<'_>, given: Option<Sourced<Vec<Taint>>>) -> Option<Sourced<Vec<Taint>>> {
    if !out.flags.has_external_cloud_provider() {
        return given;
    }
    let mut all = given.filter(|given| !given.value.is_empty()).unwrap_or_else(|| Sourced {
        value: Vec::new(),
        origin: String::new(),
        field: "registerWithTaints".to_owned(),
    });
    all.value.push(uninitialized());
    let origins = [all.origin.as_str(), "--cloud-provider"];
    all.origin = origins.into_iter().filter(|origin| !origin.is_empty()).collect::<Vec<_>>().join(", ");
    Some(all)
}

/// Keeps pods off a Node until its cloud controller has initialized it (node-and-api.md §9.1).
fn uninitialized() -> Taint {
    Taint {
        key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
        value: "true".to_owned(),
        effect: "NoSchedule".to_owned(),
    }
}
