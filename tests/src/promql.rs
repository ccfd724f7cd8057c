//! The names in PromQL expressions and in metrics texts, to check that a query finds what is exported. It reads names and does
//! not parse expressions; promtool checks whether one is well-formed.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail, ensure};

/// Operators and modifiers between expressions.
const WORDS: [&str; 8] = ["and", "or", "unless", "bool", "offset", "inf", "nan", "atan2"];
/// They are followed by labels in brackets.
const GROUPINGS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
/// They may come before `by`, without parentheses after them.
const AGGREGATIONS: [&str; 9] =
    ["sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile", "stddev"];

/// A label of a selector, and the value that it must or must not have if the expression has a literal one.
pub type Matcher = (String, Option<String>);

/// The names that an expression refers to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct QueryNames {
    /// Metrics, each with its matchers.
    pub metrics: Vec<(String, Vec<Matcher>)>,
    /// Labels of `by`, `on` and the like.
    pub grouping: BTreeSet<String>,
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take_while(&mut self, fits: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !fits(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn name(&mut self) -> &'a str {
        self.take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':'))
    }

    fn takes(&mut self, text: &str) -> bool {
        self.skip_blanks();
        self.rest.strip_prefix(text).map(|rest| self.rest = rest).is_some()
    }

    /// A string in quotes, without them; no escapes are supported.
    fn string(&mut self) -> anyhow::Result<&'a str> {
        self.skip_blanks();
        let quote = self.rest.chars().next().filter(|c| matches!(c, '"' | '\'')).context("no string")?;
        let (text, rest) = self.rest[1..].split_once(quote).context("a string without an end")?;
        ensure!(!text.contains('\\'), "an escape in {text:?}");
        self.rest = rest;
        Ok(text)
    }

    fn labels(&mut self) -> anyhow::Result<BTreeSet<String>> {
        let mut labels = BTreeSet::new();
        while !self.takes(")") {
            self.skip_blanks();
            let name = self.name();
            ensure!(!name.is_empty(), "no label before {:?}", self.rest);
            labels.insert(name.to_owned());
            self.takes(",");
        }
        Ok(labels)
    }

    fn matchers(&mut self) -> anyhow::Result<Vec<Matcher>> {
        let mut matchers = Vec::new();
        while !self.takes("}") {
            self.skip_blanks();
            let name = self.name();
            ensure!(!name.is_empty(), "no label before {:?}", self.rest);
            let operator = ["=~", "!~", "!=", "="].into_iter().find(|op| self.takes(op));
            let operator = operator.with_context(|| format!("no operator before {:?}", self.rest))?;
            let value = self.string()?;
            let written = !operator.contains('~') && !value.is_empty() && !value.contains('$');
            matchers.push((name.to_owned(), written.then(|| value.to_owned())));
            self.takes(",");
        }
        Ok(matchers)
    }
}

/// Reads the names in an expression.
///
/// # Errors
/// The expression has unknown syntax.
pub fn query_names(expression: &str) -> anyhow::Result<QueryNames> {
    let mut reader = Reader { rest: expression };
    let mut query_names = QueryNames::default();
    loop {
        reader.skip_blanks();
        let Some(next) = reader.rest.chars().next() else { return Ok(query_names) };
        match next {
            '$' => {
                reader.rest = &reader.rest[1..];
                reader.name();
            }
            '"' | '\'' => drop(reader.string()?),
            '[' => {
                reader.rest = reader.rest.split_once(']').context("[ without ]")?.1;
            }
            '0'..='9' | '.' => drop(reader.take_while(|c| c.is_ascii_alphanumeric() || c == '.')),
            'a'..='z' | 'A'..='Z' | '_' | ':' => {
                let name = reader.name();
                if GROUPINGS.contains(&name) {
                    if reader.takes("(") {
                        query_names.grouping.extend(reader.labels()?);
                    }
                } else if WORDS.contains(&name) || AGGREGATIONS.contains(&name) {
                } else if reader.takes("{") {
                    let matchers = reader.matchers()?;
                    query_names.metrics.push((name.to_owned(), matchers));
                } else if !reader.takes("(") {
                    query_names.metrics.push((name.to_owned(), Vec::new()));
                }
            }
            '(' | ')' | ',' | '+' | '-' | '*' | '/' | '%' | '^' | '<' | '>' | '=' | '!' | '@' => {
                reader.rest = &reader.rest[1..];
            }
            other => bail!("{other:?} is not understood in {expression}"),
        }
    }
}

/// The labels of each exported sample name, with all values of each label.
pub type Exported = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Adds the samples of a text in Prometheus' format 0.0.4.
///
/// # Errors
/// A line that is not a sample.
pub fn exported(text: &str, into: &mut Exported) -> anyhow::Result<()> {
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut reader = Reader { rest: line };
        let name = reader.name();
        ensure!(!name.is_empty(), "no sample: {line}");
        let labels = into.entry(name.to_owned()).or_default();
        if reader.rest.starts_with('{') {
            reader.rest = &reader.rest[1..];
            while !reader.takes("}") {
                let label = reader.name();
                ensure!(!label.is_empty() && reader.takes("=\""), "no label: {line}");
                let value = value(&mut reader).with_context(|| format!("a value without an end: {line}"))?;
                labels.entry(label.to_owned()).or_default().insert(value);
                reader.takes(",");
            }
        }
    }
    Ok(())
}

