//! Generates the manual page of keelson-init from its `--help`, which lists every flag that it accepts.

use std::fmt::Write as _;

use anyhow::Context as _;

const NAME: &str = "keelson-init";

/// The sections after the flags.
const AFTER_FLAGS: &str = "\
.SH EXIT STATUS
.TP
0
it was stopped by a signal, or the requested output was printed
.TP
64
the command line is invalid
.TP
70
an internal error of the agent
.TP
78
the configuration is invalid; all errors in it are printed
.PP
Under the name kubelet, the exit status is 0 on success and 1 on any error.
.SH FILES
.TP
/etc/keelson/kubelet.yaml, /etc/keelson/keelson.yaml
the files of \\-\\-config and \\-\\-keelson\\-config in the packaged units
.TP
/run/keelson/config.json
the resolved configuration, which every service reads
.SH SEE ALSO
.BR keelson (1)
";

/// Returns the manual page in the format of man(7). `help` is the output of `keelson-init --help`.
///
/// # Errors
/// The help does not have the expected sections.
pub(super) fn page(help: &str, version: &str) -> anyhow::Result<String> {
    let (head, flags) =
        help.split_once("\nFlags:\n").context("`keelson-init --help` prints no section \"Flags:\"")?;
    let (about, _) =
        head.split_once("\n\nUsage:\n").context("`keelson-init --help` prints no section \"Usage:\"")?;
    let mut page = format!(
        ".TH {} 8 \"\" \"keelson {}\" \"Keelson\"\n.ad l\n.SH NAME\n{name}, kubelet \\- keeps the services of a Keelson node agent \
         running\n.SH SYNOPSIS\n\\fB{name}\\fR [flags]\n.br\n\\fBkubelet\\fR [flags]\n.SH DESCRIPTION\n{}\n.PP\nkubelet is another \
         name of the same program, with the flags, files and exit codes of a kubelet.\n.SH OPTIONS\n",
        NAME.to_uppercase(),
        escaped(version),
        escaped(about),
        name = escaped(NAME),
    );
    for line in flags.lines() {
        // At least three blanks separate a flag from its description.
        let (flag, text) = line
            .trim_start()
            .split_once("   ")
            .with_context(|| format!("a line of `keelson-init --help` is not a flag: {line}"))?;
        let _ = write!(page, ".TP\n{}\n{}\n", format_flag(flag), escaped(text.trim_start()));
    }
    page.push_str(AFTER_FLAGS);
    Ok(page)
}

/// Formats a flag of `--help`: its names in bold, the type of its value in italics.
fn format_flag(flag: &str) -> String {
    let word = |word: &str| {
        let (name, more) = word.split_at(word.find(['[', ',']).unwrap_or(word.len()));
        if name.starts_with('-') {
            format!("\\fB{}\\fR{}", escaped(name), escaped(more))
        } else {
            format!("\\fI{}\\fR", escaped(word))
        }
    };
    flag.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// Escapes text so that roff prints it unchanged (groff_char(7)), also where a line begins with a full stop.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    let line = |line: &str| if line.starts_with('.') { format!("\\&{line}") } else { line.to_owned() };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
keelson-init is the node agent: it runs
.pods that somebody's files name.

Usage:
  keelson-init [flags]

Flags:
  -h, --help                              Print this and exit.
      --reserved-memory node:type=q,...   Memory kept from pods. (default \"a\\b\")
      --version[=true|raw]                Print the version and exit.
";

    #[test]
    fn the_manual_page_has_every_flag_of_the_help() {
        let page = page(HELP, "1.2.3~test").unwrap();
        assert!(page.starts_with(".TH KEELSON-INIT 8 \"\" \"keelson 1.2.3~test\" \"Keelson\"\n.ad l\n.SH NAME\nkeelson\\-init, kubelet \\- "));
        assert!(page.contains(
            "keelson\\-init is the node agent: it runs\n\\&.pods that somebody\\(aqs files name.\n"
        ));
        for option in [
            "\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nPrint this and exit.\n",
            "\\fB\\-\\-reserved\\-memory\\fR \\fInode:type=q,...\\fR\nMemory kept from pods. (default \"a\\eb\")\n",
            "\\fB\\-\\-version\\fR[=true|raw]\nPrint the version and exit.\n",
        ] {
            assert!(page.contains(&format!(".TP\n{option}")), "{option} is not in\n{page}");
        }
        assert!(page.ends_with(".BR keelson (1)\n"));
    }

    #[test]
    fn a_help_without_the_expected_sections_is_an_error() {
        for help in ["", "about\n\nUsage:\n  x\n", "about\n\nUsage:\n  x\n\nFlags:\n  --no-text\n"] {
            assert!(page(help, "1").is_err(), "{help}");
        }
    }
}
