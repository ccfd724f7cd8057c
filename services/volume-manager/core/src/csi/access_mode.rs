//! Which access mode and which capability a CSI driver is called with (volumes.md §11.3).

/// The capabilities of a driver's node service, from `NodeGetCapabilities`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeCapabilities {
    /// STAGE_UNSTAGE_VOLUME: volumes are staged once per node before pods get them.
    pub stage: bool,
    /// GET_VOLUME_STATS: the driver measures its volumes.
    pub stats: bool,
    /// EXPAND_VOLUME: the driver expands volumes on the node.
    pub expand: bool,
    /// VOLUME_CONDITION: the driver says whether a volume is healthy.
    pub condition: bool,
    /// SINGLE_NODE_MULTI_WRITER: the driver knows the two access modes that tell one pod from several on a node.
    pub single_node_multi_writer: bool,
    /// VOLUME_MOUNT_GROUP: the driver applies fsGroup itself.
    pub mount_group: bool,
}

impl NodeCapabilities {
    /// The capabilities by their numbers in CSI's `NodeServiceCapability.RPC.Type`; others are ignored.
    pub fn from_numbers(numbers: impl IntoIterator<Item = i32>) -> Self {
        let mut capabilities = Self::default();
        for number in numbers {
            match number {
                1 => capabilities.stage = true,
                2 => capabilities.stats = true,
                3 => capabilities.expand = true,
                4 => capabilities.condition = true,
                5 => capabilities.single_node_multi_writer = true,
                6 => capabilities.mount_group = true,
                _ => {}
            }
        }
        capabilities
    }
}

/// The access modes that an agent asks a driver for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMode {
    /// SINGLE_NODE_WRITER.
    SingleNodeWriter,
    /// MULTI_NODE_READER_ONLY.
    MultiNodeReaderOnly,
    /// MULTI_NODE_MULTI_WRITER.
    MultiNodeMultiWriter,
    /// SINGLE_NODE_SINGLE_WRITER.
    SingleNodeSingleWriter,
    /// SINGLE_NODE_MULTI_WRITER.
    SingleNodeMultiWriter,
}

impl AccessMode {
    /// The number in CSI's `VolumeCapability.AccessMode.Mode`.
    pub const fn number(self) -> i32 {
        match self {
            Self::SingleNodeWriter => 1,
            Self::MultiNodeReaderOnly => 3,
            Self::MultiNodeMultiWriter => 5,
            Self::SingleNodeSingleWriter => 6,
            Self::SingleNodeMultiWriter => 7,
        }
    }
}

/// The PersistentVolume has an access mode that the API does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "accessModes has the unknown mode {mode:?}; use ReadWriteOnce, ReadWriteOncePod, ReadOnlyMany or ReadWriteMany"
)]
pub struct UnknownAccessMode {
    /// The mode as written.
    pub mode: String,
}

/// The access mode of a volume: by the first of its PersistentVolume's `accessModes`, and ReadWriteOnce if it has none.
/// An inline volume has none.
pub fn access_mode(
    access_modes: &[String],
    capabilities: NodeCapabilities,
) -> Result<AccessMode, UnknownAccessMode> {
    let tells_pods_apart = capabilities.single_node_multi_writer;
    Ok(match access_modes.first().map_or("ReadWriteOnce", String::as_str) {
        "ReadWriteOnce" if tells_pods_apart => AccessMode::SingleNodeMultiWriter,
        "ReadWriteOncePod" if tells_pods_apart => AccessMode::SingleNodeSingleWriter,
        "ReadWriteOnce" | "ReadWriteOncePod" => AccessMode::SingleNodeWriter,
        "ReadOnlyMany" => AccessMode::MultiNodeReaderOnly,
        "ReadWriteMany" => AccessMode::MultiNodeMultiWriter,
        other => return Err(UnknownAccessMode { mode: other.to_owned() }),
    })
}

/// The `VolumeCapability` that a driver is called with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeCapability {
    /// How many nodes and pods may use the volume.
    pub access_mode: AccessMode,
    /// What the pod gets.
    pub access: Access,
}

/// What a pod gets of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A device.
    Block,
    /// A filesystem.
    Mount {
        /// Its type; empty: the driver chooses.
        fs_type: String,
        /// Options of the mount, in the order in which the driver gets them.
        mount_flags: Vec<String>,
        /// The gid, in decimal, for a driver that applies fsGroup itself.
        volume_mount_group: Option<String>,
    },
}

