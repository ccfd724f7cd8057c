//! The manual page of init, of what `--help` says: the table of flags that reads its command line.

use std::fmt::Write as _;

use anyhow::Context as _;

const NAME: &str = "keelson-init";

const BEHIND_THE_FLAGS: &str = "\
.SH EXIT STATUS
.TP
0
told to end, or what was asked for is done
.TP
64
the command line is wrong
.TP
70
a fault of the agent
.TP
78
the configuration is refused, with everything that is wrong in it
.PP
Under the name kubelet these are 0 and 1.
.SH FILES
.TP
/etc/keelson/kubelet.yaml, /etc/keelson/keelson.yaml
the files of \\-\\-config and \\-\\-keelson\\-config that the units name
.TP
/run/keelson/config.json
the resolved configuration, which every service reads
.SH SEE ALSO
.BR keelson (1)
";

/// The page in man(7), from the help of the program.
///
/// # Errors
/// The help has another form.
pub(super) fn page(help: &str, version: &str) -> anyhow::Result<String> {
    let (head, flags) = help.split_once("\nFlags:\n").context("the help of keelson-init has no flags")?;
    let (about, _) = head.split_once("\n\nUsage:\n").context("the help of keelson-init has no usage")?;
    let mut page = format!(
        ".TH {} 8 \"\" \"keelson {}\" \"Keelson\"\n.ad l\n.SH NAME\n{name}, kubelet \\- keeps the services of a Keelson node agent \
         running\n.SH SYNOPSIS\n\\fB{name}\\fR [flags]\n.br\n\\fBkubelet\\fR [flags]\n.SH DESCRIPTION\n{}\n.PP\nkubelet is another \
         name of the same program, with a kubelet's flags, files and exit codes.\n.SH OPTIONS\n",
        NAME.to_uppercase(),
        escaped(version),
        escaped(about),
        name = escaped(NAME),
    );
    for line in flags.lines() {
        // Blanks fill the column of the flags, three at least.
        let (flag, text) = line.trim_start().split_once("   ").with_context(|| format!("no flag: {line}"))?;
        let _ = write!(page, ".TP\n{}\n{}\n", bold(flag), escaped(text.trim_start()));
    }
    page.push_str(BEHIND_THE_FLAGS);
    Ok(page)
}

/// A flag as `--help` shows it, its names in bold and the kind of its value in italics.
fn bold(flag: &str) -> String {
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

/// Text that roff takes as it is (groff_char(7)), the first character of a line included.
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
    fn every_flag_of_the_help_is_an_option_of_the_page() {
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
    fn a_help_of_another_form_makes_no_page() {
        for help in ["", "about\n\nUsage:\n  x\n", "about\n\nUsage:\n  x\n\nFlags:\n  --no-text\n"] {
            assert!(page(help, "1").is_err(), "{help}");
        }
    }
}
