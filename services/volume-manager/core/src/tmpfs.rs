//! Memory-backed volumes (volumes.md §10.1).

/// The size in bytes: the node's memory that is allocatable to pods, bounded by the pod's memory limit and by the
/// volume's `sizeLimit`. A bound that is zero or not smaller changes nothing.
pub fn size(allocatable: u64, pod_limit: Option<u64>, size_limit: Option<u64>) -> u64 {
    let mut size = allocatable;
    for bound in [pod_limit, size_limit].into_iter().flatten() {
        if bound > 0 && (bound <= size || size == 0) {
            size = bound;
        }
    }
    size
}

/// The data argument of mount(2): `size=` only when positive, `noswap` only when the kernel supports it.
pub fn mount_options(size: u64, noswap: bool) -> String {
    let mut parts = Vec::new();
    if size > 0 {
        parts.push(format!("size={size}"));
    }
    if noswap {
        parts.push("noswap".to_owned());
    }
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_positive_bound_wins() {
        let cases = [
            ((100, None, None), 100),
            ((100, Some(50), None), 50),
            ((100, Some(150), None), 100),
            ((100, None, Some(20)), 20),
            ((100, Some(50), Some(80)), 50),
            ((100, Some(50), Some(50)), 50),
            ((100, Some(0), Some(0)), 100),
            ((0, Some(7), None), 7),
            ((0, None, None), 0),
        ];
        for ((allocatable, pod, limit), expected) in cases {
            assert_eq!(size(allocatable, pod, limit), expected, "{allocatable} {pod:?} {limit:?}");
        }
    }

    #[test]
    fn options_name_only_what_applies() {
        assert_eq!(mount_options(4096, true), "size=4096,noswap");
        assert_eq!(mount_options(4096, false), "size=4096");
        assert_eq!(mount_options(0, true), "noswap");
        assert_eq!(mount_options(0, false), "");
    }

    #[test]
    fn the_size_never_exceeds_a_positive_bound() {
        let reached = &Reached::default();
        let bytes = || prop_oneof![1 => Just(0), 3 => 1u64..1000];
        let bound = || prop::option::of(bytes());
        proptest!(ProptestConfig::with_cases(1024), |(a in bytes(), p in bound(), s in bound())| {
            let size = size(a, p, s);
            for bound in [Some(a), p, s].into_iter().flatten().filter(|b| *b > 0) {
                prop_assert!(size <= bound);
            }
            reached.case([
                ("no bound", size == 0),
                ("the node's", size > 0 && size == a),
                ("the pod's", size > 0 && size != a && Some(size) == p),
                ("the volume's", size > 0 && size != a && Some(size) == s),
                ("a bound of zero is ignored", size > 0 && (p == Some(0) || s == Some(0))),
            ]);
        });
        // The rarest: "no bound", in one case of 10.
        reached.assert_each();
    }
}
