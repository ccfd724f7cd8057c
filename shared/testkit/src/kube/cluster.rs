//! The objects that kubeadm creates in a cluster and the work of its controller manager, as far as nodes need them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rcgen::CertificateSigningRequestParams;
use serde_json::{Value, json};

use super::authority::{decoded, encoded, refused};
use super::{KubeApiServer, START_LIMIT};

/// How long a signed certificate is valid, as with kube-controller-manager.
const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
/// The group of clients with a bootstrap token made by kubeadm.
const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";
const RBAC: &str = "rbac.authorization.k8s.io";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

impl KubeApiServer {
    /// Makes a namespace, unless it is there, with what controllers put into each: the service account `default` and
    /// the authority's certificate, in the ConfigMap `kube-root-ca.crt`. Pods can be made then.
    pub fn namespace(&self, name: &str) -> anyhow::Result<()> {
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}},
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "kube-root-ca.crt", "namespace": name},
                "data": {"ca.crt": self.authority.pem()},
            },
        ]});
        // The server makes some namespaces itself, perhaps at this moment.
        let deadline = Instant::now() + START_LIMIT;
        while let Err(error) = self.apply(&objects) {
            if Instant::now() >= deadline {
                return Err(error.context(format!("cannot make the namespace {name}")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// A kubeconfig with a new bootstrap token, as `kubeadm token create` makes it, with the rights that kubeadm gives:
    /// its bearer may ask for a node's certificate and look at nodes.
    ///
    /// Its certificate requests are not approved automatically; see [`KubeApiServer::sign_csr`].
    pub fn bootstrap_kubeconfig(&self) -> anyhow::Result<PathBuf> {
        let random = |length: usize| -> String {
            std::iter::repeat_with(|| fastrand::char('a'..='z')).take(length).collect()
        };
        let (id, secret) = (random(6), random(16));
        self.namespace("kube-system")?;
        self.apply(&bootstrap_objects(&id, &secret))?;
        self.write_kubeconfig(self.address, &json!({"token": format!("{id}.{secret}")}))
    }

    /// Approves a CertificateSigningRequest and signs it for a year, as kube-controller-manager would; fails with what
    /// that would refuse.
    pub fn sign_csr(&self, name: &str) -> anyhow::Result<()> {
        self.sign_csr_for(name, VALID)
    }

    /// Like [`KubeApiServer::sign_csr`], with another period of validity.
    pub fn sign_csr_for(&self, name: &str, valid: Duration) -> anyhow::Result<()> {
        self.kubectl_good(&["certificate", "approve", name])?;
        let mut request = self.kubectl_json(&["get", "csr", name])?;
        let certificate =
            self.certificate_for(&request["spec"], valid).with_context(|| format!("CSR {name}"))?;
        request["status"]["certificate"] = json!(encoded(&certificate));
        let status = format!("{REQUESTS}/{name}/status");
        self.kubectl_with(&["replace", "--raw", &status, "-f", "-"], &request)
    }

    /// The certificate that the `spec` of a CertificateSigningRequest asks for.
    fn certificate_for(&self, spec: &Value, valid: Duration) -> anyhow::Result<String> {
        let text = |field: &str| spec[field].as_str().with_context(|| format!("no {field} in {spec}"));
        let usages: Vec<String> = serde_json::from_value(spec["usages"].clone()).context("no usages")?;
        let request = CertificateSigningRequestParams::from_pem(&decoded(text("request")?)?)?;
        if let Some(reason) = refused(text("signerName")?, &request.params, &usages) {
            bail!("is not signed: {reason}");
        }
        self.authority.sign(request, &usages, valid)
    }
}

/// The secret of a bootstrap token, and what its bearers and nodes may, under kubeadm's names.
fn bootstrap_objects(id: &str, secret: &str) -> Value {
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": format!("bootstrap-token-{id}"), "namespace": "kube-system"},
        "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": id,
            "token-secret": secret,
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "true",
            "auth-extra-groups": BOOTSTRAPPERS,
        },
    });
    let role = json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "ClusterRole",
        "metadata": {"name": "kubeadm:get-nodes"},
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}],
    });
    let approval = "system:certificates.k8s.io:certificatesigningrequests";
    let bindings = [
        ("kubeadm:get-nodes", "kubeadm:get-nodes".to_owned(), BOOTSTRAPPERS),
        ("kubeadm:kubelet-bootstrap", "system:node-bootstrapper".to_owned(), BOOTSTRAPPERS),
        ("kubeadm:node-autoapprove-bootstrap", format!("{approval}:nodeclient"), BOOTSTRAPPERS),
        (
            "kubeadm:node-autoapprove-certificate-rotation",
            format!("{approval}:selfnodeclient"),
            "system:nodes",
        ),
    ];
    let bindings = bindings.into_iter().map(|(name, role, group)| {
        json!({
            "apiVersion": format!("{RBAC}/v1"),
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": RBAC, "kind": "Group", "name": group}],
        })
    });
    let items: Vec<Value> = [secret, role].into_iter().chain(bindings).collect();
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}
