//! Each test has a network namespace of its own: that of its thread, with which it goes whatever becomes of the test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use keelson_config::{Config, ServiceName};
use keelson_resource_manager_core::iptables::{FIREWALL, HINT};
use rustix::thread::{CapabilitySet, UnshareFlags, remove_capability_from_bounding_set, unshare_unsafe};

use super::*;

/// Programs with this suffix, in a network of this thread alone.
fn alone(suffix: &'static str) -> Keeper {
    // SAFETY: of what threads of a process share only the network is no longer shared by this one.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run this as root: it makes a network namespace");
    keeper(Programs { suffix, ..Programs::of_this_machine() })
}

fn keeper(programs: Programs) -> Keeper {
    let ctx = Context::detached(ServiceName::ResourceManager, Config::default());
    let handle = ctx.progress.register("iptables");
    Keeper::new(ctx, handle, programs)
}

impl Keeper {
    async fn say(&self, family: Family, arguments: &[&str]) -> String {
        let program = self.programs.find(family).expect("install it with: apt-get install -y iptables");
        let arguments: Arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.programs.run(&program, &arguments).await.unwrap()
    }

    /// All rules of a table, without the kernel's own chains.
    async fn table(&self, family: Family, table: &str) -> Vec<String> {
        let text = self.say(family, &["-w", "5", "-t", table, "-S"]).await;
        text.lines().filter(|line| !line.starts_with("-P")).map(str::to_owned).collect()
    }

    async fn all(&self, family: Family) -> Vec<Vec<String>> {
        let mut all = Vec::new();
        for table in ["mangle", "nat", "filter"] {
            all.push(self.table(family, table).await);
        }
        all
    }

    fn condition(&self) -> Option<String> {
        let report = self.ctx.progress.report("0");
        let condition = report.conditions.into_iter().find(|c| c.name == CONDITION)?;
        (!condition.ok).then_some(condition.message)
    }

    /// The chains are made once, left alone when they are there, and come back when somebody has flushed them.
    async fn keeps_its_chains(&mut self) {
        assert!(self.pass().await, "{:?}", self.condition());
        assert_eq!(self.states, [State::Kept, State::Kept]);
        let v6 = [
            vec![format!("-N {HINT}"), format!("-N {CANARY}")],
            vec![format!("-N {CANARY}")],
            vec![format!("-N {CANARY}")],
        ];
        let sorted = |mut all: Vec<Vec<String>>| {
            all.iter_mut().for_each(|table| table.sort());
            all
        };
        assert_eq!(sorted(self.all(Family::V6).await), sorted(v6.to_vec()));
        let first = self.all(Family::V4).await;
        let [mangle, nat, filter] = &first[..] else { panic!("{first:?}") };
        assert_eq!((mangle.len(), nat.len()), (2, 1), "{first:?}");
        let rules: Vec<&String> = filter.iter().filter(|line| line.starts_with("-A")).collect();
        assert_eq!(rules.len(), 3, "{filter:?}");
        for jump in ["-A INPUT -j KUBE-FIREWALL", "-A OUTPUT -j KUBE-FIREWALL"] {
            assert!(rules.iter().any(|line| *line == jump), "{filter:?}");
        }

        // A service that was started anew knows nothing of what it has made.
        self.states = [State::Unknown, State::Unknown];
        assert!(self.pass().await && self.pass().await);
        assert_eq!(self.all(Family::V4).await, first, "nothing is there twice");

        for family in Family::ALL {
            for table in ["mangle", "nat", "filter"] {
                self.say(family, &["-w", "5", "-t", table, "-F"]).await;
                self.say(family, &["-w", "5", "-t", table, "-X"]).await;
                assert!(self.table(family, table).await.is_empty());
            }
        }
        assert!(self.pass().await, "{:?}", self.condition());
        assert_eq!(sorted(self.all(Family::V4).await), sorted(first));
        assert_eq!(sorted(self.all(Family::V6).await), sorted(v6.to_vec()));
    }
}

