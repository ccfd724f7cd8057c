//! `RuntimeConfig`: the cgroup driver of the runtime (node-and-api.md §4.2). It is queried with each new connection,
//! because a runtime may restart with another configuration.

use std::sync::{Arc, Mutex, PoisonError};

use k8s_cri::v1 as cri;
use keelson_runtime_shim_core::cgroup_driver::{self, CgroupDriver};
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tonic::{Code, Status};

use crate::cri::Cri;

/// The first kubelet release that no longer supports a runtime without the call (§4.2).
const UNSUPPORTED_FROM: &str = "1.37.0";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Version {
    version: &'static str,
}

/// The runtime's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// A response, with or without a driver.
    Driver(Option<CgroupDriver>),
    /// The runtime does not support the call.
    Unsupported,
}

/// Queries the driver, logs each change, and sets the metric for runtimes that are too old for the next release.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimeConfig {
    losing_support: Family<Version, Gauge>,
    last_answer: Arc<Mutex<Option<Answer>>>,
}

impl RuntimeConfig {
    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "1: the container runtime lacks what a kubelet of this version needs";
        metrics.register("kubelet_cri_losing_support", help, self.losing_support.clone());
    }

    /// The runtime's driver; `None`: it reports none, and the configured one is in effect.
    ///
    /// # Errors
    /// The runtime's error, and INTERNAL for an unknown driver; the caller retries.
    pub(crate) async fn query(&self, cri: &Cri) -> Result<Option<CgroupDriver>, Status> {
        let answer = match cri.runtime().runtime_config(cri.quick(cri::RuntimeConfigRequest {})).await {
            Ok(response) => {
                let linux = response.into_inner().linux.map(|linux| linux.cgroup_driver);
                let driver = cgroup_driver::parse_driver(linux)
                    .map_err(|error| Status::internal(error.to_string()))?;
                Answer::Driver(driver)
            }
            Err(status) if status.code() == Code::Unimplemented => Answer::Unsupported,
            Err(status) => return Err(status),
        };
        let before = self.last_answer.lock().unwrap_or_else(PoisonError::into_inner).replace(answer);
        if before != Some(answer) {
            self.log_change(answer);
        }
        match answer {
            Answer::Driver(driver) => Ok(driver),
            Answer::Unsupported => Ok(None),
        }
    }

    fn log_change(&self, answer: Answer) {
        match answer {
            Answer::Driver(Some(driver)) => {
                tracing::info!(
                    cgroup_driver = driver.name(),
                    "the container runtime reports its cgroup driver"
                );
            }
            Answer::Driver(None) => {
                tracing::info!(
                    "the container runtime reports no cgroup driver; the configured one is in effect"
                );
            }
            Answer::Unsupported => tracing::warn!(
                unsupported_from = UNSUPPORTED_FROM,
                "the container runtime does not support RuntimeConfig, which reports the cgroup driver; the \
                 configured one is in effect; update the runtime before using a kubelet of that version"
            ),
        }
        self.losing_support.clear();
        if answer == Answer::Unsupported {
            self.losing_support.get_or_create(&Version { version: UNSUPPORTED_FROM }).set(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_runtime::{FakeRuntime, refusal};

    #[tokio::test]
    async fn runtime_without_runtime_config_sets_cri_losing_support() {
        let fake = FakeRuntime::start().await;
        let (config, metrics) = (RuntimeConfig::default(), Metrics::new());
        config.register(&metrics);
        let losing_support = || {
            let text = metrics.text();
            text.lines().any(|line| line == "kubelet_cri_losing_support{version=\"1.37.0\"} 1")
        };
        assert!(!losing_support());
        assert_eq!(config.query(&fake.cri).await.unwrap(), None);
        assert!(losing_support(), "{}", metrics.text());
        fake.set_cgroup_driver(None);
        assert_eq!(config.query(&fake.cri).await.unwrap(), None);
        assert!(!losing_support(), "it supports the call and reports no driver");
        for (number, driver) in [(0, CgroupDriver::Systemd), (1, CgroupDriver::Cgroupfs)] {
            fake.set_cgroup_driver(Some(number));
            assert_eq!(config.query(&fake.cri).await.unwrap(), Some(driver));
        }
        assert!(!metrics.text().contains("kubelet_cri_losing_support{"));
    }

    #[tokio::test]
    async fn runtime_config_error_and_unknown_driver_are_errors() {
        let fake = FakeRuntime::start().await;
        let config = RuntimeConfig::default();
        fake.set_cgroup_driver(Some(7));
        let status = config.query(&fake.cri).await.unwrap_err();
        assert!(status.message().contains("driver 7"), "{status:?}");
        fake.set_cgroup_driver(Some(0));
        fake.runtime.runtime_config.answer_once(Err(refusal(Code::Internal)));
        assert_eq!(config.query(&fake.cri).await.unwrap_err().code(), Code::Internal);
        assert_eq!(config.query(&fake.cri).await.unwrap(), Some(CgroupDriver::Systemd));
    }
}
