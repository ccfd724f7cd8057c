//! Names of log folders, log files and links to logs (runtime-and-resources.md §3.8).

/// Maximum length of a link's name without `.log`.
const MAX_LINK_NAME: usize = 251;

/// The file name of the link to a container's log.
pub fn link_name(pod_name: &str, namespace: &str, container: &str, id: &str) -> String {
    let mut name = format!("{pod_name}_{namespace}_{container}-{id}");
    let mut end = MAX_LINK_NAME.min(name.len());
    // The labels of a container that is not ours may have any text.
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    name.push_str(".log");
    name
}

/// The pod's UID in the name of its log folder, `<namespace>_<name>_<uid>`.
pub fn uid_of_log_folder(name: &str) -> Option<&str> {
    // A namespace and a name have no underscore; a UID may have some.
    name.splitn(3, '_').nth(2)
}

/// Whether a file of a container's log folder is the log `log` or one of its rotated files.
pub fn is_part_of_log(log: &str, name: &str) -> bool {
    name.strip_prefix(log).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// One more than the highest `<n>.log…` among the files of a container's log folder; 0 if there is none.
pub fn next_attempt<'a>(names: impl IntoIterator<Item = &'a str>) -> u32 {
    let number = |name: &str| name.split_once(".log")?.0.parse::<u32>().ok();
    names.into_iter().filter_map(number).max().map_or(0, |n| n + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_link_names_pod_container_and_id_and_is_at_most_255_bytes() {
        assert_eq!(link_name("web", "default", "main", "c1"), "web_default_main-c1.log");
        let long = link_name(&"p".repeat(250), "default", "main", "c1");
        assert_eq!(long, format!("{}_.log", "p".repeat(250)));
        assert_eq!(long.len(), 255);
        let foreign = link_name(&"ä".repeat(150), "default", "main", "c1");
        assert_eq!(foreign, format!("{}.log", "ä".repeat(125)));
        let cut_within = link_name(&format!("p{}", "ä".repeat(150)), "default", "main", "c1");
        assert_eq!(cut_within, format!("p{}.log", "ä".repeat(125)));
    }

    #[test]
    fn uid_in_a_log_folder_name_may_have_underscores() {
        for (name, uid) in [
            ("default_web_u", Some("u")),
            ("default_web_u_1", Some("u_1")),
            ("default_web_", Some("")),
            ("default_web", None),
            ("lost+found", None),
        ] {
            assert_eq!(uid_of_log_folder(name), uid, "{name}");
        }
    }

    #[test]
    fn log_of_another_attempt_is_not_part_of_a_log() {
        for (name, expected) in [
            ("1.log", true),
            ("1.log.20260101-000000", true),
            ("1.log.20260101-000000.gz", true),
            ("11.log", false),
            ("1.logs", false),
            ("1", false),
        ] {
            assert_eq!(is_part_of_log("1.log", name), expected, "{name}");
        }
    }

    #[test]
    fn next_attempt_ignores_files_that_are_no_logs() {
        assert_eq!(next_attempt([]), 0);
        assert_eq!(next_attempt(["0.log"]), 1);
        assert_eq!(next_attempt(["x.log", "3", "a", ".log"]), 0);
        assert_eq!(next_attempt(["9.log", "10.log.20260101-000000.gz"]), 11);
    }
}
