//! The iptables chains that the agent maintains, and the commands that create what is missing (node-and-api.md §13).

/// The chain that shows other programs which iptables variant this machine uses, legacy or nft.
pub const HINT: &str = "KUBE-IPTABLES-HINT";
/// The chain that drops packets to the loopback network from elsewhere.
pub const FIREWALL: &str = "KUBE-FIREWALL";
/// The chain whose absence shows that somebody has flushed the tables.
pub const CANARY: &str = "KUBE-KUBELET-CANARY";

/// The comment of the rule in [`FIREWALL`].
const COMMENT: &str = "block incoming localnet connections";
/// Matches packets to the loopback network from elsewhere that belong to no connection of this machine.
const DROP: &str =
    "-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";
/// Parts of the rule as `iptables -S` prints it.
const DROP_RULE_PARTS: [&str; 4] =
    [COMMENT, "-d 127.0.0.0/8", "! -s 127.0.0.0/8", "! --ctstate RELATED,ESTABLISHED,DNAT"];
/// Seconds for which a command waits for the lock of the tables (`-w`).
const WAIT: &str = "5";

/// An address family; each has its own tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `iptables`.
    V4,
    /// `ip6tables`.
    V6,
}

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The program that lists and changes its tables.
    pub const fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }
}

/// A rule that must exist exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The rule that drops.
    Drop,
    /// A jump to [`FIREWALL`].
    Jump,
}

/// A chain, with the rule that must be in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Its table.
    pub table: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Whether it is built into the kernel and always exists.
    pub is_builtin: bool,
    /// The rule that must be in it.
    pub rule: Option<Rule>,
}

const fn custom(table: &'static str, name: &'static str) -> Chain {
    Chain { table, name, is_builtin: false, rule: None }
}

const fn builtin(name: &'static str) -> Chain {
    Chain { table: "filter", name, is_builtin: true, rule: Some(Rule::Jump) }
}

/// The canaries come last: where they exist, everything before them was created.
const BOTH_FAMILIES: [Chain; 4] =
    [custom("mangle", HINT), custom("mangle", CANARY), custom("nat", CANARY), custom("filter", CANARY)];
const V4_ONLY: [Chain; 3] = [
    Chain { table: "filter", name: FIREWALL, is_builtin: false, rule: Some(Rule::Drop) },
    builtin("OUTPUT"),
    builtin("INPUT"),
];

/// The desired chains of a family, in the order in which they are created.
pub fn desired_chains(family: Family) -> impl Iterator<Item = Chain> {
    let firewall: &[Chain] = match family {
        Family::V4 => &V4_ONLY,
        Family::V6 => &[],
    };
    firewall.iter().chain(&BOTH_FAMILIES).copied()
}

/// The tables that have desired chains.
pub const TABLES: [&str; 3] = ["mangle", "nat", "filter"];

/// Arguments of the program.
pub type Arguments = Vec<String>;

fn arguments(table: &str, rest: &[&str]) -> Arguments {
    ["-w", WAIT, "-t", table].iter().chain(rest).map(|argument| (*argument).to_owned()).collect()
}

/// The command that checks whether a table can be used: it fails where the kernel lacks the table, or without permission.
/// Each of [`TABLES`] has the chain that it lists.
pub fn probe(table: &str) -> Arguments {
    arguments(table, &["-S", "OUTPUT"])
}

/// The kind of error of a failed command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandErrorKind {
    /// The kernel lacks this table in this family, or has no tables at all.
    Unsupported,
    /// This process lacks a capability.
    PermissionDenied,
    /// Any other error.
    Other,
}

/// Exit codes of both variants when the kernel has refused the operation.
const KERNEL_EXIT_CODES: [i32; 3] = [1, 3, 4];
/// The kernel's error texts for missing features, as the programs print them.
const UNSUPPORTED: [&str; 5] =
    ["does not exist", "No such file or directory", "not supported", "not available", "Invalid argument"];
/// The kernel's error texts for missing permissions.
const PERMISSION_DENIED: [&str; 2] = ["Permission denied", "Operation not permitted"];
/// Part of errors about the lock that all legacy programs share. They say nothing about tables.
const LOCK: &str = "xtables.lock";

/// Classifies the error of a [`probe`] or of a command that creates a chain by its exit `code` and its `stderr`. Only the text
/// distinguishes the cases; the programs print it in English only.
pub fn classify_error(code: Option<i32>, stderr: &str) -> CommandErrorKind {
    let mentions = |texts: &[&str]| texts.iter().any(|text| stderr.contains(text));
    if stderr.contains(LOCK) || !code.is_some_and(|code| KERNEL_EXIT_CODES.contains(&code)) {
        CommandErrorKind::Other
    } else if mentions(&PERMISSION_DENIED) {
        CommandErrorKind::PermissionDenied
    } else if mentions(&UNSUPPORTED) {
        CommandErrorKind::Unsupported
    } else {
        CommandErrorKind::Other
    }
}

