//! Node selectors: whether a node may use a PersistentVolume (volumes.md §3.9 step 2).
//!
//! Terms are alternatives; the requirements of a term all have to hold. A term without requirements, and a term with a
//! requirement that is not valid, match no node. A selector without terms matches no node either.

use crate::objects::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Strings};

/// The only field of a node that a selector can name.
const NAME_FIELD: &str = "metadata.name";
/// The longest name part of a label key, and the longest label value, in bytes.
const MAX_NAME: usize = 63;
/// The longest prefix of a label key, in bytes.
const MAX_PREFIX: usize = 253;

/// What a selector reads of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts<'a> {
    /// `metadata.name`.
    pub name: &'a str,
    /// `metadata.labels`.
    pub labels: &'a Strings,
}

/// Why a requirement is not valid. Its term matches no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    /// No label can have this key.
    #[error("{key:?} cannot be the key of a label")]
    LabelKey {
        /// The key.
        key: String,
    },
    /// No label can have this value.
    #[error("{value:?} cannot be the value of the label {key:?}")]
    LabelValue {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// A node has no such field.
    #[error("nodes cannot be selected by the field {key:?}, only by \"{NAME_FIELD}\"")]
    Field {
        /// The field.
        key: String,
    },
    /// The API has no such operator, or none for fields.
    #[error("the operator {operator:?} of {key:?} must be {allowed}")]
    Operator {
        /// The label or field.
        key: String,
        /// The operator as written.
        operator: String,
        /// The operators that are allowed.
        allowed: &'static str,
    },
    /// The operator needs another number of values.
    #[error("the operator {operator} of {key:?} needs {needed}, but has {count} values")]
    ValueCount {
        /// The label or field.
        key: String,
        /// The operator.
        operator: String,
        /// How many values it needs.
        needed: &'static str,
        /// How many it has.
        count: usize,
    },
    /// The operator compares numbers.
    #[error("the value {value:?} of {key:?} must be a whole number")]
    Number {
        /// The label.
        key: String,
        /// The value.
        value: String,
    },
}

/// Whether the node matches one of the terms.
///
/// Parity: a kubelet compares the node's labels alone, so that there every node matches the `matchFields` of a
/// PersistentVolume. Here the node's name has to match as well.
pub fn matches(selector: &NodeSelector, node: &NodeFacts<'_>) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

/// Every requirement that is not valid, in the order of the selector.
pub fn invalid_requirements(selector: &NodeSelector) -> Vec<RequirementError> {
    selector.node_selector_terms.iter().flat_map(parsed).filter_map(|(_, _, test)| test.err()).collect()
}

/// Where the value of a requirement comes from.
#[derive(Debug, Clone, Copy)]
enum Subject {
    Label,
    Name,
}

/// A valid requirement without its key.
#[derive(Debug, Clone, Copy)]
enum Test<'a> {
    In(&'a [String]),
    NotIn(&'a [String]),
    Exists,
    DoesNotExist,
    Gt(i64),
    Lt(i64),
}

impl Test<'_> {
    fn holds(self, value: Option<&str>) -> bool {
        let is_one_of = |values: &[String]| value.is_some_and(|value| values.iter().any(|v| v == value));
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::In(values) => is_one_of(values),
            Self::NotIn(values) => !is_one_of(values),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::Gt(bound) => number().is_some_and(|number| number > bound),
            Self::Lt(bound) => number().is_some_and(|number| number < bound),
        }
    }
}

type ParsedRequirement<'a> = (Subject, &'a str, Result<Test<'a>, RequirementError>);

/// The requirements of a term, each with its subject and key.
fn parsed(term: &NodeSelectorTerm) -> impl Iterator<Item = ParsedRequirement<'_>> {
    let labels = term.match_expressions.iter().map(|r| (Subject::Label, r.key.as_str(), label_test(r)));
    let fields = term.match_fields.iter().map(|r| (Subject::Name, r.key.as_str(), name_test(r)));
    labels.chain(fields)
}

