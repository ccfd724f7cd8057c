//! A service without its own API, for the tests of init: its name is that of its executable.
//!
//! The file `behaviour` in its state folder controls it: `exit N` exits at once, `fail TEXT` fails to start, `degraded TEXT`
//! reports a condition, `orphan N` leaves that many processes to init. `at N` before any of them: only if maxPods is N.

use std::path::Path;
use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_service_kit::{Context, LoopHandle, ServiceSpec, run};
use tonic::service::Routes;

fn main() -> ExitCode {
    let program = std::env::args().next().unwrap_or_default();
    let file = Path::new(&program).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(name) = ServiceName::supervised().find(|name| name.binary() == file) else {
        eprintln!("no service has the binary {program}");
        return ExitCode::from(64);
    };
    let spec = ServiceSpec { name, about: "A fake", version: "0.0.0", descriptor: None, threads: 1 };
    run(spec, build)
}

async fn build(context: Context) -> anyhow::Result<Routes> {
    let file = context.config.paths.state(context.service).join("behaviour");
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let text = match text.trim().strip_prefix("at ").and_then(|rest| rest.split_once(' ')) {
        Some((pods, text)) if pods == context.config.resources.max_pods.to_string() => text,
        Some(_) => "",
        None => text.trim(),
    };
    match text.split_once(' ') {
        Some(("exit", code)) => std::process::exit(code.parse()?),
        Some(("fail", why)) => anyhow::bail!("{why}"),
        Some(("degraded", why)) => context.progress.condition("fake", Err(why.to_owned())),
        Some(("orphan", count)) => {
            for _ in 0..count.parse()? {
                let script = "sleep 0.05 & exit 0";
                std::process::Command::new("sh").args(["-c", script]).status()?;
            }
        }
        _ => {}
    }
    let turns = context.progress.register("turns");
    let shutdown = context.shutdown.clone();
    context.spawn("turns", async move {
        while !shutdown.is_cancelled() {
            turns.tick();
            // Cancel-safe: it only sleeps.
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
        }
    });
    Ok(Routes::default())
}
