//! Who may use the kubelet API over the network, and how it shows itself, as the KubeletConfiguration says it
//! (node-and-api.md §6, §7).
//!
//! A file with the authorities of clients turns TLS on, and with it the API may listen on any address. An API server is asked
//! whose token it is and what somebody may do, unless the file says otherwise; without one it is certificates alone.

use std::net::IpAddr;

use keelson_config::{ApiTls, CipherSuite, ControlPlane};

use crate::document::{Reader, Sourced};
use crate::kubelet_file::{KubeletFile, absolute};
use crate::resolve::{Level, Resolver};
use crate::rules;

/// `0.0.0.0`, where a kubelet listens unless it is told otherwise.
const ANYWHERE: &str = "0.0.0.0";
const TLS12: &str = "VersionTLS12";
const TLS13: &str = "VersionTLS13";

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct ApiAccessFile {
    client_ca: Option<Sourced<String>>,
    anonymous: Option<Sourced<bool>>,
    webhook: Option<Sourced<bool>>,
    mode: Option<Sourced<String>>,
    cert: Option<Sourced<String>>,
    key: Option<Sourced<String>>,
    min_version: Option<Sourced<String>>,
    cipher_suites: Option<Sourced<Vec<CipherSuite>>>,
    caches: [Option<Sourced<u64>>; 3],
}

/// A field that says for how long an answer of the API server is remembered, the setting that it becomes, and how.
type Cache = (&'static str, &'static str, fn(&mut ApiTls, u64));

const CACHES: [Cache; 3] = [
    ("authentication.webhook.cacheTTL", "api.tls.tokenCacheMs", |tls, ms| tls.token_cache_ms = ms),
    ("authorization.webhook.cacheAuthorizedTTL", "api.tls.allowedCacheMs", |tls, ms| {
        tls.allowed_cache_ms = ms;
    }),
    ("authorization.webhook.cacheUnauthorizedTTL", "api.tls.deniedCacheMs", |tls, ms| {
        tls.denied_cache_ms = ms;
    }),
];

