//! Who may call what (proof 11): every method of every service at its real socket, by every user of the agent, by an
//! operator and by a stranger. What is allowed stands in the protos; here it is asked of the running services.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use keelson_config::{Config, ServiceName};
use keelson_testkit::{Agent, Scratch};
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

/// gRPC's code for a caller that may not.
const PERMISSION_DENIED: &str = "7";

/// The users that a service can tell apart: each service that has one of its own, and an operator.
const EVERYBODY: &[&str] = &[
    "init",
    "pod-config",
    "pod-sync",
    "runtime-shim",
    "volume-manager",
    "resource-manager",
    "node-status",
    "node-api",
    "cli",
];

/// What every service answers, beside its own methods (architecture §3): the health and the description of the API are
/// for whoever may connect; progress and events for who collects them; figures and settings for who shows them; and
/// only a person sets what is logged, by the tool or by init.
const COMMON: [(&str, &[&str]); 10] = [
    ("/grpc.health.v1.Health/Check", EVERYBODY),
    ("/grpc.health.v1.Health/Watch", EVERYBODY),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", EVERYBODY),
    ("/keelson.admin.v1.Admin/GetConfig", &["init", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetMetrics", &["init", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetProgress", &["init", "node-status", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetUsage", &["cli"]),
    ("/keelson.admin.v1.Admin/ListSpans", &["cli"]),
    ("/keelson.admin.v1.Admin/SetLogLevel", &["init", "cli"]),
    ("/keelson.events.v1.Events/ListEvents", &["node-status", "cli"]),
];

/// CRI, which runtime-shim serves too: for uid 0 and pod-sync (architecture §3).
const CRI: [&str; 2] = ["/runtime.v1.RuntimeService/Version", "/runtime.v1.ImageService/ImageStatus"];

/// What of it node-status may call, too: it lists the images in the Node.
const CRI_OF_NODE_STATUS: &str = "/runtime.v1.ImageService/ListImages";

/// What of it is for uid 0 alone: its answers are addresses that lead into a container.
const CRI_OF_ROOT: [&str; 3] = [
    "/runtime.v1.RuntimeService/Attach",
    "/runtime.v1.RuntimeService/Exec",
    "/runtime.v1.RuntimeService/PortForward",
];

/// Somebody with the rights of a process.
#[derive(Debug, Clone)]
struct Caller {
    name: String,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    /// It gets through any folder and socket (CAP_DAC_OVERRIDE), so that the server itself has to refuse it.
    gets_in: bool,
}

impl Caller {
    /// The rights of a running service, as /proc tells them.
    fn of(agent: &Agent, service: ServiceName) -> Self {
        let pid = agent.service_pid(service).unwrap_or_else(|| panic!("{service} runs"));
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let numbers = |name: &str| -> Vec<u32> {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.split_whitespace().map(|n| n.parse().unwrap()).collect()
        };
        Self {
            name: service.to_string(),
            uid: numbers("Uid:")[0],
            gid: numbers("Gid:")[0],
            groups: numbers("Groups:"),
            gets_in: false,
        }
    }

    /// A connection made with its rights. Rights belong to a thread (credentials(7)), so a thread of its own makes it.
    fn connect(&self, socket: &Path) -> std::io::Result<UnixStream> {
        let (caller, socket) = (self.clone(), socket.to_owned());
        let connected = std::thread::spawn(move || {
            let groups: Vec<Gid> = caller.groups.iter().map(|g| Gid::from_raw(*g)).collect();
            let (uid, gid) = (Uid::from_raw(caller.uid), Gid::from_raw(caller.gid));
            set_thread_groups(&groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_keep_capabilities(caller.gets_in)?;
            set_thread_res_uid(uid, uid, uid)?;
            if caller.gets_in {
                let kept = CapabilitySet::DAC_OVERRIDE;
                let none = CapabilitySet::empty();
                set_capabilities(
                    None,
                    CapabilitySets { effective: kept, permitted: kept, inheritable: none },
                )?;
            }
            UnixStream::connect(socket)
        });
        connected.join().unwrap()
    }
}

/// How a call was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Taken {
    /// The folder or the socket does not let the caller in.
    NoConnection,
    /// PERMISSION_DENIED.
    Denied,
    /// Anything else: the method has seen the call.
    Served,
}

/// Calls methods one after the other over one connection, each with an empty message.
async fn call(caller: &Caller, socket: &Path, methods: &[String]) -> BTreeMap<String, Taken> {
    let stream = match caller.connect(socket) {
        Ok(stream) => stream,
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{}: {error}", socket.display());
            return methods.iter().map(|m| (m.clone(), Taken::NoConnection)).collect();
        }
    };
    stream.set_nonblocking(true).unwrap();
    let stream = TokioIo::new(tokio::net::UnixStream::from_std(stream).unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut taken = BTreeMap::new();
    for method in methods {
        let request = http::Request::post(format!("http://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", "2S")
            // A message of no fields: not compressed, no bytes.
            .body(Full::new(Bytes::from_static(&[0; 5])))
            .unwrap();
        sender.ready().await.unwrap();
        // A refusal is in the first headers; a stream that has nothing to say yet sends none.
        let answer = tokio::time::timeout(Duration::from_millis(500), sender.send_request(request)).await;
        let refused = match answer {
            Ok(answer) => {
                answer.unwrap().headers().get("grpc-status").is_some_and(|s| s == PERMISSION_DENIED)
            }
            Err(_) => false,
        };
        taken.insert(method.clone(), if refused { Taken::Denied } else { Taken::Served });
    }
    connection.abort();
    taken
}

/// `pod_sync` of `/keelson.pod_sync.v1.PodSync/ListPods`.
fn package_of(path: &str) -> &str {
    path.trim_start_matches('/').split('.').nth(1).unwrap_or_default()
}

/// The protos name no method of the common services that [`COMMON`] lacks, and no other caller.
#[test]
fn what_every_service_answers_has_the_callers_of_its_protos() {
    let of_protos =
        keelson_proto::CALLERS.iter().filter(|(path, _)| ["admin", "events"].contains(&package_of(path)));
    let listed = COMMON.iter().filter(|(path, _)| path.starts_with("/keelson."));
    assert!(listed.eq(of_protos), "{:#?}", keelson_proto::CALLERS);
    let known: BTreeSet<&str> =
        ServiceName::ALL.iter().map(|service| service.as_str()).chain(["cli"]).collect();
    assert_eq!(EVERYBODY.iter().copied().collect::<BTreeSet<_>>(), known);
}

/// The methods that a service answers, with their callers.
fn methods_of(service: ServiceName) -> BTreeMap<String, BTreeSet<String>> {
    let own = match service {
        ServiceName::Init => "supervisor".to_owned(),
        ServiceName::RuntimeShim => "runtime".to_owned(),
        other => other.as_str().replace('-', "_"),
    };
    let mut methods: BTreeMap<String, BTreeSet<String>> = keelson_proto::CALLERS
        .iter()
        .filter(|(path, _)| package_of(path) == own)
        .chain(&COMMON)
        .map(|(path, callers)| ((*path).to_owned(), callers.iter().map(|c| (*c).to_owned()).collect()))
        .collect();
    if service == ServiceName::RuntimeShim {
        methods.extend(CRI.map(|path| (path.to_owned(), BTreeSet::from(["pod-sync".to_owned()]))));
        methods.insert(CRI_OF_NODE_STATUS.to_owned(), ["pod-sync", "node-status"].map(str::to_owned).into());
        methods.extend(CRI_OF_ROOT.map(|path| (path.to_owned(), BTreeSet::new())));
    }
    methods
}

#[tokio::test]
async fn only_the_callers_that_the_protos_name_get_through_a_real_socket() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let config: Config =
        serde_json::from_slice(&std::fs::read(agent.spec().run_dir.join("config.json")).unwrap()).unwrap();
    let mut callers: Vec<Caller> = ServiceName::ALL
        .into_iter()
        .filter(|service| !service.needs_root())
        .map(|service| Caller::of(&agent, service))
        .collect();
    let person = |name: &str, groups: Vec<u32>| Caller {
        name: name.to_owned(),
        uid: 54321,
        gid: 54321,
        groups,
        gets_in: false,
    };
    callers.push(person("cli", vec![config.users.operator_gid]));
    callers.push(person("a stranger", Vec::new()));
    callers.push(Caller { gets_in: true, ..person("a stranger who gets in", Vec::new()) });
    callers.push(Caller { uid: 0, gid: 0, ..person("root", Vec::new()) });

    let mut seen: BTreeMap<(bool, Taken), usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for service in ServiceName::ALL {
        let methods = methods_of(service);
        let has_own = service != ServiceName::NodeApi;
        assert_eq!(methods.len() > COMMON.len(), has_own, "{service} serves {methods:?}");
        let names: Vec<String> = methods.keys().cloned().collect();
        let socket: PathBuf = agent.socket(service);
        for caller in &callers {
            for (method, taken) in call(caller, &socket, &names).await {
                let allowed = caller.name == "root" || methods[&method].contains(&caller.name);
                *seen.entry((allowed, taken)).or_default() += 1;
                let let_in = taken != Taken::NoConnection || !caller.gets_in;
                if allowed != (taken == Taken::Served) || !let_in {
                    wrong.push(format!("{} calls {method} of {service}: {taken:?}", caller.name));
                }
            }
        }
    }
    println!("(allowed, taken) and how often: {seen:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
    // Each way of being refused was met, or nothing is shown.
    for met in [(true, Taken::Served), (false, Taken::Denied), (false, Taken::NoConnection)] {
        assert!(seen.contains_key(&met), "{seen:?}");
    }
    agent.end().unwrap();
}
