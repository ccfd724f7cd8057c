//! What starts after a reboot while the control plane does not answer (architecture §5).
//!
//! Parity: a kubelet knows no API pods before the API server answers, so none starts. Here those pods start that may run twice
//! without harm, unless the last contact is too long ago; the others wait, and the reason is reported.

use std::fmt;
use std::time::Duration;

use keelson_config::{Offline, StartAfterReboot};
use keelson_kube_model::{Pod, Volume, format_go_duration};

/// How often per maximum age the last contact is written to the checkpoint…
const WRITES_PER_MAX_AGE: u32 = 10;
/// …but at most this often, to spare the disk…
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(60);
/// …and at least this often.
const MAX_WRITE_INTERVAL: Duration = Duration::from_secs(3600);

/// A known pod that does not start before the control plane answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its key or path.
    pub origin: String,
    /// Why it waits.
    pub reason: WaitReason,
}

/// Why a pod waits for the control plane.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitReason {
    /// `offline.startAfterReboot: never`.
    Policy,
    /// The last contact was too long ago.
    Age {
        /// Time since the last contact, if known.
        age: Option<Duration>,
        /// `offline.maxAge`.
        max_age: Duration,
    },
    /// A StatefulSet owns the pod and guarantees that it does not run twice.
    StatefulSet,
    /// The pod has a volume that another node may be using.
    Claim {
        /// Name of the volume.
        volume: String,
    },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy => f.write_str("offline.startAfterReboot is never"),
            Self::Age { age: Some(age), max_age } => {
                let (age, max_age) = (format_go_duration(*age), format_go_duration(*max_age));
                write!(f, "the last contact was {age} ago, and offline.maxAge is {max_age}")
            }
            Self::Age { age: None, max_age } => {
                let max_age = format_go_duration(*max_age);
                write!(f, "the time of the last contact is not known, and offline.maxAge is {max_age}")
            }
            Self::StatefulSet => f.write_str(
                "a StatefulSet owns the pod, which must not run twice, and offline.startAfterReboot is stateless",
            ),
            Self::Claim { volume } => write!(
                f,
                "the volume {volume} is a PersistentVolumeClaim that another node may be using, and offline.startAfterReboot is \
                 stateless"
            ),
        }
    }
}

/// Why a pod must not run twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SingleRun {
    /// A StatefulSet owns the pod.
    StatefulSet,
    /// The pod has a claim.
    Claim {
        /// Name of its volume.
        volume: String,
    },
}

impl SingleRun {
    /// Whether `pod` must not run twice, and why.
    pub fn of(pod: &Pod) -> Option<Self> {
        Self::with_node_local_claims(pod, |_| false)
    }

    /// As [`SingleRun::of`], where `is_node_local` tells by its name whether a claim of the pod's namespace is bound to a path of
    /// this node, which no other node can use.
    pub fn with_node_local_claims(pod: &Pod, is_node_local: impl Fn(&str) -> bool) -> Option<Self> {
        if pod.metadata.owner_references.iter().any(|owner| owner.kind == "StatefulSet") {
            return Some(Self::StatefulSet);
        }
        let has_claim = |volume: &&Volume| {
            let claim = volume.persistent_volume_claim.as_ref();
            claim.is_some_and(|claim| !is_node_local(&claim.claim_name)) || volume.ephemeral.is_some()
        };
        let volume = pod.spec.volumes.iter().find(has_claim)?;
        Some(Self::Claim { volume: volume.name.clone() })
    }
}

/// Why a pod must wait for the control plane after a reboot; `None` if it may start. `single_run` says why it must not run twice,
/// `age` is the time since the last contact, `None` if unknown.
pub fn wait_reason(
    single_run: Option<&SingleRun>,
    policy: &Offline,
    age: Option<Duration>,
) -> Option<WaitReason> {
    let max_age = Duration::from_millis(policy.max_age_ms);
    if policy.start_after_reboot == StartAfterReboot::Never {
        return Some(WaitReason::Policy);
    }
    if !max_age.is_zero() && age.is_none_or(|age| age > max_age) {
        let age = age.map(|age| Duration::from_secs(age.as_secs()));
        return Some(WaitReason::Age { age, max_age });
    }
    if policy.start_after_reboot == StartAfterReboot::All {
        return None;
    }
    single_run.map(|single_run| match single_run {
        SingleRun::StatefulSet => WaitReason::StatefulSet,
        SingleRun::Claim { volume } => WaitReason::Claim { volume: volume.clone() },
    })
}

/// How often to write the last contact while the control plane answers. The age after a reboot is wrong by at most this much.
pub fn contact_write_interval(policy: &Offline) -> Duration {
    let max_age = Duration::from_millis(policy.max_age_ms);
    if max_age.is_zero() {
        MAX_WRITE_INTERVAL
    } else {
        (max_age / WRITES_PER_MAX_AGE).clamp(MIN_WRITE_INTERVAL, MAX_WRITE_INTERVAL)
    }
}

/// Time from `last_contact` to `now`, both in seconds since 1970. If the clock was set back, as without a battery, the age is
/// zero.
pub fn contact_age(last_contact: Option<i64>, now: i64) -> Option<Duration> {
    last_contact
        .map(|last_contact| Duration::from_secs(u64::try_from(now.saturating_sub(last_contact)).unwrap_or(0)))
}
