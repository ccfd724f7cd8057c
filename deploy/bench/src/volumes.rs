//! The benchmark of volumes: the CPU time of volume-manager for projected volumes, and the time that volumes of a CSI driver add to
//! starts and ends of pods, compared with the time of the driver's own calls.
//!
//! The driver is `csi-test-driver` of the tests. It handles one call at a time, takes [`CALL`] for each and logs how long each one
//! took. The sum is the driver's own time.

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
use crate::pods::{Kind, NAMESPACE, OBJECTS, PROJECTED, Pod, new_pods_of};
use crate::progress::Progress;
use crate::usage::{self, Named};
use crate::volume_figures::{CsiStart, VolumeFigures};

/// The driver's program, which is in the folder of the agent's binaries.
const PROGRAM: &str = "csi-test-driver";
/// The driver's name.
const DRIVER: &str = "bench.csi.example.org";
/// The least duration of a driver's call, similar to that of a driver with a storage system in the same network.
const CALL: Duration = Duration::from_millis(50);
/// The number of pods with a CSI volume, and of pods without, that are started one by one in each round.
const PAIRS: usize = 5;
/// The largest number of pods with a claim each that are removed at once.
const CLAIMS: usize = 50;
/// The interval at which the release of all volumes is checked.
const RELEASED_POLL: Duration = Duration::from_millis(10);

/// Runs the benchmark with `pods` pods and all files in `folder`.
pub async fn measure(
    folder: &Path,
    pods: usize,
    rounds: usize,
    progress: &Progress,
) -> anyhow::Result<VolumeFigures> {
    progress.print("starting a private containerd, the agent and a CSI driver");
    let mut subject = Subject::start(folder, pods).await?;
    subject.configure(subject.agent().containerd().endpoint(), pods)?;
    subject.resume().await?;
    let driver = start_driver(&subject, &folder.join("driver")).await?;
    let mut figures = VolumeFigures::new(pods, CLAIMS.min(pods));
    for round in 1..=rounds {
        let bench = Round { subject: &subject, driver: &driver };
        progress
            .print(format!("round {round} of {rounds}: {pods} pods with {PROJECTED} projected volumes each"));
        figures.projected_cpu.push(bench.projected_cpu(pods).await.context("projected volumes")?);
        progress
            .print(format!("round {round} of {rounds}: {PAIRS} pods with a CSI volume and {PAIRS} without"));
        figures.starts.extend(bench.csi_starts().await.context("starts with a CSI volume")?);
        let count = figures.claims;
        progress.print(format!(
            "round {round} of {rounds}: {count} pods without and with a claim, removed at once"
        ));
        figures.plain_gone.push(bench.plain_gone(count).await.context("pods without a claim")?);
        let (gone, calls) = bench.claims_gone(count).await.context("pods with a claim each")?;
        figures.claims_gone.push(gone);
        figures.claims_calls.push(calls);
    }
    progress.print("removing everything");
    subject.stop().await?;
    drop(driver);
    subject.end()?;
    Ok(figures)
}

async fn start_driver(subject: &Subject, folder: &Path) -> anyhow::Result<CsiDriver> {
    let spec = subject.agent().spec();
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let (program, registry) = (built_binaries()?.join(PROGRAM), spec.root_dir.join("plugins_registry"));
    ensure!(
        program.is_file(),
        "{} does not exist; `cargo xtask bench --volumes` builds it",
        program.display()
    );
    let millis = CALL.as_millis().to_string();
    let arguments = ["--stage", "--call-millis", &millis];
    let driver =
        CsiDriver::start(CsiDriverSpec::new(program, DRIVER, folder, &registry).with(&arguments)).await?;
    driver.until_call("NotifyRegistrationStatus", "OK").await?;
    Ok(driver)
}

/// One round of the benchmark.
struct Round<'a> {
    subject: &'a Subject,
    driver: &'a CsiDriver,
}

