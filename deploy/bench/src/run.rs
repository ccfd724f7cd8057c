//! The benchmark of starts and ends: capture, rounds, idle windows, recovery.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::process::ProcessId;

use crate::agent::{StartedPods, Subject, limit_for};
use crate::capture::Recorder;
use crate::figures::{Idle, Report, Times, pluralize};
use crate::floor::Floor;
use crate::pods::{self, Pod};
use crate::progress::Progress;
use crate::proxy::Proxy;
use crate::usage::{self, Named, WriteRate};
use crate::watch::{SeenProcess, Watch};

/// How long to wait before memory and idle CPU are measured: pods that have just started still cause work.
const REST: Duration = Duration::from_secs(10);

/// The key of containerd's CPU time.
const RUNTIME: &str = "containerd";

/// What is measured.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The number of pods.
    pub pods: usize,
    /// The number of rounds.
    pub rounds: usize,
    /// The length of an idle window; `None` for no idle windows.
    pub idle: Option<Duration>,
    /// Whether a container writes its log meanwhile as fast as it can. If so, nothing is measured at rest.
    pub flood: bool,
}

/// The pods that are started directly at containerd.
struct Floors {
    pods: Floor,
    flood: Option<Floor>,
}

/// Runs the benchmark with all files in `folder`.
pub async fn run(folder: &Path, plan: &Plan, progress: &Progress) -> anyhow::Result<Report> {
    progress.print("starting a private containerd and the agent");
    let mut subject = Subject::start(folder, plan.pods).await?;
    let floors = capture(&mut subject, folder, plan, progress).await?;
    let mut report = Report::new(plan.pods, plan.rounds);
    for round in 1..=plan.rounds {
        let name = format!("round {round} of {}", plan.rounds);
        let (times, flood) =
            floor_round(&subject, &floors, plan).await.with_context(|| format!("{name}, floor"))?;
        progress.print(format!("{name}: floor: the last of {} up after {:.3} s", plan.pods, times.last()));
        report.floor.push(times);
        report.flood_floor.extend(flood);

        subject.resume().await?;
        let flood = if plan.flood { Some(subject.start_flood().await?) } else { None };
        let pods = pods::new_pods(plan.pods);
        let services = subject.service_processes()?;
        let cpu_before = usage::cpu_seconds(&services)?;
        let up = subject.start_pods(&pods).await?;
        report.flood_agent.extend(flood.map(WriteRate::megabytes_per_second).transpose()?);
        let times = times_of(&up.seen, up.begun);
        progress.print(format!("{name}: agent: the last of {} up after {:.3} s", plan.pods, times.last()));
        report.agent.push(times);
        subject.wait_ready(&pods).await?;
        report.start_cpu.push(usage::since(&cpu_before, usage::cpu_seconds(&services)?));
        if round == plan.rounds && !plan.flood {
            measure_at_rest(&mut subject, plan, &pods, &up, &mut report, progress).await?;
        }
        let gone = take_down(&mut subject, &pods, &up).await?;
        progress.print(format!("{name}: one pod gone after {:.3} s; all are gone", gone.as_secs_f64()));
        report.gone.push(gone.as_secs_f64());
    }
    progress.print("removing everything");
    subject.end()?;
    Ok(report)
}

/// Runs the agent once through the recording proxy and returns the floors made of its requests.
async fn capture(
    subject: &mut Subject,
    folder: &Path,
    plan: &Plan,
    progress: &Progress,
) -> anyhow::Result<Floors> {
    progress.print(format!("capturing the requests for {}", pluralize(plan.pods, "pod")));
    let recorder = Recorder::default();
    let upstream = subject.agent().containerd().socket().to_owned();
    let proxy = Proxy::start(folder.join("proxy.sock"), &upstream, recorder.clone())?;
    subject.configure(proxy.endpoint(), plan.pods)?;
    subject.resume().await?;
    let spec = subject.agent().spec().clone();
    let flood = if plan.flood {
        subject.start_flood().await.context("starting the flood through the recording proxy")?;
        Some(Floor::new(recorder.take(1)?, &spec, &folder.join("flood"))?)
    } else {
        None
    };
    let pods = pods::new_pods(plan.pods);
    let up = subject.start_pods(&pods).await.context("starting the pods through the recording proxy")?;
    progress.print("all are up");
    subject.wait_ready(&pods).await?;
    progress.print("all are Ready; removing them");
    let floor = Floor::new(recorder.take(plan.pods)?, &spec, &folder.join("floor"))?;
    ensure!(floor.markers().len() == plan.pods, "some captured requests start a process without a marker");
    take_down(subject, &pods, &up).await?;
    drop(proxy);
    subject.configure(subject.agent().containerd().endpoint(), plan.pods)?;
    Ok(Floors { pods: floor, flood })
}

