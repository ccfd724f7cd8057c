//! `/metrics/slis`: results of the checks of `/healthz` (node-and-api.md §15.5).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::health::Check;
use crate::metrics_text::{Family, write_family};
use crate::{App, metrics};

const LAST: Family = ("kubernetes_healthcheck", "gauge", "1 if the check passed the last time, else 0");
const TOTAL: Family = ("kubernetes_healthchecks_total", "counter", "Runs of the check by outcome");

/// The results of the checks of `/healthz` on both ports; a check that never ran has no series.
#[derive(Debug, Clone, Default)]
pub struct Slis(Arc<Mutex<BTreeMap<String, Outcomes>>>);

#[derive(Debug, Clone, Copy, Default)]
struct Outcomes {
    healthy: bool,
    passed: u64,
    failed: u64,
}

impl Slis {
    /// Counts one call of `/healthz`; excluded checks did not run.
    pub(crate) fn observe(&self, checks: &[Check<'_>], excluded: &[&str]) {
        let mut all = self.all();
        for (name, result) in checks.iter().filter(|(name, _)| !excluded.contains(name)) {
            let outcomes = all.entry((*name).to_owned()).or_default();
            outcomes.healthy = result.is_ok();
            *(if outcomes.healthy { &mut outcomes.passed } else { &mut outcomes.failed }) += 1;
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Outcomes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The metrics in text format 0.0.4. An outcome with count 0 has no series.
    fn text(&self) -> String {
        let all = self.all();
        let mut text = String::new();
        let last = all.iter().map(|(name, outcomes)| {
            (format!("{{name=\"{name}\",type=\"healthz\"}}"), f64::from(u8::from(outcomes.healthy)), None)
        });
        write_family(&mut text, &LAST, last);
        let totals = all.iter().flat_map(|(name, outcomes)| {
            [("error", outcomes.failed), ("success", outcomes.passed)].map(|(status, count)| {
                (format!("{{name=\"{name}\",status=\"{status}\",type=\"healthz\"}}"), count as f64, None)
            })
        });
        write_family(&mut text, &TOTAL, totals.filter(|(_, count, _)| *count > 0.0));
        text
    }
}

/// `GET /metrics/slis`.
pub(crate) async fn get(State(app): State<App>) -> Response {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], app.slis.text()).into_response()
}

/// `DELETE /metrics/slis`: resets all counts.
pub(crate) async fn reset(State(app): State<App>) -> &'static str {
    app.slis.all().clear();
    "metrics reset\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_check_slis_have_the_last_outcome_and_totals() {
        let slis = Slis::default();
        assert_eq!(slis.text(), "");
        let stuck = || ("syncloop", Err("stuck".to_owned()));
        slis.observe(&[("ping", Ok(())), stuck()], &[]);
        slis.observe(&[("ping", Ok(())), ("syncloop", Ok(()))], &[]);
        slis.observe(&[("ping", Ok(())), stuck()], &["ping"]);
        assert_eq!(
            slis.text(),
            "# HELP kubernetes_healthcheck 1 if the check passed the last time, else 0\n\
            # TYPE kubernetes_healthcheck gauge\n\
            kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n\
            kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 0\n\
            # HELP kubernetes_healthchecks_total Runs of the check by outcome\n\
            # TYPE kubernetes_healthchecks_total counter\n\
            kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2\n\
            kubernetes_healthchecks_total{name=\"syncloop\",status=\"error\",type=\"healthz\"} 2\n\
            kubernetes_healthchecks_total{name=\"syncloop\",status=\"success\",type=\"healthz\"} 1\n"
        );
    }
}
