//! When something happened: for people by the node's clock, for order and for waits by one that nobody sets.

use keelson_service_kit::now_unix_nanos;
use rustix::time::{ClockId, clock_gettime};

/// One look at both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Nanoseconds since 1970-01-01 UTC. Steps back and forth when the clock is set.
    pub unix_nanos: i64,
    /// Nanoseconds since the machine was booted, suspensions included (`CLOCK_BOOTTIME`, clock_gettime(2)).
    /// Never steps back within a boot, whichever process looks.
    pub boot_nanos: i64,
}

impl Reading {
    /// The unix nanoseconds of a moment that is known by the clock of the boot, as the node's clock now goes.
    pub const fn unix_nanos_of(&self, boot_nanos: i64) -> i64 {
        self.unix_nanos.saturating_add(boot_nanos.saturating_sub(self.boot_nanos))
    }
}

/// The clocks of the machine, or those that a test sets.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// The machine's.
    #[default]
    System,
    /// Both stand where they were set last.
    #[cfg(test)]
    Set(std::sync::Arc<std::sync::Mutex<Reading>>),
}

impl Clock {
    /// Looks at both.
    pub fn read(&self) -> Reading {
        match self {
            Self::System => Reading { unix_nanos: now_unix_nanos(), boot_nanos: boot_nanos() },
            #[cfg(test)]
            Self::Set(reading) => *reading.lock().unwrap(),
        }
    }

    /// A clock that stands at 2001-09-09, an hour after the boot.
    #[cfg(test)]
    pub(crate) fn standing() -> Self {
        let reading =
            Reading { unix_nanos: 1_000_000_000 * 1_000_000_000, boot_nanos: 3_600 * 1_000_000_000 };
        Self::Set(std::sync::Arc::new(std::sync::Mutex::new(reading)))
    }

    /// Lets `seconds` go by while the node's clock is put forward or back by `step` seconds.
    #[cfg(test)]
    pub(crate) fn pass(&self, seconds: i64, step: i64) {
        let Self::Set(reading) = self else { panic!("the machine's clock is not ours to set") };
        let mut reading = reading.lock().unwrap();
        reading.boot_nanos += seconds * 1_000_000_000;
        reading.unix_nanos += (seconds + step) * 1_000_000_000;
    }
}

fn boot_nanos() -> i64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_at_the_same_moment_on_both_clocks() {
        let now = Reading { unix_nanos: 5_000, boot_nanos: 300 };
        assert_eq!(now.unix_nanos_of(310), 5_010);
        assert_eq!(now.unix_nanos_of(290), 4_990);
    }

    #[test]
    fn the_clock_of_the_boot_goes_on() {
        let before = Clock::System.read();
        let after = Clock::System.read();
        assert!(before.boot_nanos > 0 && after.boot_nanos >= before.boot_nanos);
    }
}
