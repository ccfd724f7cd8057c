//! Which cgroup driver is in force (node-and-api.md §4.2): the runtime's, when it names one, before the configured one.

use crate::layout::Driver;

/// What the container runtime says of its cgroup driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// It has this one.
    Driver(Driver),
    /// It does not tell.
    Nothing,
}

impl Told {
    /// By the name of the driver; empty where it does not tell.
    pub fn parse(name: &str) -> Self {
        Driver::parse(name).map_or(Self::Nothing, Self::Driver)
    }

    /// The name that [`Self::parse`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver(driver) => driver.name(),
            Self::Nothing => "",
        }
    }
}

/// Who names the driver that is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The container runtime.
    Runtime,
    /// `cgroupDriver`.
    Configuration,
}

/// Which driver is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// This one.
    Use(Driver, By),
    /// It is not known yet: the runtime is asked before any cgroup is made.
    Wait,
    /// None: `cgroupDriver` names one that is none.
    Unknown,
}

impl Choice {
    /// The driver.
    pub const fn driver(self) -> Option<Driver> {
        match self {
            Self::Use(driver, _) => Some(driver),
            Self::Wait | Self::Unknown => None,
        }
    }
}

/// Decides by what the runtime says `now`, else by what it said last, which an earlier run of this service has kept:
/// containers of that time lie in the tree of that driver. While neither is known it is waited for, as long as that is
/// `patient`; then the configured driver is taken, until the runtime says otherwise.
pub fn choose(configured: &str, now: Option<Told>, before: Option<Told>, patient: bool) -> Choice {
    match now.or(before) {
        Some(Told::Driver(driver)) => Choice::Use(driver, By::Runtime),
        None if patient => Choice::Wait,
        Some(Told::Nothing) | None => {
            Driver::parse(configured).map_or(Choice::Unknown, |driver| Choice::Use(driver, By::Configuration))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtimes_word_stands_before_its_last_one_and_that_before_the_configuration() {
        let told = |driver| Some(Told::Driver(driver));
        let (systemd, cgroupfs, nothing) =
            (told(Driver::Systemd), told(Driver::Cgroupfs), Some(Told::Nothing));
        let by_runtime = |driver| Choice::Use(driver, By::Runtime);
        let by_configuration = |driver| Choice::Use(driver, By::Configuration);
        for (configured, now, before, patient, expected) in [
            ("cgroupfs", systemd, None, true, by_runtime(Driver::Systemd)),
            ("systemd", cgroupfs, None, false, by_runtime(Driver::Cgroupfs)),
            ("cgroupfs", systemd, cgroupfs, true, by_runtime(Driver::Systemd)),
            ("cgroupfs", None, systemd, true, by_runtime(Driver::Systemd)),
            ("cgroupfs", None, systemd, false, by_runtime(Driver::Systemd)),
            ("systemd", nothing, None, true, by_configuration(Driver::Systemd)),
            ("systemd", nothing, cgroupfs, true, by_configuration(Driver::Systemd)),
            ("cgroupfs", None, nothing, true, by_configuration(Driver::Cgroupfs)),
            ("systemd", None, None, true, Choice::Wait),
            ("systemd", None, None, false, by_configuration(Driver::Systemd)),
            ("slices", None, None, true, Choice::Wait),
            ("slices", None, None, false, Choice::Unknown),
            ("slices", nothing, None, true, Choice::Unknown),
            ("slices", systemd, None, true, by_runtime(Driver::Systemd)),
        ] {
            let choice = choose(configured, now, before, patient);
            assert_eq!(choice, expected, "{configured} {now:?} {before:?} {patient}");
        }
        assert_eq!(by_runtime(Driver::Systemd).driver(), Some(Driver::Systemd));
        assert_eq!((Choice::Wait.driver(), Choice::Unknown.driver()), (None, None));
    }

    #[test]
    fn what_the_runtime_says_is_kept_by_name() {
        for told in [Told::Driver(Driver::Systemd), Told::Driver(Driver::Cgroupfs), Told::Nothing] {
            assert_eq!(Told::parse(told.name()), told);
        }
        assert_eq!(Told::parse("cgroups"), Told::Nothing);
    }
}
