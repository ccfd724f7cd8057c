//! Whether the registration of a plugin is accepted (volumes.md §11.1).

use std::cmp::Ordering;
use std::fmt;

use super::paths::{DriverName, NameError};

/// The kind of a plugin whose socket has appeared in `plugins_registry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginKind {
    /// A CSI driver.
    Csi,
    /// A device plugin.
    Device,
    /// A driver for dynamic resource allocation.
    Dra,
}

/// Why a registration is refused. The text goes back to the plugin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// The plugin has another type.
    #[error("unknown plugin type {kind:?}: it must be CSIPlugin, DevicePlugin or DRAPlugin")]
    UnknownKind {
        /// The type as given.
        kind: String,
    },
    /// The driver's name cannot be used.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The driver supports no version of CSI.
    #[error("the CSI driver {driver} lists no supported version of CSI; it must list one of 1.x")]
    NoVersions {
        /// The driver.
        driver: DriverName,
    },
    /// No version can be read, or each is newer than 1.x.
    #[error(
        "none of the CSI versions {versions:?} of the driver {driver} is supported; it must list one of 1.x"
    )]
    NoSupportedVersion {
        /// The driver.
        driver: DriverName,
        /// Its versions.
        versions: Vec<String>,
    },
    /// The driver is older than CSI 1.0.
    #[error(
        "the CSI driver {driver} supports at most CSI {highest}, and only 1.x is supported; install a newer driver"
    )]
    TooOld {
        /// The driver.
        driver: DriverName,
        /// Its highest version.
        highest: Version,
    },
    /// Another driver has the name.
    #[error(
        "a CSI driver {driver} with version {registered} is registered already, and {offered} is not higher; remove \
         the other driver's socket first"
    )]
    AlreadyRegistered {
        /// The driver.
        driver: DriverName,
        /// The highest version of the registered one.
        registered: Version,
        /// The highest version of the new one.
        offered: Version,
    },
    /// The driver does not say which node this is.
    #[error("the CSI driver {driver} has answered NodeGetInfo with an empty node_id; the driver must set it")]
    EmptyNodeId {
        /// The driver.
        driver: DriverName,
    },
}

/// A version: two numbers or more. Missing numbers count as zero, so that 1.0 equals 1.0.0.
#[derive(Debug, Clone, Eq)]
pub struct Version(Vec<u64>);

impl Version {
    /// Parses `1.5.0`, `v1.0` or `1.0-rc1`. `None` for anything else, such as a single number or `01.0`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim_start();
        let text = text.strip_prefix('v').unwrap_or(text);
        let mut numbers = Vec::new();
        let mut rest = text;
        loop {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (number, after) = rest.split_at(digits);
            if numbers.is_empty() && number.len() > 1 && number.starts_with('0') {
                return None;
            }
            numbers.push(number.parse().ok()?);
            match after.strip_prefix('.') {
                Some(next) if next.starts_with(|c: char| c.is_ascii_digit()) => rest = next,
                _ => break,
            }
        }
        (numbers.len() > 1).then_some(Self(numbers))
    }

    fn major(&self) -> u64 {
        self.0.first().copied().unwrap_or(0)
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let at = |version: &Self, index: usize| version.0.get(index).copied().unwrap_or(0);
        (0..self.0.len().max(other.0.len()))
            .map(|index| at(self, index).cmp(&at(other, index)))
            .find(|ordering| ordering.is_ne())
            .unwrap_or(Ordering::Equal)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

/// A driver that may register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedDriver {
    /// Its name.
    pub name: DriverName,
    /// The highest version of CSI that it and the agent support.
    pub version: Version,
}

/// Whether a file in `plugins_registry` is left alone: it or a folder above it, below `plugins_registry`, has a name that
/// begins with a dot. `relative` is the path below `plugins_registry`.
pub fn is_ignored(relative: &str) -> bool {
    relative.split('/').any(|part| part.starts_with('.'))
}

/// The kind of the plugin, from the type in its answer to `GetInfo`.
pub fn plugin_kind(kind: &str) -> Result<PluginKind, RegistrationError> {
    match kind {
        "CSIPlugin" => Ok(PluginKind::Csi),
        "DevicePlugin" => Ok(PluginKind::Device),
        "DRAPlugin" => Ok(PluginKind::Dra),
        _ => Err(RegistrationError::UnknownKind { kind: kind.to_owned() }),
    }
}

/// The socket that the plugin is called on: the `endpoint` of its answer, or the socket that it registers on.
pub fn endpoint<'a>(endpoint: &'a str, registration_socket: &'a str) -> &'a str {
    if endpoint.is_empty() { registration_socket } else { endpoint }
}

