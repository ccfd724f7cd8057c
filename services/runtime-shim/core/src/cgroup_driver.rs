//! What a runtime's answer to `RuntimeConfig` says of its cgroup driver (node-and-api.md §4.2,
//! runtime-and-resources.md §1.3).

/// Who makes the cgroups of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// systemd, as units.
    Systemd,
    /// The runtime itself, by folders.
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

/// A driver that is neither of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the container runtime names the cgroup driver {0}, and only 0 (systemd) and 1 (cgroupfs) are known")]
pub struct UnknownDriver(pub i32);

/// The driver that an answer names; `linux` is its `linux.cgroup_driver`, `None` without that section. The section
/// counts, not the number: that of systemd is 0.
///
/// # Errors
/// [`UnknownDriver`], with which a kubelet does not start.
pub const fn told(linux: Option<i32>) -> Result<Option<CgroupDriver>, UnknownDriver> {
    match linux {
        None => Ok(None),
        Some(0) => Ok(Some(CgroupDriver::Systemd)),
        Some(1) => Ok(Some(CgroupDriver::Cgroupfs)),
        Some(other) => Err(UnknownDriver(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_says_whether_a_driver_is_named_and_its_number_which() {
        for (linux, expected) in [
            (None, Ok(None)),
            (Some(0), Ok(Some(CgroupDriver::Systemd))),
            (Some(1), Ok(Some(CgroupDriver::Cgroupfs))),
            (Some(2), Err(UnknownDriver(2))),
            (Some(-1), Err(UnknownDriver(-1))),
        ] {
            assert_eq!(told(linux), expected, "{linux:?}");
        }
        assert!(UnknownDriver(7).to_string().contains("driver 7"));
        assert_eq!((CgroupDriver::Systemd.name(), CgroupDriver::Cgroupfs.name()), ("systemd", "cgroupfs"));
    }
}
