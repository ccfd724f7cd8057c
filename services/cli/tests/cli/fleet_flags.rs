//! The flags of a fleet, and the environment in their place.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::fleet::run;
use crate::fleet_watch::Fleet;
use crate::{Said, command, keelson};

#[test]
fn a_command_for_a_node_of_a_fleet_does_nothing_here_without_the_fleet() {
    let said = keelson(Path::new("/nowhere"), &["delete", "pod", "web", "--node", "edge-2"]);
    assert_eq!(
        said.failed(64),
        (
            "--node is about a fleet over etcd, and this is about the agent of this machine",
            "add --etcd ENDPOINTS, or leave --node out"
        )
    );
    // What the environment says of a fleet changes nothing here.
    let mut command = command(Path::new("/nowhere"), &["get", "pods"]);
    command.env("KEELSON_ETCD", "http://127.0.0.1:1").env("KEELSON_ETCD_CA", "/nowhere/ca.crt");
    let said = Said::of(command.output().unwrap());
    assert!(said.failed(69).0.starts_with("the agent is not running"), "{said:?}");
}

#[test]
fn files_that_do_not_do_are_named_with_their_flags() {
    let https = ["get", "pods", "--etcd", "https://127.0.0.1:1"];
    let said = keelson(Path::new("/nowhere"), &https);
    assert_eq!(
        said.failed(64),
        ("--etcd-ca is not given: an endpoint with https needs it", "add --etcd-ca FILE")
    );
    let mut command = command(Path::new("/nowhere"), &https);
    let said = Said::of(command.env("KEELSON_ETCD_CA", "/nowhere/ca.crt").output().unwrap());
    let (error, hint) = said.failed(64);
    assert!(error.starts_with("cannot use /nowhere/ca.crt that --etcd-ca names: No such file"), "{error}");
    assert_eq!(hint, "name another file with --etcd-ca");
    let user = ["--etcd-user", "me", "--etcd-password-file", "/nowhere/password"];
    let http = ["get", "pods", "--etcd", "http://127.0.0.1:1"];
    let said = keelson(Path::new("/nowhere"), &[&http[..], &user].concat());
    assert!(said.failed(64).0.contains("/nowhere/password that --etcd-password-file names"), "{said:?}");
    let said = keelson(Path::new("/nowhere"), &[&http[..], &user[..2]].concat());
    assert_eq!(
        said.failed(64),
        ("there is --etcd-user without --etcd-password-file", "add --etcd-password-file")
    );
    for node in ["", "a/b"] {
        let said = keelson(Path::new("/nowhere"), &[&http[..], &["--node", node]].concat());
        assert!(said.failed(64).0.ends_with("is no name of a node"), "{said:?}");
    }
}

#[test]
fn a_node_that_has_no_key_is_not_there() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    for args in [&["get", "node", "--node", "n2"][..], &["get", "node", "n2", "--node", "n2"]] {
        let begun = Instant::now();
        let said = run(&fleet, args);
        assert_eq!(said.failed(1).0, "there is no node \"n2\" in this etcd", "{said:?}");
        assert!(said.out.is_empty() && begun.elapsed() < Duration::from_secs(30));
    }
    assert!(run(&fleet, &["get", "node", "--node", "n1"]).ok().contains("n1 "));
}
