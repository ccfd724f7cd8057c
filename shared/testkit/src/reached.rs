//! Counts which states the cases of a property test have reached.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// In how many cases of a property test each state was reached without which the property would prove little.
///
/// Cases are random. A test runs enough of them that its rarest state is reached at least 40 times on average, and names
/// that state next to the number of cases: a run then misses it with a chance of e⁻⁴⁰, which is 4·10⁻¹⁸.
#[derive(Debug, Default)]
pub struct Reached {
    cases: Cell<u32>,
    counts: RefCell<BTreeMap<&'static str, u32>>,
}

impl Reached {
    /// Records one case: for each state, whether the case has reached it.
    pub fn case<const N: usize>(&self, states: [(&'static str, bool); N]) {
        self.cases.set(self.cases.get() + 1);
        let mut counts = self.counts.borrow_mut();
        for (state, reached) in states {
            *counts.entry(state).or_default() += u32::from(reached);
        }
    }

    /// Prints how often each state was reached.
    ///
    /// # Panics
    /// When a state was never reached, or no case was recorded.
    pub fn assert_each(&self) {
        let counts = self.counts.borrow();
        println!("reached in {} cases: {counts:?}", self.cases.get());
        assert!(!counts.is_empty(), "no case was taken note of");
        let never: Vec<&str> =
            counts.iter().filter(|(_, count)| **count == 0).map(|(state, _)| *state).collect();
        assert!(never.is_empty(), "never reached in {} cases: {never:?}", self.cases.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_that_a_case_has_reached_is_enough() {
        let reached = Reached::default();
        reached.case([("low", true), ("high", false)]);
        reached.case([("low", true), ("high", true)]);
        reached.assert_each();
        assert_eq!(*reached.counts.borrow(), BTreeMap::from([("high", 1), ("low", 2)]));
    }

    #[test]
    #[should_panic(expected = "never reached in 1 cases: [\"high\"]")]
    fn a_state_that_no_case_has_reached_is_named() {
        let reached = Reached::default();
        reached.case([("low", true), ("high", false)]);
        reached.assert_each();
    }

    #[test]
    #[should_panic(expected = "no case was taken note of")]
    fn a_property_without_cases_shows_nothing() {
        Reached::default().assert_each();
    }
}