fn term_matches(term: &NodeSelectorTerm, node: &NodeFacts<'_>) -> bool {
    if term.match_expressions.is_empty() && term.match_fields.is_empty() {
        return false;
    }
    parsed(term).all(|(subject, key, test)| {
        let value = match subject {
            Subject::Label => node.labels.get(key).map(String::as_str),
            Subject::Name => Some(node.name),
        };
        test.is_ok_and(|test| test.holds(value))
    })
}

fn label_test(requirement: &NodeSelectorRequirement) -> Result<Test<'_>, RequirementError> {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    if !is_label_key(key) {
        return Err(RequirementError::LabelKey { key: key.clone() });
    }
    let test = match operator.as_str() {
        "In" if !values.is_empty() => Test::In(values),
        "NotIn" if !values.is_empty() => Test::NotIn(values),
        "In" | "NotIn" => return Err(value_count(requirement, "at least one value")),
        "Exists" if values.is_empty() => Test::Exists,
        "DoesNotExist" if values.is_empty() => Test::DoesNotExist,
        "Exists" | "DoesNotExist" => return Err(value_count(requirement, "no values")),
        "Gt" => Test::Gt(only_number(requirement)?),
        "Lt" => Test::Lt(only_number(requirement)?),
        _ => {
            let allowed = "In, NotIn, Exists, DoesNotExist, Gt or Lt";
            return Err(RequirementError::Operator { key: key.clone(), operator: operator.clone(), allowed });
        }
    };
    match values.iter().find(|value| !is_label_value(value)) {
        Some(value) => Err(RequirementError::LabelValue { key: key.clone(), value: value.clone() }),
        None => Ok(test),
    }
}

fn name_test(requirement: &NodeSelectorRequirement) -> Result<Test<'_>, RequirementError> {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    if key != NAME_FIELD {
        return Err(RequirementError::Field { key: key.clone() });
    }
    match operator.as_str() {
        "In" if values.len() == 1 => Ok(Test::In(values)),
        "NotIn" if values.len() == 1 => Ok(Test::NotIn(values)),
        "In" | "NotIn" => Err(value_count(requirement, "one value")),
        _ => {
            let (key, operator) = (key.clone(), operator.clone());
            Err(RequirementError::Operator { key, operator, allowed: "In or NotIn" })
        }
    }
}

fn only_number(requirement: &NodeSelectorRequirement) -> Result<i64, RequirementError> {
    let [value] = requirement.values.as_slice() else { return Err(value_count(requirement, "one value")) };
    let error = |_| RequirementError::Number { key: requirement.key.clone(), value: value.clone() };
    value.parse().map_err(error)
}

fn value_count(requirement: &NodeSelectorRequirement, needed: &'static str) -> RequirementError {
    RequirementError::ValueCount {
        key: requirement.key.clone(),
        operator: requirement.operator.clone(),
        needed,
        count: requirement.values.len(),
    }
}

/// Whether `text` is a label key: a name, or a DNS subdomain, a slash and a name.
fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name(name),
        None => is_name(text),
    }
}

fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_name(text)
}