/// The rest of a value after its opening quote.
fn value(reader: &mut Reader<'_>) -> Option<String> {
    let mut value = String::new();
    let mut chars = reader.rest.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => {
                reader.rest = &reader.rest[at + 1..];
                return Some(value);
            }
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

/// Labels that Prometheus itself adds to what it scrapes.
const OF_THE_TARGET: [&str; 2] = ["instance", "job"];
/// Metrics that Prometheus itself adds for each target.
const OF_PROMETHEUS: &str = "up";

/// The reasons why a query would find nothing, or not what it means, in `exported`. `shown` are further labels,
/// as those of a legend.
pub fn mismatches(query_names: &QueryNames, shown: &BTreeSet<String>, exported: &Exported) -> Vec<String> {
    let mut mismatches = Vec::new();
    let mut labels: BTreeSet<&str> = OF_THE_TARGET.into();
    for (metric, matchers) in &query_names.metrics {
        let of_the_target = |(label, _): &Matcher| OF_THE_TARGET.contains(&label.as_str());
        if metric == OF_PROMETHEUS && matchers.iter().all(of_the_target) {
            continue;
        }
        let Some(known) = exported.get(metric) else {
            mismatches.push(format!("{metric} is not exported"));
            continue;
        };
        labels.extend(known.keys().map(String::as_str));
        for (label, value) in matchers.iter().filter(|matcher| !of_the_target(matcher)) {
            match (known.get(label), value) {
                (None, _) => mismatches.push(format!("{metric} has no label {label}")),
                (Some(values), Some(value)) if !values.contains(value) => {
                    mismatches.push(format!("{label} of {metric} is never {value:?} but {values:?}"));
                }
                _ => {}
            }
        }
    }
    if query_names.metrics.is_empty() {
        mismatches.push("no metric is asked for".to_owned());
    }
    let unknown = query_names.grouping.iter().chain(shown).filter(|label| !labels.contains(label.as_str()));
    mismatches.extend(unknown.map(|label| format!("no metric here has the label {label}")));
    mismatches
}

/// The labels in `{{label}}` of a legend, or `{{ $labels.label }}` of an alert.
pub fn template_labels(text: &str) -> BTreeSet<String> {
    let inside = text.split("{{").skip(1).filter_map(|rest| rest.split("}}").next());
    inside.map(|name| name.trim().trim_start_matches("$labels.").to_owned()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A panic fails the test.
mod tests {
    use super::*;

    fn names(expression: &str) -> Vec<String> {
        query_names(expression).unwrap().metrics.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn metrics_of_an_expression_are_distinguished_from_functions_and_labels() {
        let one = query_names(
            r#"histogram_quantile(0.99, sum by (le, op) (rate(a_bucket{x="1", y!~"z|$w", i=~"$i"}[$__rate_interval])))"#,
        );
        let one = one.unwrap();
        let matchers = vec![("x".into(), Some("1".into())), ("y".into(), None), ("i".into(), None)];
        assert_eq!(one.metrics, [("a_bucket".into(), matchers)]);
        assert_eq!(one.grouping, ["le".to_owned(), "op".to_owned()].into());
        assert_eq!(
            names("time() - max by (instance) (b) > 15.5e3 and on (x) c offset 5m or sum(d) by (y)"),
            ["b", "c", "d"]
        );
        assert_eq!(names("topk(10, e:rate5m) / ignoring(z) group_left f"), ["e:rate5m", "f"]);
        assert!(query_names("a{").is_err() && query_names("a{x}").is_err() && query_names("ä").is_err());
    }

    #[test]
    fn missing_metrics_labels_and_values_are_mismatches() {
        let mut known = Exported::new();
        exported("# TYPE a counter\na{x=\"1\",y=\"}\\\"\"} 4\na{x=\"2\"} 5 17\nb 3\n", &mut known).unwrap();
        assert_eq!(known["a"]["y"], ["}\"".to_owned()].into());
        let of = |expression: &str, shown: &[&str]| {
            let shown = shown.iter().map(|label| (*label).to_owned()).collect();
            mismatches(&query_names(expression).unwrap(), &shown, &known)
        };
        assert_eq!(of("sum by (x, instance) (a{x=\"1\"})", &["y"]), Vec::<String>::new());
        assert_eq!(of("c", &[]), ["c is not exported"]);
        assert_eq!(of("b{x=\"1\"}", &[]), ["b has no label x"]);
        assert_eq!(of("a{x!=\"3\"}", &[]), ["x of a is never \"3\" but {\"1\", \"2\"}"]);
        assert_eq!(
            of("sum by (z) (a)", &["w"]),
            ["no metric here has the label z", "no metric here has the label w"]
        );
        assert_eq!(of("1 + 2", &[]), ["no metric is asked for"]);
        assert_eq!(of("min by (instance) (up{job=~\"a.*\"}) == 0", &[]), Vec::<String>::new());
        assert_eq!(of("up{x=\"1\"}", &[]), ["up is not exported"]);
        assert!(exported("{x=\"1\"} 3", &mut known).is_err());
    }

    #[test]
    fn labels_of_templates_are_found() {
        assert_eq!(template_labels("{{a}}: {{ $labels.b }} {c}"), ["a".to_owned(), "b".to_owned()].into());
    }
}
