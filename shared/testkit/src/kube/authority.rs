//! The cluster's CA: certificates, kubeconfigs and their files.

use std::fmt;
use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use serde_json::{Value, json};

/// Clocks may differ by so much.
const BACKDATED: Duration = Duration::from_secs(300);

/// A certificate and its key, both PEM.
pub(super) struct Identity {
    pub(super) cert: String,
    pub(super) key: String,
}

/// Signs certificates.
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    pub(super) fn new() -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = subject("kubernetes", &[])?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        Ok(Self { issuer })
    }

    /// Its own certificate, PEM.
    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A server with these names and addresses.
    pub(super) fn server(&self, names: &[&str]) -> anyhow::Result<Identity> {
        let mut params =
            CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())?;
        params.distinguished_name = subject("kube-apiserver", &[])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.identity(params)
    }

    /// A client that is `user` in at most two `groups`.
    pub(super) fn client(&self, user: &str, groups: &[&str]) -> anyhow::Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(user, groups)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.identity(params)
    }

    fn identity(&self, mut params: CertificateParams) -> anyhow::Result<Identity> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Identity { cert, key: key.serialize_pem() })
    }

    /// Signs a request, with the requested usages as Kubernetes names them. Returns the certificate, PEM.
    pub(super) fn sign(
        &self,
        mut request: CertificateSigningRequestParams,
        usages: &[String],
        valid: Duration,
    ) -> anyhow::Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
        let epoch = date_time_ymd(1970, 1, 1);
        let params = &mut request.params;
        params.not_before = epoch + now - BACKDATED;
        params.not_after = epoch + now + valid;
        (params.key_usages, params.extended_key_usages) = purposes(usages)?;
        params.is_ca = IsCa::NoCa;
        Ok(request.signed_by(&self.issuer)?.pem())
    }
}

/// User and groups, as the API server takes them from a certificate.
fn subject(user: &str, groups: &[&str]) -> anyhow::Result<DistinguishedName> {
    /// The same attribute under another key: each key is there once.
    const ORGANISATION: [u64; 4] = [2, 5, 4, 10];
    let kinds = [DnType::OrganizationName, DnType::CustomDnType(ORGANISATION.to_vec())];
    if groups.len() > kinds.len() {
        bail!("a certificate for more than two groups is not made here: {}", groups.join(", "));
    }
    let mut name = DistinguishedName::new();
    for (kind, group) in kinds.into_iter().zip(groups) {
        name.push(kind, *group);
    }
    name.push(DnType::CommonName, user);
    Ok(name)
}

/// Key usages and extended ones of their names in a CertificateSigningRequest's `spec.usages`.
fn purposes(usages: &[String]) -> anyhow::Result<(Vec<KeyUsagePurpose>, Vec<ExtendedKeyUsagePurpose>)> {
    let (mut plain, mut extended) = (Vec::new(), Vec::new());
    for usage in usages {
        match usage.as_str() {
            "digital signature" => plain.push(KeyUsagePurpose::DigitalSignature),
            "key encipherment" => plain.push(KeyUsagePurpose::KeyEncipherment),
            "client auth" => extended.push(ExtendedKeyUsagePurpose::ClientAuth),
            "server auth" => extended.push(ExtendedKeyUsagePurpose::ServerAuth),
            _ => bail!("no node asks for the usage {usage:?}"),
        }
    }
    Ok((plain, extended))
}

/// Why one of the three signers of the API server's and the kubelets' certificates refuses a request; `None` if it does not.
///
/// Rules: "Kubernetes signers" in the documentation of certificate signing requests; node-and-api.md §6.3, §6.4.
pub(super) fn refused(signer: &str, request: &CertificateParams, usages: &[String]) -> Option<String> {
    let optional = |usage: &&str| *usage != "key encipherment";
    let mut asked: Vec<&str> = usages.iter().map(String::as_str).filter(optional).collect();
    asked.sort_unstable();
    let exactly = |wanted: [&str; 2]| (asked != wanted).then(|| format!("the usages are {usages:?}"));
    let sans = &request.subject_alt_names;
    match signer {
        "kubernetes.io/kube-apiserver-client" => {
            (!asked.contains(&"client auth")).then(|| format!("the usages are {usages:?}"))
        }
        "kubernetes.io/kube-apiserver-client-kubelet" => not_of_node(request)
            .or_else(|| (!sans.is_empty()).then(|| "a client has other names".to_owned()))
            .or_else(|| exactly(["client auth", "digital signature"])),
        "kubernetes.io/kubelet-serving" => {
            let of_host = |name: &SanType| matches!(name, SanType::DnsName(_) | SanType::IpAddress(_));
            not_of_node(request)
                .or_else(|| sans.is_empty().then(|| "a server has no name".to_owned()))
                .or_else(|| (!sans.iter().all(of_host)).then(|| "a name is of no host".to_owned()))
                .or_else(|| exactly(["digital signature", "server auth"]))
        }
        _ => Some(format!("the signer {signer} is unknown")),
    }
}