impl Chain {
    /// The command that lists the rules of the chain, one per line, in command-line form; it exits with 1 when the chain does
    /// not exist.
    pub fn show(&self) -> Arguments {
        arguments(self.table, &["-S", self.name])
    }

    /// The commands after which the chain exists with its rule exactly once. `listed` is the output of [`Chain::show`], none when
    /// the chain does not exist.
    ///
    /// Level-triggered: after a kill between two commands, the next run plans the rest.
    pub fn plan(&self, listed: Option<&str>) -> Vec<Arguments> {
        let mut todo = Vec::new();
        if listed.is_none() && !self.is_builtin {
            todo.push(arguments(self.table, &["-N", self.name]));
        }
        let Some(rule) = self.rule else { return todo };
        let count = listed.unwrap_or_default().lines().filter(|line| self.is_rule(rule, line)).count();
        match count {
            0 => todo.push(self.change(rule, Change::Add)),
            // Two agents ran at once, or one was killed while its command waited for the lock.
            more => todo.extend((1..more).map(|_| self.change(rule, Change::Remove))),
        }
        todo
    }

    fn is_rule(&self, rule: Rule, line: &str) -> bool {
        match rule {
            Rule::Jump => line.trim_end() == format!("-A {} -j {FIREWALL}", self.name),
            // The programs print the matches in an order of their own.
            Rule::Drop => {
                DROP_RULE_PARTS.iter().all(|part| line.contains(part)) && line.trim_end().ends_with("-j DROP")
            }
        }
    }

    fn change(&self, rule: Rule, change: Change) -> Arguments {
        let verb = match (rule, change) {
            (_, Change::Remove) => "-D",
            (Rule::Jump, Change::Add) => "-I",
            (Rule::Drop, Change::Add) => "-A",
        };
        let mut all = arguments(self.table, &[verb, self.name]);
        match rule {
            Rule::Jump => all.extend(["-j", FIREWALL].map(str::to_owned)),
            Rule::Drop => {
                all.extend(["-m", "comment", "--comment", COMMENT].map(str::to_owned));
                all.extend(DROP.split(' ').map(str::to_owned));
            }
        }
        all
    }
}

#[derive(Debug, Clone, Copy)]
enum Change {
    Add,
    Remove,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const RULE: &str = "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet \
                        connections\" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";

    fn chain(family: Family, table: &str, name: &str) -> Chain {
        desired_chains(family).find(|chain| (chain.table, chain.name) == (table, name)).unwrap()
    }

    fn plan(chain: Chain, listed: Option<&str>) -> Vec<String> {
        chain.plan(listed).into_iter().map(|arguments| arguments.join(" ")).collect()
    }

    #[test]
    fn ipv4_has_the_firewall_and_both_families_have_hint_and_canaries() {
        let names = |family| -> Vec<String> {
            desired_chains(family).map(|chain| format!("{} {}", chain.table, chain.name)).collect()
        };
        let both = [
            "mangle KUBE-IPTABLES-HINT",
            "mangle KUBE-KUBELET-CANARY",
            "nat KUBE-KUBELET-CANARY",
            "filter KUBE-KUBELET-CANARY",
        ];
        assert_eq!(names(Family::V6), both);
        let mut all = vec!["filter KUBE-FIREWALL", "filter OUTPUT", "filter INPUT"];
        all.extend(both);
        assert_eq!(names(Family::V4), all);
        assert_eq!(Family::ALL.map(Family::program), ["iptables", "ip6tables"]);
    }

