//! A service that rests keeps no memory that a burst of work, or its start, has needed.

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// So much work, in microseconds of CPU time, makes it worth while to unmap the code that has done it: a service that
/// rests takes minutes for it.
const WORK_MICROS: u64 = 50_000;

/// A part of this process's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: usize,
    len: usize,
}

/// Gives pages back: those in the allocator's free lists and, after some work, the mappings of the program's own code.
///
/// What runs on is mapped again as it is met, sixteen pages at a time and without a read: the file stays in the page
/// cache. What only the start, or that work, has run stays away, and is the first that the kernel drops when memory is
/// short; mapped code it keeps for long (`VM_EXEC` in its reclaim). A breakpoint that somebody has set from outside is
/// lost with it.
pub(crate) fn give_back() {
    /// The CPU time up to the last unmapping.
    static UNMAPPED_AT: AtomicU64 = AtomicU64::new(0);
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes no pointer and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
    let used = cpu_micros();
    if used.saturating_sub(UNMAPPED_AT.load(Ordering::Relaxed)) >= WORK_MICROS {
        UNMAPPED_AT.store(used, Ordering::Relaxed);
        unmap_code();
    }
}

/// Microseconds of CPU time of this process so far.
fn cpu_micros() -> u64 {
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is that of a timespec that outlives the call (clock_gettime(3)).
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut spent) };
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    if result == 0 { part(spent.tv_sec) * 1_000_000 + part(spent.tv_nsec) / 1000 } else { 0 }
}

fn unmap_code() {
    if let Some(code) = code() {
        // SAFETY: the range is a private mapping of a file that may not be written and was not: a page that is gone
        // comes back with the same content (madvise(2)). Nothing in it was relocated, as it is position-independent.
        unsafe {
            libc::madvise(code.start as *mut libc::c_void, code.len, libc::MADV_DONTNEED);
        }
    }
}

/// Where the program's own code is; none when the kernel does not tell.
fn code() -> Option<Range> {
    static CODE: OnceLock<Option<Range>> = OnceLock::new();
    *CODE.get_or_init(|| {
        let program = fs::read_link("/proc/self/exe").ok()?;
        code_in(&fs::read_to_string("/proc/self/maps").ok()?, program.to_str()?)
    })
}

/// The executable mapping of `program` in a text such as `/proc/<pid>/maps` (proc_pid_maps(5)). None when it has several
/// or one that may be written or is shared.
fn code_in(maps: &str, program: &str) -> Option<Range> {
    let of_program =
        |line: &&str| line.split_once('/').is_some_and(|(_, path)| program.strip_prefix('/') == Some(path));
    let mut executable = maps
        .lines()
        .filter(of_program)
        .filter(|line| line.split(' ').nth(1).is_some_and(|permissions| permissions.contains('x')));
    let line = executable.next()?;
    if executable.next().is_some() || line.split(' ').nth(1) != Some("r-xp") {
        return None;
    }
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some(Range { start, len: end.checked_sub(start)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55e0a0000000-55e0a0100000 r--p 00000000 fe:00 123                        /usr/bin/keelson-x\n\
55e0a0100000-55e0a0300000 r-xp 00100000 fe:00 123                        /usr/bin/keelson-x\n\
55e0a0300000-55e0a0400000 r--p 00300000 fe:00 123                        /usr/bin/keelson-x\n\
7f0000000000-7f0000100000 r-xp 00000000 fe:00 124                        /usr/lib/libc.so.6\n\
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                          [vdso]\n";

    #[test]
    fn only_the_programs_own_code_is_found() {
        let range = Range { start: 0x55e0_a010_0000, len: 0x20_0000 };
        assert_eq!(code_in(MAPS, "/usr/bin/keelson-x"), Some(range));
        assert_eq!(code_in(MAPS, "/usr/bin/keelson"), None);
        let replaced = MAPS.replace("keelson-x\n", "keelson-x (deleted)\n");
        assert_eq!(code_in(&replaced, "/usr/bin/keelson-x (deleted)"), Some(range));
        for unusual in ["rwxp 00100000", "r-xs 00100000"] {
            assert_eq!(
                code_in(&MAPS.replace("r-xp 00100000", unusual), "/usr/bin/keelson-x"),
                None,
                "{unusual}"
            );
        }
        let twice = MAPS.replace("r--p 00300000", "r-xp 00300000");
        assert_eq!(code_in(&twice, "/usr/bin/keelson-x"), None);
    }

    /// KiB of the program's own code that are mapped.
    fn mapped() -> u64 {
        let program = fs::read_link("/proc/self/exe").unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        smaps.lines().fold(0, |sum, line| {
            if line.contains('-') && line.contains(" r") {
                inside = line.contains("r-xp") && line.ends_with(program.to_str().unwrap());
            }
            let rss = line.strip_prefix("Rss:").filter(|_| inside);
            sum + rss.map_or(0, |text| text.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap())
        })
    }

    #[test]
    fn less_code_is_mapped_afterwards_and_it_still_runs() {
        let before = mapped();
        unmap_code();
        let after = mapped();
        assert!(before > 0 && after < before, "{before} KiB, then {after} KiB");
        // It goes on running, and counts its work.
        let used = cpu_micros();
        while cpu_micros() < used + 1000 {
            std::hint::spin_loop();
        }
        give_back();
        assert_eq!(code_in(MAPS, "/usr/bin/other"), None);
    }
}
