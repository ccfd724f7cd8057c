//! Which chains the agent keeps in iptables, and what is missing of them (node-and-api.md §13).

/// The chain by which others find out which of two iptables, legacy or nft, this machine uses.
pub const HINT: &str = "KUBE-IPTABLES-HINT";
/// The chain that turns away what comes to the loopback network from elsewhere.
pub const FIREWALL: &str = "KUBE-FIREWALL";
/// The chain that is gone when somebody has flushed all.
pub const CANARY: &str = "KUBE-KUBELET-CANARY";

/// The comment of the rule in [`FIREWALL`].
const COMMENT: &str = "block incoming localnet connections";
/// Packets to the loopback network that do not come from it and that no connection of this machine has asked for.
const DROP: &str =
    "-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";
/// What the rule has in it when it is shown.
const SHOWN: [&str; 4] =
    [COMMENT, "-d 127.0.0.0/8", "! -s 127.0.0.0/8", "! --ctstate RELATED,ESTABLISHED,DNAT"];
/// Seconds for which a command waits for another one that changes the same (`-w`).
const WAIT: &str = "5";

/// An address family, of which each has tables of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `iptables`.
    V4,
    /// `ip6tables`.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The program that shows and changes its tables.
    pub const fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }
}

/// A rule that is wanted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The one that drops.
    Drop,
    /// A jump to [`FIREWALL`].
    Jump,
}

/// A chain, with the rule that is wanted in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Its table.
    pub table: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Whether it is the kernel's own and always there.
    pub is_builtin: bool,
    /// What must stand in it.
    pub rule: Option<Rule>,
}

const fn own(table: &'static str, name: &'static str) -> Chain {
    Chain { table, name, is_builtin: false, rule: None }
}

const fn builtin(name: &'static str) -> Chain {
    Chain { table: "filter", name, is_builtin: true, rule: Some(Rule::Jump) }
}

/// The canaries come last: where they are, all before them was made.
const BOTH: [Chain; 4] =
    [own("mangle", HINT), own("mangle", CANARY), own("nat", CANARY), own("filter", CANARY)];
const V4_ALONE: [Chain; 3] = [
    Chain { table: "filter", name: FIREWALL, is_builtin: false, rule: Some(Rule::Drop) },
    builtin("OUTPUT"),
    builtin("INPUT"),
];

/// What is wanted in a family, in the order in which it is made.
pub fn wanted(family: Family) -> impl Iterator<Item = Chain> {
    let firewall: &[Chain] = match family {
        Family::V4 => &V4_ALONE,
        Family::V6 => &[],
    };
    firewall.iter().chain(&BOTH).copied()
}

/// The tables in which something is wanted.
pub const TABLES: [&str; 3] = ["mangle", "nat", "filter"];

/// Arguments of the program.
pub type Arguments = Vec<String>;

fn arguments(table: &str, rest: &[&str]) -> Arguments {
    ["-w", WAIT, "-t", table].iter().chain(rest).map(|argument| (*argument).to_owned()).collect()
}

/// What shows whether a table can be used at all: it fails where the kernel has none, or without the right to see it.
/// The chain is one that each of [`TABLES`] has.
pub fn probe(table: &str) -> Arguments {
    arguments(table, &["-S", "OUTPUT"])
}

/// What a program has failed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The kernel has no such table in this family, or no tables at all.
    Lacking,
    /// This process may not.
    Forbidden,
    /// Something else.
    Other,
}

/// Codes that both kinds of programs end with when the kernel has not done what they were to do.
const OF_KERNEL: [i32; 3] = [1, 3, 4];
/// The kernel's words for what it has not, as the programs pass them on.
const LACKING: [&str; 5] =
    ["does not exist", "No such file or directory", "not supported", "not available", "Invalid argument"];
/// Its words for what one may not.
const FORBIDDEN: [&str; 2] = ["Permission denied", "Operation not permitted"];
/// What is said of the lock that all legacy programs share: nothing about tables, whatever the words are.
const LOCK: &str = "xtables.lock";

/// What a [`probe`], or what was to make a chain, has failed for: `code` is what the program has ended with, and `said` is
/// what it has printed. There is nothing but words to tell it by, and the programs have them in one language alone.
pub fn failure(code: Option<i32>, said: &str) -> Failure {
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    if said.contains(LOCK) || !code.is_some_and(|code| OF_KERNEL.contains(&code)) {
        Failure::Other
    } else if says(&FORBIDDEN) {
        Failure::Forbidden
    } else if says(&LACKING) {
        Failure::Lacking
    } else {
        Failure::Other
    }
}