impl ApiAccessFile {
    /// Reads the fields; without authorities of clients none of them has a meaning yet, and they are left for the note on what
    /// is not acted on.
    pub(crate) fn read(reader: &mut Reader<'_>, folder: &str) -> Self {
        const CLIENT_CA: &str = "authentication.x509.clientCAFile";
        if !reader.is_set(CLIENT_CA) {
            return Self::default();
        }
        let _ = reader.object("authentication") && reader.object("authentication.x509");
        let file =
            |reader: &mut Reader<'_>, field| reader.string(field).map(|p| p.map(|p| absolute(folder, &p)));
        let client_ca = file(reader, CLIENT_CA);
        let (cert, key) = (file(reader, "tlsCertFile"), file(reader, "tlsPrivateKeyFile"));
        let nested = |reader: &mut Reader<'_>, parent, field| {
            if reader.object(parent) { reader.boolean(field) } else { None }
        };
        let anonymous = nested(reader, "authentication.anonymous", "authentication.anonymous.enabled");
        let webhook = nested(reader, "authentication.webhook", "authentication.webhook.enabled");
        let mode = if reader.object("authorization") {
            reader.choice("authorization.mode", &["AlwaysAllow", "Webhook"])
        } else {
            None
        };
        let caches = CACHES.map(|(field, ..)| remembered_for(reader, field));
        let (min_version, cipher_suites) = (min_version(reader), cipher_suites(reader));
        Self { client_ca, anonymous, webhook, mode, cert, key, min_version, cipher_suites, caches }
    }

    /// Checks what belongs together, and takes it.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>) {
        let Self { client_ca, anonymous, webhook, mode, cert, key, min_version, cipher_suites, caches } =
            self;
        let Some(client_ca) = client_ca.filter(|ca| !ca.value.is_empty()) else { return };
        for (one, missing) in [(&cert, &key), (&key, &cert)] {
            if let (Some(given), None) = (one, missing) {
                resolver.refuse(given, "tlsCertFile and tlsPrivateKeyFile are of use only together");
            }
        }
        let asked = matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_));
        let (tokens, reviews) = if asked {
            let is_webhook = |mode: &Sourced<String>| mode.value == "Webhook";
            (webhook.as_ref().is_none_or(|webhook| webhook.value), mode.as_ref().is_none_or(is_webhook))
        } else {
            nobody_is_asked(resolver, webhook, mode.as_ref(), &client_ca);
            (false, false)
        };
        if !reviews && anonymous.as_ref().is_some_and(|anonymous| anonymous.value) {
            resolver.note(
                Level::Warn,
                "authentication.anonymous lets everybody who reaches the kubelet API into every container"
                    .to_owned(),
            );
        }
        let only_tls13 = min_version.as_ref().is_some_and(|version| version.value == TLS13);
        if let Some(suites) = cipher_suites.as_ref().filter(|_| cert.is_none() && !only_tls13) {
            let (tls12, ecdsa) =
                (suites.value.iter().any(|s| !s.is_tls13()), suites.value.iter().any(|s| s.is_ecdsa()));
            if tls12 && !ecdsa {
                resolver.note(
                    Level::Warn,
                    format!(
                        "tlsCipherSuites ({}) has suites of TLS 1.2 for RSA certificates alone, and the certificate that \
                         the agent signs itself has an elliptic curve: clients of TLS 1.2 cannot connect; name a suite \
                         with ECDSA, or set tlsCertFile",
                        suites.origin
                    ),
                );
            }
        }
        resolver.set("api.tls.clientCaFile", Some(client_ca), |c, v| {
            c.api.tls = Some(ApiTls::with_client_ca(v.into()));
            ANYWHERE.clone_into(&mut c.api.address);
        });
        let is_asked_for = matches!(
            &resolver.config.control_plane,
            ControlPlane::Kubernetes(api) if api.certificates.serving
        );
        // Said or not: what is meant follows from the control plane.
        if let Some(tls) = &mut resolver.config.api.tls {
            (tls.tokens, tls.reviews, tls.asked_for) = (tokens, reviews, is_asked_for);
        }
        let mut take = |path: &str, value, apply: fn(&mut ApiTls, String)| {
            resolver.set(path, value, |config, value| {
                if let Some(tls) = &mut config.api.tls {
                    apply(tls, value);
                }
            });
        };
        take("api.tls.certFile", cert, |tls, v| tls.cert_file = Some(v.into()));
        take("api.tls.keyFile", key, |tls, v| tls.key_file = Some(v.into()));
        take("api.tls.onlyTls13", min_version, |tls, v| tls.only_tls13 = v == TLS13);
        for ((_, path, apply), value) in CACHES.into_iter().zip(caches) {
            resolver.set(path, value, |config, value| {
                if let Some(tls) = &mut config.api.tls {
                    apply(tls, value);
                }
            });
        }
        resolver.set("api.tls.cipherSuites", cipher_suites, |config, value| {
            if let Some(tls) = &mut config.api.tls {
                tls.cipher_suites = value;
            }
        });
        resolver.set("api.tls.anonymous", anonymous, |config, value| {
            if let Some(tls) = &mut config.api.tls {
                tls.anonymous = value;
            }
        });
    }
}

/// Without TLS nobody would see a serving certificate, so none is asked for.
pub(crate) fn serving_certificate(resolver: &mut Resolver<'_>) {
    let secured = resolver.config.api.tls.is_some();
    if let ControlPlane::Kubernetes(api) = &mut resolver.config.control_plane
        && api.certificates.serving
        && !secured
    {
        api.certificates.serving = false;
        let text = "serverTLSBootstrap is of use only with authentication.x509.clientCAFile, which is missing: the kubelet API \
                    speaks no TLS, and no certificate is asked for";
        resolver.note(Level::Warn, text);
    }
}

