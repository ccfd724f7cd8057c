//! The cgroup driver in the runtime's response to `RuntimeConfig` (node-and-api.md §4.2,
//! runtime-and-resources.md §1.3).

/// How the cgroups of containers are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// By systemd, as units.
    Systemd,
    /// By the runtime itself, as directories.
    Cgroupfs,
}

impl CgroupDriver {
    /// Its name in the KubeletConfiguration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Systemd => "systemd",
            Self::Cgroupfs => "cgroupfs",
        }
    }
}

/// A driver number other than 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the container runtime reports cgroup driver {0}; only 0 (systemd) and 1 (cgroupfs) are known")]
pub struct UnknownDriverError(pub i32);

/// The driver in a response. `linux` is `linux.cgroup_driver`, or `None` if the response has no `linux` section; the
/// number alone does not tell, because systemd is 0.
///
/// # Errors
/// [`UnknownDriverError`]: a kubelet does not start with such a runtime.
pub const fn parse_driver(linux: Option<i32>) -> Result<Option<CgroupDriver>, UnknownDriverError> {
    match linux {
        None => Ok(None),
        Some(0) => Ok(Some(CgroupDriver::Systemd)),
        Some(1) => Ok(Some(CgroupDriver::Cgroupfs)),
        Some(other) => Err(UnknownDriverError(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_driver_is_read_from_the_linux_section() {
        for (linux, expected) in [
            (None, Ok(None)),
            (Some(0), Ok(Some(CgroupDriver::Systemd))),
            (Some(1), Ok(Some(CgroupDriver::Cgroupfs))),
            (Some(2), Err(UnknownDriverError(2))),
            (Some(-1), Err(UnknownDriverError(-1))),
        ] {
            assert_eq!(parse_driver(linux), expected, "{linux:?}");
        }
        assert!(UnknownDriverError(7).to_string().contains("driver 7"));
        assert_eq!((CgroupDriver::Systemd.name(), CgroupDriver::Cgroupfs.name()), ("systemd", "cgroupfs"));
    }
}