/// 1 to 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
fn is_name(text: &str) -> bool {
    let is_edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= MAX_NAME
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

fn is_subdomain(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        bytes.first().is_some_and(is_alphanumeric)
            && bytes.last().is_some_and(is_alphanumeric)
            && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
    };
    text.len() <= MAX_PREFIX && text.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Strings {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn selector(terms: Value) -> NodeSelector {
        serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap()
    }

    fn requirement(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    fn matches_node(terms: Value) -> bool {
        let labels = labels(&[("disk", "ssd"), ("cores", "8"), ("empty", ""), ("example.com/zone", "a")]);
        matches(&selector(terms), &NodeFacts { name: "n1", labels: &labels })
    }

    fn label_matches(key: &str, operator: &str, values: &[&str]) -> bool {
        matches_node(json!([{"matchExpressions": [requirement(key, operator, values)]}]))
    }

    #[test]
    fn each_operator_compares_the_value_of_the_label() {
        for (key, operator, values, expected) in [
            ("disk", "In", &["hdd", "ssd"][..], true),
            ("disk", "In", &["hdd"], false),
            ("disk", "In", &["SSD"], false),
            ("gone", "In", &["hdd"], false),
            ("gone", "In", &[""], false),
            ("empty", "In", &[""], true),
            ("example.com/zone", "In", &["a"], true),
            ("disk", "NotIn", &["hdd"], true),
            ("disk", "NotIn", &["hdd", "ssd"], false),
            ("gone", "NotIn", &["hdd"], true),
            ("disk", "Exists", &[], true),
            ("empty", "Exists", &[], true),
            ("gone", "Exists", &[], false),
            ("gone", "DoesNotExist", &[], true),
            ("disk", "DoesNotExist", &[], false),
            ("cores", "Gt", &["7"], true),
            ("cores", "Gt", &["8"], false),
            ("cores", "Gt", &["9"], false),
            ("cores", "Lt", &["9"], true),
            ("cores", "Lt", &["8"], false),
            ("cores", "Lt", &["9223372036854775807"], true),
            ("disk", "Gt", &["0"], false),
            ("disk", "Lt", &["9"], false),
            ("gone", "Lt", &["9"], false),
            ("empty", "Lt", &["9"], false),
        ] {
            assert_eq!(label_matches(key, operator, values), expected, "{key} {operator} {values:?}");
        }
    }

    #[test]
    fn an_invalid_requirement_of_a_label_matches_nothing_and_is_named() {
        let long = "x".repeat(64);
        for (key, operator, values, text) in [
            ("disk", "", &["ssd"][..], "the operator \"\" of \"disk\" must be In, NotIn,"),
            ("disk", "in", &["ssd"], "the operator \"in\" of \"disk\" must be In,"),
            ("disk", "Like", &["ssd"], "the operator \"Like\""),
            ("disk", "In", &[], "the operator In of \"disk\" needs at least one value, but has 0 values"),
            ("gone", "NotIn", &[], "the operator NotIn of \"gone\" needs at least one value"),
            ("disk", "Exists", &["ssd"], "the operator Exists of \"disk\" needs no values, but has 1 values"),
            ("gone", "DoesNotExist", &["a", "b"], "needs no values, but has 2 values"),
            ("cores", "Gt", &[], "the operator Gt of \"cores\" needs one value, but has 0 values"),
            ("cores", "Lt", &["9", "10"], "needs one value, but has 2 values"),
            ("cores", "Lt", &["nine"], "the value \"nine\" of \"cores\" must be a whole number"),
            ("cores", "Lt", &["9.5"], "must be a whole number"),
            ("cores", "Lt", &["9223372036854775808"], "must be a whole number"),
            ("cores", "Gt", &["-1"], "\"-1\" cannot be the value of the label \"cores\""),
            ("disk", "NotIn", &["a b"], "\"a b\" cannot be the value of the label \"disk\""),
            ("disk", "NotIn", &["hdd", &long], "cannot be the value"),
            ("", "DoesNotExist", &[], "\"\" cannot be the key of a label"),
            ("a/b/c", "DoesNotExist", &[], "\"a/b/c\" cannot be the key"),
            ("/zone", "DoesNotExist", &[], "cannot be the key"),
            ("Example.com/zone", "DoesNotExist", &[], "cannot be the key"),
            ("-disk", "DoesNotExist", &[], "cannot be the key"),
            ("disk.", "DoesNotExist", &[], "cannot be the key"),
            ("di sk", "DoesNotExist", &[], "cannot be the key"),
            ("a..b/zone", "DoesNotExist", &[], "cannot be the key"),
            ("-a.b/zone", "DoesNotExist", &[], "cannot be the key"),
            ("a.b-/zone", "DoesNotExist", &[], "cannot be the key"),
            ("a_b/zone", "DoesNotExist", &[], "cannot be the key"),
            ("a.b/", "DoesNotExist", &[], "cannot be the key"),
            (&long, "DoesNotExist", &[], "cannot be the key"),
        ] {
            assert!(!label_matches(key, operator, values), "{key} {operator} {values:?}");
            let terms = json!([{"matchExpressions": [requirement(key, operator, values)]}]);
            let errors = invalid_requirements(&selector(terms));
            assert_eq!(errors.len(), 1, "{key} {operator} {values:?}: {errors:?}");
            assert!(errors[0].to_string().contains(text), "{}", errors[0]);
        }
    }

    #[test]
    fn label_keys_and_values_may_have_their_longest_form() {
        let key = format!("{}.com/{}", "x".repeat(249), "Y_y".repeat(21));
        let value = format!("{}v_9", "v-.".repeat(20));
        assert!(label_matches(&key, "DoesNotExist", &[]) && label_matches(&key, "NotIn", &[&value, ""]));
        assert!(!label_matches(&format!("x{key}"), "DoesNotExist", &[]));
    }

    #[test]
    fn the_name_of_the_node_is_the_only_field_and_is_compared_with_one_value() {
        for (key, operator, values, expected) in [
            (NAME_FIELD, "In", &["n1"][..], true),
            (NAME_FIELD, "In", &["n2"], false),
            (NAME_FIELD, "NotIn", &["n2"], true),
            (NAME_FIELD, "NotIn", &["n1"], false),
        ] {
            let terms = json!([{"matchFields": [requirement(key, operator, values)]}]);
            assert_eq!(matches_node(terms), expected, "{key} {operator} {values:?}");
        }
        for (key, operator, values, text) in [
            (NAME_FIELD, "In", &["n1", "n2"][..], "needs one value, but has 2 values"),
            (NAME_FIELD, "NotIn", &[], "needs one value, but has 0 values"),
            (NAME_FIELD, "Exists", &[], "the operator \"Exists\" of \"metadata.name\" must be In or NotIn"),
            (NAME_FIELD, "Gt", &["0"], "must be In or NotIn"),
            ("metadata.uid", "NotIn", &["n1"], "cannot be selected by the field \"metadata.uid\""),
            ("disk", "In", &["ssd"], "cannot be selected by the field \"disk\""),
            ("", "In", &["n1"], "cannot be selected by the field \"\""),
        ] {
            let terms = json!([{"matchFields": [requirement(key, operator, values)]}]);
            assert!(!matches_node(terms.clone()), "{key} {operator} {values:?}");
            let errors = invalid_requirements(&selector(terms));
            assert!(errors.len() == 1 && errors[0].to_string().contains(text), "{errors:?}");
        }
    }

    #[test]
    fn one_term_is_enough_and_all_of_its_requirements_have_to_hold() {
        let (ssd, hdd) = (requirement("disk", "In", &["ssd"]), requirement("disk", "In", &["hdd"]));
        let (here, there) = (requirement(NAME_FIELD, "In", &["n1"]), requirement(NAME_FIELD, "In", &["n2"]));
        let invalid = requirement("disk", "Like", &["ssd"]);
        for (terms, expected) in [
            (json!([{"matchExpressions": [hdd]}, {"matchExpressions": [ssd]}]), true),
            (json!([{"matchExpressions": [hdd]}, {"matchExpressions": [hdd]}]), false),
            (json!([{"matchExpressions": [ssd, hdd]}]), false),
            (json!([{"matchExpressions": [ssd], "matchFields": [here]}]), true),
            (json!([{"matchExpressions": [ssd], "matchFields": [there]}]), false),
            (json!([{"matchExpressions": [hdd], "matchFields": [here]}]), false),
            (json!([{"matchExpressions": [ssd, invalid]}]), false),
            (json!([{"matchExpressions": [invalid]}, {"matchExpressions": [ssd]}]), true),
        ] {
            assert_eq!(matches_node(terms.clone()), expected, "{terms}");
        }
    }

    #[test]
    fn a_selector_without_terms_and_a_term_without_requirements_match_nothing() {
        for terms in [
            json!(null),
            json!([]),
            json!([{}]),
            json!([{}, {}]),
            json!([{"matchExpressions": null, "matchFields": null}]),
            json!([{"matchExpressions": [], "matchFields": []}]),
        ] {
            assert!(!matches_node(terms.clone()), "{terms}");
            assert!(invalid_requirements(&selector(terms)).is_empty());
        }
        // Another term may still match.
        assert!(matches_node(json!([{}, {"matchExpressions": [requirement("disk", "Exists", &[])]}])));
    }

    fn any_requirement() -> impl Strategy<Value = NodeSelectorRequirement> {
        let key = prop_oneof![8 => "[ab]", 1 => Just(String::new())];
        let operators = vec!["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Gt", "Lt", "Lt", "in"];
        let value = || prop_oneof![8 => "[0-3]", 1 => "[ -~]{0,3}"];
        let operator_and_values = prop::sample::select(operators).prop_flat_map(move |operator| {
            let usual = usize::from(!operator.ends_with("Exist") && !operator.ends_with("Exists"));
            let count = prop_oneof![6 => Just(usual), 1 => 0..3usize];
            let values = count.prop_flat_map(move |count| prop::collection::vec(value(), count));
            (Just(operator.to_owned()), values)
        });
        (key, operator_and_values).prop_map(|(key, (operator, values))| NodeSelectorRequirement {
            key,
            operator,
            values,
        })
    }

    fn any_labels() -> impl Strategy<Value = Strings> {
        prop::collection::btree_map("[ab]", "[0-3]", 1..3)
    }

    fn only(requirements: &[NodeSelectorRequirement]) -> NodeSelector {
        let term =
            NodeSelectorTerm { match_expressions: requirements.to_vec(), ..NodeSelectorTerm::default() };
        NodeSelector { node_selector_terms: vec![term] }
    }

    #[test]
    fn opposite_operators_never_agree_and_an_invalid_one_never_matches() {
        let reached = &Reached::default();
        let config = ProptestConfig::with_cases(2048);
        proptest!(config, |(labels in any_labels(), requirement in any_requirement())| {
            let node = NodeFacts { name: "n", labels: &labels };
            let is_valid = invalid_requirements(&only(std::slice::from_ref(&requirement))).is_empty();
            let found = matches(&only(std::slice::from_ref(&requirement)), &node);
            prop_assert!(is_valid || !found);
            let opposite = match requirement.operator.as_str() {
                "In" => Some("NotIn"),
                "NotIn" => Some("In"),
                "Exists" => Some("DoesNotExist"),
                "DoesNotExist" => Some("Exists"),
                _ => None,
            };
            if let Some(operator) = opposite.filter(|_| is_valid) {
                let other = NodeSelectorRequirement { operator: operator.to_owned(), ..requirement.clone() };
                prop_assert_ne!(found, matches(&only(&[other]), &node));
            }
            reached.case([
                ("an invalid requirement", !is_valid),
                ("a match with an opposite", found && opposite.is_some()),
                ("no match with an opposite", !found && is_valid && opposite.is_some()),
                ("a match of numbers", found && opposite.is_none()),
            ]);
        });
        // The rarest: "a match of numbers", in about one case of 13.
        reached.assert_each();
    }

    #[test]
    fn a_further_term_only_adds_nodes_and_a_further_requirement_only_removes_them() {
        let reached = &Reached::default();
        let requirements = || prop::collection::vec(any_requirement(), 1..3);
        let config = ProptestConfig::with_cases(2048);
        proptest!(config, |(labels in any_labels(), first in requirements(), second in requirements())| {
            let node = NodeFacts { name: "n", labels: &labels };
            let [one, two] = [&first, &second].map(|requirements| matches(&only(requirements), &node));
            let mut either = only(&first);
            either.node_selector_terms.extend(only(&second).node_selector_terms);
            prop_assert_eq!(matches(&either, &node), one || two);
            let both: Vec<_> = first.iter().chain(&second).cloned().collect();
            prop_assert_eq!(matches(&only(&both), &node), one && two);
            reached.case([("both", one && two), ("one of them", one != two), ("none", !one && !two)]);
        });
        // The rarest: "both", in about one case of 30.
        reached.assert_each();
    }
}
