//! A CSI driver for tests. Volumes are folders that it bind-mounts, and loop devices for block volumes. It serves the services
//! Identity and Node on `--endpoint`, and its registration on a socket in `--registration-dir`, and it is strict: a request that
//! the CSI specification does not allow is an error.
//!
//! ```text
//! csi-test-driver --name N --endpoint unix:///…/csi.sock --registration-dir DIR --state DIR [--node-id ID] [--stage]
//!     [--capabilities stats,expand,condition,multi-writer,mount-group] [--max-volumes N] [--topology KEY=VALUE]
//!     [--version V] [--faults FILE] [--call-millis N] [--end-with-stdin]
//! ```
//!
//! It prints `ready` once it serves. `calls.jsonl` in the state folder gets one line per call: `method`, `request` with the keys of
//! secrets instead of their values, `pod`, and `result`: `OK`, the name of a gRPC code, or the name of a fault. A call that did its
//! work also has `micros`, the time that the work took. Work is done one call at a time; with `--call-millis` each call for a
//! volume takes at least so long, as those of a real driver do.
//!
//! The file of faults may be replaced at any time. It is a JSON object, method → one of
//!
//! | fault | effect |
//! |---|---|
//! | `{"fail": {"code": 14, "times": 2, "message": "…"}}` | fails with this code so often, or always |
//! | `{"hang": true}` | does not answer until the fault is removed |
//! | `{"garbage": "empty"}` | answers without a message and without a status |
//! | `{"garbage": "broken"}` | answers with a message that is not Protobuf |
//! | `{"garbage": "large"}` | answers with 8 MiB |
//! | `{"lie": true}` | reports success and does nothing |
//! | `{"exit": 3}` | ends the process with this code |
//!
//! With `--end-with-stdin` it removes its mounts and ends when stdin is closed.
//!
//! | module | does |
//! |---|---|
//! | `arguments` | reads the command line |
//! | `driver` | carries out one call, or its fault, and logs it |
//! | `volumes` | stages, mounts, measures and grows volumes |
//! | `services` | the services of gRPC |
//! | `garbling` | answers that are no answers |

#![allow(clippy::disallowed_methods, reason = "the tasks end with the process")]

mod arguments;
mod driver;
mod garbling;
mod services;
mod volumes;

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use keelson_proto::csi::v1::identity_server::IdentityServer;
use keelson_proto::csi::v1::node_server::NodeServer;
use keelson_proto::pluginregistration::registration_server::RegistrationServer;
use keelson_tests::csi_driver::clean_up;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::arguments::{Arguments, parse};
use crate::driver::Driver;
use crate::garbling::Garbling;

fn main() -> ExitCode {
    let result = parse(std::env::args().skip(1)).and_then(|arguments| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?
            .block_on(run(arguments))
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "csi-test-driver: {error:#}");
            ExitCode::from(64)
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    fs::create_dir_all(arguments.state.join("volumes"))?;
    fs::create_dir_all(&arguments.registration)?;
    let registration = arguments.registration.join(format!("{}-reg.sock", arguments.name));
    let state = arguments.state.clone();
    let ends_with_stdin = arguments.ends_with_stdin;
    let endpoint = listen(&arguments.endpoint)?;
    let registered = listen(&registration)?;
    let driver = Driver::new(arguments);
    let csi = Server::builder()
        .add_service(Garbling(NodeServer::new(driver.clone())))
        .add_service(Garbling(IdentityServer::new(driver.clone())))
        .serve_with_incoming(UnixListenerStream::new(endpoint));
    let registration_api = Server::builder()
        .add_service(Garbling(RegistrationServer::new(driver)))
        .serve_with_incoming(UnixListenerStream::new(registered));
    if ends_with_stdin {
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let _ = fs::remove_file(&registration);
            clean_up(&state);
            std::process::exit(0);
        });
    }
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")?;
    stdout.flush()?;
    // Neither ends before the process does.
    tokio::select! {
        ended = csi => ended?,
        ended = registration_api => ended?,
    }
    Ok(())
}

fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder)?;
    }
    let _ = fs::remove_file(socket);
    UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))
}
