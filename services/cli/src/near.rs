//! Names that a person may have meant.

/// How many names are offered.
const OFFERED: usize = 3;

/// Those of `known` that are near `wanted`, the nearest first: they begin with it, or differ in few characters.
pub(crate) fn near<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    // A third of the characters may be wrong: `wbe` is `web`, `db` is not `web`.
    let limit = wanted.chars().count() / 3;
    let mut found: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|name| {
            let begins = !wanted.is_empty() && name.starts_with(wanted);
            let distance = if begins { 0 } else { distance(wanted, name) };
            (distance <= limit).then_some((distance, name))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(OFFERED).map(|(_, name)| name).collect()
}

/// How many characters must be put in, left out, changed or swapped with their neighbour to make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // rows[i][j]: the distance of the first i characters of `a` and the first j of `b`.
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let differs = usize::from(a[i - 1] != b[j - 1]);
            let mut least = (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + differs);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first_and_strangers_not_at_all() {
        let known = ["web-edge", "web", "wbe", "db-edge", "database"];
        assert_eq!(near("wep", known), ["web"]);
        assert_eq!(near("web-egde", known), ["web-edge"]);
        assert_eq!(near("data", known), ["database"]);
        assert_eq!(near("we", known), ["web", "web-edge"]);
        assert_eq!(near("nope", known), Vec::<&str>::new());
        assert_eq!(near("", known), Vec::<&str>::new());
    }

    #[test]
    fn the_distance_counts_what_must_be_changed() {
        for (a, b, expected) in
            [("", "", 0), ("", "abc", 3), ("web", "web", 0), ("wbe", "web", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (expected, expected), "{a} {b}");
        }
    }
}
