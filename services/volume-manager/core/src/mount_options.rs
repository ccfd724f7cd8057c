//! Mount options (volumes.md §7): how a list of options is read, merged and shown, and the two steps in which a bind
//! mount gets them.

use std::collections::BTreeSet;
use std::fmt;

/// Shown in place of each sensitive option.
const MASK: &str = "<masked>";

/// Options that only restrict what a mount allows, each with the option that takes the restriction back.
const RESTRICTIONS: [(&str, &str); 4] =
    [("ro", "rw"), ("nosuid", "suid"), ("nodev", "dev"), ("noexec", "exec")];

/// The flags of statfs(2) in `f_flags` that a bind mount keeps, with their options.
const KEPT_FLAGS: [(u64, &str); 7] = [
    (0x1, "ro"),
    (0x2, "nosuid"),
    (0x4, "nodev"),
    (0x8, "noexec"),
    (0x400, "noatime"),
    (0x800, "nodiratime"),
    (0x1000, "relatime"),
];

/// Options of a single mount that restrict it, or that keep times of access from being written.
const PER_MOUNT: [&str; 7] = ["ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "nosymfollow"];

/// The options of a list that is separated by commas, as in the mount options annotation or in mountinfo. A comma in
/// double quotes belongs to its option: `ro,context="u:r:t:s0:c1,c2"` has two options. A quote that is not closed
/// extends to the end. Empty options are left out.
pub fn split(list: &str) -> Vec<&str> {
    let mut is_quoted = false;
    let is_separator = |c: char| {
        is_quoted ^= c == '"';
        c == ',' && !is_quoted
    };
    list.split(is_separator).filter(|option| !option.is_empty()).collect()
}

/// Why text cannot be a mount option: mount(8) would read it together with the options that follow it, such as `ro`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MountOptionError {
    /// A quote is not closed.
    #[error(
        "the mount option {option} has a double quote that is not closed; close the quote in mountOptions"
    )]
    UnclosedQuote {
        /// The option, or the mask of a sensitive one.
        option: String,
    },
    /// The last character is a backslash, which would escape the comma behind it.
    #[error("the mount option {option} ends with a backslash; remove it from mountOptions")]
    Backslash {
        /// The option, or the mask of a sensitive one.
        option: String,
    },
    /// There is a control character, such as a zero byte or a line break.
    #[error("the mount option {option} contains a control character; remove it from mountOptions")]
    ControlCharacter {
        /// The option, or the mask of a sensitive one.
        option: String,
    },
}

/// The options of a list, or why one of them is not an option. `show` gives the text of an option for an error.
fn checked(list: &str, show: fn(&str) -> String) -> Result<Vec<&str>, MountOptionError> {
    let options = split(list);
    for option in options.iter().copied() {
        if option.chars().any(char::is_control) {
            return Err(MountOptionError::ControlCharacter { option: show(option) });
        }
        if option.matches('"').count() % 2 == 1 {
            return Err(MountOptionError::UnclosedQuote { option: show(option) });
        }
        if option.ends_with('\\') {
            return Err(MountOptionError::Backslash { option: show(option) });
        }
    }
    Ok(options)
}

/// A set of mount options.
///
/// Of two options that contradict each other the stricter one stays, wherever they come from: with `ro` there is no
/// `rw`. mount(8) obeys the last one, which in a sorted list would be `rw`.
///
/// `Debug` and `Display` mask the sensitive options; only [`MountOptions::argument`] has them in full.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct MountOptions {
    plain: BTreeSet<String>,
    sensitive: BTreeSet<String>,
    has_defaults: bool,
}

impl MountOptions {
    /// Adds the options of lists as [`split`] reads them. Each item may be a single option, too.
    pub fn with<T: AsRef<str>>(
        mut self,
        lists: impl IntoIterator<Item = T>,
    ) -> Result<Self, MountOptionError> {
        for list in lists {
            for option in checked(list.as_ref(), |option| format!("{option:?}"))? {
                self.insert(option);
            }
        }
        Ok(self.without_contradictions())
    }

    /// Adds options that are written in the program.
    #[must_use]
    pub fn with_flags(mut self, flags: impl IntoIterator<Item = &'static str>) -> Self {
        for flag in flags {
            self.insert(flag);
        }
        self.without_contradictions()
    }