#[tokio::test]
async fn flushed_chains_of_this_machines_iptables_come_back() {
    alone("").keeps_its_chains().await;
}

#[tokio::test]
async fn flushed_chains_of_nft_come_back() {
    alone("-nft").keeps_its_chains().await;
}

#[tokio::test]
async fn flushed_chains_of_legacy_iptables_come_back() {
    alone("-legacy").keeps_its_chains().await;
}

#[tokio::test]
async fn a_firewall_that_is_there_twice_is_there_once_afterwards() {
    let mut keeper = alone("");
    assert!(keeper.pass().await);
    keeper.say(Family::V4, &["-I", "INPUT", "-j", FIREWALL]).await;
    let firewall = wanted(Family::V4).find(|chain| chain.name == FIREWALL).unwrap();
    let rule = firewall.plan(Some("-N KUBE-FIREWALL\n")).remove(0);
    keeper.say(Family::V4, &rule.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let twice = keeper.table(Family::V4, "filter").await;
    assert_eq!(twice.iter().filter(|line| line.starts_with("-A INPUT")).count(), 2, "{twice:?}");
    assert_eq!(twice.iter().filter(|line| line.ends_with("-j DROP")).count(), 2, "{twice:?}");
    keeper.states = [State::Unknown, State::Unknown];
    assert!(keeper.pass().await, "{:?}", keeper.condition());
    let once = keeper.table(Family::V4, "filter").await;
    assert_eq!(once.iter().filter(|line| line.starts_with("-A INPUT")).count(), 1, "{once:?}");
    assert_eq!(once.iter().filter(|line| line.ends_with("-j DROP")).count(), 1, "{once:?}");
}

#[tokio::test]
async fn a_machine_without_iptables_is_no_failure() {
    let none = tempfile::tempdir().unwrap();
    let folders = vec![none.path().to_owned()];
    let mut keeper = keeper(Programs { folders, suffix: "", limit: LIMIT });
    assert!(keeper.pass().await);
    assert_eq!(keeper.condition(), None);
    let absent = |program| State::Absent(format!("there is no {program} on this machine"));
    assert_eq!(keeper.states, [absent("iptables"), absent("ip6tables")]);
}

/// Programs that do what the scripts say.
fn scripted(v4: &str, v6: &str) -> (tempfile::TempDir, Keeper) {
    let dir = tempfile::tempdir().unwrap();
    for (name, script) in [("iptables", v4), ("ip6tables", v6)] {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let programs =
        Programs { folders: vec![dir.path().to_owned()], suffix: "", limit: Duration::from_secs(2) };
    let keeper = keeper(programs);
    (dir, keeper)
}

#[tokio::test]
async fn a_family_that_the_kernel_lacks_is_told_once_and_holds_up_nothing() {
    const LACKS: &str = "echo \"can't initialize ip6tables table: Address family not supported\" >&2; exit 3";
    let (_dir, mut keeper) = scripted("exit 0", LACKS);
    assert!(keeper.pass().await, "{:?}", keeper.condition());
    assert_eq!(keeper.states[0], State::Kept);
    let State::Absent(why) = &keeper.states[1] else { panic!("{:?}", keeper.states) };
    assert!(why.contains("Address family not supported"), "{why}");
    assert_eq!(keeper.condition(), None);
}

#[tokio::test]
async fn a_table_that_the_kernel_lacks_is_told_once_and_the_others_are_kept() {
    const LEGACY: &str = "case \"$*\" in *nat*) echo \"can't initialize ip6tables table 'nat': Table does not exist\" \
                          >&2; exit 3;; *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    // nft shows any table, and lacks it when a chain is made in it.
    const NFT: &str = "case \"$*\" in *'nat -N'*) echo 'CHAIN_ADD failed (No such file or directory): chain OUTPUT' \
                       >&2; exit 4;; *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    for (script, said) in [(LEGACY, "Table does not exist"), (NFT, "CHAIN_ADD failed")] {
        let (dir, mut keeper) = scripted("exit 0", &format!("echo \"$*\" >> \"$0.log\"; {script}"));
        let done = || fs::read_to_string(dir.path().join("ip6tables.log")).unwrap();
        assert!(keeper.pass().await, "{:?}", keeper.condition());
        let State::Partly(why) = keeper.states[1].clone() else { panic!("{:?}", keeper.states) };
        assert!(why.contains(said) && why.contains("-t nat "), "{why}");
        for chain in ["mangle -N KUBE-IPTABLES-HINT", "mangle -N KUBE-KUBELET-", "filter -N KUBE-KUBELET-"] {
            assert!(done().contains(chain), "{chain}: {}", done());
        }
        assert!(keeper.pass().await);
        assert_eq!(keeper.states[1], State::Partly(why), "nothing new is told");
        assert_eq!(keeper.condition(), None);
    }
}

#[tokio::test]
async fn a_rule_that_the_kernel_cannot_have_is_a_failure_and_no_lacking_table() {
    let fails = "case \"$*\" in *-A*) echo 'RULE_APPEND failed (No such file or directory)' >&2; exit 4;; \
                 *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    let (_dir, mut keeper) = scripted(fails, "exit 0");
    assert!(!keeper.pass().await);
    let told = keeper.condition().unwrap();
    assert!(told.contains("RULE_APPEND failed"), "{told}");
}

#[tokio::test]
async fn what_one_may_not_is_a_failure_and_named_with_what_is_needed() {
    for (code, said) in [
        (3, "can't initialize iptables table 'mangle': Permission denied (you must be root)"),
        (4, "Could not fetch rule set generation id: Permission denied (you must be root)"),
    ] {
        let (_dir, mut keeper) = scripted(&format!("echo \"{said}\" >&2; exit {code}"), "exit 0");
        assert!(!keeper.pass().await);
        assert_eq!(keeper.states[1], State::Kept);
        let told = keeper.condition().unwrap();
        assert!(told.contains(said), "{told}");
        assert!(told.ends_with("must keep CAP_NET_ADMIN, and CAP_NET_RAW for the legacy iptables"), "{told}");
    }
}

#[tokio::test]
async fn legacy_iptables_without_raw_sockets_is_a_failure() {
    let mut keeper = alone("-legacy");
    // Of this thread alone, which ends with the test; programs that it starts have no more than this.
    remove_capability_from_bounding_set(CapabilitySet::NET_RAW).unwrap();
    assert!(!keeper.pass().await);
    let told = keeper.condition().unwrap();
    assert!(told.contains("iptables-legacy") && told.contains("CAP_NET_RAW"), "{told}");
}

#[tokio::test]
async fn one_that_hangs_and_one_that_fails_are_named_and_tried_again() {
    let fails = "case \"$*\" in *-N*) echo 'no room' >&2; exit 4;; *OUTPUT*) exit 0;; *) exit 1;; esac";
    let (dir, mut keeper) = scripted("exec sleep 600", fails);
    assert!(!keeper.pass().await);
    let told = keeper.condition().unwrap();
    assert!(told.contains("/iptables -w 5 -t mangle -S OUTPUT` has not ended within 2s"), "{told}");
    assert!(told.contains("KUBE-IPTABLES-HINT` has ended with exit status: 4: no room"), "{told}");
    for name in ["iptables", "ip6tables"] {
        fs::write(dir.path().join(name), "#!/bin/sh\nexit 0\n").unwrap();
    }
    assert!(keeper.pass().await);
    assert_eq!(keeper.condition(), None);
}

#[tokio::test(start_paused = true)]
async fn whoever_does_not_manage_the_host_keeps_no_chains() {
    for (manage_host, iptables_util_chains) in [(false, true), (true, false)] {
        let config = Config { manage_host, iptables_util_chains, ..Config::default() };
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        keep(&ctx);
        let report = ctx.progress.report("0");
        assert!(report.loops.iter().all(|turning| turning.name != "iptables"), "{manage_host}");
    }
}
