//! Releases memory that an idle service needed only for its start or for a burst of work.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// CPU time in microseconds after which unmapping the code is worth while again; an idle service takes minutes to use it.
const WORK_MICROS: u64 = 50_000;

/// A range of this process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: usize,
    len: usize,
}

/// Releases pages: those in the allocator's free lists and, after enough work, the mappings of the read-only parts of the
/// program's own file (code, constants, and tables that only the start or a panic reads).
///
/// Pages that are used again are mapped again on access, sixteen at a time and without a read, because the file stays in
/// the page cache. Pages that only the start or that work needed stay unmapped and are the first that the kernel drops when
/// memory is short; it keeps mapped code for long (`VM_EXEC` in its reclaim). A breakpoint set by a debugger is lost.
pub(crate) fn give_back() {
    /// CPU time at the last unmapping. The first unmapping follows the start, which is work enough.
    static UNMAPPED_AT: AtomicU64 = AtomicU64::new(u64::MAX);
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes no pointer and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
    let used = cpu_micros();
    if is_worth_while(used, UNMAPPED_AT.load(Ordering::Relaxed)) {
        UNMAPPED_AT.store(used, Ordering::Relaxed);
        unmap_file();
    }
}

/// Whether to unmap at CPU time `used` when the last unmapping was at `last`; `u64::MAX`: never yet.
fn is_worth_while(used: u64, last: u64) -> bool {
    last == u64::MAX || used.saturating_sub(last) >= WORK_MICROS
}

/// Microseconds of CPU time of this process so far.
fn cpu_micros() -> u64 {
    cpu_nanos() / 1000
}

/// Nanoseconds of CPU time of this process so far, user and system.
pub(crate) fn cpu_nanos() -> u64 {
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is that of a timespec that outlives the call (clock_gettime(3)).
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut spent) };
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    if result == 0 { part(spent.tv_sec) * 1_000_000_000 + part(spent.tv_nsec) } else { 0 }
}

fn unmap_file() {
    for range in unwritten() {
        // SAFETY: the range is a private mapping of a file that may not be written and was not: a page that is gone
        // comes back with the same content (madvise(2)). What is relocated lies in a segment that may be written.
        unsafe {
            libc::madvise(range.start as *mut libc::c_void, range.len, libc::MADV_DONTNEED);
        }
    }
}

/// The read-only segments of the program; empty when the kernel does not report the program headers.
fn unwritten() -> &'static [Range] {
    static SEGMENTS: OnceLock<Vec<Range>> = OnceLock::new();
    SEGMENTS.get_or_init(|| {
        // SAFETY: getauxval(3) takes a number. The table of program headers that it names is mapped as long as the
        // process lives, is never written, and has as many entries of this size (elf(5)).
        let headers = unsafe {
            let (at, count) = (libc::getauxval(libc::AT_PHDR), libc::getauxval(libc::AT_PHNUM));
            let size = libc::getauxval(libc::AT_PHENT);
            if at == 0 || usize::try_from(size) != Ok(size_of::<libc::Elf64_Phdr>()) {
                return Vec::new();
            }
            std::slice::from_raw_parts(at as *const libc::Elf64_Phdr, usize::try_from(count).unwrap_or(0))
        };
        unwritten_in(headers, headers.as_ptr() as usize)
    })
}

/// The loaded read-only segments of a program whose headers are at this address.
fn unwritten_in(headers: &[libc::Elf64_Phdr], address: usize) -> Vec<Range> {
    let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let Some(own) = headers.iter().find(|header| header.p_type == libc::PT_PHDR) else { return Vec::new() };
    let base = address.wrapping_sub(number(own.p_vaddr));
    let page = rustix::param::page_size();
    let loaded = headers.iter().filter(|h| h.p_type == libc::PT_LOAD && h.p_flags & libc::PF_W == 0);
    let range = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(number(header.p_vaddr));
        let end = start.wrapping_add(number(header.p_filesz)).next_multiple_of(page);
        let start = start - start % page;
        Range { start, len: end.saturating_sub(start) }
    };
    loaded.map(range).filter(|range| range.len > 0).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn header(p_type: u32, p_flags: u32, p_vaddr: u64, p_filesz: u64) -> libc::Elf64_Phdr {
        libc::Elf64_Phdr {
            p_type,
            p_flags,
            p_offset: p_vaddr,
            p_vaddr,
            p_paddr: p_vaddr,
            p_filesz,
            p_memsz: p_filesz,
            p_align: 0x1000,
        }
    }

    #[test]
    fn only_read_only_segments_are_released() {
        let page = rustix::param::page_size();
        let at = |n: usize| u64::try_from(n * page).unwrap();
        let (r, x, w) = (libc::PF_R, libc::PF_X, libc::PF_W);
        let headers = [
            header(libc::PT_PHDR, r, 0x40, 0x200),
            header(libc::PT_LOAD, r, 0, at(2) + 1),
            header(libc::PT_LOAD, r | x, at(4) + 16, at(1)),
            header(libc::PT_LOAD, r | w, at(8), at(1)),
            header(libc::PT_GNU_RELRO, r, at(8), at(1)),
        ];
        let base = 0x5500_0000_0000;
        let expected =
            [Range { start: base, len: 3 * page }, Range { start: base + 4 * page, len: 2 * page }];
        assert_eq!(unwritten_in(&headers, base + 0x40), expected);
        assert_eq!(unwritten_in(&headers[1..], base + 0x40), [], "without its place nothing is known");
    }

    #[test]
    fn memory_is_released_after_the_start_and_after_enough_work() {
        for (used, last, expected) in [
            (0, u64::MAX, true),
            (20_000, u64::MAX, true),
            (69_999, 20_000, false),
            (70_000, 20_000, true),
            (0, 20_000, false),
        ] {
            assert_eq!(is_worth_while(used, last), expected, "{used} {last}");
        }
    }

    #[test]
    fn read_only_segments_of_this_program_are_found() {
        let own = unwritten();
        let holds = |address: usize| own.iter().any(|r| (r.start..r.start + r.len).contains(&address));
        static CONSTANT: &str = "a constant";
        assert!(holds(give_back as *const () as usize) && holds(CONSTANT.as_ptr() as usize), "{own:?}");
        static WRITTEN: AtomicU64 = AtomicU64::new(1);
        assert!(!holds(&raw const WRITTEN as usize));
    }

    /// KiB of the program's own code and constants that are mapped.
    fn mapped() -> u64 {
        let program = fs::read_link("/proc/self/exe").unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        smaps.lines().fold(0, |sum, line| {
            if line.contains('-') && line.contains(" r") {
                inside = !line.contains(" rw-p") && line.ends_with(program.to_str().unwrap());
            }
            let rss = line.strip_prefix("Rss:").filter(|_| inside);
            sum + rss.map_or(0, |text| text.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap())
        })
    }

    #[test]
    fn release_unmaps_code_and_the_program_still_runs() {
        let before = mapped();
        unmap_file();
        let after = mapped();
        assert!(before > 0 && after < before, "{before} KiB, then {after} KiB");
        // It continues to run and to count its work.
        let used = cpu_micros();
        while cpu_micros() < used + 1000 {
            std::hint::spin_loop();
        }
        give_back();
    }
}
