//! Whether the services that a node cannot do without make progress (architecture §5).

/// From this silence on, a service counts as not working, in milliseconds.
pub const SILENCE_MS: u64 = 30_000;

/// How long the service that reads the sources of pods may be without a working watch, in milliseconds.
///
/// What runs goes on without it, so that much later than the others it makes the node unready (architecture §5).
pub const NO_WATCH_MS: u64 = 300_000;

/// What a service answered when it was asked for its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Every loop turns.
    Turning,
    /// The named loop has not turned for too long, although the service answers.
    Stuck {
        /// Name of the loop.
        loop_name: String,
    },
    /// Every loop turns, but the control plane tells it of no pods, though it takes what this node writes.
    Unwatched {
        /// What the service says of it.
        message: String,
    },
    /// There was no answer, and why.
    None {
        /// The error of the call.
        error: String,
    },
}

impl Answer {
    /// The verdict over the loops of an answer: name, silence and allowed silence (0: [`SILENCE_MS`]), in ms.
    pub fn of_loops<'a>(loops: impl IntoIterator<Item = (&'a str, u64, u64)>) -> Self {
        loops
            .into_iter()
            .find(|(_, silent, allowed)| *silent > if *allowed == 0 { SILENCE_MS } else { *allowed })
            .map_or(Self::Turning, |(name, _, _)| Self::Stuck { loop_name: name.to_owned() })
    }
}

/// Remembers for each watched service when it last answered and what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watchdog {
    services: Vec<Watched>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Watched {
    name: &'static str,
    /// What makes the node unready, and when.
    rule: Rule,
    /// When it last fulfilled the rule.
    good_ms: Option<u64>,
    last: Option<Answer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// It must answer within [`SILENCE_MS`], and every loop must turn.
    Progress,
    /// Every loop must have turned within [`NO_WATCH_MS`], and its watch have worked; at the start it is given as long.
    Watch,
}

impl Watchdog {
    /// Watches these services; none has answered yet.
    pub fn new(services: &[&'static str]) -> Self {
        Self { services: services.iter().map(|name| Watched::new(name, Rule::Progress)).collect() }
    }

    /// Watches also the service that reads the sources of pods.
    #[must_use]
    pub fn with_sources_of(mut self, service: &'static str) -> Self {
        self.services.push(Watched::new(service, Rule::Watch));
        self
    }

    /// Takes the answer of one service at `now_ms` of any monotonic clock.
    pub fn record(&mut self, service: &str, answer: Answer, now_ms: u64) {
        if let Some(watched) = self.services.iter_mut().find(|w| w.name == service) {
            watched.record(answer, now_ms);
        }
    }

    /// What is wrong with the services, one sentence for each that makes no progress.
    ///
    /// A service that does not answer is given [`SILENCE_MS`] since its last answer, so that a restart of it
    /// is not seen; one that never answered is given nothing. The one that reads the sources is given
    /// [`NO_WATCH_MS`] since its loops last turned, or since it was first asked. The sentences carry no running figures: the
    /// same trouble reads the same at each look.
    pub fn errors(&self, now_ms: u64) -> Vec<String> {
        self.services.iter().filter_map(|watched| watched.error(now_ms)).collect()
    }

    /// Whether every service answered the last time with all loops turning.
    pub fn all_turning(&self) -> bool {
        self.services.iter().all(|w| w.last == Some(Answer::Turning))
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
        Self { name, rule, good_ms: None, last: None }
    }

    fn record(&mut self, answer: Answer, now_ms: u64) {
        let good = match self.rule {
            Rule::Progress => !matches!(answer, Answer::None { .. }),
            Rule::Watch => answer == Answer::Turning || self.good_ms.is_none(),
        };
        if good {
            self.good_ms = Some(now_ms);
        }
        self.last = Some(answer);
    }

    /// When it is named, unless it answers better before.
    fn due_ms(&self) -> Option<u64> {
        match (self.rule, self.last.as_ref()?) {
            (Rule::Progress, Answer::None { .. }) => self.good_ms.map(|at| at + SILENCE_MS),
            (Rule::Watch, Answer::None { .. } | Answer::Stuck { .. } | Answer::Unwatched { .. }) => {
                self.good_ms.map(|at| at + NO_WATCH_MS)
            }
            (_, Answer::Turning) | (Rule::Progress, Answer::Stuck { .. } | Answer::Unwatched { .. }) => None,
        }
    }

    fn error(&self, now_ms: u64) -> Option<String> {
        let name = self.name;
        let waits = self.due_ms().is_some_and(|due| now_ms < due);
        match (self.rule, &self.last) {
            (_, Some(Answer::Turning))
            | (Rule::Watch, None)
            | (Rule::Progress, Some(Answer::Unwatched { .. })) => None,
            _ if waits => None,
            (Rule::Watch, Some(Answer::Stuck { loop_name })) => Some(format!(
                "{name} has read no source of pods for more than 5m: its loop {loop_name:?} does not turn"
            )),
            (Rule::Watch, Some(Answer::Unwatched { message })) => Some(format!(
                "{name} has had no working watch of pods for more than 5m, while this node's writes are taken: {message}"
            )),
            (Rule::Watch, Some(Answer::None { error })) => Some(format!(
                "{name} has read no source of pods for more than 5m: it does not answer ({error})"
            )),
            (Rule::Progress, Some(Answer::Stuck { loop_name })) => Some(format!(
                "{name} makes no progress: its loop {loop_name:?} has not turned for more than 30s"
            )),
            (Rule::Progress, Some(Answer::None { error })) if self.good_ms.is_some() => {
                Some(format!("{name} makes no progress: it has not answered for more than 30s ({error})"))
            }
            (Rule::Progress, Some(Answer::None { error })) => {
                Some(format!("{name} has not answered yet ({error})"))
            }
            (Rule::Progress, None) => Some(format!("{name} has not answered yet")),
        }
    }
}
