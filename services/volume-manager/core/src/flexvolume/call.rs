//! Calls of flexVolume drivers (volumes.md §10.8).

use crate::flexvolume::options::Options;

/// How long `waitforattach` may take, in seconds.
const WAIT_FOR_ATTACH_SECONDS: u64 = 600;

/// A command of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Command {
    /// `init`
    Init,
    /// `getvolumename`
    GetVolumeName,
    /// `attach`
    Attach,
    /// `detach`
    Detach,
    /// `isattached`
    IsAttached,
    /// `waitforattach`
    WaitForAttach,
    /// `mountdevice`
    MountDevice,
    /// `unmountdevice`
    UnmountDevice,
    /// `mount`
    Mount,
    /// `unmount`
    Unmount,
    /// `expandvolume`
    ExpandVolume,
    /// `expandfs`
    ExpandFs,
}

impl Command {
    /// Every command.
    pub const ALL: [Self; 12] = [
        Self::Init,
        Self::GetVolumeName,
        Self::Attach,
        Self::Detach,
        Self::IsAttached,
        Self::WaitForAttach,
        Self::MountDevice,
        Self::UnmountDevice,
        Self::Mount,
        Self::Unmount,
        Self::ExpandVolume,
        Self::ExpandFs,
    ];

    /// Its name, which is the first argument.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::GetVolumeName => "getvolumename",
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::IsAttached => "isattached",
            Self::WaitForAttach => "waitforattach",
            Self::MountDevice => "mountdevice",
            Self::UnmountDevice => "unmountdevice",
            Self::Mount => "mount",
            Self::Unmount => "unmount",
            Self::ExpandVolume => "expandvolume",
            Self::ExpandFs => "expandfs",
        }
    }
}

/// Sizes of a volume that grows, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The wanted size.
    pub new: u64,
    /// The size so far.
    pub old: u64,
}

/// A call of a driver. Its `Debug` form shows no secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call<'c> {
    /// The driver is new or has changed.
    Init,
    /// The answer is ignored; the volume's name is used.
    GetVolumeName(&'c Options),
    /// Attach to a node.
    Attach {
        /// The volume.
        options: &'c Options,
        /// The node.
        node: &'c str,
    },
    /// Detach from a node.
    Detach {
        /// The volume's inner name.
        volume: &'c str,
        /// The node.
        node: &'c str,
    },
    /// Whether the volume is attached to a node.
    IsAttached {
        /// The volume.
        options: &'c Options,
        /// The node.
        node: &'c str,
    },
    /// Wait until the device is there.
    WaitForAttach {
        /// What `attach` answered.
        device: &'c str,
        /// The volume.
        options: &'c Options,
    },
    /// Mount the device.
    MountDevice {
        /// Where.
        folder: &'c str,
        /// The device.
        device: &'c str,
        /// The volume.
        options: &'c Options,
    },
    /// Unmount the device.
    UnmountDevice {
        /// Where it is mounted.
        folder: &'c str,
    },
    /// Mount the volume for a pod.
    Mount {
        /// Where.
        folder: &'c str,
        /// The volume, the pod and the Secret.
        options: &'c Options,
    },
    /// Unmount the volume of a pod.
    Unmount {
        /// Where it is mounted.
        folder: &'c str,
    },
    /// Grow the volume.
    ExpandVolume {
        /// The volume.
        options: &'c Options,
        /// The device.
        device: &'c str,
        /// Its sizes.
        sizes: Sizes,
    },
    /// Grow the filesystem.
    ExpandFs {
        /// The volume.
        options: &'c Options,
        /// The device.
        device: &'c str,
        /// Where it is mounted.
        mount: &'c str,
        /// Its sizes.
        sizes: Sizes,
    },
}