impl Round<'_> {
    /// Starts pods with projected volumes. Returns the CPU seconds of volume-manager per volume.
    async fn projected_cpu(&self, pods: usize) -> anyhow::Result<f64> {
        self.subject.agent().write_manifest("objects.yaml", &objects())?;
        let pods = new_pods_of(Kind::Projected, pods);
        let service = Named::from([(ServiceName::VolumeManager.to_string(), self.volume_manager()?)]);
        let before = usage::cpu_seconds(&service)?;
        self.subject.start_pods(&pods).await?;
        self.subject.wait_ready(&pods).await?;
        let used: f64 = usage::since(&before, usage::cpu_seconds(&service)?).values().sum();
        self.subject.remove_all_manifests().await?;
        self.until_released().await?;
        // Exact: the number of volumes fits into a float.
        Ok(used / (pods.len() * PROJECTED) as f64)
    }

    fn volume_manager(&self) -> anyhow::Result<ProcessId> {
        self.subject.agent().service(ServiceName::VolumeManager).context("volume-manager is not running")
    }

    /// Starts pods one by one, alternately without and with a CSI volume.
    async fn csi_starts(&self) -> anyhow::Result<Vec<CsiStart>> {
        let (plain, with) = (new_pods_of(Kind::Plain, PAIRS), new_pods_of(Kind::Claim, PAIRS));
        // The claims are bound while the first pod, which has no claim, starts.
        self.subject.agent().write_manifest("storage.yaml", &storage(&with))?;
        let mut starts = Vec::new();
        for (plain, with) in plain.iter().zip(&with) {
            let without = self.start_one(plain).await?;
            let before = self.driver_time()?;
            let with = self.start_one(with).await?;
            starts.push(CsiStart { without, with, calls: self.driver_time()? - before });
        }
        self.subject.remove_all_manifests().await?;
        self.until_released().await?;
        Ok(starts)
    }

    /// Starts a pod. Returns the time from just before its manifest is put in place until its process is seen.
    async fn start_one(&self, pod: &Pod) -> anyhow::Result<Duration> {
        let pods = std::slice::from_ref(pod);
        let up = self.subject.start_pods(pods).await?;
        let seen = up.seen.first().context("no process was seen")?.at;
        self.subject.wait_ready(pods).await?;
        Ok(seen.saturating_duration_since(up.begun))
    }

    /// Starts and removes pods without a claim. Returns the time that the removal takes.
    async fn plain_gone(&self, count: usize) -> anyhow::Result<Duration> {
        let pods = new_pods_of(Kind::Plain, count);
        self.subject.start_pods(&pods).await?;
        self.subject.wait_ready(&pods).await?;
        let gone = self.remove_pods(&pods).await?;
        self.subject.remove_all_manifests().await?;
        Ok(gone)
    }

    /// Starts and removes pods with a claim each. Returns the time that the removal takes and the time of the driver's own calls
    /// meanwhile.
    async fn claims_gone(&self, count: usize) -> anyhow::Result<(Duration, Duration)> {
        let pods = new_pods_of(Kind::Claim, count);
        self.subject.agent().write_manifest("storage.yaml", &storage(&pods))?;
        self.subject.start_pods(&pods).await?;
        self.subject.wait_ready(&pods).await?;
        let before = self.driver_time()?;
        let gone = self.remove_pods(&pods).await?;
        let calls = self.driver_time()? - before;
        self.subject.remove_all_manifests().await?;
        Ok((gone, calls))
    }

    /// Removes the manifests of `pods`. Returns the time from just before the first removal until all volumes are released.
    async fn remove_pods(&self, pods: &[Pod]) -> anyhow::Result<Duration> {
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
            tokio::time::sleep(RELEASED_POLL).await;
        }
        Ok(())
    }

    /// The total time that the driver has spent in calls so far.
    fn driver_time(&self) -> anyhow::Result<Duration> {
        let micros = self.driver.calls()?.iter().filter_map(|call| call["micros"].as_u64()).sum();
        Ok(Duration::from_micros(micros))
    }

    /// The number of volumes that the driver has staged.
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

/// The manifests of the ConfigMap and the Secret in projected volumes.
fn objects() -> String {
    let object = |kind: &str, key: &str| {
        json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"name": OBJECTS, "namespace": NAMESPACE},
            "data": {key: "dGV4dA=="},
        })
    };
    documents(&[object("ConfigMap", "text"), object("Secret", "key")])
}

/// The manifests of a PersistentVolume of the driver and a claim for each pod.
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

/// The objects as one YAML stream.
fn documents(objects: &[Value]) -> String {
    objects.iter().map(|object| format!("{object}\n---\n")).collect()
}