/// Milliseconds that an answer is remembered: zero is the default, and below zero is not at all.
fn remembered_for(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<u64>> {
    let (parent, _) = field.rsplit_once('.')?;
    if !reader.object(parent) {
        return None;
    }
    let text = reader.string(field)?;
    match rules::signed(&text.value) {
        Some(0) => None,
        Some(nanos) => Some(text.map(|_| u64::try_from(nanos.max(0) / 1_000_000).unwrap_or(u64::MAX))),
        None => {
            reader.refuse(&text, rules::NO_DURATION);
            None
        }
    }
}

/// Without an API server nobody can say whose token it is, or what somebody may do: who counts on that is refused.
fn nobody_is_asked(
    resolver: &mut Resolver<'_>,
    webhook: Option<Sourced<bool>>,
    mode: Option<&Sourced<String>>,
    client_ca: &Sourced<String>,
) {
    if let Some(webhook) = webhook.filter(|webhook| webhook.value) {
        resolver.refuse(
            &webhook,
            "no client provided, cannot use webhook authentication: there is no API server that could say whose token it is; \
             write false, or name one with --kubeconfig",
        );
    }
    let asks = "no client provided, cannot use webhook authorization: there is no API server to ask what somebody may do; \
                name one with --kubeconfig, or write AlwaysAllow: then each certificate that \
                authentication.x509.clientCAFile stands behind may do everything";
    match mode {
        Some(mode) if mode.value == "AlwaysAllow" => {}
        Some(mode) => resolver.refuse(mode, asks),
        None => {
            let unset = Sourced {
                value: "Webhook",
                field: "authorization.mode".into(),
                origin: client_ca.origin.clone(),
            };
            resolver.refuse(&unset, asks);
        }
    }
}

/// The lowest version of TLS; empty text is the default (node-and-api.md §2.5). Those that are not spoken are refused: who
/// asks for them has clients that could not connect.
fn min_version(reader: &mut Reader<'_>) -> Option<Sourced<String>> {
    let version = reader.string("tlsMinVersion").filter(|version| !version.value.is_empty())?;
    match version.value.as_str() {
        TLS12 | TLS13 => return Some(version),
        "VersionTLS10" | "VersionTLS11" => reader.refuse(
            &version,
            format!("TLS 1.0 and 1.1 are not spoken here; write {TLS12}, which is the default, or {TLS13}"),
        ),
        _ => reader.refuse(&version, format!("this must be one of: {TLS12}, {TLS13}")),
    }
    None
}

/// The suites that may be spoken. One that is not known is refused with those that are: left out in silence it would be missed
/// by the clients that have no other.
fn cipher_suites(reader: &mut Reader<'_>) -> Option<Sourced<Vec<CipherSuite>>> {
    let names = reader.strings("tlsCipherSuites")?;
    let refused: Vec<&str> =
        names.value.iter().map(String::as_str).filter(|name| CipherSuite::named(name).is_none()).collect();
    if refused.is_empty() {
        return Some(names.map(|names| names.iter().filter_map(|name| CipherSuite::named(name)).collect()));
    }
    let possible = CipherSuite::ALL.map(CipherSuite::name).join(", ");
    let way_out = format!("{} cannot be spoken here; possible are {possible}", refused.join(", "));
    reader.refuse(&names, way_out);
    None
}

/// The addresses and ports of the three listeners.
pub(crate) fn listeners(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let secured = resolver.config.api.tls.is_some();
    if let Some(address) = kubelet.address.clone() {
        match address.value.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() || secured => {}
            Ok(_) => resolver.refuse(
                &address,
                "without authentication.x509.clientCAFile nobody could tell who asks, so the API may listen on loopback only; \
                 set that, or write 127.0.0.1 or ::1",
            ),
            Err(_) => resolver.refuse(&address, "this is not a valid IP address"),
        }
    }
    if let Some(address) = kubelet.healthz_address.clone()
        && address.value.parse::<IpAddr>().is_err()
    {
        resolver.refuse(&address, "this is not a valid IP address");
    }
    resolver.set("api.address", kubelet.address.take(), |c, v| c.api.address = v);
    resolver.set("api.port", kubelet.port.take(), |c, v| c.api.port = v);
    if let Some(off) = kubelet.enable_server.take().filter(|enabled| !enabled.value) {
        resolver.set("api.port", Some(off), |c, _| c.api.port = 0);
    }
    let read_only = kubelet.read_only_port.take();
    if let Some(port) =
        read_only.as_ref().filter(|port| port.value != 0 && port.value == resolver.config.api.port)
    {
        resolver.refuse(port, "the API listens on this port already; the read-only port needs another one");
    }
    resolver.set("api.readOnlyPort", read_only, |c, v| c.api.read_only_port = v);
    resolver.set("api.healthzAddress", kubelet.healthz_address.take(), |c, v| c.api.healthz_address = v);
    let healthz = kubelet.healthz_port.take();
    if let Some(port) =
        healthz.as_ref().filter(|port| port.value != 0 && resolver.config.api.ports().contains(&port.value))
    {
        resolver.refuse(port, "the API listens on this port already; the health port needs another one");
    }
    resolver.set("api.healthzPort", healthz, |c, v| c.api.healthz_port = v);
}

#[cfg(test)]
mod tests {
    use keelson_config::Config;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::document::Document;
    use crate::resolve::{Flags, Host, Inputs, Resolved, resolve};

    const RSA: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";

