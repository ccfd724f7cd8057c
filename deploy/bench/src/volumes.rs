//! What volumes cost: volume-manager's CPU time for projected volumes, and how much longer pods with volumes of a CSI driver take to
//! come and to go than the driver's own calls.
//!
//! The driver is `csi-test-driver` of the tests. It takes [`CALL`] for each call, does one at a time and writes down how long each
//! one took, so its own time is the sum of that.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_config::ServiceName;
use keelson_testkit::built_binaries;
use keelson_testkit::process::ProcessId;
use keelson_tests::csi_driver::{CsiDriver, CsiDriverSpec};
use serde_json::{Value, json};

use crate::agent::{Subject, limit_for};
use crate::pods::{Kind, NAMESPACE, OBJECTS, PROJECTED, Pod, fresh_of};
use crate::progress::Progress;
use crate::usage::{self, Named};
use crate::volume_figures::{CsiStart, VolumeFigures};

/// The driver's program, next to the agent's.
const PROGRAM: &str = "csi-test-driver";
/// Its name.
const DRIVER: &str = "bench.csi.example.org";
/// How long it takes for a call, at least: such as a driver's that asks a storage system nearby.
const CALL: Duration = Duration::from_millis(50);
/// Pods that are started one by one with a CSI volume, and as many without, in each round.
const PAIRS: usize = 5;
/// Pods with a claim each that are removed at once, at most.
const CLAIMS: usize = 50;
/// Between two looks whether all volumes are released.
const LOOK: Duration = Duration::from_millis(10);

/// Measures with `pods` pods, with everything in `folder`.
pub async fn measure(
    folder: &Path,
    pods: usize,
    rounds: usize,
    progress: &Progress,
) -> anyhow::Result<VolumeFigures> {
    progress.say("starting a private containerd, the agent and a CSI driver");
    let mut subject = Subject::start(folder, pods).await?;
    subject.configure(subject.agent().containerd().endpoint(), pods)?;
    subject.resume().await?;
    let driver = start_driver(&subject, &folder.join("driver")).await?;
    let mut figures = VolumeFigures::new(pods, CLAIMS.min(pods));
    for round in 1..=rounds {
        let bench = Round { subject: &subject, driver: &driver };
        progress
            .say(format!("round {round} of {rounds}: {pods} pods with {PROJECTED} projected volumes each"));
        figures.projected_cpu.push(bench.projected(pods).await.context("projected volumes")?);
        progress
            .say(format!("round {round} of {rounds}: {PAIRS} pods with a CSI volume and {PAIRS} without"));
        figures.starts.extend(bench.starts().await.context("starts with a CSI volume")?);
        let count = figures.claims;
        progress.say(format!(
            "round {round} of {rounds}: {count} pods without and with a claim, removed at once"
        ));
        figures.plain_gone.push(bench.plain_gone(count).await.context("pods without a claim")?);
        let (gone, calls) = bench.claims_gone(count).await.context("pods with a claim each")?;
        figures.claims_gone.push(gone);
        figures.claims_calls.push(calls);
    }
    progress.say("removing everything");
    subject.stop().await?;
    drop(driver);
    subject.end()?;
    Ok(figures)
}

async fn start_driver(subject: &Subject, folder: &Path) -> anyhow::Result<CsiDriver> {
    let spec = subject.agent().spec();
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (program, registry) = (built_binaries()?.join(PROGRAM), spec.root_dir.join("plugins_registry"));
    ensure!(program.is_file(), "there is no {}; run: cargo xtask bench --volumes", program.display());
    let millis = CALL.as_millis().to_string();
    let arguments = ["--stage", "--call-millis", &millis];
    let driver =
        CsiDriver::start(CsiDriverSpec::new(program, DRIVER, folder, &registry).with(&arguments)).await?;
    driver.until_call("NotifyRegistrationStatus", "OK").await?;
    Ok(driver)
}

struct Round<'a> {
    subject: &'a Subject,
    driver: &'a CsiDriver,
}

