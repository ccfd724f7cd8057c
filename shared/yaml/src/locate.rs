//! Finds the position of a field path in the text of a manifest.

/// Finds the deepest node on the path to a field.
#[derive(Debug)]
pub(crate) struct Locator {
    wanted: Vec<String>,
    document: usize,
    depth: Option<usize>,
    line: u32,
    column: u32,
}

impl Locator {
    /// Looks for `field` (`spec.containers[0].env[1].name`, `metadata.labels[a.b/c]`) in the document with this 0-based index.
    pub(crate) fn new(document: usize, field: &str) -> Self {
        Self { wanted: segments(field), document, depth: None, line: 0, column: 0 }
    }

    /// Records a node that the composer has reached.
    pub(crate) fn visit(&mut self, document: usize, path: &[String], line: u32, column: u32) {
        let on_the_way = document == self.document
            && path.len() <= self.wanted.len()
            && path.iter().zip(&self.wanted).all(|(a, b)| a == b);
        // Of equal keys the last one wins, as it does for the value.
        if on_the_way && self.depth.is_none_or(|d| d <= path.len()) {
            (self.depth, self.line, self.column) = (Some(path.len()), line, column);
        }
    }

    /// Line and column of the deepest node found, if any.
    pub(crate) fn position(&self) -> Option<(u32, u32)> {
        self.depth.map(|_| (self.line, self.column))
    }
}

fn segments(field: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut rest = field;
    while !rest.is_empty() {
        rest = rest.strip_prefix('.').unwrap_or(rest);
        if let Some(inside) = rest.strip_prefix('[') {
            let (key, after) = inside.split_once(']').unwrap_or((inside, ""));
            all.push(key.to_owned());
            rest = after;
        } else {
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            if end == 0 {
                break;
            }
            all.push(rest[..end].to_owned());
            rest = &rest[end..];
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_path_is_split_into_names_indices_and_keys() {
        assert_eq!(
            segments("spec.containers[0].resources.limits[example.com/gpu].x"),
            ["spec", "containers", "0", "resources", "limits", "example.com/gpu", "x"]
        );
        assert!(segments("").is_empty());
        assert_eq!(segments("a..b"), ["a"]);
        assert_eq!(segments("a[b"), ["a", "b"]);
    }
}
