//! Limits for the content of a file in memory. The length of the file alone is not enough: a YAML alias expands to a value of any
//! size, which may contain aliases itself.

use serde_json::Value;

/// Values in one file, with aliases expanded.
const MAX_VALUES: usize = 250_000;
/// Bytes of keys and text in one file, with aliases expanded.
const MAX_TEXT: usize = 20 * 1024 * 1024;
/// Maximum nesting of lists and objects. JSON readers stop at 127, and objects are nested further inside of lists.
const MAX_DEPTH: usize = 100;

/// The size of a value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// The value itself and all nested values.
    values: usize,
    /// Bytes of keys and text.
    text: usize,
    /// Lists and objects around the innermost value.
    depth: usize,
}

impl Size {
    /// Measures a value. Its nesting has been limited before, by a JSON reader or by [`check_depth`].
    pub fn of(value: &Value) -> Self {
        match value {
            Value::String(text) => Self::scalar(text.len()),
            Value::Array(items) => Self::around(0, items.iter()),
            Value::Object(map) => Self::around(map.keys().map(String::len).sum(), map.values()),
            _ => Self::scalar(0),
        }
    }

    /// A scalar of `text` bytes.
    pub fn scalar(text: usize) -> Self {
        Self { values: 1, text, depth: 0 }
    }

    /// A key of `text` bytes.
    pub fn key(text: usize) -> Self {
        Self { text, ..Self::default() }
    }

    fn around<'a>(keys: usize, inner: impl Iterator<Item = &'a Value>) -> Self {
        let outer = Self { values: 1, text: keys, depth: 1 };
        inner.map(Self::of).fold(outer, |sum, size| Self {
            values: sum.values + size.values,
            text: sum.text + size.text,
            depth: sum.depth.max(size.depth + 1),
        })
    }
}

/// How much of the limits a file has used.
#[derive(Debug, Default)]
pub struct Budget {
    values: usize,
    text: usize,
}

impl Budget {
    /// Adds a value of this size, nested in `outside` lists and objects.
    ///
    /// # Errors
    /// The limit that is exceeded.
    pub fn take(&mut self, size: Size, outside: usize) -> Result<(), String> {
        self.values = self.values.saturating_add(size.values);
        self.text = self.text.saturating_add(size.text);
        if self.values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values in one file, with aliases expanded"));
        }
        if self.text > MAX_TEXT {
            return Err(format!(
                "more than {} MiB of text in one file, with aliases expanded",
                MAX_TEXT >> 20
            ));
        }
        check_depth(outside + size.depth)
    }
}

/// Checks the nesting of lists and objects.
///
/// # Errors
/// The limit.
pub fn check_depth(depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("nested more than {MAX_DEPTH} deep"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_size_of_a_value_includes_all_nested_values() {
        assert_eq!(Size::of(&json!(1)), Size { values: 1, text: 0, depth: 0 });
        assert_eq!(Size::of(&json!([])), Size { values: 1, text: 0, depth: 1 });
        assert_eq!(Size::of(&json!({"ab": ["c", 1], "d": {}})), Size { values: 5, text: 4, depth: 2 });
    }

    #[test]
    fn a_key_counts_as_text_but_not_as_a_value() {
        assert_eq!(Size::key(3), Size { values: 0, text: 3, depth: 0 });
    }

    #[test]
    fn each_size_limit_may_be_reached_but_not_exceeded() {
        let cases = [
            (Size { values: MAX_VALUES, ..Size::default() }, 0, 1, "values"),
            (Size { text: MAX_TEXT, ..Size::default() }, 0, 1, "more than 20 MiB of text"),
            (Size { depth: MAX_DEPTH, ..Size::default() }, 0, 1, "deep"),
        ];
        for (size, outside, more, word) in cases {
            let mut budget = Budget::default();
            assert_eq!(budget.take(size, outside), Ok(()));
            let one_more = budget.take(Size::scalar(1), MAX_DEPTH + more);
            assert!(one_more.as_ref().is_err_and(|text| text.contains(word)), "{word}: {one_more:?}");
        }
    }
}