    #[test]
    fn missing_iptables_chains_are_created_and_existing_ones_left_alone() {
        for (family, table, name, listed, todo) in [
            (Family::V6, "mangle", HINT, None, &["-w 5 -t mangle -N KUBE-IPTABLES-HINT"][..]),
            (Family::V6, "mangle", HINT, Some("-N KUBE-IPTABLES-HINT\n"), &[]),
            (Family::V4, "nat", CANARY, None, &["-w 5 -t nat -N KUBE-KUBELET-CANARY"]),
            (
                Family::V4,
                "filter",
                FIREWALL,
                None,
                &[
                    "-w 5 -t filter -N KUBE-FIREWALL",
                    "-w 5 -t filter -A KUBE-FIREWALL -m comment --comment block incoming localnet connections -d 127.0.0.0/8 \
                     ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
                ],
            ),
            (
                Family::V4,
                "filter",
                "INPUT",
                Some("-P INPUT ACCEPT\n"),
                &["-w 5 -t filter -I INPUT -j KUBE-FIREWALL"],
            ),
            (
                Family::V4,
                "filter",
                "INPUT",
                Some("-P INPUT ACCEPT\n-A INPUT -p tcp -j KUBE-FIREWALL\n-A INPUT -j KUBE-FIREWALL-2\n"),
                &["-w 5 -t filter -I INPUT -j KUBE-FIREWALL"],
            ),
            (Family::V4, "filter", "OUTPUT", Some("-P OUTPUT ACCEPT\n-A OUTPUT -j KUBE-FIREWALL\n"), &[]),
            (Family::V4, "filter", "OUTPUT", None, &["-w 5 -t filter -I OUTPUT -j KUBE-FIREWALL"]),
        ] {
            assert_eq!(plan(chain(family, table, name), listed), todo, "{table} {name} {listed:?}");
        }
        let firewall = chain(Family::V4, "filter", FIREWALL);
        assert_eq!(plan(firewall, Some(&format!("-N KUBE-FIREWALL\n{RULE}\n"))), Vec::<String>::new());
        for other in ["-m mark --mark 0x8000 -j DROP", &format!("-m comment --comment \"{COMMENT}\" -j DROP")]
        {
            let todo = plan(firewall, Some(&format!("-N KUBE-FIREWALL\n-A KUBE-FIREWALL {other}\n")));
            assert_eq!(todo.len(), 1, "this is another rule: {other}");
            assert!(todo[0].contains("-A KUBE-FIREWALL"), "{todo:?}");
        }
    }

    #[test]
    fn duplicate_iptables_rules_are_removed() {
        let input = "-P INPUT ACCEPT\n-A INPUT -j KUBE-FIREWALL\n-A INPUT -j ACCEPT\n-A INPUT -j KUBE-FIREWALL\n\
                     -A INPUT -j KUBE-FIREWALL\n";
        let removal = "-w 5 -t filter -D INPUT -j KUBE-FIREWALL";
        assert_eq!(plan(chain(Family::V4, "filter", "INPUT"), Some(input)), [removal, removal]);
        let firewall = format!("-N KUBE-FIREWALL\n{RULE}\n{RULE}\n");
        let todo = plan(chain(Family::V4, "filter", FIREWALL), Some(&firewall));
        assert_eq!(todo.len(), 1);
        assert!(todo[0].starts_with("-w 5 -t filter -D KUBE-FIREWALL -m comment "), "{todo:?}");
    }

    #[test]
    fn iptables_show_and_probe_commands_only_list() {
        for family in Family::ALL {
            for chain in desired_chains(family) {
                assert_eq!(chain.show(), ["-w", "5", "-t", chain.table, "-S", chain.name]);
            }
        }
        assert_eq!(probe("nat"), ["-w", "5", "-t", "nat", "-S", "OUTPUT"]);
    }

    #[test]
    fn every_table_with_a_chain_is_probed() {
        for family in Family::ALL {
            let of_chains: BTreeSet<&str> = desired_chains(family).map(|chain| chain.table).collect();
            assert_eq!(of_chains, BTreeSet::from(TABLES));
        }
    }

    #[test]
    fn iptables_errors_are_unsupported_permission_denied_or_other() {
        use CommandErrorKind::{Other, PermissionDenied, Unsupported};
        for (code, stderr, expected) in [
            (
                3,
                "can't initialize ip6tables table `nat': Table does not exist (do you need to insmod?)",
                Unsupported,
            ),
            (
                3,
                "can't initialize ip6tables table `nat': Address family not supported by protocol",
                Unsupported,
            ),
            (3, "can't initialize iptables table `mangle': Protocol not available", Unsupported),
            (1, "Failed to initialize nft: Protocol not supported", Unsupported),
            (4, "Could not fetch rule set generation id: Invalid argument", Unsupported),
            (4, "CHAIN_ADD failed (No such file or directory): chain PREROUTING", Unsupported),
            (
                3,
                "can't initialize iptables table `mangle': Permission denied (you must be root)",
                PermissionDenied,
            ),
            (
                4,
                "Could not fetch rule set generation id: Permission denied (you must be root)",
                PermissionDenied,
            ),
            (1, "Failed to initialize nft: Operation not permitted", PermissionDenied),
            (4, "Fatal: can't open lock file /run/xtables.lock: No such file or directory", Other),
            (4, "Fatal: can't open lock file /run/xtables.lock: Permission denied", Other),
            (4, "Another app is currently holding the xtables lock; still 5s 0us time ahead", Other),
            (3, "can't initialize iptables table `nat': Cannot allocate memory", Other),
            (127, "libxtables.so.12: cannot open shared object file: No such file or directory", Other),
        ] {
            assert_eq!(classify_error(Some(code), stderr), expected, "{code} {stderr}");
        }
        assert_eq!(
            classify_error(None, "Protocol not available"),
            Other,
            "the program was killed by a signal"
        );
    }
}
