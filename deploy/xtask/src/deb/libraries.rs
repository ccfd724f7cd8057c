//! The package dependencies for the shared libraries that the binaries need.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};

use super::stdout_of;

/// Returns the value of `Depends:` for all shared libraries that the binaries need.
///
/// The version of libc6 is that of the newest symbol in use. libgcc-s1 needs no version: its symbols have been the same since
/// Debian 11.
///
/// # Errors
/// A binary cannot be read, or needs a library whose package is not known here.
pub(super) fn depends(binaries: impl Iterator<Item = PathBuf>) -> anyhow::Result<String> {
    let mut needed = Needed::default();
    for binary in binaries {
        let text = stdout_of(Command::new("objdump").arg("-p").arg(&binary))?;
        needed.add(&text).with_context(|| format!("{}", binary.display()))?;
    }
    needed.depends()
}

/// The libraries that a set of binaries needs.
#[derive(Debug, Default)]
struct Needed {
    /// The newest version of glibc symbols, as numbers: `[2, 34]`. Empty until a binary that needs one was read.
    libc: Vec<u32>,
    libgcc: bool,
}

impl Needed {
    /// Adds the libraries of one binary. `text` is the output of `objdump -p`.
    fn add(&mut self, text: &str) -> anyhow::Result<()> {
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["NEEDED", library] => match library.split_once(".so").map_or(library, |(name, _)| name) {
                    "libc" | "libm" | "libdl" | "libpthread" | "librt" | "libresolv" => {}
                    "libgcc_s" => self.libgcc = true,
                    loader if loader.starts_with("ld-linux") => {}
                    other => bail!(
                        "the package of the library {other} is not known; add it to deploy/xtask/src/deb/libraries.rs"
                    ),
                },
                [.., symbol] if symbol.starts_with("GLIBC_") => {
                    let parts = symbol.trim_start_matches("GLIBC_").split('.').map(str::parse);
                    // GLIBC_PRIVATE and similar names have no version.
                    if let Ok(version) = parts.collect::<Result<Vec<u32>, _>>() {
                        self.libc = version.max(std::mem::take(&mut self.libc));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn depends(&self) -> anyhow::Result<String> {
        if self.libc.is_empty() {
            bail!("no binary needs glibc; the packages are for dynamically linked binaries");
        }
        let version: Vec<String> = self.libc.iter().map(u32::to_string).collect();
        let mut depends = format!("libc6 (>= {})", version.join("."));
        if self.libgcc {
            depends.push_str(", libgcc-s1");
        }
        Ok(depends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libc6_version_is_that_of_the_newest_symbol_of_all_binaries() {
        let mut needed = Needed::default();
        let one =
            "  NEEDED               libgcc_s.so.1\n  NEEDED  libc.so.6\n    0x0969 0x00 03 GLIBC_2.34\n";
        let two = "  NEEDED  libc.so.6\n  NEEDED ld-linux-x86-64.so.2\n    0x0969 0x00 03 GLIBC_2.9\n 0x01 0x00 04 GLIBC_2.2.5";
        needed.add(one).unwrap();
        needed.add(two).unwrap();
        assert_eq!(needed.depends().unwrap(), "libc6 (>= 2.34), libgcc-s1");
    }

    #[test]
    fn a_library_of_an_unknown_package_is_an_error() {
        let error = Needed::default().add("  NEEDED   libssl.so.3\n").unwrap_err().to_string();
        assert!(error.contains("libssl"), "{error}");
        Needed::default().depends().unwrap_err();
    }
}