    /// Adds options that are never shown, such as passwords.
    pub fn with_sensitive<T: AsRef<str>>(
        mut self,
        lists: impl IntoIterator<Item = T>,
    ) -> Result<Self, MountOptionError> {
        for list in lists {
            for option in checked(list.as_ref(), |_| MASK.to_owned())? {
                self.plain.remove(option);
                self.sensitive.insert(option.to_owned());
            }
        }
        Ok(self.without_contradictions())
    }

    /// Appends `defaults`, behind the options that can be shown.
    #[must_use]
    pub fn with_defaults(mut self) -> Self {
        self.plain.remove("defaults");
        self.has_defaults = true;
        self
    }

    /// Whether the set contains the option.
    pub fn contains(&self, option: &str) -> bool {
        self.plain.contains(option)
            || self.sensitive.contains(option)
            || (self.has_defaults && option == "defaults")
    }

    /// Which of the options a bind mount lacks that has the options `present`, as mountinfo shows those of the mount itself.
    /// Only options that a bind mount can have of its own count.
    pub fn missing_in(&self, present: &str) -> Vec<&'static str> {
        let present = split(present);
        let is_missing = |option: &&str| self.contains(option) && !present.contains(option);
        PER_MOUNT.into_iter().filter(is_missing).collect()
    }

    /// Whether the mount is read-only.
    pub fn is_read_only(&self) -> bool {
        self.contains("ro")
    }

    /// Whether there are no options.
    pub fn is_empty(&self) -> bool {
        self.plain.is_empty() && self.sensitive.is_empty() && !self.has_defaults
    }

    /// The argument of `mount -o`: sorted, the sensitive options last. It contains secrets and must not be logged.
    pub fn argument(&self) -> String {
        self.shown().chain(self.sensitive.iter().map(String::as_str)).collect::<Vec<_>>().join(",")
    }

    fn insert(&mut self, option: &str) {
        if !self.contains(option) {
            self.plain.insert(option.to_owned());
        }
    }

    fn shown(&self) -> impl Iterator<Item = &str> {
        self.plain.iter().map(String::as_str).chain(self.has_defaults.then_some("defaults"))
    }

    fn without_contradictions(mut self) -> Self {
        for (strict, loose) in RESTRICTIONS {
            if self.contains(strict) {
                self.plain.remove(loose);
                self.sensitive.remove(loose);
            }
        }
        self
    }
}

impl fmt::Display for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masked = self.sensitive.iter().map(|_| MASK);
        f.write_str(&self.shown().chain(masked).collect::<Vec<_>>().join(","))
    }
}

impl fmt::Debug for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MountOptions({self})")
    }
}

/// The options of the two mounts that make a bind mount, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindSteps {
    /// The options of the mount that binds the source. The kernel ignores all others in this step.
    pub bind: MountOptions,
    /// The options of the remount. It has `bind`, so that it changes this mount only and never the source.
    pub remount: MountOptions,
}

