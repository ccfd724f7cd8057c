//! How long a machine takes from its boot until its Node is ready (node-and-api.md §15.1).
//!
//! Parity: as the kubelet; only the process that makes the Node measures, once.

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
    /// All of it.
    pub fn total(&self) -> i64 {
        self.pre_kubelet + self.pre_registration + self.registration + self.post_registration
    }
}

/// How far a Node has come. Moments are nanoseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StartupClock {
    /// Nobody has asked the server.
    #[default]
    Begins,
    /// The server is asked since then.
    Registers(i64),
    /// The server has the Node that this process has made.
    Waits {
        /// When it was first asked.
        asked: i64,
        /// When it had the Node.
        made: i64,
    },
    /// Measured, or not this process's to measure.
    Over,
}

impl StartupClock {
    /// The Node is to be registered.
    pub fn registers(&mut self, now: i64) {
        if *self == Self::Begins {
            *self = Self::Registers(now);
        }
    }

    /// The server has a Node, which this process has `made` or found.
    pub fn registered(&mut self, made: bool, now: i64) {
        if let Self::Registers(asked) = *self {
            *self = if made { Self::Waits { asked, made: now } } else { Self::Over };
        }
    }

    /// The server has the Node as ready. The parts, once.
    pub fn ready(&mut self, boot: i64, agent: i64, now: i64) -> Option<Startup> {
        let Self::Waits { asked, made } = *self else { return None };
        *self = Self::Over;
        // A clock that was set in between tells less than nothing.
        let part = |from: i64, to: i64| to.saturating_sub(from).max(0);
        Some(Startup {
            pre_kubelet: part(boot, agent),
            pre_registration: part(agent, asked),
            registration: part(asked, made),
            post_registration: part(made, now),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_makes_the_node_measures_each_part_once() {
        let mut clock = StartupClock::default();
        assert_eq!(clock.ready(1, 10, 11), None);
        clock.registers(12);
        clock.registers(13);
        clock.registered(true, 15);
        clock.registered(false, 16);
        let parts = clock.ready(1, 10, 20).unwrap();
        assert_eq!(
            (parts.pre_kubelet, parts.pre_registration, parts.registration, parts.post_registration),
            (9, 2, 3, 5)
        );
        assert_eq!(parts.total(), 19);
        clock.registered(true, 21);
        assert_eq!(clock.ready(1, 10, 22), None);
    }

    #[test]
    fn a_node_that_was_there_measures_nothing_and_a_clock_that_was_set_back_tells_no_time() {
        let mut found = StartupClock::default();
        found.registers(2);
        found.registered(false, 3);
        found.registered(true, 4);
        assert_eq!(found.ready(0, 1, 5), None);
        let mut clock = StartupClock::default();
        clock.registers(9);
        clock.registered(true, 4);
        assert_eq!(clock.ready(0, 1, 5).unwrap().registration, 0);
    }
}
