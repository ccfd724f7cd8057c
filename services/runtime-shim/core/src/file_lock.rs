//! Who has locked a file (proc_locks(5)).

/// The process that has locked a file by flock(2), from a list in the format of proc_locks(5).
///
/// `device` is the major and minor number. Some file systems report another device to stat(2) than in this list; then
/// the result is `None`.
pub fn flock_holder(locks: &str, device: (u32, u32), inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", device.0, device.1);
    locks.lines().find_map(|line| {
        // `1: FLOCK ADVISORY WRITE 712 08:01:131 0 EOF`; a waiting process has `->` before the kind.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, locked, ..] = fields[..] else { return None };
        (locked == file).then(|| pid.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flock_holder_is_found_by_device_and_inode() {
        let locks = "\
            1: POSIX  ADVISORY  WRITE 10 08:01:131 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 11 08:02:131 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 12 08:01:1131 0 EOF\n\
            4: FLOCK  ADVISORY  WRITE 13 08:01:131 0 EOF\n\
            4: -> FLOCK  ADVISORY  WRITE 14 08:01:131 0 EOF\n";
        assert_eq!(flock_holder(locks, (8, 1), 131), Some(13));
        assert_eq!(flock_holder(locks, (8, 3), 131), None);
    }
}
