//! The fleet flags, and the environment variables for them.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::fleet::run;
use crate::fleet_watch::Fleet;
use crate::{CommandResult, command, keelson};

#[test]
fn fleet_flags_without_etcd_are_refused() {
    let result = keelson(Path::new("/nowhere"), &["delete", "pod", "web", "--node", "edge-2"]);
    assert_eq!(
        result.failed(64),
        (
            "--node is about a fleet over etcd, and without --etcd the command is about the agent of this machine",
            "add --etcd ENDPOINTS, or leave --node out"
        )
    );
    // The environment variables of a fleet have no effect without --etcd.
    let mut command = command(Path::new("/nowhere"), &["get", "pods"]);
    command.env("KEELSON_ETCD", "http://127.0.0.1:1").env("KEELSON_ETCD_CA", "/nowhere/ca.crt");
    let result = CommandResult::of(command.output().unwrap());
    assert!(result.failed(69).0.starts_with("the agent is not running"), "{result:?}");
}

#[test]
fn unusable_credential_files_are_named_with_their_flags() {
    let https = ["get", "pods", "--etcd", "https://127.0.0.1:1"];
    let result = keelson(Path::new("/nowhere"), &https);
    assert_eq!(
        result.failed(64),
        ("--etcd-ca is not given: an endpoint with https needs it", "add --etcd-ca FILE")
    );
    let mut command = command(Path::new("/nowhere"), &https);
    let result = CommandResult::of(command.env("KEELSON_ETCD_CA", "/nowhere/ca.crt").output().unwrap());
    let (error, hint) = result.failed(64);
    assert!(error.starts_with("cannot use /nowhere/ca.crt of --etcd-ca: No such file"), "{error}");
    assert_eq!(hint, "name another file with --etcd-ca");
    let user = ["--etcd-user", "me", "--etcd-password-file", "/nowhere/password"];
    let http = ["get", "pods", "--etcd", "http://127.0.0.1:1"];
    let result = keelson(Path::new("/nowhere"), &[&http[..], &user].concat());
    assert!(result.failed(64).0.contains("/nowhere/password of --etcd-password-file"), "{result:?}");
    let result = keelson(Path::new("/nowhere"), &[&http[..], &user[..2]].concat());
    assert_eq!(
        result.failed(64),
        ("--etcd-user is given without --etcd-password-file", "add --etcd-password-file")
    );
    for node in ["", "a/b"] {
        let result = keelson(Path::new("/nowhere"), &[&http[..], &["--node", node]].concat());
        assert!(result.failed(64).0.ends_with("is not a valid node name"), "{result:?}");
    }
}

#[test]
fn node_without_a_key_does_not_exist() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    for args in [&["get", "node", "--node", "n2"][..], &["get", "node", "n2", "--node", "n2"]] {
        let started_at = Instant::now();
        let result = run(&fleet, args);
        assert_eq!(result.failed(1).0, "there is no node \"n2\" in this etcd", "{result:?}");
        assert!(result.out.is_empty() && started_at.elapsed() < Duration::from_secs(30));
    }
    assert!(run(&fleet, &["get", "node", "--node", "n1"]).ok().contains("n1 "));
}
