//! Checks pods of random choices on every build; see `keelson_fuzz_properties::pod`.

use keelson_fuzz_properties::{Outcome, pod};
use keelson_testkit::Reached;
use proptest::prelude::*;

#[test]
fn container_runtime_requests_for_valid_pods_are_well_formed() {
    let reached = &Reached::default();
    // Most choices are the first value, which is valid, because a pod of random values only is hardly ever accepted. The rarer
    // of the two outcomes is that of every third pod.
    let choice = prop_oneof![24 => Just(0_u8), 1 => any::<u8>()];
    proptest!(ProptestConfig::with_cases(3000), |(bytes in prop::collection::vec(choice, 0..300))| {
        let outcome = pod::check(&bytes);
        reached.case([("accepted", outcome == Outcome::Accepted), ("rejected", outcome == Outcome::Rejected)]);
    });
    reached.assert_each();
}
