//! Credentials of CHAP.

use super::*;
use crate::plugins::secrets::Secret;

fn with_chap() -> VolumeSpec {
    let mut chap = source(&[]);
    chap["chapAuthSession"] = true.into();
    chap["chapAuthDiscovery"] = true.into();
    chap["secretRef"] = json!({"name": "chap"});
    inline("iscsi", chap)
}

fn secret(node: &FakeNode, value: &str) {
    let data = [
        ("node.session.auth.username".into(), "dTE=".into()),
        ("node.session.auth.password".into(), value.into()),
        ("discovery.sendtargets.auth.password".into(), value.into()),
    ];
    node.state().secrets.insert("shop/chap".into(), Secret { kind: String::new(), data: data.into() });
}

#[tokio::test]
async fn chap_credentials_come_from_the_pods_namespace() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    let error = plugin(&node).mount_device(&with_chap(), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("shop/chap"), "{error}");
    assert_eq!(node.take_log(), Vec::<String>::new(), "nothing is started without the credentials");
    secret(&node, "aHVudGVyMg==");
    plugin(&node).mount_device(&with_chap(), UNLABELLED).await.unwrap();
    let log = node.take_log();
    for end in [
        "node.session.auth.authmethod -v CHAP",
        "node.session.auth.username -v u1",
        "node.session.auth.password -v hunter2",
        "discovery.sendtargets.auth.password -v hunter2",
    ] {
        assert!(log.iter().any(|line| line.ends_with(end)), "{end}: {log:?}");
    }
}

#[tokio::test]
async fn an_endless_error_of_iscsiadm_is_shown_truncated() {
    let node = FakeNode::new();
    node.program("iscsiadm", |_| CommandOutput {
        code: Some(7),
        stdout: String::new(),
        stderr: "x".repeat(60_000),
    });
    let error = plugin(&node).mount_device(&inline("iscsi", source(&[])), UNLABELLED).await.unwrap_err();
    assert!(
        error.message.ends_with("… [truncated]") && error.message.len() < 2200,
        "{}",
        error.message.len()
    );
}

#[tokio::test]
async fn an_error_never_shows_a_credential() {
    let node = FakeNode::new();
    secret(&node, "aHVudGVyMg==");
    node.program("iscsiadm", |arguments| match arguments {
        [.., "show"] => ended(0, "iface.transport_name = tcp\n"),
        [.., "hunter2"] => {
            CommandOutput { code: Some(7), stdout: "hunter2".into(), stderr: arguments.join(" ") }
        }
        _ => ended(0, ""),
    });
    let error = plugin(&node).mount_device(&with_chap(), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("-v <masked> ended with exit code 7"), "{error}");
    assert!(!error.message.contains("hunter2"), "{error}");
}

#[tokio::test]
async fn an_unusable_secret_is_refused_before_anything_starts() {
    let node = FakeNode::new();
    secret(&node, "!!!");
    let error = plugin(&node).mount_device(&with_chap(), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("shop/chap") && !error.message.contains("!!!"), "{error}");
    assert_eq!(node.take_log(), Vec::<String>::new());
}