    fn with(fields: Value) -> Result<Resolved, Vec<String>> {
        let mut root = Map::new();
        root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        root.insert("kind".into(), "KubeletConfiguration".into());
        root.extend(fields.as_object().unwrap().clone());
        let document =
            Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() };
        let host = Host { hostname: "n1".into(), exe_dir: "/usr/libexec".into(), ..Host::default() };
        let inputs = Inputs {
            flags: &Flags::default(),
            kubelet: Some(&document),
            drop_ins: &[],
            keelson: None,
            host: &host,
        };
        resolve(inputs).map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    fn secured(more: Value) -> Value {
        let mut fields = json!({
            "authentication": {"x509": {"clientCAFile": "pki/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    }

    #[test]
    fn authorities_of_clients_turn_tls_on_and_open_the_api() {
        let resolved = with(secured(json!({}))).unwrap();
        let Config { api, provenance, .. } = resolved.config;
        assert_eq!(api.tls, Some(ApiTls::with_client_ca("/etc/k/pki/ca.crt".into())));
        assert_eq!(api.address, "0.0.0.0", "as a kubelet");
        assert!(provenance.contains_key("api.tls.clientCaFile"), "{provenance:?}");
        assert_eq!(resolved.kubelet_configuration["authentication"]["webhook"]["enabled"], false);
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("authentication")),
            "{:?}",
            resolved.notes
        );

        let more = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "a.key", "tlsMinVersion": "VersionTLS13",
            "address": "10.0.0.7", "readOnlyPort": 10255});
        let api = with(secured(more)).unwrap().config.api;
        let tls = api.tls.unwrap();
        assert_eq!((api.address.as_str(), api.read_only_port), ("10.0.0.7", 10255));
        assert_eq!((tls.cert_file, tls.key_file), (Some("/a.crt".into()), Some("/etc/k/a.key".into())));
        assert!(tls.only_tls13 && !tls.anonymous);
    }

    #[test]
    fn what_would_leave_nobody_or_somebody_unknown_in_is_refused() {
        let x509 = json!({"clientCAFile": "/ca"});
        let no_mode = json!({"authentication": {"x509": x509}});
        let webhook_mode = secured(json!({"authorization": {"mode": "Webhook"}}));
        let tokens = secured(json!({"authentication": {"x509": x509, "webhook": {"enabled": true}}}));
        for (fields, what, way_out) in [
            (no_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (webhook_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (tokens, "authentication.webhook.enabled = true", "write false"),
            (secured(json!({"tlsCertFile": "/a"})), r#"tlsCertFile = "/a""#, "only together"),
            (secured(json!({"tlsPrivateKeyFile": "/a"})), r#"tlsPrivateKeyFile = "/a""#, "only together"),
            (
                json!({"authentication": {"x509": x509, "webhook": {"cacheTTL": "2"}}, "authorization": {"mode": "AlwaysAllow"}}),
                r#"cacheTTL = "2""#,
                "no duration",
            ),
            (secured(json!({"tlsMinVersion": "1.3"})), r#"tlsMinVersion = "1.3""#, "VersionTLS13"),
            (
                secured(json!({"tlsMinVersion": "VersionTLS10"})),
                r#"tlsMinVersion = "VersionTLS10""#,
                "TLS 1.0 and 1.1 are not spoken here; write VersionTLS12",
            ),
            (
                secured(json!({"tlsMinVersion": "VersionTLS11"})),
                r#"tlsMinVersion = "VersionTLS11""#,
                "or VersionTLS13",
            ),
            (
                secured(json!({"tlsCipherSuites": [RSA, "TLS_RSA_WITH_RC4_128_SHA", "x"]})),
                r#"tlsCipherSuites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_RC4_128_SHA", "x"]"#,
                "TLS_RSA_WITH_RC4_128_SHA, x cannot be spoken here; possible are TLS_AES_128_GCM_SHA256, ",
            ),
            (secured(json!({"tlsCipherSuites": RSA})), "tlsCipherSuites = ", "a list of texts"),
            (secured(json!({"address": "here"})), r#"address = "here""#, "not a valid IP address"),
            (json!({"authentication": {"x509": {"clientCAFile": 1}}}), "clientCAFile = 1", "quotes"),
        ] {
            let problems = with(fields.clone()).unwrap_err();
            assert_eq!(problems.len(), 1, "{fields}: {problems:?}");
            assert!(problems[0].contains(what) && problems[0].contains(way_out), "{fields}: {problems:?}");
        }
    }

    #[test]
    fn what_is_dangerous_or_shuts_clients_out_is_a_warning() {
        let anonymous =
            json!({"authentication": {"x509": {"clientCAFile": "/ca"}, "anonymous": {"enabled": true}}});
        for (more, text) in [
            (anonymous, "everybody who reaches the kubelet API"),
            (json!({"tlsCipherSuites": [RSA, "TLS_AES_128_GCM_SHA256"]}), "name a suite with ECDSA"),
        ] {
            let resolved = with(secured(more)).unwrap();
            assert!(resolved.notes.iter().any(|n| n.level == Level::Warn && n.text.contains(text)), "{text}");
        }
    }

    #[test]
    fn suites_and_the_lowest_version_of_tls_arrive_and_nothing_set_is_all_of_them() {
        let both = [CipherSuite::RsaAes128Gcm, CipherSuite::EcdsaChacha20];
        let old_form = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305";
        let pair = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "/a.key", "tlsCipherSuites": [RSA]});
        for (more, suites, only_tls13) in [
            (json!({}), &[][..], false),
            (json!({"tlsCipherSuites": [], "tlsMinVersion": ""}), &[], false),
            (json!({"tlsMinVersion": "VersionTLS12"}), &[], false),
            (json!({"tlsCipherSuites": [RSA, old_form]}), &both, false),
            (pair, &both[..1], false),
            (json!({"tlsCipherSuites": [RSA], "tlsMinVersion": "VersionTLS13"}), &both[..1], true),
            (json!({"tlsCipherSuites": ["TLS_AES_128_GCM_SHA256"]}), &[CipherSuite::Aes128Gcm], false),
        ] {
            let resolved = with(secured(more.clone())).unwrap();
            assert!(
                resolved.notes.iter().all(|note| !note.text.contains("tls")),
                "{more}: {:?}",
                resolved.notes
            );
            let tls = resolved.config.api.tls.unwrap();
            assert_eq!((tls.cipher_suites.as_slice(), tls.only_tls13), (suites, only_tls13), "{more}");
            let shown = resolved.config.provenance.contains_key("api.tls.cipherSuites");
            assert_eq!(shown, more.get("tlsCipherSuites").is_some(), "{more}");
        }
    }

    #[test]
    fn with_an_api_server_it_is_asked_whose_token_it_is_and_what_somebody_may_do() {
        let with_server = |fields: Value| {
            let mut root = fields.as_object().unwrap().clone();
            root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
            root.insert("kind".into(), "KubeletConfiguration".into());
            let document =
                Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() };
            let mut flags = Flags::default();
            flags.others.insert("kubeconfig", "/etc/kubernetes/kubelet.conf".to_owned());
            let host = Host { hostname: "n".into(), ..Host::default() };
            let inputs =
                Inputs { flags: &flags, kubelet: Some(&document), drop_ins: &[], keelson: None, host: &host };
            resolve(inputs).unwrap().config.api.tls.unwrap()
        };
        let x509 = json!({"clientCAFile": "/ca"});
        for (authentication, mode, tokens, reviews) in [
            (json!({"x509": x509}), None, true, true),
            (json!({"x509": x509, "webhook": {"enabled": true}}), Some("Webhook"), true, true),
            (json!({"x509": x509, "webhook": {"enabled": false}}), Some("AlwaysAllow"), false, false),
        ] {
            let mut fields = json!({"authentication": authentication});
            if let Some(mode) = mode {
                fields["authorization"] = json!({"mode": mode});
            }
            let tls = with_server(fields.clone());
            assert_eq!((tls.tokens, tls.reviews), (tokens, reviews), "{fields}");
        }
    }

    #[test]
    fn for_how_long_answers_are_remembered_is_a_setting_and_zero_is_the_default() {
        let of = |token: &str, allowed: &str, denied: &str| {
            let resolved = with(json!({
                "authentication": {"x509": {"clientCAFile": "/ca"}, "webhook": {"enabled": false, "cacheTTL": token}},
                "authorization": {"mode": "AlwaysAllow",
                    "webhook": {"cacheAuthorizedTTL": allowed, "cacheUnauthorizedTTL": denied}},
            }))
            .unwrap();
            let tls = resolved.config.api.tls.unwrap();
            (tls.token_cache_ms, tls.allowed_cache_ms, tls.denied_cache_ms)
        };
        assert_eq!(of("0s", "0", "0s"), (120_000, 300_000, 30_000));
        assert_eq!(of("1m", "1.5s", "40ms"), (60_000, 1_500, 40));
        assert_eq!(of("-1s", "1h", "-1ns"), (0, 3_600_000, 0), "not at all");
    }

    #[test]
    fn without_authorities_of_clients_the_fields_are_not_acted_on() {
        for fields in [
            json!({"authentication": {"anonymous": {"enabled": false}}, "tlsCertFile": "/a"}),
            json!({"authentication": {"x509": {"clientCAFile": null}}, "tlsCertFile": "/a"}),
        ] {
            let resolved = with(fields).unwrap();
            assert_eq!((resolved.config.api.tls, resolved.config.api.address.as_str()), (None, "127.0.0.1"));
            let told = |name| resolved.notes.iter().any(|n| n.level == Level::Info && n.text.contains(name));
            assert!(told("authentication") && told("tlsCertFile"), "{:?}", resolved.notes);
        }
    }
}
