//! The order of things: capture, rounds, rest, recovery.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::process::ProcessId;

use crate::agent::{Subject, Up, limit_for};
use crate::capture::Recorder;
use crate::figures::{Idle, Report, Times, counted};
use crate::floor::Floor;
use crate::pods::{self, Pod};
use crate::progress::Progress;
use crate::proxy::Proxy;
use crate::usage::{self, Flow, Named};
use crate::watch::{Seen, Watch};

/// Pods that have just started still use resources; memory is measured after this time.
const REST: Duration = Duration::from_secs(10);

/// The name under which containerd's CPU time is kept.
const RUNTIME: &str = "containerd";

/// What is measured.
#[derive(Debug, Clone)]
pub struct Plan {
    /// How many pods.
    pub pods: usize,
    /// How often.
    pub rounds: usize,
    /// The length of an idle window; `None`: no idle windows.
    pub idle: Option<Duration>,
    /// Whether a container writes its log meanwhile, as fast as it can. Then nothing is measured at rest.
    pub flood: bool,
}

/// The floors: pods that are started directly at containerd.
struct Floors {
    pods: Floor,
    flood: Option<Floor>,
}

/// Measures, with everything in `folder`.
pub async fn run(folder: &Path, plan: &Plan, progress: &Progress) -> anyhow::Result<Report> {
    progress.say("starting a private containerd and the agent");
    let mut subject = Subject::start(folder, plan.pods).await?;
    let floors = capture(&mut subject, folder, plan, progress).await?;
    let mut report = Report::new(plan.pods, plan.rounds);
    for round in 1..=plan.rounds {
        let name = format!("round {round} of {}", plan.rounds);
        let (times, flood) =
            floor_round(&subject, &floors, plan).await.with_context(|| format!("{name}, floor"))?;
        progress.say(format!("{name}: floor: the last of {} up after {:.3} s", plan.pods, times.last()));
        report.floor.push(times);
        report.flood_floor.extend(flood);

        subject.resume().await?;
        let flood = if plan.flood { Some(subject.flood().await?) } else { None };
        let pods = pods::fresh(plan.pods);
        let services = subject.services()?;
        let cpu_before = usage::cpu_seconds(&services)?;
        let up = subject.up(&pods).await?;
        report.flood_agent.extend(flood.map(Flow::megabytes_per_second).transpose()?);
        let times = times_of(&up.seen, up.begun);
        progress.say(format!("{name}: agent: the last of {} up after {:.3} s", plan.pods, times.last()));
        report.agent.push(times);
        subject.wait_ready(&pods).await?;
        report.start_cpu.push(usage::since(&cpu_before, usage::cpu_seconds(&services)?));
        if round == plan.rounds && !plan.flood {
            at_rest(&mut subject, plan, &pods, &up, &mut report, progress).await?;
        }
        let gone = take_down(&mut subject, &pods, &up).await?;
        progress.say(format!("{name}: one pod gone after {:.3} s; all are gone", gone.as_secs_f64()));
        report.gone.push(gone.as_secs_f64());
    }
    progress.say("removing everything");
    subject.end()?;
    Ok(report)
}

/// One run of the agent through the recording proxy.
async fn capture(
    subject: &mut Subject,
    folder: &Path,
    plan: &Plan,
    progress: &Progress,
) -> anyhow::Result<Floors> {
    progress.say(format!("capturing the requests for {}", counted(plan.pods, "pod")));
    let recorder = Recorder::default();
    let upstream = subject.agent().containerd().socket().to_owned();
    let proxy = Proxy::start(folder.join("proxy.sock"), &upstream, recorder.clone())?;
    subject.configure(proxy.endpoint(), plan.pods)?;
    subject.resume().await?;
    let spec = subject.agent().spec().clone();
    let flood = if plan.flood {
        subject.flood().await.context("the flood through the recording proxy")?;
        Some(Floor::of(recorder.take(1)?, &spec, &folder.join("flood"))?)
    } else {
        None
    };
    let pods = pods::fresh(plan.pods);
    let up = subject.up(&pods).await.context("the run through the recording proxy")?;
    progress.say("all are up");
    subject.wait_ready(&pods).await?;
    progress.say("all are Ready; removing them");
    let floor = Floor::of(recorder.take(plan.pods)?, &spec, &folder.join("floor"))?;
    ensure!(floor.markers().len() == plan.pods, "the captured requests do not start what the manifests say");
    take_down(subject, &pods, &up).await?;
    drop(proxy);
    subject.configure(subject.agent().containerd().endpoint(), plan.pods)?;
    Ok(Floors { pods: floor, flood })
}

