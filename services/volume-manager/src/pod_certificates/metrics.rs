//! The metric of certificates, by signer and state.

use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    signer_name: String,
    state: &'static str,
}

/// The numbers of certificates. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct CertificateMetrics(Family<Labels, Gauge>);

impl CertificateMetrics {
    /// Registers the metric.
    pub(super) fn register(metrics: &Metrics) -> Self {
        let states = Self::default();
        let help = "Certificates of pods, by signer and state";
        metrics.register("kubelet_podcertificate_states", help, states.0.clone());
        states
    }

    /// Starts counting a certificate.
    pub(super) fn count(&self, signer: &str) -> CountedCertificate {
        CountedCertificate { states: self.0.clone(), signer: signer.to_owned(), state: None }
    }
}

/// A certificate that counts. Dropping it ends that.
#[derive(Debug)]
pub(super) struct CountedCertificate {
    states: Family<Labels, Gauge>,
    signer: String,
    state: Option<&'static str>,
}

impl CountedCertificate {
    /// Counts it in this state from now on; `None`: in no state.
    pub(super) fn set(&mut self, state: Option<&'static str>) {
        let before = std::mem::replace(&mut self.state, state);
        if before == state {
            return;
        }
        for (state, sign) in [(before, -1), (state, 1)] {
            if let Some(state) = state {
                let labels = Labels { signer_name: self.signer.clone(), state };
                self.states.get_or_create(&labels).inc_by(sign);
            }
        }
    }
}

impl Drop for CountedCertificate {
    fn drop(&mut self) {
        self.set(None);
    }
}
