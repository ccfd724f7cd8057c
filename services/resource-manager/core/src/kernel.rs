//! Kernel tunables, and processes that the kernel's OOM killer has killed (runtime-and-resources.md §9, §12.8).

/// A kernel tunable with the value that pods need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunable {
    /// Its sysctl(8) name.
    pub name: &'static str,
    /// The expected value.
    pub expected: u64,
}

impl Tunable {
    /// Its file below `/proc/sys`.
    pub fn file(&self) -> String {
        self.name.replace('.', "/")
    }
}

/// The tunables that are checked and set at startup.
pub const TUNABLES: [Tunable; 6] = [
    Tunable { name: "vm.overcommit_memory", expected: 1 },
    Tunable { name: "vm.panic_on_oom", expected: 0 },
    Tunable { name: "kernel.panic", expected: 10 },
    Tunable { name: "kernel.panic_on_oops", expected: 1 },
    Tunable { name: "kernel.keys.root_maxkeys", expected: 1_000_000 },
    Tunable { name: "kernel.keys.root_maxbytes", expected: 25_000_000 },
];

/// What to do about the tunables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TunablePlan {
    /// Those to set.
    pub set: Vec<Tunable>,
    /// Tunables with another value that may not be set, each in the kubelet's words.
    pub violations: Vec<String>,
}

/// Compares the current values with the expected ones; `None` is a tunable that cannot be read, which is skipped. With
/// `protect` (`protectKernelDefaults`) nothing is set, and a different value is a violation.
pub fn plan_tunables(found: impl Fn(&Tunable) -> Option<i64>, protect: bool) -> TunablePlan {
    let mut plan = TunablePlan::default();
    for tunable in TUNABLES {
        let Some(value) = found(&tunable) else { continue };
        if u64::try_from(value) == Ok(tunable.expected) {
            continue;
        }
        if protect {
            let Tunable { name, expected } = tunable;
            plan.violations.push(format!(
                "invalid kernel flag: {}, expected value: {expected}, actual value: {value}",
                name.replace('.', "/")
            ));
        } else {
            plan.set.push(tunable);
        }
    }
    plan
}

/// A process that the kernel has killed because the machine was out of memory (system OOM).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// Its name.
    pub process: String,
    /// Its process id.
    pub pid: u32,
}

/// Parses the kernel's OOM killer messages, record by record.
#[derive(Debug, Default)]
pub struct OomParser {
    /// Whether the report that has begun is about the whole machine; none outside a report.
    report: Option<bool>,
}

impl OomParser {
    /// Takes a record of `/dev/kmsg`; returns the victim when it ends a report about the whole machine. Victims of a cgroup's
    /// limit are reported by the container runtime.
    pub fn take(&mut self, record: &str) -> Option<Victim> {
        let text = record.split_once(';').map_or(record, |(_, text)| text);
        let text = text.lines().next().unwrap_or_default();
        if text.contains("invoked oom-killer") {
            self.report = Some(true);
        } else if let Some(line) = text.strip_prefix("oom-kill:") {
            let field =
                |name: &str| line.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            let whole = field("oom_memcg").is_none() || field("task_memcg") == Some("/");
            self.report = Some(whole);
        } else if let Some((task, _)) = killed_for_limit(text) {
            self.report = Some(task == "/");
        } else if let Some(victim) = victim(text) {
            return self.report.take().filter(|whole| *whole).map(|_| victim);
        }
        None
    }
}

/// `Task in /a killed as a result of limit of /b`, as kernels before 5.0 say.
fn killed_for_limit(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix("Task in ")?.split_once(" killed as a result of limit of ")
}

/// `Out of memory: Killed process 12 (name) total-vm:…`, in all its forms.
fn victim(text: &str) -> Option<Victim> {
    let (_, rest) = text.split_once("Killed process ").or_else(|| text.split_once("Kill process "))?;
    let (pid, rest) = rest.split_once(' ')?;
    // A name may contain brackets; the text after it does not.
    let name = rest.strip_prefix('(')?;
    let end = name.find(") total-vm").or_else(|| name.find("), ")).or_else(|| name.find(") score"))?;
    Some(Victim { process: name[..end].to_owned(), pid: pid.trim_end_matches(',').parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_tunables_that_differ_are_set_or_reported_when_protected() {
        let found = |tunable: &Tunable| match tunable.name {
            "vm.overcommit_memory" => Some(0),
            "kernel.panic" => Some(-1),
            "kernel.keys.root_maxkeys" => None,
            _ => i64::try_from(tunable.expected).ok(),
        };
        let plan = plan_tunables(found, false);
        let names: Vec<&str> = plan.set.iter().map(|t| t.name).collect();
        assert_eq!((names, plan.violations.len()), (vec!["vm.overcommit_memory", "kernel.panic"], 0));
        let plan = plan_tunables(found, true);
        assert!(plan.set.is_empty());
        assert_eq!(
            plan.violations,
            [
                "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0",
                "invalid kernel flag: kernel/panic, expected value: 10, actual value: -1"
            ]
        );
        assert_eq!(TUNABLES[4].file(), "kernel/keys/root_maxkeys");
    }

    fn victims(records: &[&str]) -> Vec<(String, u32)> {
        let mut lines = OomParser::default();
        records.iter().filter_map(|record| lines.take(record)).map(|v| (v.process, v.pid)).collect()
    }

    #[test]
    fn system_oom_victims_are_reported() {
        let found = victims(&[
            "4,100,5,-;stress invoked oom-killer: gfp_mask=0x140dca, order=0, oom_score_adj=0",
            "6,101,5,-;Mem-Info:",
            "6,102,5,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=stress,pid=4711,uid=0",
            "3,103,5,-;Out of memory: Killed process 4711 (stress (a)) total-vm:100kB, anon-rss:1kB\n SUBSYSTEM=x",
            "3,104,5,-;Killed process 4712 (late) total-vm:100kB",
        ]);
        assert_eq!(found, [("stress (a)".to_owned(), 4711)]);
    }

    #[test]
    fn cgroup_oom_victims_are_left_to_the_runtime() {
        let found = victims(&[
            "4,1,5,-;stress invoked oom-killer: gfp_mask=0x140dca",
            "6,2,5,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/kubepods/podu,task_memcg=/kubepods/podu/c,task=stress,pid=5,uid=0",
            "3,3,5,-;Memory cgroup out of memory: Killed process 5 (stress) total-vm:1kB",
            "4,4,5,-;stress invoked oom-killer: gfp_mask=0x140dca",
            "6,5,5,-;Task in /kubepods/podu killed as a result of limit of /kubepods",
            "3,6,5,-;Killed process 6 (stress) total-vm:1kB",
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn oom_messages_of_older_kernels_are_parsed() {
        let found = victims(&[
            "4,1,5,-;x invoked oom-killer: gfp_mask=0x1",
            "6,2,5,-;Task in / killed as a result of limit of /",
            "3,3,5,-;Killed process 7, (init) total-vm:1kB",
            "nothing of interest",
            "",
        ]);
        assert_eq!(found, [("init".to_owned(), 7)]);
    }
}
