//! Whether another agent has this node's name at the API server.
//!
//! A kubelet takes over a Node of its name without a question, and so does this one: a machine that was installed anew has to
//! come back as what it was. Two that are there at once write over each other, with nothing to tell them apart but that the
//! lease is renewed by somebody in between. That is what is looked at: a lease whose `renewTime` is none of ours, in two turns
//! one after the other, after one of our own renewals. Nothing is refused because of it, as it is a word about the other, too.
//!
//! Parity: a kubelet does not notice.

use std::collections::VecDeque;

use serde_json::Value;

/// So many of our own renewals are remembered. One may have been made although its answer was lost.
const REMEMBERED: usize = 16;
/// Turns in which somebody else has renewed before it is told.
const TELLING: u32 = 2;
/// Turns without anybody else until it is over.
const OVER: u32 = 3;

/// What is known of the renewals of a lease.
#[derive(Debug, Default)]
pub struct Renewals {
    ours: VecDeque<String>,
    /// One of ours was answered: what comes after it is not what an earlier run has left.
    has_been_ours: bool,
    /// The last one that was somebody else's.
    theirs: Option<String>,
    /// Somebody else has renewed since our last turn.
    met: bool,
    turns_with: u32,
    turns_without: u32,
    shared: bool,
}

impl Renewals {
    /// The lease is about to be renewed with this `renewTime`.
    pub fn tries(&mut self, renew_time: &str) {
        if self.ours.len() == REMEMBERED {
            self.ours.pop_front();
        }
        self.ours.push_back(renew_time.to_owned());
    }

    /// The server has the lease with this `renewTime`.
    pub fn finds(&mut self, renew_time: &str) {
        let is_ours = self.ours.iter().any(|ours| ours == renew_time);
        if self.has_been_ours && !is_ours && self.theirs.as_deref() != Some(renew_time) {
            self.met = true;
            self.theirs = Some(renew_time.to_owned());
        }
    }

    /// A turn has ended with a renewal; whether somebody else has the name, too.
    pub fn renewed(&mut self) -> bool {
        self.has_been_ours = true;
        if std::mem::take(&mut self.met) {
            (self.turns_with, self.turns_without) = (self.turns_with.saturating_add(1), 0);
        } else {
            (self.turns_with, self.turns_without) = (0, self.turns_without.saturating_add(1));
        }
        if self.turns_with >= TELLING {
            self.shared = true;
        } else if self.turns_without >= OVER {
            self.shared = false;
        }
        self.shared
    }
}

/// What tells one machine, or one start of it, from another, with the words for it.
const IDS: [(&str, &str); 3] = [("machineID", "machine"), ("systemUUID", "system"), ("bootID", "boot")];

/// What is told of the other one. `ours` and `live` are `status.nodeInfo`, as it is here and as the server has it.
pub fn in_words(node: &str, ours: &Value, live: &Value) -> String {
    let differs = |field: &str| {
        let (ours, live) = (ours[field].as_str()?, live[field].as_str()?);
        (!ours.is_empty() && !live.is_empty() && ours != live).then(|| live.to_owned())
    };
    let other: Vec<String> =
        IDS.iter().filter_map(|(field, word)| Some(format!("{word} {}", differs(field)?))).collect();
    let who = if other.is_empty() { String::new() } else { format!(" ({})", other.join(", ")) };
    format!(
        "another agent{who} is the node {node}, too: it renews the node's lease between the renewals of this one, and each \
         writes over what the other has written; end one of the two, or give it another name (--hostname-override)"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A turn: what the server is found with before it, if it is looked at, and what is written.
    fn turn(renewals: &mut Renewals, found: Option<&str>, written: &str) -> bool {
        if let Some(found) = found {
            renewals.finds(found);
        }
        renewals.tries(written);
        renewals.renewed()
    }

    #[test]
    fn somebody_who_renews_in_between_twice_in_a_row_has_the_name_until_three_turns_pass_without() {
        let mut renewals = Renewals::default();
        for (found, written, shared) in [
            // What an earlier run, or the machine before, has left.
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
    fn a_renewal_of_ours_whose_answer_was_lost_and_one_that_stands_still_are_nobody_elses() {
        let mut renewals = Renewals::default();
        turn(&mut renewals, None, "1");
        for n in 2..20 {
            // Each is made, and none is answered but the last.
            let (lost, made) = (format!("{n} lost"), format!("{n}"));
            renewals.tries(&lost);
            renewals.finds(&lost);
            assert!(!turn(&mut renewals, None, &made));
        }
        for n in 20..24 {
            // Somebody has put back a lease of long ago, once.
            assert!(!turn(&mut renewals, Some("restored"), &format!("{n}")));
        }
    }

    #[test]
    fn a_machine_that_takes_over_a_name_finds_nobody() {
        let mut renewals = Renewals::default();
        for found in ["left by the one before", "left by the one before"] {
            renewals.finds(found);
        }
        for n in 0..5 {
            assert!(!turn(&mut renewals, None, &n.to_string()));
        }
    }

    #[test]
    fn the_other_one_is_told_by_what_differs() {
        let ours = json!({"machineID": "m1", "systemUUID": "s1", "bootID": "b1"});
        for (live, part) in [
            (
                json!({"machineID": "m2", "systemUUID": "s1", "bootID": "b2"}),
                "(machine m2, boot b2) is the node n,",
            ),
            (json!({"machineID": "m1", "systemUUID": "", "bootID": "b2"}), "(boot b2) is"),
            (ours.clone(), "another agent is the node n, too"),
            (Value::Null, "another agent is the node n, too"),
        ] {
            let words = in_words("n", &ours, &live);
            assert!(words.contains(part) && words.contains("--hostname-override"), "{words}");
        }
    }
}