impl Call<'_> {
    /// Its command.
    pub const fn command(&self) -> Command {
        match self {
            Self::Init => Command::Init,
            Self::GetVolumeName(_) => Command::GetVolumeName,
            Self::Attach { .. } => Command::Attach,
            Self::Detach { .. } => Command::Detach,
            Self::IsAttached { .. } => Command::IsAttached,
            Self::WaitForAttach { .. } => Command::WaitForAttach,
            Self::MountDevice { .. } => Command::MountDevice,
            Self::UnmountDevice { .. } => Command::UnmountDevice,
            Self::Mount { .. } => Command::Mount,
            Self::Unmount { .. } => Command::Unmount,
            Self::ExpandVolume { .. } => Command::ExpandVolume,
            Self::ExpandFs { .. } => Command::ExpandFs,
        }
    }

    /// The arguments of the executable. They may contain secrets.
    pub fn arguments(&self) -> Vec<String> {
        let rest: Vec<String> = match self {
            Self::Init => Vec::new(),
            Self::GetVolumeName(options) => vec![options.to_json()],
            Self::Attach { options, node } | Self::IsAttached { options, node } => {
                vec![options.to_json(), (*node).to_owned()]
            }
            Self::Detach { volume, node } => vec![(*volume).to_owned(), (*node).to_owned()],
            Self::WaitForAttach { device, options } => vec![(*device).to_owned(), options.to_json()],
            Self::MountDevice { folder, device, options } => {
                vec![(*folder).to_owned(), (*device).to_owned(), options.to_json()]
            }
            Self::Mount { folder, options } => vec![(*folder).to_owned(), options.to_json()],
            Self::UnmountDevice { folder } | Self::Unmount { folder } => vec![(*folder).to_owned()],
            Self::ExpandVolume { options, device, sizes } => {
                vec![options.to_json(), (*device).to_owned(), sizes.new.to_string(), sizes.old.to_string()]
            }
            Self::ExpandFs { options, device, mount, sizes } => vec![
                options.to_json(),
                (*device).to_owned(),
                (*mount).to_owned(),
                sizes.new.to_string(),
                sizes.old.to_string(),
            ],
        };
        [self.command().name().to_owned()].into_iter().chain(rest).collect()
    }

    /// How long it may take, in seconds, if that is limited.
    pub const fn limit_seconds(&self) -> Option<u64> {
        match self {
            Self::WaitForAttach { .. } => Some(WAIT_FOR_ATTACH_SECONDS),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::FlexSource;

    #[test]
    fn each_command_has_its_name_and_arguments_in_order() {
        let options = &Options::of_volume("pv", &FlexSource::default(), false);
        let json = options.to_json();
        let json = json.as_str();
        let sizes = Sizes { new: 20, old: 10 };
        let (folder, device, node) = ("/f", "/dev/x", "n");
        let table: [(Call<'_>, &[&str]); 12] = [
            (Call::Init, &["init"]),
            (Call::GetVolumeName(options), &["getvolumename", json]),
            (Call::Attach { options, node }, &["attach", json, "n"]),
            (Call::Detach { volume: "pv", node }, &["detach", "pv", "n"]),
            (Call::IsAttached { options, node }, &["isattached", json, "n"]),
            (Call::WaitForAttach { device, options }, &["waitforattach", "/dev/x", json]),
            (Call::MountDevice { folder, device, options }, &["mountdevice", "/f", "/dev/x", json]),
            (Call::UnmountDevice { folder }, &["unmountdevice", "/f"]),
            (Call::Mount { folder, options }, &["mount", "/f", json]),
            (Call::Unmount { folder }, &["unmount", "/f"]),
            (Call::ExpandVolume { options, device, sizes }, &["expandvolume", json, "/dev/x", "20", "10"]),
            (
                Call::ExpandFs { options, device, mount: "/m", sizes },
                &["expandfs", json, "/dev/x", "/m", "20", "10"],
            ),
        ];
        for ((call, expected), command) in table.iter().zip(Command::ALL) {
            assert_eq!(call.arguments(), *expected);
            assert_eq!(call.command(), command);
            let limit = (command == Command::WaitForAttach).then_some(600);
            assert_eq!(call.limit_seconds(), limit, "{command:?}");
        }
    }
}