fn not_of_node(request: &CertificateParams) -> Option<String> {
    let text = |kind: &DnType| request.distinguished_name.get(kind).map(text_of).unwrap_or_default();
    let (user, group) = (text(&DnType::CommonName), text(&DnType::OrganizationName));
    let of_node = user.strip_prefix("system:node:").is_some_and(|node| !node.is_empty());
    (!of_node || group != "system:nodes").then(|| format!("the subject is {user} in {group}"))
}

fn text_of(value: &rcgen::DnValue) -> String {
    match value {
        rcgen::DnValue::Utf8String(text) => text.clone(),
        rcgen::DnValue::PrintableString(text) => text.as_str().to_owned(),
        // No tool of Kubernetes writes the others.
        other => format!("{other:?}"),
    }
}

/// A kubeconfig with all that a client needs; JSON, which is YAML, too.
pub(super) fn kubeconfig(server: &str, ca: &str, user: &Value) -> String {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": encoded(ca)}}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    });
    format!("{config:#}\n")
}

/// A user of a kubeconfig, with a certificate.
pub(super) fn certified(identity: &Identity) -> Value {
    json!({
        "client-certificate-data": encoded(&identity.cert),
        "client-key-data": encoded(&identity.key),
    })
}

/// Base64, as Kubernetes has bytes in its objects and files.
pub(super) fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

/// The text behind [`encoded`].
pub(super) fn decoded(text: &str) -> anyhow::Result<String> {
    String::from_utf8(STANDARD.decode(text).context("no base64")?).context("no text")
}

/// Writes a file that holds a secret: its owner alone reads it.
pub(super) fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let open = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    open.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
    const SERVING: &str = "kubernetes.io/kubelet-serving";

    /// Signer, user, groups, other names, usages, and a part of the reason for a refusal.
    type Case = (
        &'static str,
        &'static str,
        &'static [&'static str],
        &'static [&'static str],
        &'static [&'static str],
        Option<&'static str>,
    );

    fn request(user: &str, groups: &[&str], names: &[&str]) -> CertificateSigningRequestParams {
        let mut params =
            CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = subject(user, groups).unwrap();
        let key = KeyPair::generate().unwrap();
        let pem = params.serialize_request(&key).unwrap().pem().unwrap();
        CertificateSigningRequestParams::from_pem(&pem).unwrap()
    }

    fn usages(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn signers_refuse_non_node_subjects_and_other_usages() {
        let client: &[_] = &["digital signature", "client auth"];
        let with_rsa: &[_] = &["key encipherment", "digital signature", "client auth"];
        let server: &[_] = &["digital signature", "server auth"];
        let (node, nodes): (_, &[_]) = ("system:node:a", &["system:nodes"]);
        let cases: [Case; 13] = [
            (CLIENT, node, nodes, &[], client, None),
            (CLIENT, node, nodes, &[], with_rsa, None),
            (CLIENT, node, nodes, &[], server, Some("usages")),
            (CLIENT, node, nodes, &["a"], client, Some("other names")),
            (CLIENT, node, &[], &[], client, Some("subject")),
            (CLIENT, node, &["system:masters"], &[], client, Some("subject")),
            (CLIENT, "system:node:", nodes, &[], client, Some("subject")),
            (CLIENT, "a", nodes, &[], client, Some("subject")),
            (SERVING, node, nodes, &["a", "10.0.0.1"], server, None),
            (SERVING, node, nodes, &[], server, Some("no name")),
            (SERVING, node, nodes, &["a"], client, Some("usages")),
            ("kubernetes.io/kube-apiserver-client", "a", &[], &[], client, None),
            ("example.com/own", node, nodes, &[], client, Some("is unknown")),
        ];
        for (signer, user, groups, names, asked, expected) in cases {
            let request = request(user, groups, names);
            let refused = refused(signer, &request.params, &usages(asked));
            let good = match (&refused, expected) {
                (None, None) => true,
                (Some(reason), Some(part)) => reason.contains(part),
                _ => false,
            };
            assert!(good, "{signer} {user} {groups:?} {names:?} {asked:?}: {refused:?}");
        }
    }

    #[test]
    fn a_csr_is_signed_and_an_unknown_usage_is_an_error() {
        let authority = Authority::new().unwrap();
        let day = Duration::from_secs(86_400);
        let ask = || request("system:node:a", &["system:nodes"], &[]);
        let pem = authority.sign(ask(), &usages(&["digital signature", "client auth"]), day).unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE-----"), "{pem}");
        assert!(authority.sign(ask(), &usages(&["code signing"]), day).is_err());
    }

    #[test]
    fn a_certificate_names_at_most_two_groups() {
        let authority = Authority::new().unwrap();
        assert!(authority.client("a", &["b", "c"]).is_ok());
        assert!(authority.client("a", &["b", "c", "d"]).is_err());
    }
}
