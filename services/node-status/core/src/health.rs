//! Whether the services that a node cannot do without make progress (architecture §5).

/// From this silence on, a service counts as not working, in milliseconds.
pub const SILENCE_MS: u64 = 30_000;

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
    answered_ms: Option<u64>,
    last: Option<Answer>,
}

impl Watchdog {
    /// Watches these services; none has answered yet.
    pub fn new(services: &[&'static str]) -> Self {
        let watched = |name: &&'static str| Watched { name, answered_ms: None, last: None };
        Self { services: services.iter().map(watched).collect() }
    }

    /// Takes the answer of one service at `now_ms` of any monotonic clock.
    pub fn record(&mut self, service: &str, answer: Answer, now_ms: u64) {
        if let Some(watched) = self.services.iter_mut().find(|w| w.name == service) {
            if !matches!(answer, Answer::None { .. }) {
                watched.answered_ms = Some(now_ms);
            }
            watched.last = Some(answer);
        }
    }

    /// What is wrong with the services, one sentence for each that makes no progress.
    ///
    /// A service that does not answer is given [`SILENCE_MS`] since its last answer, so that a restart of it
    /// is not seen; one that never answered is given nothing. The sentences carry no running figures: the
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
        let silent = |w: &&Watched| matches!(w.last, Some(Answer::None { .. }));
        let due = |w: &Watched| w.answered_ms.map(|at| at + SILENCE_MS);
        self.services.iter().filter(silent).filter_map(due).filter(|at| *at > now_ms).min()
    }
}

impl Watched {
    fn error(&self, now_ms: u64) -> Option<String> {
        let name = self.name;
        match (&self.last, self.answered_ms) {
            (Some(Answer::Turning), _) => None,
            (Some(Answer::Stuck { loop_name }), _) => Some(format!(
                "{name} makes no progress: its loop {loop_name:?} has not turned for more than 30s"
            )),
            (Some(Answer::None { error }), Some(at)) => {
                (now_ms.saturating_sub(at) >= SILENCE_MS).then(|| {
                    format!("{name} makes no progress: it has not answered for more than 30s ({error})")
                })
            }
            (Some(Answer::None { error }), None) => Some(format!("{name} has not answered yet ({error})")),
            (None, _) => Some(format!("{name} has not answered yet")),
        }
    }
}
