//! Suggests names that resemble a mistyped one.

use strsim::osa_distance;

/// The number of names suggested at most.
const MAX_SUGGESTIONS: usize = 3;

/// The names in `known` that begin with `wanted` or differ from it in few characters, closest first.
pub(crate) fn similar_names<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    // A third of the characters may be wrong: `wbe` is `web`, `db` is not `web`.
    let limit = wanted.chars().count() / 3;
    let mut found: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|name| {
            let begins = !wanted.is_empty() && name.starts_with(wanted);
            let distance = if begins { 0 } else { osa_distance(wanted, name) };
            (distance <= limit).then_some((distance, name))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_sorted_by_distance_and_others_left_out() {
        let known = ["web-edge", "web", "wbe", "db-edge", "database"];
        assert_eq!(similar_names("wep", known), ["web"]);
        assert_eq!(similar_names("web-egde", known), ["web-edge"]);
        assert_eq!(similar_names("data", known), ["database"]);
        assert_eq!(similar_names("we", known), ["web", "web-edge"]);
        assert_eq!(similar_names("nope", known), Vec::<&str>::new());
        assert_eq!(similar_names("", known), Vec::<&str>::new());
    }

    #[test]
    fn edit_distance_counts_changed_characters() {
        for (a, b, expected) in
            [("", "", 0), ("", "abc", 3), ("web", "web", 0), ("wbe", "web", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((osa_distance(a, b), osa_distance(b, a)), (expected, expected), "{a} {b}");
        }
    }
}
