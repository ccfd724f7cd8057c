//! Features of a kernel, by its release.

/// The first kernel whose tmpfs supports `noswap`.
const NOSWAP_SINCE: (u32, u32) = (6, 4);

/// Whether the tmpfs of a kernel of this release (`uname -r`) has the option `noswap` (volumes.md §10.1). False for a
/// release that cannot be parsed.
pub fn has_noswap(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= NOSWAP_SINCE,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noswap_is_there_from_kernel_6_4_on() {
        for (release, has) in [
            ("6.4.0", true),
            ("6.18.44-fc", true),
            ("7.0-rc1", true),
            ("6.3.13", false),
            ("5.10.0-30-amd64", false),
            ("6", false),
            ("linux", false),
        ] {
            assert_eq!(has_noswap(release), has, "{release}");
        }
    }
}
