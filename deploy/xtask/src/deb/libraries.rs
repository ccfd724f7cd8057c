//! The shared libraries that the binaries need, as dependencies of the package.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};

use super::said;

/// `Depends:` for all shared libraries that these binaries name.
///
/// The C library is asked for in the newest version of which a symbol is used; libgcc has been one package with the same
/// symbols since Debian 11.
pub(super) fn depends(binaries: impl Iterator<Item = PathBuf>) -> anyhow::Result<String> {
    let mut needed = Needed::default();
    for binary in binaries {
        let text = said(Command::new("objdump").arg("-p").arg(&binary))?;
        needed.read(&text).with_context(|| format!("{}", binary.display()))?;
    }
    needed.depends()
}

/// What a number of binaries need.
#[derive(Debug, Default)]
struct Needed {
    /// The newest version of the C library, as its parts.
    libc: Vec<u32>,
    libgcc: bool,
}

impl Needed {
    /// Takes in what `objdump -p` prints of a binary.
    fn read(&mut self, text: &str) -> anyhow::Result<()> {
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["NEEDED", library] => match library.split_once(".so").map_or(library, |(name, _)| name) {
                    "libc" | "libm" | "libdl" | "libpthread" | "librt" | "libresolv" => {}
                    "libgcc_s" => self.libgcc = true,
                    loader if loader.starts_with("ld-linux") => {}
                    other => bail!("{other} is a library that no package is known for"),
                },
                [.., symbol] if symbol.starts_with("GLIBC_") => {
                    let parts = symbol.trim_start_matches("GLIBC_").split('.').map(str::parse);
                    // GLIBC_PRIVATE and the like are no versions.
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
            bail!("no binary needs the C library, which cannot be");
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
    fn the_newest_symbol_of_all_binaries_counts() {
        let mut needed = Needed::default();
        let one =
            "  NEEDED               libgcc_s.so.1\n  NEEDED  libc.so.6\n    0x0969 0x00 03 GLIBC_2.34\n";
        let two = "  NEEDED  libc.so.6\n  NEEDED ld-linux-x86-64.so.2\n    0x0969 0x00 03 GLIBC_2.9\n 0x01 0x00 04 GLIBC_2.2.5";
        needed.read(one).unwrap();
        needed.read(two).unwrap();
        assert_eq!(needed.depends().unwrap(), "libc6 (>= 2.34), libgcc-s1");
    }

    #[test]
    fn a_library_that_nobody_knows_is_an_error() {
        let error = Needed::default().read("  NEEDED   libssl.so.3\n").unwrap_err().to_string();
        assert!(error.contains("libssl"), "{error}");
        Needed::default().depends().unwrap_err();
    }
}
