use keelson_config::{ApiTls, CipherSuite, Config, KeyExchange};
use serde_json::{Map, Value, json};

use crate::document::Document;
use crate::inputs::{Flags, Host, Inputs};
use crate::outcome::Level;
use crate::resolve::{Resolved, resolve};
use crate::testing::assert_refused;

const RSA: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";

fn with(fields: Value) -> Result<Resolved, Vec<String>> {
    let mut root = Map::new();
    root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
    root.insert("kind".into(), "KubeletConfiguration".into());
    root.extend(fields.as_object().unwrap().clone());
    let document = Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() };
    let host = Host { hostname: "n1".into(), exe_dir: "/usr/libexec".into(), ..Host::default() };
    let inputs = Inputs {
        flags: &Flags::default(),
        kubelet: Some(&document),
        drop_ins: &[],
        keelson: None,
        host: &host,
    };
    resolve(inputs).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

fn with_tls(more: Value) -> Value {
    let mut fields = json!({
        "authentication": {"x509": {"clientCAFile": "pki/ca.crt"}},
        "authorization": {"mode": "AlwaysAllow"},
    });
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

#[test]
fn client_ca_enables_tls_and_the_default_listen_address() {
    let resolved = with(with_tls(json!({}))).unwrap();
    let Config { api, provenance, .. } = resolved.config;
    assert_eq!(api.tls, Some(ApiTls::with_client_ca("/etc/k/pki/ca.crt".into())));
    assert_eq!(api.address, "0.0.0.0", "the default of a kubelet");
    assert!(provenance.contains_key("api.tls.clientCaFile"), "{provenance:?}");
    assert_eq!(resolved.kubelet_configuration["authentication"]["webhook"]["enabled"], false);
    assert!(resolved.notes.iter().all(|note| !note.text.contains("authentication")), "{:?}", resolved.notes);

    let more = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "a.key", "tlsMinVersion": "VersionTLS13",
        "address": "10.0.0.7", "readOnlyPort": 10255});
    let api = with(with_tls(more)).unwrap().config.api;
    let tls = api.tls.unwrap();
    assert_eq!((api.address.as_str(), api.read_only_port), ("10.0.0.7", 10255));
    assert_eq!((tls.cert_file, tls.key_file), (Some("/a.crt".into()), Some("/etc/k/a.key".into())));
    assert!(tls.only_tls13 && !tls.anonymous);
}

