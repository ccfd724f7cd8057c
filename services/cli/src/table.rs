//! Tables with left-aligned columns, three blanks apart.

use std::fmt::Write as _;

use crate::sanitize::is_unsafe;

/// A table whose columns are as wide as their widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this header.
    pub(crate) fn new<const N: usize>(header: [&str; N]) -> Self {
        Self::with_header(header.map(ToOwned::to_owned).to_vec())
    }

    /// A table whose columns are chosen at run time.
    pub(crate) fn with_header(header: Vec<String>) -> Self {
        Self { rows: vec![header] }
    }

    /// Appends a row.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| printable(cell)).collect());
    }

    /// Whether the table has no rows below the header.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// The table as text, indented by `indent` blanks, without trailing blanks.
    pub(crate) fn render(&self, indent: usize) -> String {
        let mut widths = Vec::new();
        widen(&mut widths, &self.rows);
        lines(&self.rows, &widths, indent)
    }
}

/// A table that is printed in batches: each batch is aligned with those before it, and wider where needed.
#[derive(Debug)]
pub(crate) struct GrowingTable {
    header: Option<Vec<String>>,
    widths: Vec<usize>,
}

impl GrowingTable {
    /// An empty table; the header is printed with the first batch.
    pub(crate) fn new(header: Vec<String>) -> Self {
        Self { header: Some(header), widths: Vec::new() }
    }

    /// Renders another batch of rows.
    pub(crate) fn render_batch(&mut self, rows: &[Vec<String>]) -> String {
        if rows.is_empty() {
            return String::new();
        }
        let mut batch: Vec<Vec<String>> = self.header.take().into_iter().collect();
        batch.extend(rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()));
        widen(&mut self.widths, &batch);
        lines(&batch, &self.widths, 0)
    }
}

/// Widens columns to fit their cells.
fn widen(widths: &mut Vec<usize>, rows: &[Vec<String>]) {
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
}

fn lines(rows: &[Vec<String>], widths: &[usize], indent: usize) -> String {
    let mut text = String::new();
    for row in rows {
        let mut line = " ".repeat(indent);
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:<width$}   ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Text from a pod or a service, made safe for one line of a terminal: line breaks become blanks, other control
/// characters are escaped, so that no message can move the cursor or colour the screen.
pub(crate) fn printable(text: &str) -> String {
    if !text.chars().any(is_unsafe) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    for c in text.trim_end().chars() {
        match c {
            '\n' | '\r' | '\t' => out.push(' '),
            c if is_unsafe(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_without_trailing_blanks() {
        let mut table = Table::new(["NAME", "READY", "MESSAGE"]);
        table.row(vec!["web".into(), "1/1".into(), String::new()]);
        table.row(vec!["a-long-name".into(), "0/1".into(), "größer".into()]);
        assert_eq!(
            table.render(0),
            "NAME          READY   MESSAGE\n\
             web           1/1\n\
             a-long-name   0/1     größer\n"
        );
    }

    #[test]
    fn a_table_may_be_indented() {
        let mut table = Table::new(["Type", "Reason"]);
        assert!(table.is_empty());
        table.row(vec!["Normal".into(), "Started".into()]);
        assert_eq!(table.render(2), "  Type     Reason\n  Normal   Started\n");
    }

    #[test]
    fn later_batches_keep_the_column_widths() {
        let mut table = GrowingTable::new(vec!["NAME".into(), "STATUS".into(), "AGE".into()]);
        let row = |name: &str, status: &str| vec![name.into(), status.into(), "1s".into()];
        assert_eq!(table.render_batch(&[]), "");
        assert_eq!(
            table.render_batch(&[row("web", "Pending"), row("db", "Running")]),
            "NAME   STATUS    AGE\nweb    Pending   1s\ndb     Running   1s\n"
        );
        assert_eq!(table.render_batch(&[row("web", "Running")]), "web    Running   1s\n");
        assert_eq!(table.render_batch(&[row("web-2", "\u{1b}")]), "web-2   \\u{1b}    1s\n");
    }

    #[test]
    fn printable_text_has_no_control_characters() {
        assert_eq!(printable("two\nlines\n"), "two lines");
        assert_eq!(printable("\u{1b}[31mred"), "\\u{1b}[31mred");
    }
}
