//! `RuntimeConfig`: which cgroup driver the runtime has (node-and-api.md §4.2). It is asked with each new connection,
//! for a runtime may come back with another configuration.

use std::sync::{Arc, Mutex, PoisonError};

use k8s_cri::v1 as cri;
use keelson_runtime_shim_core::cgroup_driver::{self, CgroupDriver};
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tonic::{Code, Status};

use crate::cri::Cri;

/// The first release of the kubelet that does without a runtime that does not know the call (§4.2).
const LOST_WITH: &str = "1.37.0";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Version {
    version: &'static str,
}

/// What the runtime has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// With a driver, or without.
    Told(Option<CgroupDriver>),
    /// It does not know the call.
    Lacking,
}

/// Asks, tells a person once, and counts the runtimes that are too old for the next release.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimeConfig {
    losing: Family<Version, Gauge>,
    last: Arc<Mutex<Option<Answer>>>,
}

impl RuntimeConfig {
    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "1: the container runtime lacks what a kubelet of this version needs";
        metrics.register("kubelet_cri_losing_support", help, self.losing.clone());
    }

    /// The driver that the runtime names; `None`: it names none, the configured one is in force.
    ///
    /// # Errors
    /// What the runtime answers, and INTERNAL for a driver that nobody knows; to be tried again.
    pub(crate) async fn ask(&self, cri: &Cri) -> Result<Option<CgroupDriver>, Status> {
        let answer = match cri.runtime().runtime_config(cri.quick(cri::RuntimeConfigRequest {})).await {
            Ok(response) => {
                let linux = response.into_inner().linux.map(|linux| linux.cgroup_driver);
                let told = cgroup_driver::told(linux).map_err(|error| Status::internal(error.to_string()))?;
                Answer::Told(told)
            }
            Err(status) if status.code() == Code::Unimplemented => Answer::Lacking,
            Err(status) => return Err(status),
        };
        let before = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(answer);
        if before != Some(answer) {
            self.tell(answer);
        }
        match answer {
            Answer::Told(driver) => Ok(driver),
            Answer::Lacking => Ok(None),
        }
    }

    fn tell(&self, answer: Answer) {
        match answer {
            Answer::Told(Some(driver)) => {
                tracing::info!(
                    cgroup_driver = driver.name(),
                    "the container runtime names its cgroup driver"
                );
            }
            Answer::Told(None) => {
                tracing::info!(
                    "the container runtime names no cgroup driver, the configured one is in force"
                );
            }
            Answer::Lacking => tracing::warn!(
                lost_with = LOST_WITH,
                "the container runtime does not know RuntimeConfig, by which it would name its cgroup driver: the \
                 configured one is in force; update the runtime before the kubelet of that version"
            ),
        }
        self.losing.clear();
        if answer == Answer::Lacking {
            self.losing.get_or_create(&Version { version: LOST_WITH }).set(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer as Instead, FakeRuntime};

    #[tokio::test]
    async fn a_runtime_that_lacks_the_call_is_losing_support_until_one_answers() {
        let fake = FakeRuntime::start().await;
        let (config, metrics) = (RuntimeConfig::default(), Metrics::new());
        config.register(&metrics);
        let losing = || {
            let text = metrics.text();
            text.lines().any(|line| line == "kubelet_cri_losing_support{version=\"1.37.0\"} 1")
        };
        assert!(!losing());
        assert_eq!(config.ask(&fake.cri).await.unwrap(), None);
        assert!(losing(), "{}", metrics.text());
        fake.drives_cgroups(None);
        assert_eq!(config.ask(&fake.cri).await.unwrap(), None);
        assert!(!losing(), "it knows the call and names no driver");
        for (number, driver) in [(0, CgroupDriver::Systemd), (1, CgroupDriver::Cgroupfs)] {
            fake.drives_cgroups(Some(number));
            assert_eq!(config.ask(&fake.cri).await.unwrap(), Some(driver));
        }
        assert!(!metrics.text().contains("kubelet_cri_losing_support{"));
    }

    #[tokio::test]
    async fn an_error_and_an_unknown_driver_are_no_answers() {
        let fake = FakeRuntime::start().await;
        let config = RuntimeConfig::default();
        fake.drives_cgroups(Some(7));
        let status = config.ask(&fake.cri).await.unwrap_err();
        assert!(status.message().contains("driver 7"), "{status:?}");
        fake.drives_cgroups(Some(0));
        fake.answer("RuntimeConfig", Instead::Fail(1, Code::Internal));
        assert_eq!(config.ask(&fake.cri).await.unwrap_err().code(), Code::Internal);
        assert_eq!(config.ask(&fake.cri).await.unwrap(), Some(CgroupDriver::Systemd));
    }
}
