//! How long a machine takes from its boot until its Node is ready (node-and-api.md §15.1).
//!
//! Parity: as the kubelet; only the process that creates the Node measures, once.

/// The parts of the time from the boot until the Node is ready, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Startup {
    /// From the boot to the start of the agent.
    pub pre_kubelet: i64,
    /// From there to the first try to register the Node.
    pub pre_registration: i64,
    /// From there until the server has it.
    pub registration: i64,
    /// From there until the server has it as ready.
    pub post_registration: i64,
}

impl Startup {
    /// The sum of all parts.
    pub fn total(&self) -> i64 {
        self.pre_kubelet + self.pre_registration + self.registration + self.post_registration
    }
}

/// The progress of a Node's registration. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StartupClock {
    /// The registration has not begun.
    #[default]
    Idle,
    /// The registration began at this time.
    Registering(i64),
    /// The server has the Node that this process has created.
    AwaitingReady {
        /// When the registration began.
        started: i64,
        /// When the server had the Node.
        created: i64,
    },
    /// Measured, or not for this process to measure.
    Done,
}

impl StartupClock {
    /// The registration begins.
    pub fn start_registration(&mut self, now: i64) {
        if *self == Self::Idle {
            *self = Self::Registering(now);
        }
    }

    /// The server has a Node, which this process has `created` or found.
    pub fn finish_registration(&mut self, created: bool, now: i64) {
        if let Self::Registering(started) = *self {
            *self = if created { Self::AwaitingReady { started, created: now } } else { Self::Done };
        }
    }

    /// The server has the Node as ready. Returns the parts, once.
    pub fn ready(&mut self, boot: i64, agent: i64, now: i64) -> Option<Startup> {
        let Self::AwaitingReady { started, created } = *self else { return None };
        *self = Self::Done;
        // A clock that was set in between may yield a negative time.
        let part = |from: i64, to: i64| to.saturating_sub(from).max(0);
        Some(Startup {
            pre_kubelet: part(boot, agent),
            pre_registration: part(agent, started),
            registration: part(started, created),
            post_registration: part(created, now),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn startup_durations_are_measured_once_by_the_creator_of_the_node() {
        let mut clock = StartupClock::default();
        assert_eq!(clock.ready(1, 10, 11), None);
        clock.start_registration(12);
        clock.start_registration(13);
        clock.finish_registration(true, 15);
        clock.finish_registration(false, 16);
        let parts = clock.ready(1, 10, 20).unwrap();
        assert_eq!(
            (parts.pre_kubelet, parts.pre_registration, parts.registration, parts.post_registration),
            (9, 2, 3, 5)
        );
        assert_eq!(parts.total(), 19);
        clock.finish_registration(true, 21);
        assert_eq!(clock.ready(1, 10, 22), None);
    }

    #[test]
    fn startup_durations_ignore_an_existing_node_and_are_never_negative() {
        let mut found = StartupClock::default();
        found.start_registration(2);
        found.finish_registration(false, 3);
        found.finish_registration(true, 4);
        assert_eq!(found.ready(0, 1, 5), None);
        let mut clock = StartupClock::default();
        clock.start_registration(9);
        clock.finish_registration(true, 4);
        assert_eq!(clock.ready(0, 1, 5).unwrap().registration, 0);
    }
}
