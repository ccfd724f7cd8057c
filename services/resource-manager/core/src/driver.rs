//! Chooses the cgroup driver (node-and-api.md §4.2): the one that the runtime reports, else the configured one.

use crate::layout::Driver;

/// The cgroup driver that the container runtime reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportedDriver {
    /// The runtime uses this driver.
    Named(Driver),
    /// The runtime answered without naming a driver.
    Unnamed,
}

impl ReportedDriver {
    /// Parses the name of a driver; an empty or unknown name is [`Self::Unnamed`].
    pub fn parse(name: &str) -> Self {
        Driver::parse(name).map_or(Self::Unnamed, Self::Named)
    }

    /// The name that [`Self::parse`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Named(driver) => driver.name(),
            Self::Unnamed => "",
        }
    }
}

/// Where the chosen driver comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverSource {
    /// The container runtime.
    Runtime,
    /// `cgroupDriver`.
    Configuration,
}

/// The decision which driver to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverChoice {
    /// Use this driver, which comes from this source.
    Use(Driver, DriverSource),
    /// Not known yet: no cgroup is made before the runtime has answered.
    Wait,
    /// `cgroupDriver` names an unknown driver.
    Unknown,
}

impl DriverChoice {
    /// The driver to use, if there is one.
    pub const fn driver(self) -> Option<Driver> {
        match self {
            Self::Use(driver, _) => Some(driver),
            Self::Wait | Self::Unknown => None,
        }
    }
}

/// Uses what the runtime has `reported` since the start, else what an earlier run of this service has `checkpointed`:
/// containers of that run are in the tree of that driver. While neither is known it waits if it `may_wait`; otherwise it
/// uses the configured driver until the runtime reports one.
pub fn choose(
    configured: &str,
    reported: Option<ReportedDriver>,
    checkpointed: Option<ReportedDriver>,
    may_wait: bool,
) -> DriverChoice {
    match reported.or(checkpointed) {
        Some(ReportedDriver::Named(driver)) => DriverChoice::Use(driver, DriverSource::Runtime),
        None if may_wait => DriverChoice::Wait,
        Some(ReportedDriver::Unnamed) | None => Driver::parse(configured)
            .map_or(DriverChoice::Unknown, |driver| DriverChoice::Use(driver, DriverSource::Configuration)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtimes_cgroup_driver_wins_over_the_checkpoint_and_the_configuration() {
        let named = |driver| Some(ReportedDriver::Named(driver));
        let (systemd, cgroupfs, nothing) =
            (named(Driver::Systemd), named(Driver::Cgroupfs), Some(ReportedDriver::Unnamed));
        let by_runtime = |driver| DriverChoice::Use(driver, DriverSource::Runtime);
        let by_configuration = |driver| DriverChoice::Use(driver, DriverSource::Configuration);
        for (configured, reported, checkpointed, may_wait, expected) in [
            ("cgroupfs", systemd, None, true, by_runtime(Driver::Systemd)),
            ("systemd", cgroupfs, None, false, by_runtime(Driver::Cgroupfs)),
            ("cgroupfs", systemd, cgroupfs, true, by_runtime(Driver::Systemd)),
            ("cgroupfs", None, systemd, true, by_runtime(Driver::Systemd)),
            ("cgroupfs", None, systemd, false, by_runtime(Driver::Systemd)),
            ("systemd", nothing, None, true, by_configuration(Driver::Systemd)),
            ("systemd", nothing, cgroupfs, true, by_configuration(Driver::Systemd)),
            ("cgroupfs", None, nothing, true, by_configuration(Driver::Cgroupfs)),
            ("systemd", None, None, true, DriverChoice::Wait),
            ("systemd", None, None, false, by_configuration(Driver::Systemd)),
            ("slices", None, None, true, DriverChoice::Wait),
            ("slices", None, None, false, DriverChoice::Unknown),
            ("slices", nothing, None, true, DriverChoice::Unknown),
            ("slices", systemd, None, true, by_runtime(Driver::Systemd)),
        ] {
            let choice = choose(configured, reported, checkpointed, may_wait);
            assert_eq!(choice, expected, "{configured} {reported:?} {checkpointed:?} {may_wait}");
        }
        assert_eq!(by_runtime(Driver::Systemd).driver(), Some(Driver::Systemd));
        assert_eq!((DriverChoice::Wait.driver(), DriverChoice::Unknown.driver()), (None, None));
    }

    #[test]
    fn the_reported_cgroup_driver_round_trips_through_its_name() {
        for reported in [
            ReportedDriver::Named(Driver::Systemd),
            ReportedDriver::Named(Driver::Cgroupfs),
            ReportedDriver::Unnamed,
        ] {
            assert_eq!(ReportedDriver::parse(reported.name()), reported);
        }
        assert_eq!(ReportedDriver::parse("cgroups"), ReportedDriver::Unnamed);
    }
}
