//! Authorization of callers (proof 11): every method of every service at its real socket, by every user of the agent, by an
//! operator and by a stranger. The protos say what is allowed; this test asks the running services.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

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

/// gRPC's code of a call that is not permitted.
const PERMISSION_DENIED: &str = "7";

/// The users that a service can distinguish: each service with its own user, and an operator.
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

/// Methods of every service besides its own (architecture §3): health and reflection are for all that may
/// connect; progress and events for the services that collect them; metrics and settings for those that show them; and
/// only an operator or init sets log levels.
const COMMON: [(&str, &[&str]); 11] = [
    ("/grpc.health.v1.Health/Check", EVERYBODY),
    ("/grpc.health.v1.Health/Watch", EVERYBODY),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", EVERYBODY),
    ("/keelson.admin.v1.Admin/GetConfig", &["init", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetMetrics", &["init", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetProgress", &["init", "node-status", "node-api", "cli"]),
    ("/keelson.admin.v1.Admin/GetUsage", &["cli"]),
    ("/keelson.admin.v1.Admin/ListSpans", &["cli"]),
    ("/keelson.admin.v1.Admin/SetLogLevel", &["init", "cli"]),
    ("/keelson.admin.v1.Admin/SetVerbosity", &["node-api"]),
    ("/keelson.events.v1.Events/ListEvents", &["node-status", "cli"]),
];

/// CRI, which runtime-shim serves too: for uid 0 and pod-sync (architecture §3).
const CRI: [&str; 2] = ["/runtime.v1.RuntimeService/Version", "/runtime.v1.ImageService/ImageStatus"];

/// CRI methods that node-status may call, too: it lists the images in the Node.
const CRI_OF_NODE_STATUS: &str = "/runtime.v1.ImageService/ListImages";

/// CRI methods for uid 0 alone: they return addresses of streams into a container.
const CRI_OF_ROOT: [&str; 3] = [
    "/runtime.v1.RuntimeService/Attach",
    "/runtime.v1.RuntimeService/Exec",
    "/runtime.v1.RuntimeService/PortForward",
];

/// The credentials of a process.
#[derive(Debug, Clone)]
struct Caller {
    name: String,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    /// Whether it passes any folder and socket (CAP_DAC_OVERRIDE), so that the server itself has to refuse it.
    gets_in: bool,
}

impl Caller {
    /// The credentials of a running service, from /proc.
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

    /// Connects with these credentials. They belong to a thread (credentials(7)), so a new thread connects.
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

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CallResult {
    /// The permissions of the folder or the socket keep the caller out.
    NoConnection,
    /// PERMISSION_DENIED.
    Denied,
    /// Anything else: the method was called.
    Served,
}

/// Calls methods one after the other over one connection, each with an empty message.
async fn call(caller: &Caller, socket: &Path, methods: &[String]) -> BTreeMap<String, CallResult> {
    let stream = match caller.connect(socket) {
        Ok(stream) => stream,
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{}: {error}", socket.display());
            return methods.iter().map(|m| (m.clone(), CallResult::NoConnection)).collect();
        }
    };
    stream.set_nonblocking(true).unwrap();
    let stream = TokioIo::new(tokio::net::UnixStream::from_std(stream).unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut result = BTreeMap::new();
    for method in methods {
        let request = http::Request::post(format!("http://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", "2S")
            // An empty message: not compressed, no bytes.
            .body(Full::new(Bytes::from_static(&[0; 5])))
            .unwrap();
        sender.ready().await.unwrap();
        // A refusal is in the first headers; a stream without messages yet sends none.
        let answer = tokio::time::timeout(Duration::from_millis(500), sender.send_request(request)).await;
        let refused = match answer {
            Ok(answer) => {
                answer.unwrap().headers().get("grpc-status").is_some_and(|s| s == PERMISSION_DENIED)
            }
            Err(_) => false,
        };
        result.insert(method.clone(), if refused { CallResult::Denied } else { CallResult::Served });
    }
    connection.abort();
    result
}

/// `pod_sync` of `/keelson.pod_sync.v1.PodSync/ListPods`.
fn package_of(path: &str) -> &str {
    path.trim_start_matches('/').split('.').nth(1).unwrap_or_default()
}

/// The methods and callers of the common services in the protos are those of [`COMMON`].
#[test]
fn every_served_method_has_the_callers_of_its_proto() {
    let of_protos =
        keelson_proto::CALLERS.iter().filter(|(path, _)| ["admin", "events"].contains(&package_of(path)));
    let listed = COMMON.iter().filter(|(path, _)| path.starts_with("/keelson."));
    assert!(listed.eq(of_protos), "{:#?}", keelson_proto::CALLERS);
    let known: BTreeSet<&str> =
        ServiceName::ALL.iter().map(|service| service.as_str()).chain(["cli"]).collect();
    assert_eq!(EVERYBODY.iter().copied().collect::<BTreeSet<_>>(), known);
}

/// The methods that a service serves, with their callers.
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
async fn only_callers_named_in_the_protos_may_call_each_method() {
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

    let mut seen: BTreeMap<(bool, CallResult), usize> = BTreeMap::new();
    let mut violations = Vec::new();
    for service in ServiceName::ALL {
        let methods = methods_of(service);
        let has_own = service != ServiceName::NodeApi;
        assert_eq!(methods.len() > COMMON.len(), has_own, "{service} serves {methods:?}");
        let names: Vec<String> = methods.keys().cloned().collect();
        let socket: PathBuf = agent.socket(service);
        for caller in &callers {
            for (method, result) in call(caller, &socket, &names).await {
                let allowed = caller.name == "root" || methods[&method].contains(&caller.name);
                *seen.entry((allowed, result)).or_default() += 1;
                let let_in = result != CallResult::NoConnection || !caller.gets_in;
                if allowed != (result == CallResult::Served) || !let_in {
                    violations.push(format!("{} calls {method} of {service}: {result:?}", caller.name));
                }
            }
        }
    }
    println!("(allowed, taken) and how often: {seen:?}");
    assert!(violations.is_empty(), "{violations:#?}");
    // Each kind of refusal must have occurred, or the test shows nothing.
    for met in [(true, CallResult::Served), (false, CallResult::Denied), (false, CallResult::NoConnection)] {
        assert!(seen.contains_key(&met), "{seen:?}");
    }
    agent.end().unwrap();
}
