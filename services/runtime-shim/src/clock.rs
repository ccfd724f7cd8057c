//! Clocks: the node's clock for times shown to people, and the boot clock, which is never set, for order and waits.

use keelson_service_kit::now_unix_nanos;
use rustix::time::{ClockId, clock_gettime};

/// A reading of both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Nanoseconds since 1970-01-01 UTC. Steps forward or back when the clock is set.
    pub unix_nanos: i64,
    /// Nanoseconds since the machine was booted, including suspension (`CLOCK_BOOTTIME`, clock_gettime(2)).
    /// Never steps back within a boot, and is the same for all processes.
    pub boot_nanos: i64,
}

impl Reading {
    /// Converts a time of the boot clock to unix nanoseconds by the node's current clock.
    pub const fn unix_nanos_of(&self, boot_nanos: i64) -> i64 {
        self.unix_nanos.saturating_add(boot_nanos.saturating_sub(self.boot_nanos))
    }
}

/// The clocks of the machine, or clocks that a test sets.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// The clocks of the machine.
    #[default]
    System,
    /// Both clocks show the times that were set last.
    #[cfg(test)]
    Set(std::sync::Arc<std::sync::Mutex<Reading>>),
}

impl Clock {
    /// Reads both clocks.
    pub fn read(&self) -> Reading {
        match self {
            Self::System => Reading { unix_nanos: now_unix_nanos(), boot_nanos: boot_nanos() },
            #[cfg(test)]
            Self::Set(reading) => *reading.lock().unwrap(),
        }
    }

    /// Clocks stopped at 2001-09-09, one hour after the boot.
    #[cfg(test)]
    pub(crate) fn stopped() -> Self {
        let reading =
            Reading { unix_nanos: 1_000_000_000 * 1_000_000_000, boot_nanos: 3_600 * 1_000_000_000 };
        Self::Set(std::sync::Arc::new(std::sync::Mutex::new(reading)))
    }

    /// Advances both clocks by `seconds`; the node's clock is also set forward or back by `step` seconds.
    #[cfg(test)]
    pub(crate) fn advance(&self, seconds: i64, step: i64) {
        let Self::Set(reading) = self else { panic!("the machine's clock cannot be set") };
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
    fn boot_time_is_converted_to_unix_time() {
        let now = Reading { unix_nanos: 5_000, boot_nanos: 300 };
        assert_eq!(now.unix_nanos_of(310), 5_010);
        assert_eq!(now.unix_nanos_of(290), 4_990);
    }

    #[test]
    fn boot_clock_never_steps_back() {
        let before = Clock::System.read();
        let after = Clock::System.read();
        assert!(before.boot_nanos > 0 && after.boot_nanos >= before.boot_nanos);
    }
}
