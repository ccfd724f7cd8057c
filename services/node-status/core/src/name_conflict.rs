//! Whether another agent uses this node's name at the API server.
//!
//! A kubelet takes over an existing Node of its name, and so does this agent: a reinstalled machine has to keep its node. Two
//! agents with one name overwrite each other's Node, and the only sign is that another client renews the lease in between. So
//! this module looks for a lease whose `renewTime` is not ours, in two consecutive turns, after one of our own renewals. It only
//! reports the conflict and refuses nothing, since either agent may be the right one.
//!
//! Parity: a kubelet does not notice.

use std::collections::VecDeque;

use serde_json::Value;

/// How many of our own renewals are remembered. One may have been written although its answer was lost.
const REMEMBERED: usize = 16;
/// Consecutive turns with a renewal by another agent until the name counts as shared.
const SHARED_AFTER: u32 = 2;
/// Consecutive turns without one until it does not any more.
const CLEAR_AFTER: u32 = 3;

/// The known renewals of a lease.
#[derive(Debug, Default)]
pub struct Renewals {
    own: VecDeque<String>,
    /// One of ours was answered: a later unknown renewal is not left over from an earlier run.
    has_been_ours: bool,
    /// The last renewal by another agent.
    last_foreign: Option<String>,
    /// Another agent has renewed since our last turn.
    met_other: bool,
    turns_with: u32,
    turns_without: u32,
    shared: bool,
}

impl Renewals {
    /// Records that the lease is about to be renewed with this `renewTime`.
    pub fn record_attempt(&mut self, renew_time: &str) {
        if self.own.len() == REMEMBERED {
            self.own.pop_front();
        }
        self.own.push_back(renew_time.to_owned());
    }

    /// Records that the server has the lease with this `renewTime`.
    pub fn record_seen(&mut self, renew_time: &str) {
        let is_ours = self.own.iter().any(|own| own == renew_time);
        if self.has_been_ours && !is_ours && self.last_foreign.as_deref() != Some(renew_time) {
            self.met_other = true;
            self.last_foreign = Some(renew_time.to_owned());
        }
    }

    /// Ends a turn whose renewal succeeded. Returns whether another agent uses the name, too.
    pub fn finish_turn(&mut self) -> bool {
        self.has_been_ours = true;
        if std::mem::take(&mut self.met_other) {
            (self.turns_with, self.turns_without) = (self.turns_with.saturating_add(1), 0);
        } else {
            (self.turns_with, self.turns_without) = (0, self.turns_without.saturating_add(1));
        }
        if self.turns_with >= SHARED_AFTER {
            self.shared = true;
        } else if self.turns_without >= CLEAR_AFTER {
            self.shared = false;
        }
        self.shared
    }
}

/// Fields of `nodeInfo` that identify a machine or a boot, with the word for each.
const IDS: [(&str, &str); 3] = [("machineID", "machine"), ("systemUUID", "system"), ("bootID", "boot")];

/// The message about the other agent. `ours` and `live` are `status.nodeInfo`, as it is here and as the server has it.
pub fn conflict_message(node: &str, ours: &Value, live: &Value) -> String {
    let differs = |field: &str| {
        let (ours, live) = (ours[field].as_str()?, live[field].as_str()?);
        (!ours.is_empty() && !live.is_empty() && ours != live).then(|| live.to_owned())
    };
    let other: Vec<String> =
        IDS.iter().filter_map(|(field, word)| Some(format!("{word} {}", differs(field)?))).collect();
    let who = if other.is_empty() { String::new() } else { format!(" ({})", other.join(", ")) };
    format!(
        "another agent{who} uses the node name {node}, too: it renews the node's lease between the renewals of this agent, and each \
         overwrites what the other reports; stop one of the two, or give it another name (--hostname-override)"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A turn: the lease that the server has before it, if it is read, and the one that is written.
    fn turn(renewals: &mut Renewals, found: Option<&str>, written: &str) -> bool {
        if let Some(found) = found {
            renewals.record_seen(found);
        }
        renewals.record_attempt(written);
        renewals.finish_turn()
    }

    #[test]
    fn a_name_conflict_needs_two_foreign_lease_renewals_and_ends_after_three_turns() {
        let mut renewals = Renewals::default();
        for (found, written, shared) in [
            // Left over from an earlier run, or from the machine before.
            (Some("old"), "1", false),
            (None, "2", false),
            (Some("a"), "3", false),
            (Some("b"), "4", true),
            (None, "5", true),
            (None, "6", true),
            (Some("c"), "7", true),
            (None, "8", true),
            (None, "9", true),
            (None, "10", false),
            (Some("d"), "11", false),
            (None, "12", false),
            (Some("e"), "13", false),
        ] {
            assert_eq!(turn(&mut renewals, found, written), shared, "{found:?} {written}");
        }
    }

    #[test]
    fn own_unanswered_and_unchanged_lease_renewals_are_no_name_conflict() {
        let mut renewals = Renewals::default();
        turn(&mut renewals, None, "1");
        for n in 2..20 {
            // Each renewal is written, and only the last one is answered.
            let (lost, made) = (format!("{n} lost"), format!("{n}"));
            renewals.record_attempt(&lost);
            renewals.record_seen(&lost);
            assert!(!turn(&mut renewals, None, &made));
        }
        for n in 20..24 {
            // An old lease is restored, once.
            assert!(!turn(&mut renewals, Some("restored"), &format!("{n}")));
        }
    }

    #[test]
    fn a_machine_that_takes_over_a_name_reports_no_conflict() {
        let mut renewals = Renewals::default();
        for found in ["left by the one before", "left by the one before"] {
            renewals.record_seen(found);
        }
        for n in 0..5 {
            assert!(!turn(&mut renewals, None, &n.to_string()));
        }
    }

    #[test]
    fn the_name_conflict_message_names_the_other_machine() {
        let ours = json!({"machineID": "m1", "systemUUID": "s1", "bootID": "b1"});
        for (live, part) in [
            (
                json!({"machineID": "m2", "systemUUID": "s1", "bootID": "b2"}),
                "(machine m2, boot b2) uses the node name n,",
            ),
            (json!({"machineID": "m1", "systemUUID": "", "bootID": "b2"}), "(boot b2) uses"),
            (ours.clone(), "another agent uses the node name n, too"),
            (Value::Null, "another agent uses the node name n, too"),
        ] {
            let words = conflict_message("n", &ours, &live);
            assert!(words.contains(part) && words.contains("--hostname-override"), "{words}");
        }
    }
}
