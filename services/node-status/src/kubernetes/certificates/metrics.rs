//! The kubelet's metrics of its certificates (node-and-api.md §15.1). Its counters are gauges here, since the text format would
//! add `_total` to the names of counters.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use keelson_config::CertificateKind;
use keelson_service_kit::{Metrics, now_unix_nanos};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds in seconds: from a minute to four years.
const AGE_BUCKETS: [f64; 10] = [
    60.0,
    3_600.0,
    14_400.0,
    86_400.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
    124_416_000.0,
];

/// When the current certificate expires, seconds since 1970; 0: there is none.
#[derive(Debug, Clone, Default)]
struct ExpiryGauge(Arc<AtomicI64>);

impl EncodeMetric for ExpiryGauge {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let left = match self.0.load(Ordering::Relaxed) {
            0 => f64::INFINITY,
            ends => (ends - now_unix_nanos() / 1_000_000_000) as f64,
        };
        ConstGauge::new(left).encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// The metrics of a kind of certificate.
#[derive(Debug)]
pub(super) struct CertificateMetrics {
    expiry: ExpiryGauge,
    errors: Gauge,
    ages: Option<Histogram>,
}

impl CertificateMetrics {
    pub(super) fn register(metrics: &Metrics, kind: CertificateKind) -> Self {
        let (expiry, errors) = (ExpiryGauge::default(), Gauge::default());
        let (ttl, renew_errors) = match kind {
            CertificateKind::Client => (
                "kubelet_certificate_manager_client_ttl_seconds",
                "kubelet_certificate_manager_client_expiration_renew_errors",
            ),
            CertificateKind::Serving => {
                ("kubelet_certificate_manager_server_ttl_seconds", "kubelet_server_expiration_renew_errors")
            }
        };
        let word = kind.word();
        metrics.register(
            ttl,
            &format!("Seconds until the {word} certificate expires; +Inf without one"),
            expiry.clone(),
        );
        metrics.register(renew_errors, &format!("Failed requests for a {word} certificate"), errors.clone());
        let ages = (kind == CertificateKind::Serving).then(|| {
            let ages = Histogram::new(AGE_BUCKETS);
            metrics.register(
                "kubelet_certificate_manager_server_rotation_seconds",
                "How old serving certificates were when they were replaced",
                ages.clone(),
            );
            ages
        });
        Self { expiry, errors, ages }
    }

    /// Sets when the current certificate expires, seconds since 1970; `None`: there is none.
    pub(super) fn set_expiry(&self, at: Option<i64>) {
        self.expiry.0.store(at.unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn count_error(&self) {
        self.errors.inc();
    }

    /// Observes that a certificate, valid since `not_before`, was replaced.
    pub(super) fn replaced(&self, not_before: i64, now: i64) {
        if let Some(ages) = &self.ages {
            ages.observe((now - not_before).max(0) as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_ttl_metrics_are_infinite_without_a_certificate() {
        let metrics = Metrics::new();
        let client = CertificateMetrics::register(&metrics, CertificateKind::Client);
        let serving = CertificateMetrics::register(&metrics, CertificateKind::Serving);
        let value = |name: &str| {
            let text = metrics.text();
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("no {name} in {text}")).parse::<f64>().unwrap()
        };
        assert_eq!(value("kubelet_certificate_manager_client_ttl_seconds"), f64::INFINITY);
        let now = now_unix_nanos() / 1_000_000_000;
        client.set_expiry(Some(now + 1_000));
        serving.set_expiry(Some(now - 1_000));
        let left = value("kubelet_certificate_manager_client_ttl_seconds");
        assert!((900.0..=1_000.0).contains(&left), "{left}");
        assert!(value("kubelet_certificate_manager_server_ttl_seconds") <= -1_000.0);
        client.count_error();
        assert_eq!(value("kubelet_certificate_manager_client_expiration_renew_errors"), 1.0);
        assert_eq!(value("kubelet_server_expiration_renew_errors"), 0.0);
        serving.replaced(now - 3_000, now);
        assert_eq!(value("kubelet_certificate_manager_server_rotation_seconds_sum"), 3_000.0);
        assert_eq!(value("kubelet_certificate_manager_server_rotation_seconds_bucket{le=\"3600.0\"}"), 1.0);
    }
}