#[test]
fn invalid_authentication_authorization_and_tls_settings_are_refused() {
    let x509 = json!({"clientCAFile": "/ca"});
    let no_mode = json!({"authentication": {"x509": x509}});
    let webhook_mode = with_tls(json!({"authorization": {"mode": "Webhook"}}));
    let tokens = with_tls(json!({"authentication": {"x509": x509, "webhook": {"enabled": true}}}));
    for (fields, what, remedy) in [
        (no_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
        (webhook_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
        (tokens, "authentication.webhook.enabled = true", "write false"),
        (with_tls(json!({"tlsCertFile": "/a"})), r#"tlsCertFile = "/a""#, "only together"),
        (with_tls(json!({"tlsPrivateKeyFile": "/a"})), r#"tlsPrivateKeyFile = "/a""#, "only together"),
        (
            json!({"authentication": {"x509": x509, "webhook": {"cacheTTL": "2"}}, "authorization": {"mode": "AlwaysAllow"}}),
            r#"cacheTTL = "2""#,
            "not a duration",
        ),
        (with_tls(json!({"tlsMinVersion": "1.3"})), r#"tlsMinVersion = "1.3""#, "VersionTLS13"),
        (
            with_tls(json!({"tlsMinVersion": "VersionTLS10"})),
            r#"tlsMinVersion = "VersionTLS10""#,
            "TLS 1.0 and 1.1 are not supported; write VersionTLS12",
        ),
        (
            with_tls(json!({"tlsMinVersion": "VersionTLS11"})),
            r#"tlsMinVersion = "VersionTLS11""#,
            "or VersionTLS13",
        ),
        (
            with_tls(
                json!({"tlsCipherSuites": [RSA, "TLS_RSA_WITH_RC4_128_SHA", "TLS_RSA_WITH_AES_128_CBC_SHA"]}),
            ),
            r#"tlsCipherSuites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_RC4_128_SHA", "#,
            "TLS_RSA_WITH_RC4_128_SHA, TLS_RSA_WITH_AES_128_CBC_SHA are not supported; supported are TLS_AES_128",
        ),
        (
            with_tls(json!({"tlsCipherSuites": [RSA, "x"]})),
            r#"tlsCipherSuites[1] = "x""#,
            "no such cipher suite",
        ),
        (with_tls(json!({"tlsCipherSuites": RSA})), "tlsCipherSuites = ", "a list"),
        (
            with_tls(json!({"tlsCurvePreferences": [4588, 29, 25]})),
            "tlsCurvePreferences = [4588, 29, 25]",
            "X25519MLKEM768 (4588), P-521 (25) are not supported; supported are 23 (P-256), 24 (P-384), 29 (X25519)",
        ),
        (with_tls(json!({"tlsCurvePreferences": [22]})), "tlsCurvePreferences[0] = 22", "a known curve"),
        (
            json!({"tlsCertFile": "/a", "tlsPrivateKeyFile": "/b", "authorization": {"mode": "AlwaysAllow"}}),
            "authentication = false (k.yaml",
            "no authentication method configured",
        ),
        (with_tls(json!({"address": "here"})), r#"address = "here""#, "not a valid IP address"),
        (json!({"authentication": {"x509": {"clientCAFile": 1}}}), "clientCAFile = 1", "quotes"),
        (json!({"tlsCertFile": "/a"}), r#"tlsCertFile = "/a""#, "only together"),
    ] {
        let errors = with(fields.clone()).unwrap_err();
        assert_eq!(errors.len(), 1, "{fields}: {errors:?}");
        assert!(errors[0].contains(what) && errors[0].contains(remedy), "{fields}: {errors:?}");
    }
}

#[test]
fn open_anonymous_access_and_rsa_only_cipher_suites_cause_a_warning() {
    let anonymous =
        json!({"authentication": {"x509": {"clientCAFile": "/ca"}, "anonymous": {"enabled": true}}});
    for (more, text) in [
        (anonymous, "everybody who reaches the kubelet API"),
        (json!({"tlsCipherSuites": [RSA, "TLS_AES_128_GCM_SHA256"]}), "name a suite with ECDSA"),
    ] {
        let resolved = with(with_tls(more)).unwrap();
        assert!(resolved.notes.iter().any(|n| n.level == Level::Warn && n.text.contains(text)), "{text}");
    }
}

#[test]
fn cipher_suites_and_min_tls_version_are_applied_and_default_to_all() {
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
        (json!({"tlsCurvePreferences": []}), &[], false),
    ] {
        let resolved = with(with_tls(more.clone())).unwrap();
        assert!(resolved.notes.iter().all(|note| !note.text.contains("tls")), "{more}: {:?}", resolved.notes);
        let tls = resolved.config.api.tls.unwrap();
        assert_eq!((tls.cipher_suites.as_slice(), tls.only_tls13), (suites, only_tls13), "{more}");
        let shown = resolved.config.provenance.contains_key("api.tls.cipherSuites");
        assert_eq!(shown, more.get("tlsCipherSuites").is_some(), "{more}");
    }
}

#[test]
fn tls_curve_preferences_are_applied() {
    let tls = with(with_tls(json!({"tlsCurvePreferences": [29, 23]}))).unwrap().config.api.tls.unwrap();
    assert_eq!(tls.key_exchanges, [KeyExchange::X25519, KeyExchange::P256]);
}

/// The configuration of a node with an API server.
fn with_api_server(fields: Option<Value>) -> Resolved {
    let document = fields.map(|fields| {
        let mut root = fields.as_object().unwrap().clone();
        root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        root.insert("kind".into(), "KubeletConfiguration".into());
        Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() }
    });
    let mut flags = Flags::default();
    flags.others.insert("kubeconfig", "/etc/kubernetes/kubelet.conf".to_owned());
    let host = Host { hostname: "n".into(), ..Host::default() };
    let kubelet = document.as_ref();
    resolve(Inputs { flags: &flags, kubelet, drop_ins: &[], keelson: None, host: &host }).unwrap()
}

#[test]
fn with_an_api_server_token_and_webhook_authorization_are_the_default() {
    let x509 = json!({"clientCAFile": "/ca"});
    for (authentication, mode, tokens, reviews) in [
        (json!({"x509": x509}), None, true, true),
        (json!({}), None, true, true),
        (json!({"webhook": {"enabled": true}}), Some(""), true, true),
        (
            json!({"anonymous": {"enabled": true}, "webhook": {"enabled": false}}),
            Some("Webhook"),
            false,
            true,
        ),
        (json!({"x509": x509, "webhook": {"enabled": true}}), Some("Webhook"), true, true),
        (json!({"x509": x509, "webhook": {"enabled": false}}), Some("AlwaysAllow"), false, false),
    ] {
        let mut fields = json!({"authentication": authentication});
        if let Some(mode) = mode {
            fields["authorization"] = json!({"mode": mode});
        }
        let api = with_api_server(Some(fields.clone())).config.api;
        assert_eq!(api.address, "0.0.0.0", "{fields}");
        let tls = api.tls.unwrap();
        assert_eq!((tls.tokens, tls.reviews), (tokens, reviews), "{fields}");
        let ca = authentication.get("x509").map(|_| "/ca".into());
        assert_eq!((tls.client_ca_file, tls.asked_for), (ca, false), "{fields}");
    }
}

#[test]
fn with_an_api_server_and_no_file_anonymous_access_is_open_with_a_warning() {
    let resolved = with_api_server(None);
    let tls = resolved.config.api.tls.unwrap();
    assert_eq!((tls.tokens, tls.reviews, tls.anonymous), (false, false, true), "the defaults of a kubelet");
    let warns = |n: &crate::Note| n.level == Level::Warn && n.text.contains("everybody who reaches");
    assert!(resolved.notes.iter().any(warns), "{:?}", resolved.notes);
}

#[test]
fn serving_certificate_or_tls_bootstrap_enables_tls_without_client_ca() {
    let anonymous =
        json!({"authentication": {"anonymous": {"enabled": true}}, "authorization": {"mode": "AlwaysAllow"}});
    for more in
        [json!({"tlsCertFile": "a.crt", "tlsPrivateKeyFile": "/a.key"}), json!({"serverTLSBootstrap": true})]
    {
        let mut fields = anonymous.clone();
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let resolved = with(fields).unwrap();
        let api = resolved.config.api;
        let tls = api.tls.unwrap();
        let named = more.get("tlsCertFile").map(|_| "/etc/k/a.crt".into());
        assert_eq!((api.address.as_str(), tls.cert_file, tls.asked_for), ("0.0.0.0", named, false), "{more}");
        assert!(tls.anonymous && !tls.tokens && !tls.reviews && tls.client_ca_file.is_none(), "{more}");
        let reported = resolved.notes.iter().any(|note| note.text.contains("serverTLSBootstrap"));
        assert_eq!(
            reported,
            more.get("serverTLSBootstrap").is_some(),
            "without an API server nothing can sign it"
        );
    }
}

#[test]
fn webhook_cache_ttls_are_applied_and_zero_means_the_default() {
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
    assert_eq!(of("-1s", "1h", "-1ns"), (0, 3_600_000, 0), "not cached");
}

#[test]
fn without_tls_authentication_fields_have_no_effect() {
    for fields in [
        json!({"authentication": {"anonymous": {"enabled": false}}, "tlsMinVersion": "VersionTLS10"}),
        json!({"authentication": {"x509": {"clientCAFile": null}}, "tlsMinVersion": "VersionTLS13", "tlsCertFile": ""}),
    ] {
        let resolved = with(fields).unwrap();
        assert_eq!((resolved.config.api.tls, resolved.config.api.address.as_str()), (None, "127.0.0.1"));
        let reported = |name| resolved.notes.iter().any(|n| n.level == Level::Info && n.text.contains(name));
        assert!(reported("authentication") && reported("tlsMinVersion"), "{:?}", resolved.notes);
    }
}

#[test]
fn invalid_api_fields_are_refused_with_a_remedy() {
    assert_refused(&[
        (json!({"authentication": []}), "authentication = []", "a map"),
        (json!({"authentication": {"anonymous": {"enabled": "no"}}}), "enabled = \"no\"", "true or false"),
        (json!({"authentication": {"webhook": {"cacheTTL": "2"}}}), "cacheTTL = \"2\"", "not a duration"),
        (json!({"authorization": {"mode": "RBAC"}}), "authorization.mode = \"RBAC\"", "AlwaysAllow, Webhook"),
        (
            json!({"authorization": {"webhook": {"cacheAuthorizedTTL": 5}}}),
            "cacheAuthorizedTTL = 5",
            "a string",
        ),
        (json!({"authorization": {"webhook": {"cacheUnauthorizedTTL": "x"}}}), "\"x\"", "not a duration"),
        (json!({"enableDebuggingHandlers": "on"}), "enableDebuggingHandlers = \"on\"", "true or false"),
        (
            json!({"enableSystemLogQuery": true, "enableSystemLogHandler": false}),
            "enableSystemLogQuery = true",
            "enableSystemLogHandler: true",
        ),
        (json!({"port": 65536}), "port = 65536", "from 1 to 65535"),
        (
            json!({"tlsCipherSuites": ["TLS_AES_128_GCM_SHA256", "TLS_X"]}),
            "[1] = \"TLS_X\"",
            "names are those",
        ),
        (json!({"tlsCurvePreferences": [23, 22]}), "tlsCurvePreferences[1] = 22", "4588"),
        (json!({"tlsCurvePreferences": [29, 29]}), "tlsCurvePreferences = [29,29]", "once"),
        (json!({"tlsMinVersion": "1.3"}), "tlsMinVersion = \"1.3\"", "VersionTLS13"),
    ]);
}
