//! Pods of random choices, on every build: see `keelson_fuzz_properties::pod`.

use keelson_fuzz_properties::{Met, pod};
use keelson_testkit::Reached;
use proptest::prelude::*;

#[test]
fn what_validation_lets_through_can_be_asked_of_a_container_runtime() {
    let reached = &Reached::default();
    // Most choices are the first, which is a good one: a pod of random ones alone is hardly ever let through. The rarer of the
    // two outcomes is that of every third pod.
    let choice = prop_oneof![24 => Just(0_u8), 1 => any::<u8>()];
    proptest!(ProptestConfig::with_cases(3000), |(bytes in prop::collection::vec(choice, 0..300))| {
        let met = pod::check(&bytes);
        reached.case([("good", met == Met::Good), ("refused", met == Met::Refused)]);
    });
    reached.assert_each();
}
