//! What a container runtime supports according to its name and version, where CRI has no answer for it
//! (runtime-and-resources.md §1.6).

/// How far a runtime supports image volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageVolumeSupport {
    /// It ignores the image of a mount, or is not known to support it.
    #[default]
    None,
    /// It mounts whole images, and ignores a subpath.
    WholeImages,
    /// It also mounts a directory of an image.
    SubPaths,
}

/// The support of image volumes of a runtime. An unknown runtime has none, since one that ignores the image of a mount would start
/// the container without its files.
pub fn image_volume_support(name: &str, version: &str) -> ImageVolumeSupport {
    let (images, sub_paths) = match name {
        "containerd" => ((2, 1), (2, 2)),
        "cri-o" => ((1, 31), (1, 33)),
        _ => return ImageVolumeSupport::None,
    };
    match major_and_minor(version) {
        version if version >= sub_paths => ImageVolumeSupport::SubPaths,
        version if version >= images => ImageVolumeSupport::WholeImages,
        _ => ImageVolumeSupport::None,
    }
}

/// The runtimes that support image volumes, or their subpaths, for messages.
pub fn runtimes_with(support: ImageVolumeSupport) -> &'static str {
    match support {
        ImageVolumeSupport::None => "any runtime",
        ImageVolumeSupport::WholeImages => "containerd 2.1 or CRI-O 1.31, or newer",
        ImageVolumeSupport::SubPaths => "containerd 2.2 or CRI-O 1.33, or newer",
    }
}

/// The first two numbers of a version such as `v2.1.4`; (0, 0) if it has none.
pub(crate) fn major_and_minor(version: &str) -> (u32, u32) {
    let mut numbers = version.trim_start_matches('v').split('.').map(|number| number.parse::<u32>().ok());
    (numbers.next().flatten().unwrap_or(0), numbers.next().flatten().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_volumes_need_a_runtime_that_is_known_to_mount_them() {
        use ImageVolumeSupport::{None, SubPaths, WholeImages};
        for (name, version, expected) in [
            ("containerd", "1.6.20~ds1", None),
            ("containerd", "v1.7.24", None),
            ("containerd", "v2.0.5", None),
            ("containerd", "2.1.9+unknown", WholeImages),
            ("containerd", "v2.1.6", WholeImages),
            ("containerd", "v2.2.0", SubPaths),
            ("containerd", "v2.10.1", SubPaths),
            ("containerd", "v3.0.0", SubPaths),
            ("containerd", "", None),
            ("containerd", "main", None),
            ("cri-o", "1.30.4", None),
            ("cri-o", "1.31.0", WholeImages),
            ("cri-o", "1.33.1", SubPaths),
            ("docker", "28.0.0", None),
            ("", "", None),
        ] {
            assert_eq!(image_volume_support(name, version), expected, "{name} {version}");
        }
    }
}