/// The flags of a mount: `spec.mountOptions` of the PersistentVolume in its order, then the SELinux context if there is
/// one (`context="…"`, volumes.md §6). The beta annotation for mount options does not count (volumes.md §11.5).
pub fn mount_flags(mount_options: &[String], selinux_option: Option<&str>) -> Vec<String> {
    mount_options.iter().map(String::as_str).chain(selinux_option).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(modes: &[&str], tells_pods_apart: bool) -> Result<AccessMode, UnknownAccessMode> {
        let modes: Vec<String> = modes.iter().map(|mode| (*mode).to_owned()).collect();
        let capabilities =
            NodeCapabilities { single_node_multi_writer: tells_pods_apart, ..NodeCapabilities::default() };
        access_mode(&modes, capabilities)
    }

    #[test]
    fn the_first_access_mode_and_the_capability_decide() {
        use AccessMode::*;
        for (modes, without, with) in [
            (&[][..], SingleNodeWriter, SingleNodeMultiWriter),
            (&["ReadWriteOnce"], SingleNodeWriter, SingleNodeMultiWriter),
            (&["ReadWriteOncePod"], SingleNodeWriter, SingleNodeSingleWriter),
            (&["ReadOnlyMany"], MultiNodeReaderOnly, MultiNodeReaderOnly),
            (&["ReadWriteMany"], MultiNodeMultiWriter, MultiNodeMultiWriter),
            (&["ReadOnlyMany", "ReadWriteOnce"], MultiNodeReaderOnly, MultiNodeReaderOnly),
            (&["ReadWriteOnce", "ReadWriteMany"], SingleNodeWriter, SingleNodeMultiWriter),
        ] {
            assert_eq!(mode(modes, false), Ok(without), "{modes:?}");
            assert_eq!(mode(modes, true), Ok(with), "{modes:?}");
        }
    }

    #[test]
    fn an_unknown_access_mode_is_an_error_that_names_it() {
        for text in ["", "readwriteonce", "ReadWrite", "ReadWriteOnce "] {
            for tells_pods_apart in [false, true] {
                let error = mode(&[text, "ReadWriteOnce"], tells_pods_apart).unwrap_err();
                assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            }
        }
    }

    #[test]
    fn access_modes_have_the_numbers_of_the_csi_protocol() {
        use AccessMode::*;
        let modes = [
            (SingleNodeWriter, 1),
            (MultiNodeReaderOnly, 3),
            (MultiNodeMultiWriter, 5),
            (SingleNodeSingleWriter, 6),
            (SingleNodeMultiWriter, 7),
        ];
        for (mode, number) in modes {
            assert_eq!(mode.number(), number, "{mode:?}");
        }
    }

    #[test]
    fn each_capability_has_its_number_and_unknown_numbers_are_ignored() {
        let none = NodeCapabilities::default();
        let of = |number| NodeCapabilities::from_numbers([number]);
        assert_eq!(of(1), NodeCapabilities { stage: true, ..none });
        assert_eq!(of(2), NodeCapabilities { stats: true, ..none });
        assert_eq!(of(3), NodeCapabilities { expand: true, ..none });
        assert_eq!(of(4), NodeCapabilities { condition: true, ..none });
        assert_eq!(of(5), NodeCapabilities { single_node_multi_writer: true, ..none });
        assert_eq!(of(6), NodeCapabilities { mount_group: true, ..none });
        assert_eq!(NodeCapabilities::from_numbers([-1, 0, 7, i32::MAX]), none);
        let twice = NodeCapabilities::from_numbers([6, 1, 6]);
        assert_eq!(twice, NodeCapabilities { stage: true, mount_group: true, ..none });
    }

    #[test]
    fn the_selinux_context_follows_the_mount_options() {
        let options = ["ro".to_owned(), "noatime".to_owned()];
        let context = "context=\"system_u:object_r:container_file_t:s0:c1,c2\"";
        assert_eq!(mount_flags(&options, Some(context)), ["ro", "noatime", context]);
        assert_eq!(mount_flags(&options, None), ["ro", "noatime"]);
        assert_eq!(mount_flags(&[], None), [""; 0]);
    }
}
