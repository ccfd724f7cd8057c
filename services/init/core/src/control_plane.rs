//! The control plane named in the KeelsonConfiguration (architecture §6, §7).

use std::time::Duration;

use keelson_config::{Certificates, ControlPlane, Etcd, EtcdEndpoint, Kubernetes, ObjectsBy, Taint};

use crate::document::{Reader, Sourced};
use crate::kubelet_file::{KubeletFile, absolute};
use crate::node_ip;
use crate::offline::OfflineFile;
use crate::resolve::{Level, Resolver, millis};

/// The limits of the trial period of an assigned configuration. A running service is polled every ten seconds.
const TRIAL: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct ControlPlaneFile {
    name: Option<Sourced<String>>,
    endpoints: Option<Sourced<Vec<String>>>,
    ca: Option<Sourced<String>>,
    cert: Option<Sourced<String>>,
    key: Option<Sourced<String>>,
    user: Option<Sourced<String>>,
    password: Option<Sourced<String>>,
    trial_period: Option<Sourced<Duration>>,
    offline: OfflineFile,
}

impl ControlPlaneFile {
    /// Reads `controlPlane`, `etcd`, `nodeConfiguration` and `offline`; relative paths start from `folder`.
    pub(crate) fn read(reader: &mut Reader<'_>, folder: &str) -> Self {
        let name = reader.choice("controlPlane", &["none", "kubernetes", "etcd"]);
        let mut own = Self { name, offline: OfflineFile::read(reader), ..Self::default() };
        if reader.object("etcd") {
            own.endpoints = reader.strings("etcd.endpoints");
            let mut file = |field| reader.string(field).map(|path| path.map(|path| absolute(folder, &path)));
            own.ca = file("etcd.caFile");
            own.cert = file("etcd.certFile");
            own.key = file("etcd.keyFile");
            own.password = file("etcd.passwordFile");
            own.user = reader.string("etcd.user");
        }
        if reader.object("nodeConfiguration") {
            own.trial_period = reader.duration("nodeConfiguration.trialPeriod", TRIAL);
        }
        own
    }

    /// Checks fields that depend on each other and applies them, with those of the KubeletConfiguration for the control
    /// plane.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
        let Self { name, endpoints, ca, cert, key, user, password, trial_period, offline } = self;
        offline.resolve(resolver);
        resolver.set("nodeConfiguration.trialPeriodMs", trial_period, |c, v| {
            c.node_configuration.trial_period_ms = millis(v);
        });
        let is_kubernetes = kubernetes(resolver, name.as_ref(), kubelet);
        // Only the API server signs certificates.
        let unsupported_fields = [kubelet.rotate_certificates.take(), kubelet.serving_certificate.take()];
        kubelet.unsupported.extend(unsupported_fields.into_iter().flatten().map(|given| given.field));
        if is_kubernetes {
            return;
        }
        let is_etcd = name.as_ref().is_some_and(|name| name.value == "etcd");
        let Some(endpoints) = endpoints.filter(|_| is_etcd) else {
            if let Some(name) = name.filter(|_| is_etcd) {
                resolver.refuse(&name, "etcd.endpoints lists the members of etcd and is missing");
            }
            return;
        };
        for endpoint in endpoints.value.iter().filter(|text| EtcdEndpoint::parse(text).is_none()) {
            resolver.refuse(&endpoints, format!("{endpoint:?} {}", EtcdEndpoint::RULE));
        }
        if endpoints.value.is_empty() {
            resolver.refuse(&endpoints, "list at least one member of etcd");
        }
        let secure = |text: &String| EtcdEndpoint::parse(text).is_some_and(|endpoint| endpoint.secure);
        if endpoints.value.iter().any(secure) && ca.is_none() {
            resolver.refuse(&endpoints, "members with https need etcd.caFile, the CA of their certificates");
        }
        for (one, field, other, missing) in [
            (&cert, "etcd.certFile", &key, "etcd.keyFile"),
            (&key, "etcd.keyFile", &cert, "etcd.certFile"),
            (&user, "etcd.user", &password, "etcd.passwordFile"),
            (&password, "etcd.passwordFile", &user, "etcd.user"),
        ] {
            if let (Some(given), None) = (one, other) {
                resolver.refuse(given, format!("{field} works only with {missing}, which is missing"));
            }
        }
        resolver.set("controlPlane", name, |_, _| ());
        resolver.set("controlPlane.etcd.endpoints", Some(endpoints), |c, v| {
            c.control_plane = ControlPlane::Etcd(Etcd::plain(v));
        });
        let mut text = |path: &str, value, apply: fn(&mut Etcd, String)| take(resolver, path, value, apply);
        text("controlPlane.etcd.caFile", ca, |etcd, v| etcd.ca_file = Some(v.into()));
        text("controlPlane.etcd.certFile", cert, |etcd, v| etcd.cert_file = Some(v.into()));
        text("controlPlane.etcd.keyFile", key, |etcd, v| etcd.key_file = Some(v.into()));
        text("controlPlane.etcd.user", user, |etcd, v| etcd.user = Some(v));
        text("controlPlane.etcd.passwordFile", password, |etcd, v| etcd.password_file = Some(v.into()));
        let lease = kubelet.lease_seconds.take();
        take(resolver, "controlPlane.etcd.leaseSeconds", lease, |etcd, v| etcd.lease_seconds = v);
    }
}

