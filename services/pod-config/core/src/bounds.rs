//! How much one file may become in memory. Its length alone is no bound: an alias of YAML stands for a value of any
//! size, and what it stands for may hold aliases itself.

use serde_json::Value;

use crate::manifest::MAX_BYTES;

/// Values in one file, with aliases written out.
const MAX_VALUES: usize = 250_000;
/// Bytes of keys and text in one file, with aliases written out.
const MAX_TEXT: usize = 2 * MAX_BYTES;
/// Deepest nesting of lists and objects. Readers of JSON stop at 127, and an object is read again inside of lists.
const MAX_DEPTH: usize = 100;

/// How large a value is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    /// Itself and all values in it.
    values: usize,
    /// Bytes of keys and text.
    text: usize,
    /// Lists and objects around its innermost value.
    depth: usize,
}

impl Size {
    /// Measures a value that is nested no deeper than a reader of JSON or [`check_depth`] lets it be.
    pub(crate) fn of(value: &Value) -> Self {
        match value {
            Value::String(text) => Self::scalar(text.len()),
            Value::Array(items) => Self::around(0, items.iter()),
            Value::Object(map) => Self::around(map.keys().map(String::len).sum(), map.values()),
            _ => Self::scalar(0),
        }
    }

    /// A value of so much text that holds no other.
    pub(crate) fn scalar(text: usize) -> Self {
        Self { values: 1, text, depth: 0 }
    }

    /// A key of so much text.
    pub(crate) fn key(text: usize) -> Self {
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

/// What a file has used of its bounds.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    values: usize,
    text: usize,
}

impl Budget {
    /// Takes in a value of this size, which stands in so many lists and objects.
    ///
    /// # Errors
    /// What is exceeded, in words.
    pub(crate) fn take(&mut self, size: Size, outside: usize) -> Result<(), String> {
        self.values = self.values.saturating_add(size.values);
        self.text = self.text.saturating_add(size.text);
        if self.values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values in one file, with aliases written out"));
        }
        if self.text > MAX_TEXT {
            return Err(format!(
                "more than {} MiB of text in one file, with aliases written out",
                MAX_TEXT >> 20
            ));
        }
        check_depth(outside + size.depth)
    }
}

/// Whether so many lists and objects may be around each other.
///
/// # Errors
/// The limit, in words.
pub(crate) fn check_depth(depth: usize) -> Result<(), String> {
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
    fn a_value_is_as_large_as_all_that_is_in_it() {
        assert_eq!(Size::of(&json!(1)), Size { values: 1, text: 0, depth: 0 });
        assert_eq!(Size::of(&json!([])), Size { values: 1, text: 0, depth: 1 });
        assert_eq!(Size::of(&json!({"ab": ["c", 1], "d": {}})), Size { values: 5, text: 4, depth: 2 });
    }

    #[test]
    fn a_key_is_text_that_holds_no_value() {
        assert_eq!(Size::key(3), Size { values: 0, text: 3, depth: 0 });
    }

    #[test]
    fn each_bound_is_met_before_it_is_passed() {
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
