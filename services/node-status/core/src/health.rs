//! Whether the services that a node depends on make progress (architecture §5).

/// A service that does not answer for this long counts as not working, in milliseconds.
pub const SILENCE_MS: u64 = 30_000;

/// How long pod-config may be without a working watch, in milliseconds.
///
/// Running pods continue without it, so it makes the node unready much later than the others do (architecture §5).
pub const NO_WATCH_MS: u64 = 300_000;

/// A service's answer to `GetProgress`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Every loop makes progress.
    Healthy,
    /// The named loop has made no progress for too long, although the service answers.
    Stuck {
        /// Name of the loop.
        loop_name: String,
    },
    /// Every loop makes progress, but the control plane sends the service no pods, although it accepts this node's writes.
    WatchFailing {
        /// The message of the service's condition.
        message: String,
    },
    /// There was no answer.
    NoAnswer {
        /// The error of the call.
        error: String,
    },
}

impl Progress {
    /// The result for the loops of an answer: name, silence and allowed silence (0: [`SILENCE_MS`]), in ms.
    pub fn from_loops<'a>(loops: impl IntoIterator<Item = (&'a str, u64, u64)>) -> Self {
        loops
            .into_iter()
            .find(|(_, silent, allowed)| *silent > if *allowed == 0 { SILENCE_MS } else { *allowed })
            .map_or(Self::Healthy, |(name, _, _)| Self::Stuck { loop_name: name.to_owned() })
    }
}

/// Remembers the last answer of each watched service, and when it was last good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watchdog {
    services: Vec<Watched>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Watched {
    name: &'static str,
    /// When it makes the node unready.
    rule: Rule,
    /// When it last met the rule.
    last_good_ms: Option<u64>,
    last: Option<Progress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// It must answer within [`SILENCE_MS`], and every loop must make progress.
    Progress,
    /// Within [`NO_WATCH_MS`] every loop must have made progress and its watch have worked; after the start it has as much time.
    Watch,
}

impl Watchdog {
    /// Watches these services; none has answered yet.
    pub fn new(services: &[&'static str]) -> Self {
        Self { services: services.iter().map(|name| Watched::new(name, Rule::Progress)).collect() }
    }

    /// Watches also the service that reads the pod sources.
    #[must_use]
    pub fn with_source_reader(mut self, service: &'static str) -> Self {
        self.services.push(Watched::new(service, Rule::Watch));
        self
    }

    /// Records the answer of one service at `now_ms` of any monotonic clock.
    pub fn record(&mut self, service: &str, answer: Progress, now_ms: u64) {
        if let Some(watched) = self.services.iter_mut().find(|w| w.name == service) {
            watched.record(answer, now_ms);
        }
    }

    /// The errors of the services, one sentence for each that makes no progress.
    ///
    /// A service that does not answer has [`SILENCE_MS`] since its last answer, so that a restart is not reported; one that never
    /// answered is reported at once. pod-config has [`NO_WATCH_MS`] since its loops last made progress, or since it was first
    /// asked. The sentences contain no growing durations: the same error has the same text at each call.
    pub fn errors(&self, now_ms: u64) -> Vec<String> {
        self.services.iter().filter_map(|watched| watched.error(now_ms)).collect()
    }

    /// Whether the last answer of every service was that all loops make progress.
    pub fn all_healthy(&self) -> bool {
        self.services.iter().all(|w| w.last == Some(Progress::Healthy))
    }

    /// Whether every service has been asked at least once.
    pub fn all_asked(&self) -> bool {
        self.services.iter().all(|w| w.last.is_some())
    }

    /// The next moment after `now_ms` at which [`Watchdog::errors`] changes without a new answer.
    pub fn next_change_ms(&self, now_ms: u64) -> Option<u64> {
        self.services.iter().filter_map(Watched::due_ms).filter(|at| *at > now_ms).min()
    }
}

impl Watched {
    fn new(name: &'static str, rule: Rule) -> Self {
        Self { name, rule, last_good_ms: None, last: None }
    }

    fn record(&mut self, answer: Progress, now_ms: u64) {
        let good = match self.rule {
            Rule::Progress => !matches!(answer, Progress::NoAnswer { .. }),
            Rule::Watch => answer == Progress::Healthy || self.last_good_ms.is_none(),
        };
        if good {
            self.last_good_ms = Some(now_ms);
        }
        self.last = Some(answer);
    }

    /// When its error is reported, unless a better answer comes first.
    fn due_ms(&self) -> Option<u64> {
        match (self.rule, self.last.as_ref()?) {
            (Rule::Progress, Progress::NoAnswer { .. }) => self.last_good_ms.map(|at| at + SILENCE_MS),
            (
                Rule::Watch,
                Progress::NoAnswer { .. } | Progress::Stuck { .. } | Progress::WatchFailing { .. },
            ) => self.last_good_ms.map(|at| at + NO_WATCH_MS),
            (_, Progress::Healthy)
            | (Rule::Progress, Progress::Stuck { .. } | Progress::WatchFailing { .. }) => None,
        }
    }

    fn error(&self, now_ms: u64) -> Option<String> {
        let name = self.name;
        let in_grace_period = self.due_ms().is_some_and(|due| now_ms < due);
        match (self.rule, &self.last) {
            (_, Some(Progress::Healthy))
            | (Rule::Watch, None)
            | (Rule::Progress, Some(Progress::WatchFailing { .. })) => None,
            _ if in_grace_period => None,
            (Rule::Watch, Some(Progress::Stuck { loop_name })) => Some(format!(
                "{name} has read no pod source for more than 5m: its loop {loop_name:?} is stuck"
            )),
            (Rule::Watch, Some(Progress::WatchFailing { message })) => Some(format!(
                "{name} has had no working watch of pods for more than 5m, while this node's writes succeed: {message}"
            )),
            (Rule::Watch, Some(Progress::NoAnswer { error })) => {
                Some(format!("{name} has read no pod source for more than 5m: it does not answer ({error})"))
            }
            (Rule::Progress, Some(Progress::Stuck { loop_name })) => Some(format!(
                "{name} makes no progress: its loop {loop_name:?} has not run for more than 30s"
            )),
            (Rule::Progress, Some(Progress::NoAnswer { error })) if self.last_good_ms.is_some() => {
                Some(format!("{name} makes no progress: it has not answered for more than 30s ({error})"))
            }
            (Rule::Progress, Some(Progress::NoAnswer { error })) => {
                Some(format!("{name} has not answered yet ({error})"))
            }
            (Rule::Progress, None) => Some(format!("{name} has not answered yet")),
        }
    }
}
