//! Columns, left-aligned, three blanks apart.

use std::fmt::Write as _;

use crate::plain::acts;

/// A table that is as wide as what is in it.
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

    /// Whether there is nothing below the header.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// The text, each line after `indent` blanks, none with blanks at its end.
    pub(crate) fn render(&self, indent: usize) -> String {
        let mut widths = Vec::new();
        widen(&mut widths, &self.rows);
        lines(&self.rows, &widths, indent)
    }
}

/// A table whose rows come little by little: each batch is laid out like those before it, and wider where it must be.
#[derive(Debug)]
pub(crate) struct GrowingTable {
    header: Option<Vec<String>>,
    widths: Vec<usize>,
}

impl GrowingTable {
    /// A table without rows; the header comes with the first of them.
    pub(crate) fn new(header: Vec<String>) -> Self {
        Self { header: Some(header), widths: Vec::new() }
    }

    /// The text of further rows.
    pub(crate) fn more(&mut self, rows: &[Vec<String>]) -> String {
        if rows.is_empty() {
            return String::new();
        }
        let mut batch: Vec<Vec<String>> = self.header.take().into_iter().collect();
        batch.extend(rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()));
        widen(&mut self.widths, &batch);
        lines(&batch, &self.widths, 0)
    }
}

/// Makes columns as wide as what is in them.
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

/// Text from a pod or a service made fit for one line of a terminal: line breaks become blanks, other control
/// characters are spelled out, so that no message can move the cursor or colour the screen.
pub(crate) fn printable(text: &str) -> String {
    if !text.chars().any(acts) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    for c in text.trim_end().chars() {
        match c {
            '\n' | '\r' | '\t' => out.push(' '),
            c if acts(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_without_blanks() {
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
    fn rows_that_come_later_stand_below_the_first_ones() {
        let mut table = GrowingTable::new(vec!["NAME".into(), "STATUS".into(), "AGE".into()]);
        let row = |name: &str, status: &str| vec![name.into(), status.into(), "1s".into()];
        assert_eq!(table.more(&[]), "");
        assert_eq!(
            table.more(&[row("web", "Pending"), row("db", "Running")]),
            "NAME   STATUS    AGE\nweb    Pending   1s\ndb     Running   1s\n"
        );
        assert_eq!(table.more(&[row("web", "Running")]), "web    Running   1s\n");
        assert_eq!(table.more(&[row("web-2", "\u{1b}")]), "web-2   \\u{1b}    1s\n");
    }

    #[test]
    fn a_message_cannot_write_to_the_terminal() {
        assert_eq!(printable("two\nlines\n"), "two lines");
        assert_eq!(printable("\u{1b}[31mred"), "\\u{1b}[31mred");
    }
}
