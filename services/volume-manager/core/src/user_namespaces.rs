//! The IDs on the node that the users and groups of a pod with a user namespace have (runtime-and-resources.md §2.6).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The node's IDs end here. The last number of 32 bits is no ID, and no range can have it.
const END: u64 = (1 << 32) - 1;

/// Consecutive IDs on the node; a pod sees them as those from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdRange {
    /// The first ID on the node.
    pub host_id: u32,
    /// How many IDs.
    pub length: u32,
}

impl IdRange {
    /// One past the last ID.
    fn end(self) -> u64 {
        u64::from(self.host_id) + u64::from(self.length)
    }

    fn overlaps(self, other: Self) -> bool {
        u64::from(self.host_id) < other.end() && u64::from(other.host_id) < self.end()
    }
}

/// Why a pod gets no range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdRangeError {
    /// All ranges are in use.
    #[error("all {slots} ranges of IDs for user namespaces are in use; {remedy}")]
    Exhausted {
        /// How many there are.
        slots: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A pod's range is unknown or overlaps another, so every other range may overlap it.
    #[error(
        "no range of IDs for user namespaces is assigned while that of pod {uid} is unusable: {why}; remove that pod, or \
         restore the file `userns` in its folder"
    )]
    Unusable {
        /// The pod.
        uid: String,
        /// Why its range is unusable.
        why: String,
    },
    /// The node's range does not suit.
    #[error("{0}")]
    NodeRange(#[from] NodeRangeError),
}

/// Why the node's range of IDs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the IDs of the user `kubelet` cannot be used for user namespaces of pods: {0}; correct /etc/subuid and /etc/subgid"
)]
pub struct NodeRangeError(String);

/// The IDs from which pods get theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    first: u64,
    end: u64,
}

impl NodeRange {
    /// Every ID of the node except those of the node's own users: from `ids_per_pod` on.
    #[must_use]
    pub const fn whole_node(ids_per_pod: u32) -> Self {
        Self { first: ids_per_pod as u64, end: END }
    }

    /// The range that `getsubids kubelet` and `getsubids -g kubelet` print.
    ///
    /// # Errors
    /// There is not exactly one range, the two differ, the range is not aligned to `ids_per_pod`, begins below it, or is
    /// too short for `max_pods`.
    pub fn from_subids(
        users: &str,
        groups: &str,
        ids_per_pod: u32,
        max_pods: u32,
    ) -> Result<Self, NodeRangeError> {
        let (range, of_groups) = (sub_ids(users, "user")?, sub_ids(groups, "group")?);
        if range != of_groups {
            let text = format!("its user IDs ({range:?}) and its group IDs ({of_groups:?}) differ");
            return Err(NodeRangeError(text));
        }
        let (first, length) = range;
        let per_pod = u64::from(ids_per_pod);
        let refuse = |text: String| Err(NodeRangeError(text));
        if first < per_pod {
            return refuse(format!("the first one, {first}, is below {per_pod} (userNamespaces.idsPerPod)"));
        }
        if !first.is_multiple_of(per_pod) || !length.is_multiple_of(per_pod) {
            return refuse(format!(
                "the first one, {first}, and their number, {length}, must be multiples of {per_pod} \
                 (userNamespaces.idsPerPod)"
            ));
        }
        if length / per_pod < u64::from(max_pods) {
            let pods = length / per_pod;
            return refuse(format!("they are enough for {pods} pods, but maxPods is {max_pods}"));
        }
        match first.checked_add(length).filter(|end| *end <= END) {
            Some(end) => Ok(Self { first, end }),
            None => refuse(format!("{length} IDs from {first} on are more than there are")),
        }
    }

    /// The ranges of this length, in order.
    fn slots(self, ids_per_pod: u32) -> impl Iterator<Item = IdRange> {
        let starts =
            (self.first..self.end).step_by(usize::try_from(ids_per_pod.max(1)).unwrap_or(usize::MAX));
        starts.filter_map(move |start| {
            let range = IdRange { host_id: u32::try_from(start).ok()?, length: ids_per_pod };
            (range.end() <= self.end).then_some(range)
        })
    }
}

