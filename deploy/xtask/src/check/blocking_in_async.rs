//! Async code does not call `std::fs`: a slow disk would stop every other task of the thread (docs/architecture.md §5). The
//! check finds calls in the async function or block itself, not in the synchronous functions that it calls.

use std::path::Path;

use super::Finding;
use super::source::{Source, matching, sources};

/// Folders with code that runs under tokio.
const FOLDERS: [&str; 2] = ["services", "shared"];
/// The functions that run a closure on a thread where it may block.
const BLOCKING_RUNNERS: [&str; 2] = ["spawn_blocking", "blocking"];

/// Checks the product's async functions and blocks.
///
/// # Errors
/// A source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for folder in FOLDERS {
        for source in sources(root, Path::new(folder))? {
            if !is_exempt(&source.file) {
                findings.extend(blocking_calls(&source));
            }
        }
    }
    Ok(findings)
}

/// Whether `file` belongs to tests or the test kit.
fn is_exempt(file: &Path) -> bool {
    file.starts_with("shared/testkit")
        || file
            .components()
            .any(|part| ["tests", "examples", "benches"].contains(&&*part.as_os_str().to_string_lossy()))
        || is_test_module(file)
}

/// Whether `file` is, by its name, a module that its parent declares under `#[cfg(test)]`.
fn is_test_module(file: &Path) -> bool {
    let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    name == "tests" || name == "testing" || name.ends_with("_tests") || name.starts_with("fake")
}

/// A finding for each call of `std::fs` in async code of `source`.
fn blocking_calls(source: &Source) -> Vec<Finding> {
    let mut code = source.code.clone().into_bytes();
    for name in BLOCKING_RUNNERS {
        for at in source.find(name) {
            let open = at + name.len();
            if source.code.as_bytes().get(open) == Some(&b'(') {
                let end = matching(&source.code, open).unwrap_or(source.code.len());
                blank(&mut code[open..end]);
            }
        }
    }
    let code = String::from_utf8_lossy(&code);
    let mut calls = Vec::new();
    for start in source.find("async") {
        if let Some((open, end)) = body(&code, start) {
            calls.extend(fs_calls(&code[open..end]).into_iter().map(|at| open + at));
        }
    }
    // A call in an async block of an async function was found twice.
    calls.sort_unstable();
    calls.dedup();
    calls
        .into_iter()
        .map(|at| Finding {
            file: source.file.clone(),
            line: source.line(at),
            message: "std::fs in async code; use tokio::task::spawn_blocking or tokio::fs".to_owned(),
        })
        .collect()
}

/// The offsets of the braces of the async function, block or closure whose keyword `async` is at `start`.
fn body(code: &str, start: usize) -> Option<(usize, usize)> {
    let mut brackets = 0_usize;
    for (at, c) in code[start..].char_indices() {
        match c {
            '[' => brackets += 1,
            ']' => brackets = brackets.saturating_sub(1),
            ';' if brackets == 0 => return None,
            '{' => return Some((start + at, matching(code, start + at)?)),
            _ => {}
        }
    }
    None
}

/// The offsets at which `code` calls a function of `std::fs`.
fn fs_calls(code: &str) -> Vec<usize> {
    code.match_indices("fs::")
        .map(|(at, _)| at)
        .filter(|at| {
            let before = &code[..*at];
            let is_part_of_name = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let is_of_other_crate = before.ends_with("::") && !before.ends_with("std::");
            !is_part_of_name && !is_of_other_crate
        })
        .collect()
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().filter(|byte| **byte != b'\n') {
        *byte = b' ';
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        blocking_calls(&Source::new(Path::new("x.rs"), text)).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn std_fs_in_an_async_function_or_block_is_found_once() {
        let text = "async fn f() {\n  fs::read(p);\n  let g = async move { std::fs::write(p, b) };\n}\n\
                    fn h() { tokio::spawn(async { fs::read(p) }); }\n\
                    async fn i(key: [u8; 32]) { fs::read(p) }\n";
        assert_eq!(lines(text), [2, 3, 5, 6]);
    }

    #[test]
    fn std_fs_on_blocking_threads_and_in_sync_functions_is_allowed() {
        let text = "async fn f() {\n spawn_blocking(move || { fs::read(p) }).await;\n tokio::fs::read(p).await;\n \
                    rustix::fs::open(p);\n my_fs::x();\n}\nfn g() { fs::read(p) }\ntrait T { async fn t(); }\n";
        assert_eq!(lines(text), Vec::<usize>::new());
    }
}