/// Starts the pods of the floor directly at containerd and removes them again. Returns their start times and, with a flood, the
/// rate at which it wrote meanwhile, in MB/s.
async fn floor_round(
    subject: &Subject,
    floors: &Floors,
    plan: &Plan,
) -> anyhow::Result<(Times, Option<f64>)> {
    let flood = match &floors.flood {
        Some(flood) => Some(WriteRate::start(&replay_floor(subject, flood, 1).await?.seen).await?),
        None => None,
    };
    let up = replay_floor(subject, &floors.pods, plan.pods).await?;
    let rate = flood.map(WriteRate::megabytes_per_second).transpose()?;
    subject.remove_sandboxes().await?;
    ensure_ended(&up.seen)?;
    floors.pods.clean_up()?;
    floors.flood.iter().try_for_each(Floor::clean_up)?;
    Ok((times_of(&up.seen, up.begun), rate))
}

/// Replays the requests of one floor and waits until all their processes exist.
async fn replay_floor(subject: &Subject, floor: &Floor, pods: usize) -> anyhow::Result<StartedPods> {
    floor.prepare()?;
    let watch = Watch::start(floor.markers())?;
    let begun = floor.replay(&subject.cri()).await?;
    let seen = watch.until(begun + limit_for(pods)).await;
    ensure!(seen.len() == pods, "only {} of {pods} processes were seen", seen.len());
    Ok(StartedPods { begun, seen })
}

/// Measures how long one pod takes to end, then removes the others and stops the agent.
async fn take_down(subject: &mut Subject, pods: &[Pod], up: &StartedPods) -> anyhow::Result<Duration> {
    let first = pods.first().context("there are no pods")?;
    let gone = subject.remove_pod(first, process_of(first, up)?).await?;
    subject.remove_all_manifests().await?;
    ensure_ended(&up.seen)?;
    subject.stop().await?;
    subject.remove_sandboxes().await?;
    Ok(gone)
}

/// Measures memory, idle CPU and the recovery after a kill. Leaves the agent and all pods running.
async fn measure_at_rest(
    subject: &mut Subject,
    plan: &Plan,
    pods: &[Pod],
    up: &StartedPods,
    report: &mut Report,
    progress: &Progress,
) -> anyhow::Result<()> {
    progress.print(format!("waiting {} s before memory is measured", REST.as_secs()));
    tokio::time::sleep(REST).await;
    report.pss_kib = subject.pss_kib()?;
    let with = match plan.idle {
        Some(window) => {
            progress.print(format!("idle for {} s with the agent", window.as_secs()));
            let mut processes = subject.service_processes()?;
            processes.insert(RUNTIME.to_owned(), containerd(subject)?);
            Some(cpu_percent(&processes, window).await?)
        }
        None => None,
    };
    for _ in 0..plan.rounds {
        let recovery = subject.kill_and_recover(pods, &up.seen).await?;
        let (ready, adopted) = (recovery.ready.as_secs_f64(), recovery.adopted.as_secs_f64());
        progress.print(format!(
            "all services killed: Ready again after {ready:.3} s, adopted after {adopted:.3} s"
        ));
        report.recovery.push(ready);
        report.adoption.push(adopted);
    }
    let (Some(window), Some(mut services)) = (plan.idle, with) else { return Ok(()) };
    subject.stop().await?;
    progress.print(format!("idle for {} s without the agent", window.as_secs()));
    tokio::time::sleep(REST).await;
    let alone = Named::from([(RUNTIME.to_owned(), containerd(subject)?)]);
    let runtime_without = cpu_percent(&alone, window).await?.values().sum();
    let runtime_with = services.remove(RUNTIME).context("containerd was not measured")?;
    report.idle = Some(Idle { window, services, runtime_with, runtime_without });
    subject.resume().await?;
    subject.wait_ready(pods).await
}

/// Measures the CPU use of each process over `window`, in percent of one core.
async fn cpu_percent(processes: &Named, window: Duration) -> anyhow::Result<BTreeMap<String, f64>> {
    let before = usage::cpu_seconds(processes)?;
    let begun = Instant::now();
    tokio::time::sleep(window).await;
    let used = usage::since(&before, usage::cpu_seconds(processes)?);
    let seconds = begun.elapsed().as_secs_f64();
    Ok(used.into_iter().map(|(name, used)| (name, used * 100.0 / seconds)).collect())
}

fn containerd(subject: &Subject) -> anyhow::Result<ProcessId> {
    subject.agent().containerd().process().context("containerd has ended")
}

fn process_of(pod: &Pod, up: &StartedPods) -> anyhow::Result<ProcessId> {
    let seen = up.seen.iter().find(|seen| seen.marker == pod.marker);
    Ok(seen.with_context(|| format!("no process of {} was seen", pod.name))?.process)
}

fn ensure_ended(seen: &[SeenProcess]) -> anyhow::Result<()> {
    let alive = seen.iter().filter(|seen| seen.process.is_alive()).count();
    ensure!(alive == 0, "{alive} processes of removed pods still run");
    Ok(())
}

/// The times from `begun` until each process was seen.
fn times_of(seen: &[SeenProcess], begun: Instant) -> Times {
    Times::new(seen.iter().map(|seen| seen.at.saturating_duration_since(begun)))
}