/// The first ID and the number of IDs in the output of getsubids(1): one line such as `0: kubelet 65536 7208960`.
fn sub_ids(output: &str, kind: &str) -> Result<(u64, u64), NodeRangeError> {
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    let [line] = lines[..] else {
        let count = lines.len();
        return Err(NodeRangeError(format!("it needs one range of {kind} IDs and has {count}")));
    };
    let fields: Vec<&str> = line.split_whitespace().collect();
    let numbers = match fields[..] {
        [_, _, first, length] => first.parse().ok().zip(length.parse().ok()),
        _ => None,
    };
    numbers.ok_or_else(|| NodeRangeError(format!("getsubids prints {line:?} for its {kind} IDs")))
}

/// The ranges of all pods on the node.
#[derive(Clone, Debug, Default)]
pub struct IdRanges {
    by_pod: BTreeMap<String, Result<IdRange, String>>,
}

impl IdRanges {
    /// Records what was found of a pod's range: its range, or why that cannot be read. A range that overlaps that of a pod
    /// which was recorded before is unusable; returns why.
    pub fn record(&mut self, uid: &str, range: Result<IdRange, String>) -> Result<(), String> {
        let other = |range: &IdRange| {
            let mut others = self.by_pod.iter().filter(|(other, _)| *other != uid);
            others.find_map(|(other, taken)| {
                taken.as_ref().is_ok_and(|t| t.overlaps(*range)).then(|| other.clone())
            })
        };
        let range = range.and_then(|range| match other(&range) {
            Some(other) => Err(format!("its range overlaps that of pod {other}")),
            None => Ok(range),
        });
        let recorded = range.clone().map(drop);
        self.by_pod.insert(uid.to_owned(), range);
        recorded
    }

    /// The range of a pod.
    #[must_use]
    pub fn of_pod(&self, uid: &str) -> Option<IdRange> {
        self.by_pod.get(uid)?.as_ref().ok().copied()
    }

    /// Frees the range of a pod whose folder is removed.
    pub fn release(&mut self, uid: &str) {
        self.by_pod.remove(uid);
    }

    /// The range of a pod; a new one is the lowest that overlaps no other pod's. A pod keeps its range when `ids_per_pod`
    /// or the node's range changes.
    ///
    /// # Errors
    /// No range is left, or the range of some pod is unknown.
    pub fn assign(&mut self, uid: &str, node: NodeRange, ids_per_pod: u32) -> Result<IdRange, IdRangeError> {
        if let Some(range) = self.of_pod(uid) {
            return Ok(range);
        }
        if let Some((uid, why)) =
            self.by_pod.iter().find_map(|(uid, range)| Some((uid, range.as_ref().err()?)))
        {
            return Err(IdRangeError::Unusable { uid: uid.clone(), why: why.clone() });
        }
        let mut taken: Vec<IdRange> = self.by_pod.values().filter_map(|range| range.clone().ok()).collect();
        taken.sort_unstable();
        let free = node.slots(ids_per_pod).find(|slot| !taken.iter().any(|range| range.overlaps(*slot)));
        let Some(range) = free else {
            let slots = node.slots(ids_per_pod).count();
            return Err(IdRangeError::Exhausted {
                slots: u64::try_from(slots).unwrap_or(u64::MAX),
                remedy: "give the user `kubelet` more IDs in /etc/subuid and /etc/subgid, or lower \
                         userNamespaces.idsPerPod",
            });
        };
        self.by_pod.insert(uid.to_owned(), Ok(range));
        Ok(range)
    }
}

/// The file `userns` in a pod's folder, as a kubelet writes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uid_mappings: Vec<Mapping>,
    gid_mappings: Vec<Mapping>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

