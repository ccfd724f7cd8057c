//! The kubelet API: listeners, TLS, access and handlers.

use super::FieldKind::{Bool, Choice, Int, Ip, Numbers, Object, Path, SignedDuration, Strings};
use super::{KubeletField, field};
use crate::ServiceName::{NodeApi, NodeStatus};

pub(super) const FIELDS: &[KubeletField] = &[
    field("address", Ip, "Where the kubelet API listens.")
        .flag("address")
        .default_text("0.0.0.0")
        .empty_is_default_in_files()
        .sets(&["api.address"])
        .restarts(&[NodeStatus, NodeApi])
        .shows_resolved(),
    field("authentication", Object, "How clients of the kubelet API are authenticated.").sets(&["api.tls"]),
    field("authentication.x509", Object, "Authentication by client certificates.")
        .default_map(&[])
        .sets(&["api.tls"]),
    field(
        "authentication.x509.clientCAFile",
        Path,
        "The CA certificates for client certificates; a client is identified by the common name.",
    )
    .flag("client-ca-file")
    .empty_is_unset()
    .sets(&["api.tls.clientCaFile"]),
    field("authentication.webhook", Object, "Authentication of bearer tokens by the API server.")
        .sets(&["api.tls"]),
    field("authentication.webhook.enabled", Bool, "Authenticate bearer tokens with the API server.")
        .flag("authentication-token-webhook")
        .default_bool(true)
        .sets(&["api.tls.tokens"]),
    field(
        "authentication.webhook.cacheTTL",
        SignedDuration,
        "How long the result of token authentication is cached.",
    )
    .flag("authentication-token-webhook-cache-ttl")
    .default_text("2m0s")
    .empty_is_default()
    .sets(&["api.tls.tokenCacheMs"]),
    field("authentication.anonymous", Object, "Requests without credentials.").sets(&["api.tls"]),
    field("authentication.anonymous.enabled", Bool, "Accept requests without credentials.")
        .flag("anonymous-auth")
        .default_bool(false)
        .sets(&["api.tls.anonymous"]),
    field("authorization", Object, "How requests to the kubelet API are authorized.").sets(&["api.tls"]),
    field(
        "authorization.mode",
        Choice(&["AlwaysAllow", "Webhook"]),
        "How requests are authorized: AlwaysAllow or Webhook.",
    )
    .flag("authorization-mode")
    .default_text("Webhook")
    .empty_is_unset()
    .sets(&["api.tls.reviews"]),
    field("authorization.webhook", Object, "Authorization by the API server.").sets(&["api.tls"]),
    field(
        "authorization.webhook.cacheAuthorizedTTL",
        SignedDuration,
        "How long an allowed authorization is cached.",
    )
    .flag("authorization-webhook-cache-authorized-ttl")
    .default_text("5m0s")
    .empty_is_default()
    .sets(&["api.tls.allowedCacheMs"]),
    field(
        "authorization.webhook.cacheUnauthorizedTTL",
        SignedDuration,
        "How long a denied authorization is cached.",
    )
    .flag("authorization-webhook-cache-unauthorized-ttl")
    .default_text("30s")
    .empty_is_default()
    .sets(&["api.tls.deniedCacheMs"]),
    field("enableDebugFlagsHandler", Bool, "Serve /debug/flags/v, which changes the log verbosity.")
        .default_bool(true)
        .sets(&["api.handlers.debugFlags"]),
    field("enableDebuggingHandlers", Bool, "Serve logs, exec, attach, port-forward and run.")
        .flag("enable-debugging-handlers")
        .default_bool(true)
        .sets(&["api.handlers.debugging"]),
    field("enableProfilingHandler", Bool, "Serve /debug/pprof; not implemented yet.")
        .default_bool(true)
        .sets(&["api.handlers.profiling"]),
    field("enableServer", Bool, "Serve the kubelet API.")
        .flag("enable-server")
        .default_bool(true)
        .sets(&["api.port"]),
    field("enableSystemLogHandler", Bool, "Serve the files of /var/log below /logs.")
        .default_bool(true)
        .sets(&["api.handlers.systemLog"]),
    field("enableSystemLogQuery", Bool, "Serve queries of the logs of system services below /logs.")
        .default_bool(false)
        .sets(&["api.handlers.systemLogQuery"]),
    field("healthzBindAddress", Ip, "Where /healthz listens.")
        .flag("healthz-bind-address")
        .default_text("127.0.0.1")
        .empty_is_default_in_files()
        .sets(&["api.healthzAddress"])
        .restarts(&[NodeApi])
        .shows_resolved(),
    field("healthzPort", Int(0, 65_535), "The port of /healthz; 0: none.")
        .flag("healthz-port")
        .default_int(10_248)
        .sets(&["api.healthzPort"])
        .restarts(&[NodeApi]),
    field("port", Int(1, 65_535), "The port of the kubelet API.")
        .flag("port")
        .default_int(10_250)
        .empty_is_default_in_files()
        .sets(&["api.port"])
        .restarts(&[NodeStatus, NodeApi]),
    field("readOnlyPort", Int(0, 65_535), "The port of the kubelet API without authentication; 0: none.")
        .flag("read-only-port")
        .default_int(0)
        .sets(&["api.readOnlyPort"])
        .restarts(&[NodeApi]),
    field(
        "streamingConnectionIdleTimeout",
        SignedDuration,
        "Without effect: the runtime has its own timeout.",
    )
    .flag("streaming-connection-idle-timeout")
    .default_text("4h0m0s")
    .empty_is_default()
    .checked_by_type(),
    field("tlsCertFile", Path, "The certificate of the kubelet API, with those of its chain.")
        .flag("tls-cert-file")
        .empty_is_unset()
        .sets(&["api.tls.certFile"]),
    field("tlsCipherSuites", Strings, "The cipher suites of the kubelet API.")
        .flag("tls-cipher-suites")
        .sets(&["api.tls.cipherSuites"]),
    field(
        "tlsCurvePreferences",
        Numbers,
        "The key exchanges of the kubelet API, by their numbers in the IANA TLS registry.",
    )
    .sets(&["api.tls.keyExchanges"]),
    field(
        "tlsMinVersion",
        Choice(&["VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"]),
        "The lowest version of TLS: VersionTLS12 or VersionTLS13.",
    )
    .flag("tls-min-version")
    .empty_is_default_in_files()
    .sets(&["api.tls.onlyTls13"]),
    field("tlsPrivateKeyFile", Path, "The key of --tls-cert-file.")
        .flag("tls-private-key-file")
        .empty_is_unset()
        .sets(&["api.tls.keyFile"]),
];