/// The steps of a bind mount with the options `requested`, from a source for which statfs(2) reports `source_flags` in
/// `f_flags`. The bind mount keeps the restrictions of its source: inside a user namespace the kernel refuses a remount
/// that drops them.
pub fn bind_steps(requested: &MountOptions, source_flags: u64) -> BindSteps {
    // Only mount(8) knows _netdev, and only from its own arguments.
    let netdev = requested.contains("_netdev").then_some("_netdev");
    let kept = KEPT_FLAGS.iter().filter(|(flag, _)| source_flags & flag != 0).map(|(_, option)| *option);
    BindSteps {
        bind: MountOptions::default().with_flags(["bind"]).with_flags(netdev),
        remount: requested.clone().with_flags(["remount", "bind"]).with_flags(kept),
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn options(list: &str) -> MountOptions {
        MountOptions::default().with([list]).unwrap()
    }

    #[test]
    fn a_list_is_split_at_commas_outside_of_quotes() {
        for (list, expected) in [
            ("", vec![]),
            (",,", vec![]),
            ("ro", vec!["ro"]),
            ("ro,,noatime,", vec!["ro", "noatime"]),
            (
                "dirsync,context=\"u:r:t:s0:c15,c25\",noatime",
                vec!["dirsync", "context=\"u:r:t:s0:c15,c25\"", "noatime"],
            ),
            ("a=\"1,2\"\"3,4\",b", vec!["a=\"1,2\"\"3,4\"", "b"]),
            ("\",\"", vec!["\",\""]),
            ("a,b=\"c,d", vec!["a", "b=\"c,d"]),
            ("ä,ö", vec!["ä", "ö"]),
            (" ro, soft", vec![" ro", " soft"]),
        ] {
            assert_eq!(split(list), expected, "{list:?}");
        }
    }

    #[test]
    fn options_are_merged_as_a_sorted_set() {
        let user = ["soft", "nfsvers=4.1", "hard,soft"];
        let merged = MountOptions::default().with(user).unwrap().with_flags(["ro", "soft"]);
        assert_eq!(merged.argument(), "hard,nfsvers=4.1,ro,soft");
        assert!(merged.is_read_only() && !merged.is_empty());
        assert!(MountOptions::default().is_empty() && options(",").is_empty());
        assert_eq!(options("").argument(), "");
    }

    #[test]
    fn the_stricter_of_two_contradicting_options_stays() {
        for (list, expected) in [
            ("rw,ro", "ro"),
            ("ro,rw", "ro"),
            ("rw", "rw"),
            ("suid,nosuid", "nosuid"),
            ("dev,nodev", "nodev"),
            ("exec,noexec,suid", "noexec,suid"),
        ] {
            assert_eq!(options(list).argument(), expected, "{list}");
        }
        let secretly = options("rw").with_sensitive(["ro"]).unwrap();
        assert_eq!(secretly.argument(), "ro");
        assert!(secretly.is_read_only());
        assert!(!options("rw,errors=remount-ro").is_read_only());
    }

    #[test]
    fn sensitive_options_are_in_the_argument_and_nowhere_else() {
        let all = options("vers=3.0,password=hunter2")
            .with_sensitive(["username=joe,password=hunter2"])
            .and_then(|all| all.with(["password=hunter2"]))
            .unwrap();
        assert_eq!(all.argument(), "vers=3.0,password=hunter2,username=joe");
        assert_eq!(all.to_string(), "vers=3.0,<masked>,<masked>");
        assert_eq!(format!("{all:?}"), "MountOptions(vers=3.0,<masked>,<masked>)");
        let only = MountOptions::default().with_sensitive(["a"]).unwrap();
        assert_eq!((only.to_string().as_str(), only.is_empty()), ("<masked>", false));
    }

    #[test]
    fn an_option_that_would_swallow_the_next_one_is_refused() {
        for bad in ["a=\"", "ro,b=\"x,y", "\"\"\"", "a\\", "a\\,ro", "a\0b", "a\nb"] {
            let text = MountOptions::default().with([bad, "ro"]).unwrap_err().to_string();
            assert!(text.contains("in mountOptions") || text.contains("from mountOptions"), "{bad:?} {text}");
            let text = MountOptions::default().with_sensitive([bad]).unwrap_err().to_string();
            assert!(text.starts_with("the mount option <masked> "), "{text}");
        }
        let text = MountOptions::default().with(["ro,b=\"x,y"]).unwrap_err().to_string();
        assert!(text.contains("option \"b=\\\"x,y\" has a double quote"), "{text}");
        for good in ["a=\"\"", "a\\b", "x=\"y,z\"", "\\a"] {
            assert!(MountOptions::default().with([good]).is_ok(), "{good}");
        }
    }

    #[test]
    fn defaults_follow_the_options_that_can_be_shown() {
        let all =
            options("ro,noatime,defaults").with_sensitive(["key=1"]).unwrap().with_defaults().with_defaults();
        assert_eq!(all.argument(), "noatime,ro,defaults,key=1");
        assert_eq!(all.to_string(), "noatime,ro,defaults,<masked>");
        assert!(all.contains("defaults") && !options("ro").contains("defaults"));
        assert!(!MountOptions::default().with_defaults().is_empty());
    }

    #[test]
    fn a_bind_mount_binds_first_and_then_remounts_itself_with_the_options() {
        let steps = bind_steps(&options("bind,ro,remount,noexec"), 0);
        assert_eq!(steps.bind.argument(), "bind");
        assert_eq!(steps.remount.argument(), "bind,noexec,remount,ro");
        let steps = bind_steps(&options("_netdev"), 0);
        assert_eq!(steps.bind.argument(), "_netdev,bind");
        assert_eq!(steps.remount.argument(), "_netdev,bind,remount");
        assert_eq!(bind_steps(&MountOptions::default(), 0).remount.argument(), "bind,remount");
    }

    #[test]
    fn a_bind_mount_keeps_each_restriction_of_its_source() {
        for (flags, expected) in [
            (1, "bind,remount,ro"),
            (2, "bind,nosuid,remount"),
            (4, "bind,nodev,remount"),
            (8, "bind,noexec,remount"),
            (1024, "bind,noatime,remount"),
            (2048, "bind,nodiratime,remount"),
            (4096, "bind,relatime,remount"),
            // ST_MANDLOCK, ST_SYNCHRONOUS and ST_VALID are no concern of a bind mount.
            (64 | 16 | 0x20, "bind,remount"),
            (2 | 4 | 4096, "bind,nodev,nosuid,relatime,remount"),
        ] {
            assert_eq!(bind_steps(&MountOptions::default(), flags).remount.argument(), expected, "{flags}");
        }
        // Even if the opposite is requested.
        let steps = bind_steps(&options("rw,suid,dev,exec"), 1 | 2 | 4 | 8);
        assert_eq!(steps.remount.argument(), "bind,nodev,noexec,nosuid,remount,ro");
    }

    #[test]
    fn a_bind_mount_lacks_the_restrictions_that_mountinfo_does_not_show() {
        for (requested, present, missing) in [
            ("", "rw,relatime", vec![]),
            ("rw,exec,relatime,errors=remount-ro", "rw", vec![]),
            ("ro", "rw,relatime", vec!["ro"]),
            ("ro", "ro,relatime", vec![]),
            ("noexec,nodev,nosuid,ro,noatime", "rw,nosuid,nodev", vec!["ro", "noexec", "noatime"]),
            ("nodiratime,nosymfollow", "rw,noatime", vec!["nodiratime", "nosymfollow"]),
        ] {
            assert_eq!(options(requested).missing_in(present), missing, "{requested} in {present}");
        }
    }

    #[test]
    fn a_remount_keeps_sensitive_options_masked() {
        let steps = bind_steps(&MountOptions::default().with_sensitive(["key=1"]).unwrap(), 1);
        assert_eq!(steps.remount.argument(), "bind,remount,ro,key=1");
        assert!(!format!("{steps:?}").contains("key"));
    }

    #[test]
    fn a_merged_list_reads_back_as_the_same_options_in_any_order() {
        let reached = &Reached::default();
        let option =
            prop::sample::select(vec!["ro", "rw", "soft", "a=\"x,y\"", "suid", "nosuid", "z", "defaults"]);
        let lists = prop::collection::vec(option, 0..6);
        proptest!(ProptestConfig::with_cases(1024), |(list in lists)| {
            let merged = MountOptions::default().with(&list).unwrap();
            let argument = merged.argument();
            prop_assert_eq!(options(&argument), merged.clone());
            prop_assert_eq!(options(&list.join(",")), merged.clone());
            let backwards = MountOptions::default().with_flags(list.iter().rev().copied());
            prop_assert_eq!(&backwards, &merged);
            let parts = split(&argument);
            prop_assert!(parts.is_sorted());
            prop_assert!(list.iter().all(|o| parts.contains(o) || matches!(*o, "rw" | "suid")));
            prop_assert!(!(merged.contains("ro") && merged.contains("rw")));
            reached.case([
                ("empty", list.is_empty()),
                ("a quoted comma", list.contains(&"a=\"x,y\"")),
                ("a contradiction", list.contains(&"ro") && list.contains(&"rw")),
                ("a repeated option", parts.len() < list.len()),
            ]);
        });
        // The rarest: "a contradiction", in one case of 12.
        reached.assert_each();
    }
}
