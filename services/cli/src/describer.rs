//! The text of `describe`: indented blocks of aligned `Key: value` lines.

use crate::table::printable;

/// Builds the text of one object.
#[derive(Debug, Default)]
pub(crate) struct Describer {
    text: String,
}

impl Describer {
    /// Adds a line.
    pub(crate) fn line(&mut self, indent: usize, text: &str) {
        self.text.push_str(format!("{}{}", " ".repeat(indent), printable(text)).trim_end());
        self.text.push('\n');
    }

    /// Adds text that is already laid out.
    pub(crate) fn raw(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds keys and values with the values aligned; further lines of a value stay in its column.
    pub(crate) fn pairs(&mut self, indent: usize, pairs: &[(&str, String)]) {
        let width = pairs.iter().map(|(key, _)| key.chars().count()).max().unwrap_or(0) + 1;
        for (key, value) in pairs {
            let mut head = format!("{key}:");
            for part in value.split('\n') {
                self.line(indent, &format!("{head:<width$}  {}", printable(part)));
                head.clear();
            }
        }
    }

    /// Adds a heading with a list below it, or with `<none>` for an empty list.
    pub(crate) fn list(&mut self, indent: usize, heading: &str, lines: &[String]) {
        if lines.is_empty() {
            self.line(indent, &format!("{heading}:  <none>"));
            return;
        }
        self.line(indent, &format!("{heading}:"));
        for line in lines {
            self.line(indent + 2, line);
        }
    }

    /// Adds a heading with laid out text below it, or with `<none>`.
    pub(crate) fn block(&mut self, heading: &str, text: Option<&str>) {
        match text {
            Some(text) => {
                self.line(0, &format!("{heading}:"));
                self.raw(text);
            }
            None => self.line(0, &format!("{heading}:  <none>")),
        }
    }

    /// The whole text.
    pub(crate) fn finish(self) -> String {
        self.text
    }
}

/// `<none>` for an empty text.
pub(crate) fn or_none(text: &str) -> String {
    if text.is_empty() { "<none>".into() } else { text.to_owned() }
}

/// One `key=value` per line, `<none>` without any.
pub(crate) fn map_lines<'a>(map: impl IntoIterator<Item = (&'a String, &'a String)>, sign: &str) -> String {
    let lines: Vec<String> = map.into_iter().map(|(key, value)| format!("{key}{sign}{value}")).collect();
    or_none(&lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_aligned_in_one_column() {
        let mut describer = Describer::default();
        describer.pairs(2, &[("Name", "web".into()), ("Start Time", "a\nb".into()), ("IP", String::new())]);
        describer.list(0, "Command", &["sh".into(), "-c".into()]);
        describer.list(0, "Args", &[]);
        assert_eq!(
            describer.finish(),
            "  Name:        web\n  Start Time:  a\n               b\n  IP:\nCommand:\n  sh\n  -c\nArgs:  <none>\n"
        );
    }
}