/// The content of the file `userns` for a range.
#[must_use]
pub fn record_of(range: IdRange) -> String {
    let mapping = Mapping { host_id: range.host_id, container_id: 0, length: range.length };
    let record = Record { uid_mappings: vec![mapping], gid_mappings: vec![mapping] };
    serde_json::to_string(&record).unwrap_or_default()
}

/// Reads the content of the file `userns`, also of one that a kubelet has written.
///
/// # Errors
/// It is not that of one range, for users and groups alike.
pub fn range_in(content: &[u8]) -> Result<IdRange, String> {
    let record: Record = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    let ([users], [groups]) = (&record.uid_mappings[..], &record.gid_mappings[..]) else {
        return Err("it must have one mapping of user IDs and one of group IDs".to_owned());
    };
    if users != groups {
        return Err("the mappings of user IDs and group IDs differ".to_owned());
    }
    let range = IdRange { host_id: users.host_id, length: users.length };
    if users.container_id != 0 {
        return Err(format!("its mapping begins at ID {} of the pod, not at 0", users.container_id));
    }
    if range.length == 0 || range.host_id == 0 || range.end() > END {
        return Err(format!("{} IDs from {} on are no usable range", range.length, range.host_id));
    }
    Ok(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 65_536;

    fn range(host_id: u32, length: u32) -> IdRange {
        IdRange { host_id, length }
    }

    #[test]
    fn id_ranges_of_pods_begin_after_the_nodes_own_users_and_freed_ones_are_used_again() {
        let (mut ranges, node) = (IdRanges::default(), NodeRange::whole_node(BLOCK));
        let mut assign = |uid: &str| ranges.assign(uid, node, BLOCK).unwrap();
        assert_eq!(
            [assign("a"), assign("b"), assign("a")],
            [range(BLOCK, BLOCK), range(2 * BLOCK, BLOCK), range(BLOCK, BLOCK)]
        );
        ranges.release("a");
        assert_eq!(ranges.of_pod("a"), None);
        assert_eq!(ranges.assign("c", node, BLOCK).unwrap(), range(BLOCK, BLOCK));
    }

    #[test]
    fn a_range_found_on_disk_stays_its_pods_and_overlaps_no_new_one() {
        let (mut ranges, node) = (IdRanges::default(), NodeRange::whole_node(BLOCK));
        // Of a time with another idsPerPod: it covers the second half of the first slot and the first half of the second.
        ranges.record("old", Ok(range(BLOCK + BLOCK / 2, BLOCK))).unwrap();
        assert_eq!(ranges.assign("new", node, BLOCK).unwrap(), range(3 * BLOCK, BLOCK));
        assert_eq!(ranges.assign("old", node, BLOCK).unwrap(), range(BLOCK + BLOCK / 2, BLOCK));
    }

    #[test]
    fn no_id_range_is_assigned_while_that_of_another_pod_is_unknown() {
        let (mut ranges, node) = (IdRanges::default(), NodeRange::whole_node(BLOCK));
        ranges.record("known", Ok(range(BLOCK, BLOCK))).unwrap();
        ranges.record("broken", Err("it is empty".into())).unwrap_err();
        let error = ranges.assign("new", node, BLOCK).unwrap_err().to_string();
        assert!(error.contains("that of pod broken is unusable: it is empty"), "{error}");
        assert_eq!(ranges.assign("known", node, BLOCK).unwrap(), range(BLOCK, BLOCK));
        ranges.release("broken");
        assert_eq!(ranges.assign("new", node, BLOCK).unwrap(), range(2 * BLOCK, BLOCK));
    }

    #[test]
    fn two_records_with_overlapping_id_ranges_refuse_new_ones() {
        let (mut ranges, node) = (IdRanges::default(), NodeRange::whole_node(BLOCK));
        ranges.record("a", Ok(range(BLOCK, BLOCK))).unwrap();
        ranges.record("a", Ok(range(BLOCK, BLOCK))).unwrap();
        let why = ranges.record("b", Ok(range(2 * BLOCK - 1, BLOCK))).unwrap_err();
        assert_eq!(why, "its range overlaps that of pod a");
        let error = ranges.assign("new", node, BLOCK).unwrap_err().to_string();
        assert!(error.contains("that of pod b is unusable: its range overlaps that of pod a"), "{error}");
        assert_eq!(ranges.assign("a", node, BLOCK).unwrap(), range(BLOCK, BLOCK));
        assert!(ranges.assign("b", node, BLOCK).is_err());
    }

    #[test]
    fn user_namespaces_end_with_the_nodes_last_id_range() {
        let node =
            NodeRange::from_subids("0: kubelet 65536 131072", "0: kubelet 65536 131072", BLOCK, 2).unwrap();
        let mut ranges = IdRanges::default();
        assert_eq!(ranges.assign("a", node, BLOCK).unwrap(), range(BLOCK, BLOCK));
        assert_eq!(ranges.assign("b", node, BLOCK).unwrap(), range(2 * BLOCK, BLOCK));
        let error = ranges.assign("c", node, BLOCK).unwrap_err().to_string();
        assert!(error.starts_with("all 2 ranges of IDs for user namespaces are in use"), "{error}");
        // The last number is no ID, so the last block of the node is no range.
        assert_eq!(NodeRange::whole_node(1 << 31).slots(1 << 31).count(), 0);
        assert_eq!(NodeRange::whole_node(BLOCK).slots(BLOCK).count(), 65_534);
    }

    #[test]
    fn sub_ids_of_the_kubelet_user_are_one_aligned_range_large_enough_for_max_pods() {
        let of = |users: &str, groups: &str, pods| {
            NodeRange::from_subids(users, groups, BLOCK, pods).map_err(|error| error.to_string())
        };
        let good = "0: kubelet 65536 7208960\n";
        assert_eq!(of(good, good, 110), Ok(NodeRange { first: 65_536, end: 65_536 + 7_208_960 }));
        let refused = [
            ("", "it needs one range of user IDs and has 0"),
            ("0: kubelet 65536 65536\n1: kubelet 131072 65536\n", "it needs one range of user IDs and has 2"),
            ("0: kubelet x 65536", "getsubids prints \"0: kubelet x 65536\" for its user IDs"),
            ("65536 65536", "getsubids prints \"65536 65536\" for its user IDs"),
            ("0: kubelet 0 7208960", "the first one, 0, is below 65536"),
            ("0: kubelet 65537 7208960", "must be multiples of 65536"),
            ("0: kubelet 65536 7208961", "must be multiples of 65536"),
            ("0: kubelet 65536 65536", "they are enough for 1 pods, but maxPods is 110"),
            ("0: kubelet 65536 4294967296", "4294967296 IDs from 65536 on are more than there are"),
        ];
        for (output, why) in refused {
            let error = of(output, output, 110).unwrap_err();
            assert!(error.contains(why) && error.contains("/etc/subuid"), "{output}: {error}");
        }
        let error = of(good, "0: kubelet 131072 7208960", 110).unwrap_err();
        assert!(error.contains("differ"), "{error}");
    }

    #[test]
    fn the_userns_file_is_a_kubelets_and_broken_ones_are_refused() {
        let text = r#"{"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":0,"length":65536}]}"#;
        assert_eq!(record_of(range(BLOCK, BLOCK)), text);
        assert_eq!(range_in(text.as_bytes()), Ok(range(BLOCK, BLOCK)));
        let refused = [
            "",
            "{",
            "{}",
            r#"{"uidMappings":[],"gidMappings":[]}"#,
            &text.replacen("65536", "131072", 1),
            &text.replace("\"containerId\":0", "\"containerId\":1"),
            &text.replace("\"hostId\":65536", "\"hostId\":0"),
            &text.replace("\"hostId\":65536", "\"hostId\":4294967295"),
            &text.replace("\"hostId\":65536", "\"hostId\":4294901760"),
            &text.replace("\"length\":65536", "\"length\":0"),
        ];
        for content in refused {
            assert!(range_in(content.as_bytes()).is_err(), "{content}");
        }
    }
}
