//! Paths in files and flags.

/// A path, made absolute with the folder from which relative paths start.
pub(crate) fn absolute(folder: &str, path: &str) -> String {
    if path.is_empty() || path.starts_with('/') || folder.is_empty() {
        return path.to_owned();
    }
    let path = path.trim_start_matches("./");
    format!("{}/{path}", folder.trim_end_matches('/'))
}

/// Whether this is an absolute path in its shortest form.
pub(crate) fn is_clean(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|rest| {
        !rest.is_empty() && rest.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
    }) && !path.contains('\0')
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_start_from_the_folder_of_the_file() {
        for (path, result) in
            [("manifests", "/etc/k/manifests"), ("./m", "/etc/k/m"), ("/abs", "/abs"), ("", "")]
        {
            assert_eq!(absolute("/etc/k/", path), result);
        }
    }
}
