//! What starts after a reboot while the control plane does not answer (architecture §5).
//!
//! Parity: a kubelet knows no pod of the API before the API server answers, so none starts. Here those start that may run
//! twice without harm, up to an age of what is known of them; what waits is told with its reason.

use std::fmt;
use std::time::Duration;

use keelson_config::{Offline, StartAfterReboot};
use keelson_kube_model::format_go_duration;
use serde::Deserialize;

/// How much of the maximum age may pass before the control plane's last word is written down anew.
const PART: u32 = 10;
/// It is written down at most this often, for the sake of the disk…
const OFTEN: Duration = Duration::from_secs(60);
/// …and at least this often.
const SELDOM: Duration = Duration::from_secs(3600);

/// A pod that is known and does not start before the control plane answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub origin: String,
    /// Why it waits.
    pub why: WaitsFor,
}

/// Why a pod waits for the control plane.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitsFor {
    /// `offline.startAfterReboot: never`.
    Any,
    /// The control plane was heard too long ago.
    Age {
        /// How long ago, when that is known.
        age: Option<Duration>,
        /// `offline.maxAge`.
        most: Duration,
    },
    /// A StatefulSet promises that it does not run twice.
    Owner,
    /// It has data that another node may use by now.
    Claim {
        /// The volume.
        volume: String,
    },
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("offline.startAfterReboot is never"),
            Self::Age { age: Some(age), most } => {
                let (age, most) = (format_go_duration(*age), format_go_duration(*most));
                write!(f, "it was last heard {age} ago, and offline.maxAge is {most}")
            }
            Self::Age { age: None, most } => {
                let most = format_go_duration(*most);
                write!(f, "it is not known when it was last heard, and offline.maxAge is {most}")
            }
            Self::Owner => f.write_str(
                "a StatefulSet owns the pod, which must not run twice, and offline.startAfterReboot is stateless",
            ),
            Self::Claim { volume } => write!(
                f,
                "the volume {volume} is a claim that another node may use by now, and offline.startAfterReboot is \
                 stateless"
            ),
        }
    }
}

/// Why a pod does not start after a reboot before the control plane answers; `None` when it starts. `age` is the time since
/// the control plane was last heard, `None` when nobody knows.
pub fn waits_for(pod_json: &[u8], policy: &Offline, age: Option<Duration>) -> Option<WaitsFor> {
    let most = Duration::from_millis(policy.max_age_ms);
    if policy.start_after_reboot == StartAfterReboot::Never {
        return Some(WaitsFor::Any);
    }
    if !most.is_zero() && age.is_none_or(|age| age > most) {
        let age = age.map(|age| Duration::from_secs(age.as_secs()));
        return Some(WaitsFor::Age { age, most });
    }
    if policy.start_after_reboot == StartAfterReboot::All {
        return None;
    }
    // What cannot be read says nothing of itself.
    let Ok(pod) = serde_json::from_slice::<Pod>(pod_json) else { return Some(WaitsFor::Any) };
    if pod.metadata.owner_references.iter().any(|owner| owner.kind == "StatefulSet") {
        return Some(WaitsFor::Owner);
    }
    let claim = |volume: &Volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some();
    pod.spec.volumes.into_iter().find(claim).map(|volume| WaitsFor::Claim { volume: volume.name })
}

/// How often the control plane's last word is written down while it is heard: its age after a reboot is wrong by no more.
pub fn written_every(policy: &Offline) -> Duration {
    let most = Duration::from_millis(policy.max_age_ms);
    if most.is_zero() { SELDOM } else { (most / PART).clamp(OFTEN, SELDOM) }
}

/// How long ago `heard` was at the moment `now`, both in seconds since 1970. A clock that runs back, as one without a battery
/// does, counts as no time.
pub fn age(heard: Option<i64>, now: i64) -> Option<Duration> {
    heard.map(|heard| Duration::from_secs(u64::try_from(now.saturating_sub(heard)).unwrap_or(0)))
}

#[derive(Deserialize)]
struct Pod {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    owner_references: Vec<Owner>,
}

#[derive(Deserialize)]
struct Owner {
    #[serde(default)]
    kind: String,
}

#[derive(Default, Deserialize)]
struct Spec {
    #[serde(default)]
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    #[serde(default)]
    name: String,
    persistent_volume_claim: Option<serde::de::IgnoredAny>,
    ephemeral: Option<serde::de::IgnoredAny>,
}