/// The captured requests straight at containerd, then all of it removed. Beside a flood also what that wrote meanwhile, in
/// MB/s.
async fn floor_round(
    subject: &Subject,
    floors: &Floors,
    plan: &Plan,
) -> anyhow::Result<(Times, Option<f64>)> {
    let flood = match &floors.flood {
        Some(flood) => Some(Flow::of(&replayed(subject, flood, 1).await?.seen).await?),
        None => None,
    };
    let up = replayed(subject, &floors.pods, plan.pods).await?;
    let wrote = flood.map(Flow::megabytes_per_second).transpose()?;
    subject.purge().await?;
    ensure_ended(&up.seen)?;
    floors.pods.clean_up()?;
    floors.flood.iter().try_for_each(Floor::clean_up)?;
    Ok((times_of(&up.seen, up.begun), wrote))
}

/// The requests of one floor, until all their processes are there.
async fn replayed(subject: &Subject, floor: &Floor, pods: usize) -> anyhow::Result<Up> {
    floor.prepare()?;
    let watch = Watch::start(floor.markers())?;
    let begun = floor.replay(&subject.cri()).await?;
    let seen = watch.until(begun + limit_for(pods)).await;
    ensure!(seen.len() == pods, "only {} of {pods} processes were seen", seen.len());
    Ok(Up { begun, seen })
}

/// Measures how long one pod takes to end, then removes the others and stops the agent.
async fn take_down(subject: &mut Subject, pods: &[Pod], up: &Up) -> anyhow::Result<Duration> {
    let first = pods.first().context("there are no pods")?;
    let gone = subject.remove_one(first, process_of(first, up)?).await?;
    subject.remove_rest().await?;
    ensure_ended(&up.seen)?;
    subject.stop().await?;
    subject.purge().await?;
    Ok(gone)
}

/// What the agent costs while nothing happens, and how it comes back after it was killed. Leaves the agent
/// running and all pods as they were.
async fn at_rest(
    subject: &mut Subject,
    plan: &Plan,
    pods: &[Pod],
    up: &Up,
    report: &mut Report,
    progress: &Progress,
) -> anyhow::Result<()> {
    progress.say(format!("{} s of rest before memory is read", REST.as_secs()));
    tokio::time::sleep(REST).await;
    report.pss_kib = subject.pss_kib()?;
    let with = match plan.idle {
        Some(window) => {
            progress.say(format!("idle for {} s with the agent", window.as_secs()));
            let mut processes = subject.services()?;
            processes.insert(RUNTIME.to_owned(), containerd(subject)?);
            Some(cpu_percent(&processes, window).await?)
        }
        None => None,
    };
    for _ in 0..plan.rounds {
        let took = subject.recover(pods, &up.seen).await?;
        let (ready, adopted) = (took.ready.as_secs_f64(), took.adopted.as_secs_f64());
        progress.say(format!(
            "all services killed: Ready again after {ready:.3} s, adopted after {adopted:.3} s"
        ));
        report.recovery.push(ready);
        report.adoption.push(adopted);
    }
    let (Some(window), Some(mut services)) = (plan.idle, with) else { return Ok(()) };
    subject.stop().await?;
    progress.say(format!("idle for {} s without the agent", window.as_secs()));
    tokio::time::sleep(REST).await;
    let alone = Named::from([(RUNTIME.to_owned(), containerd(subject)?)]);
    let runtime_without = cpu_percent(&alone, window).await?.values().sum();
    let runtime_with = services.remove(RUNTIME).context("containerd was not measured")?;
    report.idle = Some(Idle { window, services, runtime_with, runtime_without });
    subject.resume().await?;
    subject.wait_ready(pods).await
}

/// CPU time over `window`, in percent of one core.
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

fn process_of(pod: &Pod, up: &Up) -> anyhow::Result<ProcessId> {
    let seen = up.seen.iter().find(|seen| seen.marker == pod.marker);
    Ok(seen.with_context(|| format!("no process of {} was seen", pod.name))?.process)
}

fn ensure_ended(seen: &[Seen]) -> anyhow::Result<()> {
    let alive = seen.iter().filter(|seen| seen.process.is_alive()).count();
    ensure!(alive == 0, "{alive} processes of removed pods are still there");
    Ok(())
}

fn times_of(seen: &[Seen], begun: Instant) -> Times {
    Times::new(seen.iter().map(|seen| seen.at.saturating_duration_since(begun)))
}