impl Round<'_> {
    /// The CPU seconds of volume-manager for each volume.
    async fn projected(&self, pods: usize) -> anyhow::Result<f64> {
        self.subject.agent().write_manifest("objects.yaml", &objects())?;
        let pods = fresh_of(Kind::Projected, pods);
        let service = Named::from([(ServiceName::VolumeManager.to_string(), self.volume_manager()?)]);
        let before = usage::cpu_seconds(&service)?;
        self.subject.up(&pods).await?;
        self.subject.wait_ready(&pods).await?;
        let used: f64 = usage::since(&before, usage::cpu_seconds(&service)?).values().sum();
        self.subject.remove_rest().await?;
        self.until_released().await?;
        // So few volumes are counted exactly.
        Ok(used / (pods.len() * PROJECTED) as f64)
    }

    fn volume_manager(&self) -> anyhow::Result<ProcessId> {
        self.subject.agent().service(ServiceName::VolumeManager).context("volume-manager does not run")
    }

    /// Pods without and with a CSI volume in turns, one by one.
    async fn starts(&self) -> anyhow::Result<Vec<CsiStart>> {
        let (plain, with) = (fresh_of(Kind::Plain, PAIRS), fresh_of(Kind::Claim, PAIRS));
        // They are bound while the first pod, which has no claim, starts.
        self.subject.agent().write_manifest("storage.yaml", &storage(&with))?;
        let mut starts = Vec::new();
        for (plain, with) in plain.iter().zip(&with) {
            let without = self.start_one(plain).await?;
            let calls = self.calls()?;
            let with = self.start_one(with).await?;
            starts.push(CsiStart { without, with, calls: self.calls()? - calls });
        }
        self.subject.remove_rest().await?;
        self.until_released().await?;
        Ok(starts)
    }

    /// From just before the manifest is in place to the process.
    async fn start_one(&self, pod: &Pod) -> anyhow::Result<Duration> {
        let pods = std::slice::from_ref(pod);
        let up = self.subject.up(pods).await?;
        let seen = up.seen.first().context("no process was seen")?.at;
        self.subject.wait_ready(pods).await?;
        Ok(seen.saturating_duration_since(up.begun))
    }

    /// Pods without a claim, from just before the first manifest is removed until nothing of them is left.
    async fn plain_gone(&self, count: usize) -> anyhow::Result<Duration> {
        self.all_gone(&fresh_of(Kind::Plain, count)).await
    }

    /// The same for pods with a claim each, and the time of the driver's own calls meanwhile.
    async fn claims_gone(&self, count: usize) -> anyhow::Result<(Duration, Duration)> {
        let pods = fresh_of(Kind::Claim, count);
        self.subject.agent().write_manifest("storage.yaml", &storage(&pods))?;
        self.subject.up(&pods).await?;
        self.subject.wait_ready(&pods).await?;
        let calls = self.calls()?;
        let gone = self.remove_all(&pods).await?;
        let calls = self.calls()? - calls;
        self.subject.remove_rest().await?;
        Ok((gone, calls))
    }

    async fn all_gone(&self, pods: &[Pod]) -> anyhow::Result<Duration> {
        self.subject.up(pods).await?;
        self.subject.wait_ready(pods).await?;
        let gone = self.remove_all(pods).await?;
        self.subject.remove_rest().await?;
        Ok(gone)
    }

    async fn remove_all(&self, pods: &[Pod]) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        for pod in pods {
            self.subject.agent().remove_manifest(&pod.file())?;
        }
        self.until_released().await?;
        Ok(begun.elapsed())
    }

    /// Waits until no pod has a folder and the driver has no volume staged.
    async fn until_released(&self) -> anyhow::Result<()> {
        let folder = self.subject.agent().spec().root_dir.join("pods");
        let limit = limit_for(CLAIMS);
        let begun = Instant::now();
        while !is_empty(&folder) || self.staged()? > 0 {
            ensure!(
                begun.elapsed() < limit,
                "{} s after all pods were removed, {} has entries or the driver has {} volumes staged\n{}",
                limit.as_secs(),
                folder.display(),
                self.staged()?,
                self.subject.agent().log_tail()
            );
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// The time that the driver has spent on calls so far.
    fn calls(&self) -> anyhow::Result<Duration> {
        let micros = self.driver.calls()?.iter().filter_map(|call| call["micros"].as_u64()).sum();
        Ok(Duration::from_micros(micros))
    }

    /// The volumes that the driver has staged.
    fn staged(&self) -> anyhow::Result<usize> {
        let calls = self.driver.calls()?;
        let count = |method: &str| {
            calls.iter().filter(|call| call["method"] == method && call["result"] == "OK").count()
        };
        Ok(count("NodeStageVolume").saturating_sub(count("NodeUnstageVolume")))
    }
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

/// The ConfigMap and the Secret of projected volumes.
fn objects() -> String {
    let object = |kind: &str, key: &str| {
        json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"name": OBJECTS, "namespace": NAMESPACE},
            "data": {key: "dGV4dA=="},
        })
    };
    documents(&[object("ConfigMap", "text"), object("Secret", "key")])
}

/// A PersistentVolume of the driver and a claim for each pod.
fn storage(pods: &[Pod]) -> String {
    let objects: Vec<Value> = pods.iter().flat_map(|pod| [volume(&pod.name), claim(&pod.name)]).collect();
    documents(&objects)
}

fn volume(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("pv-{name}")},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": NAMESPACE, "name": name},
            "csi": {"driver": DRIVER, "volumeHandle": format!("handle-{name}")},
        },
    })
}

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
            "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

fn documents(objects: &[Value]) -> String {
    objects.iter().map(|object| format!("{object}\n---\n")).collect()
}