impl Chain {
    /// What shows the chain: rules as the command line would have them, a line each; it ends with 1 when there is no such
    /// chain.
    pub fn show(&self) -> Arguments {
        arguments(self.table, &["-S", self.name])
    }

    /// What is to be done so that the chain is there with its rule in it once. `seen` is what [`Chain::show`] has told,
    /// none when there is no such chain.
    ///
    /// Depends only on the arguments: who was killed between two commands goes on with the second.
    pub fn plan(&self, seen: Option<&str>) -> Vec<Arguments> {
        let mut todo = Vec::new();
        if seen.is_none() && !self.is_builtin {
            todo.push(arguments(self.table, &["-N", self.name]));
        }
        let Some(rule) = self.rule else { return todo };
        let count = seen.unwrap_or_default().lines().filter(|line| self.is(rule, line)).count();
        match count {
            0 => todo.push(self.change(rule, Change::Add)),
            // Two agents that ran at once, or one that was killed while its command still waited.
            more => todo.extend((1..more).map(|_| self.change(rule, Change::Remove))),
        }
        todo
    }

    fn is(&self, rule: Rule, line: &str) -> bool {
        match rule {
            Rule::Jump => line.trim_end() == format!("-A {} -j {FIREWALL}", self.name),
            // Programs show what is matched in an order of their own.
            Rule::Drop => {
                SHOWN.iter().all(|part| line.contains(part)) && line.trim_end().ends_with("-j DROP")
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
        wanted(family).find(|chain| (chain.table, chain.name) == (table, name)).unwrap()
    }

    fn plan(chain: Chain, seen: Option<&str>) -> Vec<String> {
        chain.plan(seen).into_iter().map(|arguments| arguments.join(" ")).collect()
    }

    #[test]
    fn each_family_has_the_hint_and_canaries_and_the_fourth_version_the_firewall_besides() {
        let names = |family| -> Vec<String> {
            wanted(family).map(|chain| format!("{} {}", chain.table, chain.name)).collect()
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
    fn what_is_missing_is_made_and_what_is_there_is_left_alone() {
        for (family, table, name, seen, todo) in [
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
            assert_eq!(plan(chain(family, table, name), seen), todo, "{table} {name} {seen:?}");
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
    fn what_is_there_more_than_once_is_removed_but_for_one() {
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
    fn what_is_shown_changes_nothing() {
        for family in Family::ALL {
            for chain in wanted(family) {
                assert_eq!(chain.show(), ["-w", "5", "-t", chain.table, "-S", chain.name]);
            }
        }
        assert_eq!(probe("nat"), ["-w", "5", "-t", "nat", "-S", "OUTPUT"]);
    }

    #[test]
    fn each_table_with_a_chain_is_one_that_is_looked_at() {
        for family in Family::ALL {
            let of_chains: BTreeSet<&str> = wanted(family).map(|chain| chain.table).collect();
            assert_eq!(of_chains, BTreeSet::from(TABLES));
        }
    }

    #[test]
    fn what_the_kernel_lacks_is_told_from_what_one_may_not_and_from_all_else() {
        use Failure::{Forbidden, Lacking, Other};
        for (code, said, expected) in [
            (
                3,
                "can't initialize ip6tables table `nat': Table does not exist (do you need to insmod?)",
                Lacking,
            ),
            (3, "can't initialize ip6tables table `nat': Address family not supported by protocol", Lacking),
            (3, "can't initialize iptables table `mangle': Protocol not available", Lacking),
            (1, "Failed to initialize nft: Protocol not supported", Lacking),
            (4, "Could not fetch rule set generation id: Invalid argument", Lacking),
            (4, "CHAIN_ADD failed (No such file or directory): chain PREROUTING", Lacking),
            (3, "can't initialize iptables table `mangle': Permission denied (you must be root)", Forbidden),
            (4, "Could not fetch rule set generation id: Permission denied (you must be root)", Forbidden),
            (1, "Failed to initialize nft: Operation not permitted", Forbidden),
            (4, "Fatal: can't open lock file /run/xtables.lock: No such file or directory", Other),
            (4, "Fatal: can't open lock file /run/xtables.lock: Permission denied", Other),
            (4, "Another app is currently holding the xtables lock; still 5s 0us time ahead", Other),
            (3, "can't initialize iptables table `nat': Cannot allocate memory", Other),
            (127, "libxtables.so.12: cannot open shared object file: No such file or directory", Other),
        ] {
            assert_eq!(failure(Some(code), said), expected, "{code} {said}");
        }
        assert_eq!(failure(None, "Protocol not available"), Other, "it was ended by a signal");
    }
}