/// Decides whether a driver may register. `registered` is the version of the driver that has the name now.
pub fn check_driver(
    name: &str,
    versions: &[String],
    registered: Option<&Version>,
) -> Result<AcceptedDriver, RegistrationError> {
    let driver = DriverName::parse(name)?;
    if versions.is_empty() {
        return Err(RegistrationError::NoVersions { driver });
    }
    let supported = versions.iter().filter_map(|text| Version::parse(text)).filter(|v| v.major() <= 1);
    let Some(version) = supported.max() else {
        return Err(RegistrationError::NoSupportedVersion { driver, versions: versions.to_vec() });
    };
    if version.major() == 0 {
        return Err(RegistrationError::TooOld { driver, highest: version });
    }
    match registered {
        Some(registered) if *registered >= version => Err(RegistrationError::AlreadyRegistered {
            driver,
            registered: registered.clone(),
            offered: version,
        }),
        _ => Ok(AcceptedDriver { name: driver, version }),
    }
}

/// Checks the node id of the driver's answer to `NodeGetInfo`.
pub fn check_node_id<'a>(driver: &DriverName, node_id: &'a str) -> Result<&'a str, RegistrationError> {
    if node_id.is_empty() {
        return Err(RegistrationError::EmptyNodeId { driver: driver.clone() });
    }
    Ok(node_id)
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn version(text: &str) -> Version {
        Version::parse(text).unwrap()
    }

    fn check(versions: &[&str], registered: Option<&str>) -> Result<AcceptedDriver, RegistrationError> {
        let versions: Vec<String> = versions.iter().map(|text| (*text).to_owned()).collect();
        check_driver("d.io", &versions, registered.map(version).as_ref())
    }

    #[test]
    fn a_version_has_two_numbers_or_more_and_anything_may_follow() {
        for (text, numbers) in [
            ("1.0", "1.0"),
            ("1.5.0", "1.5.0"),
            ("v1.2", "1.2"),
            (" v1.2.3.4", "1.2.3.4"),
            ("1.0-rc1", "1.0"),
            ("1.0.", "1.0"),
            ("1.05", "1.5"),
            ("0.3", "0.3"),
            ("18446744073709551615.0", "18446744073709551615.0"),
        ] {
            assert_eq!(Version::parse(text).map(|v| v.to_string()).as_deref(), Some(numbers), "{text:?}");
        }
        for bad in ["", "1", "v", "v1", "vv1.0", "x1.0", "1.x", "1..0", ".1.0", "01.0", "-1.0", "1,0"] {
            assert_eq!(Version::parse(bad), None, "{bad:?}");
        }
        assert_eq!(Version::parse("18446744073709551616.0"), None);
    }

    #[test]
    fn missing_numbers_of_a_version_are_zero() {
        assert_eq!(version("1.0"), version("1.0.0"));
        assert!(version("1.0") < version("1.0.1"));
        assert!(version("1.9") < version("1.10"));
        assert!(version("2.0") > version("1.99.99"));
    }

    #[test]
    fn the_highest_version_of_1_x_counts() {
        for (versions, highest) in [
            (&["1.0.0"][..], "1.0.0"),
            (&["0.3.0", "1.2.0", "1.10.0", "1.9.0"], "1.10.0"),
            (&["2.0.0", "1.1.0"], "1.1.0"),
            (&["garbage", "1.1.0", ""], "1.1.0"),
        ] {
            let accepted = check(versions, None).unwrap();
            assert_eq!(accepted.version.to_string(), highest, "{versions:?}");
            assert_eq!(accepted.name.as_str(), "d.io");
        }
    }

    #[test]
    fn a_driver_without_a_version_of_1_x_is_refused() {
        assert!(matches!(check(&[], None), Err(RegistrationError::NoVersions { .. })));
        for versions in [&["2.0.0"][..], &["garbage"], &[""], &["1"], &["2.0", "10.1"]] {
            let result = check(versions, None);
            assert!(matches!(result, Err(RegistrationError::NoSupportedVersion { .. })), "{result:?}");
        }
        for versions in [&["0.3.0"][..], &["2.0.0", "0.4.0", "0.3.0"]] {
            let result = check(versions, None);
            assert!(matches!(result, Err(RegistrationError::TooOld { .. })), "{result:?}");
        }
        let text = check(&["0.3.0", "0.4.0"], None).unwrap_err().to_string();
        assert!(text.contains("d.io supports at most CSI 0.4.0"), "{text}");
    }

    #[test]
    fn a_registered_name_is_taken_over_only_by_a_higher_version() {
        for (registered, offered, accepted) in [
            ("1.0.0", "1.0.0", false),
            ("1.0", "1.0.0", false),
            ("1.1.0", "1.0.0", false),
            ("1.0.0", "1.0.1", true),
            ("1.9.0", "1.10.0", true),
        ] {
            let result = check(&[offered], Some(registered));
            assert_eq!(result.is_ok(), accepted, "{registered} {offered}: {result:?}");
        }
        let text = check(&["1.0.0"], Some("1.1.0")).unwrap_err().to_string();
        let expected = "a CSI driver d.io with version 1.1.0 is registered already, and 1.0.0 is not higher; remove \
                        the other driver's socket first";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_driver_with_an_unsafe_name_is_refused() {
        for name in ["", "..", ".hidden", "a/b", "a:b", "a^b"] {
            let result = check_driver(name, &["1.0.0".to_owned()], None);
            assert!(matches!(result, Err(RegistrationError::Name(_))), "{name:?}: {result:?}");
        }
    }

    #[test]
    fn plugins_of_three_types_are_known() {
        assert_eq!(plugin_kind("CSIPlugin"), Ok(PluginKind::Csi));
        assert_eq!(plugin_kind("DevicePlugin"), Ok(PluginKind::Device));
        assert_eq!(plugin_kind("DRAPlugin"), Ok(PluginKind::Dra));
        for other in ["", "csiplugin", "CSIPlugin ", "NRIPlugin"] {
            let text = plugin_kind(other).unwrap_err().to_string();
            assert!(text.starts_with(&format!("unknown plugin type {other:?}")), "{text}");
        }
    }

    #[test]
    fn files_and_folders_that_begin_with_a_dot_are_ignored() {
        for (path, ignored) in [
            ("d.io-reg.sock", false),
            ("d.io/reg.sock", false),
            ("a..b", false),
            (".d.io-reg.sock", true),
            ("d.io/.reg.sock", true),
            (".d.io/reg.sock", true),
            ("..", true),
        ] {
            assert_eq!(is_ignored(path), ignored, "{path}");
        }
    }

    #[test]
    fn an_empty_endpoint_is_the_registration_socket() {
        assert_eq!(endpoint("", "/r/d.sock"), "/r/d.sock");
        assert_eq!(endpoint("/p/csi.sock", "/r/d.sock"), "/p/csi.sock");
    }

    #[test]
    fn an_empty_node_id_is_refused_and_names_the_driver() {
        let driver = DriverName::parse("d.io").unwrap();
        assert_eq!(check_node_id(&driver, "node-1"), Ok("node-1"));
        let text = check_node_id(&driver, "").unwrap_err().to_string();
        assert!(text.contains("d.io") && text.contains("empty node_id"), "{text}");
    }

    #[test]
    fn an_accepted_version_is_1_x_listed_and_higher_than_the_registered_one() {
        let reached = &Reached::default();
        let number = || prop_oneof![Just("0"), Just("1"), Just("2"), Just("10"), Just("x")];
        let text = (number(), number()).prop_map(|(major, minor)| format!("{major}.{minor}"));
        let strategy = (prop::collection::vec(text, 0..4), prop::option::of(0u64..12));
        proptest!(ProptestConfig::with_cases(2048), |((versions, registered) in strategy)| {
            let registered = registered.map(|minor| version(&format!("1.{minor}")));
            let result = check_driver("d.io", &versions, registered.as_ref());
            let offered = versions.iter().filter(|text| text.starts_with("1.")).filter_map(|text| Version::parse(text));
            let highest = offered.max();
            let expected = highest.filter(|version| registered.as_ref().is_none_or(|other| version > other));
            prop_assert_eq!(result.as_ref().ok().map(|accepted| &accepted.version), expected.as_ref());
            reached.case([
                ("takes a name over", result.is_ok() && registered.is_some()),
                ("a new name", result.is_ok() && registered.is_none()),
                ("taken", matches!(result, Err(RegistrationError::AlreadyRegistered { .. }))),
                ("too old", matches!(result, Err(RegistrationError::TooOld { .. }))),
                ("none supported", matches!(result, Err(RegistrationError::NoSupportedVersion { .. }))),
                ("none listed", matches!(result, Err(RegistrationError::NoVersions { .. }))),
            ]);
        });
        // The rarest: "takes a name over", in about one case of 20.
        reached.assert_each();
    }
}
