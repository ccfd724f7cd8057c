//! Each test has its own network namespace: that of its thread, which disappears with the thread.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use keelson_config::{Config, ServiceName};
use keelson_resource_manager_core::iptables::{FIREWALL, HINT};
use rustix::thread::{CapabilitySet, UnshareFlags, remove_capability_from_bounding_set, unshare_unsafe};

use super::*;

/// Programs with this suffix, in a network namespace of this thread.
fn in_new_network(suffix: &'static str) -> ChainKeeper {
    // SAFETY: this thread stops sharing only its network namespace with the other threads.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run this as root: it makes a network namespace");
    keeper(Programs { suffix, ..Programs::of_this_machine() })
}

fn keeper(programs: Programs) -> ChainKeeper {
    let ctx = Context::detached(ServiceName::ResourceManager, Config::default());
    let handle = ctx.progress.register("iptables");
    ChainKeeper::new(ctx, handle, programs)
}

impl ChainKeeper {
    async fn run_program(&self, family: Family, arguments: &[&str]) -> String {
        let program = self.programs.find(family).expect("install it with: apt-get install -y iptables");
        let arguments: Arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.programs.run(&program, &arguments).await.unwrap()
    }

    /// All rules of a table, without the kernel's own chains.
    async fn table(&self, family: Family, table: &str) -> Vec<String> {
        let text = self.run_program(family, &["-w", "5", "-t", table, "-S"]).await;
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

    /// The chains are created once, left alone when they exist, and created again after a flush.
    async fn chains_are_kept(&mut self) {
        assert!(self.reconcile().await, "{:?}", self.condition());
        assert_eq!(self.states, [FamilyState::Complete, FamilyState::Complete]);
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

        // A restarted service does not know what it has created.
        self.states = [FamilyState::Unknown, FamilyState::Unknown];
        assert!(self.reconcile().await && self.reconcile().await);
        assert_eq!(self.all(Family::V4).await, first, "there are no duplicates");

        for family in Family::ALL {
            for table in ["mangle", "nat", "filter"] {
                self.run_program(family, &["-w", "5", "-t", table, "-F"]).await;
                self.run_program(family, &["-w", "5", "-t", table, "-X"]).await;
                assert!(self.table(family, table).await.is_empty());
            }
        }
        assert!(self.reconcile().await, "{:?}", self.condition());
        assert_eq!(sorted(self.all(Family::V4).await), sorted(first));
        assert_eq!(sorted(self.all(Family::V6).await), sorted(v6.to_vec()));
    }
}

#[tokio::test]
async fn flushed_chains_of_this_machines_iptables_come_back() {
    in_new_network("").chains_are_kept().await;
}

#[tokio::test]
async fn flushed_chains_of_nft_come_back() {
    in_new_network("-nft").chains_are_kept().await;
}

#[tokio::test]
async fn flushed_chains_of_legacy_iptables_come_back() {
    in_new_network("-legacy").chains_are_kept().await;
}

#[tokio::test]
async fn duplicate_firewall_rules_are_reduced_to_one() {
    let mut keeper = in_new_network("");
    assert!(keeper.reconcile().await);
    keeper.run_program(Family::V4, &["-I", "INPUT", "-j", FIREWALL]).await;
    let firewall = desired_chains(Family::V4).find(|chain| chain.name == FIREWALL).unwrap();
    let rule = firewall.plan(Some("-N KUBE-FIREWALL\n")).remove(0);
    keeper.run_program(Family::V4, &rule.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let twice = keeper.table(Family::V4, "filter").await;
    assert_eq!(twice.iter().filter(|line| line.starts_with("-A INPUT")).count(), 2, "{twice:?}");
    assert_eq!(twice.iter().filter(|line| line.ends_with("-j DROP")).count(), 2, "{twice:?}");
    keeper.states = [FamilyState::Unknown, FamilyState::Unknown];
    assert!(keeper.reconcile().await, "{:?}", keeper.condition());
    let once = keeper.table(Family::V4, "filter").await;
    assert_eq!(once.iter().filter(|line| line.starts_with("-A INPUT")).count(), 1, "{once:?}");
    assert_eq!(once.iter().filter(|line| line.ends_with("-j DROP")).count(), 1, "{once:?}");
}

#[tokio::test]
async fn a_machine_without_iptables_is_not_an_error() {
    let none = tempfile::tempdir().unwrap();
    let dirs = vec![none.path().to_owned()];
    let mut keeper = keeper(Programs { dirs, suffix: "", limit: LIMIT });
    assert!(keeper.reconcile().await);
    assert_eq!(keeper.condition(), None);
    let absent = |program| FamilyState::Unavailable(format!("this machine has no {program}"));
    assert_eq!(keeper.states, [absent("iptables"), absent("ip6tables")]);
}

/// Programs that run these scripts.
fn scripted(v4: &str, v6: &str) -> (tempfile::TempDir, ChainKeeper) {
    let dir = tempfile::tempdir().unwrap();
    for (name, script) in [("iptables", v4), ("ip6tables", v6)] {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let programs = Programs { dirs: vec![dir.path().to_owned()], suffix: "", limit: Duration::from_secs(2) };
    let keeper = keeper(programs);
    (dir, keeper)
}

#[tokio::test]
async fn an_unsupported_address_family_is_reported_once_and_is_not_an_error() {
    const LACKS: &str = "echo \"can't initialize ip6tables table: Address family not supported\" >&2; exit 3";
    let (_dir, mut keeper) = scripted("exit 0", LACKS);
    assert!(keeper.reconcile().await, "{:?}", keeper.condition());
    assert_eq!(keeper.states[0], FamilyState::Complete);
    let FamilyState::Unavailable(why) = &keeper.states[1] else { panic!("{:?}", keeper.states) };
    assert!(why.contains("Address family not supported"), "{why}");
    assert_eq!(keeper.condition(), None);
}

#[tokio::test]
async fn an_unsupported_iptables_table_is_reported_once_and_the_others_are_kept() {
    const LEGACY: &str = "case \"$*\" in *nat*) echo \"can't initialize ip6tables table 'nat': Table does not exist\" \
                          >&2; exit 3;; *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    // nft lists any table, and fails when a chain is created in a table that the kernel lacks.
    const NFT: &str = "case \"$*\" in *'nat -N'*) echo 'CHAIN_ADD failed (No such file or directory): chain OUTPUT' \
                       >&2; exit 4;; *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    for (script, stderr) in [(LEGACY, "Table does not exist"), (NFT, "CHAIN_ADD failed")] {
        let (dir, mut keeper) = scripted("exit 0", &format!("echo \"$*\" >> \"$0.log\"; {script}"));
        let done = || fs::read_to_string(dir.path().join("ip6tables.log")).unwrap();
        assert!(keeper.reconcile().await, "{:?}", keeper.condition());
        let FamilyState::Partial(why) = keeper.states[1].clone() else { panic!("{:?}", keeper.states) };
        assert!(why.contains(stderr) && why.contains("-t nat "), "{why}");
        for chain in ["mangle -N KUBE-IPTABLES-HINT", "mangle -N KUBE-KUBELET-", "filter -N KUBE-KUBELET-"] {
            assert!(done().contains(chain), "{chain}: {}", done());
        }
        assert!(keeper.reconcile().await);
        assert_eq!(keeper.states[1], FamilyState::Partial(why), "nothing new is reported");
        assert_eq!(keeper.condition(), None);
    }
}

#[tokio::test]
async fn a_rule_that_cannot_be_added_is_an_error_and_not_an_unsupported_table() {
    let fails = "case \"$*\" in *-A*) echo 'RULE_APPEND failed (No such file or directory)' >&2; exit 4;; \
                 *OUTPUT*) exit 0;; *-S*) exit 1;; esac";
    let (_dir, mut keeper) = scripted(fails, "exit 0");
    assert!(!keeper.reconcile().await);
    let message = keeper.condition().unwrap();
    assert!(message.contains("RULE_APPEND failed"), "{message}");
}

#[tokio::test]
async fn iptables_permission_errors_name_the_missing_capabilities() {
    for (code, stderr) in [
        (3, "can't initialize iptables table 'mangle': Permission denied (you must be root)"),
        (4, "Could not fetch rule set generation id: Permission denied (you must be root)"),
    ] {
        let (_dir, mut keeper) = scripted(&format!("echo \"{stderr}\" >&2; exit {code}"), "exit 0");
        assert!(!keeper.reconcile().await);
        assert_eq!(keeper.states[1], FamilyState::Complete);
        let message = keeper.condition().unwrap();
        assert!(message.contains(stderr), "{message}");
        assert!(
            message.ends_with("must keep CAP_NET_ADMIN, and CAP_NET_RAW for the legacy iptables"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn legacy_iptables_without_cap_net_raw_is_an_error() {
    let mut keeper = in_new_network("-legacy");
    // For this thread only, which ends with the test; programs that it starts inherit the bounding set.
    remove_capability_from_bounding_set(CapabilitySet::NET_RAW).unwrap();
    assert!(!keeper.reconcile().await);
    let message = keeper.condition().unwrap();
    assert!(message.contains("iptables-legacy") && message.contains("CAP_NET_RAW"), "{message}");
}

#[tokio::test]
async fn hanging_and_failing_iptables_are_reported_and_retried() {
    let fails = "case \"$*\" in *-N*) echo 'no room' >&2; exit 4;; *OUTPUT*) exit 0;; *) exit 1;; esac";
    let (dir, mut keeper) = scripted("exec sleep 600", fails);
    assert!(!keeper.reconcile().await);
    let message = keeper.condition().unwrap();
    assert!(message.contains("/iptables -w 5 -t mangle -S OUTPUT` has not ended within 2s"), "{message}");
    assert!(message.contains("KUBE-IPTABLES-HINT` failed with exit status: 4: no room"), "{message}");
    for name in ["iptables", "ip6tables"] {
        fs::write(dir.path().join(name), "#!/bin/sh\nexit 0\n").unwrap();
    }
    assert!(keeper.reconcile().await);
    assert_eq!(keeper.condition(), None);
}

#[tokio::test(start_paused = true)]
async fn iptables_chains_are_kept_only_when_managing_the_host() {
    for (manage_host, iptables_util_chains) in [(false, true), (true, false)] {
        let config = Config { manage_host, iptables_util_chains, ..Config::default() };
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        start(&ctx);
        let report = ctx.progress.report("0");
        assert!(report.loops.iter().all(|running| running.name != "iptables"), "{manage_host}");
    }
}