/// Makes the Kubernetes API the control plane if `--kubeconfig` is given and the KeelsonConfiguration does not choose
/// another. Returns whether the control plane is decided.
fn kubernetes(
    resolver: &mut Resolver<'_>,
    name: Option<&Sourced<String>>,
    kubelet: &mut KubeletFile,
) -> bool {
    let (flags, host) = (resolver.flags, resolver.host);
    let given = |flag: &'static str| {
        let path = flags.others.get(flag).filter(|path| !path.is_empty())?;
        let name = format!("--{flag}");
        Some(Sourced { value: absolute(&host.cwd, path), origin: name.clone(), field: name })
    };
    let (kubeconfig, bootstrap) = (given("kubeconfig"), given("bootstrap-kubeconfig"));
    let chosen = name.map(|name| name.value.as_str());
    match (kubeconfig, chosen) {
        (Some(kubeconfig), None | Some("kubernetes")) => {
            resolver.set("controlPlane.kubernetes.kubeconfig", Some(kubeconfig), |c, v| {
                c.control_plane = ControlPlane::Kubernetes(Kubernetes::of(v.into()));
            });
            resolver.set("controlPlane.kubernetes.leaseSeconds", kubelet.lease_seconds.take(), |c, v| {
                if let ControlPlane::Kubernetes(api) = &mut c.control_plane {
                    api.lease_seconds = v;
                }
            });
            resolver.set("controlPlane.kubernetes.objectsBy", kubelet.objects_by.take(), |c, v| {
                if let ControlPlane::Kubernetes(api) = &mut c.control_plane {
                    api.objects_by = match v.as_str() {
                        "Get" => ObjectsBy::Get,
                        "Cache" => ObjectsBy::Cache,
                        // The reader accepts no other value.
                        _ => ObjectsBy::Watch,
                    };
                }
            });
            let mut set_node_field = |path: &str, value, apply: fn(&mut Kubernetes, String)| {
                resolver.set(path, value, |c, v| {
                    if let ControlPlane::Kubernetes(api) = &mut c.control_plane {
                        apply(api, v);
                    }
                });
            };
            set_node_field("controlPlane.kubernetes.providerId", kubelet.provider_id.take(), |api, v| {
                api.provider_id = Some(v);
            });
            resolver.set(
                "controlPlane.kubernetes.taints",
                taints(resolver, kubelet.taints.take()),
                |c, v| {
                    if let ControlPlane::Kubernetes(api) = &mut c.control_plane {
                        api.taints = v;
                    }
                },
            );
            certificates(resolver, bootstrap, given("cert-dir"), kubelet);
            resolver.set("controlPlane.kubernetes.registerNode", kubelet.register_node.take(), |c, v| {
                if let ControlPlane::Kubernetes(api) = &mut c.control_plane {
                    api.register_node = v;
                }
            });
            true
        }
        (Some(kubeconfig), Some("etcd")) => {
            resolver.refuse(
                &kubeconfig,
                "controlPlane is etcd, and a node has one control plane; remove one of the two",
            );
            true
        }
        (Some(_), _) => {
            resolver.note(Level::Info, "controlPlane is none, so --kubeconfig is ignored");
            true
        }
        (None, Some("kubernetes")) => {
            if let Some(name) = name {
                resolver.refuse(name, "--kubeconfig, which tells how to reach the API server, is missing");
            }
            true
        }
        (None, _) => {
            if let Some(bootstrap) = bootstrap {
                resolver.refuse(&bootstrap, "this flag works only with --kubeconfig, which is missing");
            }
            false
        }
    }
}

/// How the node of an API server gets its certificates (node-and-api.md §6).
fn certificates(
    resolver: &mut Resolver<'_>,
    bootstrap: Option<Sourced<String>>,
    dir: Option<Sourced<String>>,
    kubelet: &mut KubeletFile,
) {
    set(resolver, "controlPlane.kubernetes.certificates.bootstrapKubeconfig", bootstrap, |own, v| {
        own.bootstrap_kubeconfig = Some(v.into());
    });
    set(resolver, "controlPlane.kubernetes.certificates.dir", dir, |own, v| own.dir = v.into());
    let (rotate, serving) = (kubelet.rotate_certificates.take(), kubelet.serving_certificate.take());
    set(resolver, "controlPlane.kubernetes.certificates.rotate", rotate, |own, v| own.rotate = v);
    set(resolver, "controlPlane.kubernetes.certificates.serving", serving, |own, v| own.serving = v);
}

fn set<T>(
    resolver: &mut Resolver<'_>,
    path: &str,
    value: Option<Sourced<T>>,
    apply: impl FnOnce(&mut Certificates, T),
) {
    resolver.set(path, value, |config, value| {
        if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
            apply(&mut api.certificates, value);
        }
    });
}

/// The taints of the files, and the one of a cloud provider.
fn taints(resolver: &Resolver<'_>, given: Option<Sourced<Vec<Taint>>>) -> Option<Sourced<Vec<Taint>>> {
    if !node_ip::has_external_cloud_provider(resolver.flags) {
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

fn take<T>(
    resolver: &mut Resolver<'_>,
    path: &str,
    value: Option<Sourced<T>>,
    apply: impl FnOnce(&mut Etcd, T),
) {
    resolver.set(path, value, |config, value| {
        if let ControlPlane::Etcd(etcd) = &mut config.control_plane {
            apply(etcd, value);
        }
    });
}

#[cfg(test)]
#[path = "control_plane_tests.rs"]
mod tests;
