//! The initramfs: it loads the drivers of the disk and starts systemd from there.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context as _;

use crate::Component;

/// The drivers of the disk and of its file system, which Debian's kernel has as modules. ext4 asks for the checksum by name.
const DRIVERS: [&str; 4] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];

/// The first process. The modules are loaded in the order of their numbers.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /dev /root
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do /bin/busybox insmod $module; done
until [ -b /dev/vda ]; do /bin/busybox usleep 10000; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount -o move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
"#;

/// Writes the initramfs for the kernel whose modules are in `modules` (with the `modules.dep` of depmod(8)).
pub(super) fn write(path: &Path, modules: &Path) -> anyhow::Result<()> {
    let busybox = fs::read(Component::Busybox.find()?)?;
    let listing = modules.join("modules.dep");
    let listing =
        fs::read_to_string(&listing).with_context(|| format!("cannot read {}", listing.display()))?;
    let mut archive = Vec::new();
    for folder in ["bin", "modules"] {
        entry(&mut archive, folder, 0o040_755, &[])?;
    }
    entry(&mut archive, "bin/busybox", 0o100_755, &busybox)?;
    entry(&mut archive, "init", 0o100_755, INIT.as_bytes())?;
    for (number, module) in in_order(&listing, &DRIVERS).iter().enumerate() {
        let content = fs::read(modules.join(module)).with_context(|| format!("cannot read {module}"))?;
        entry(&mut archive, &format!("modules/{number:03}.ko"), 0o100_644, &content)?;
    }
    entry(&mut archive, "TRAILER!!!", 0, &[])?;
    fs::write(path, archive).with_context(|| format!("cannot write {}", path.display()))
}

/// The files of `wanted` and of what they need, each after those. What is not listed is built into the kernel.
fn in_order(listing: &str, wanted: &[&str]) -> Vec<String> {
    let mut order = Vec::new();
    for name in wanted {
        let line =
            listing.lines().filter_map(|line| line.split_once(':')).find(|(file, _)| stem(file) == *name);
        let Some((file, needs)) = line else { continue };
        // depmod lists all that it needs, those that need nothing last.
        for file in needs.split_whitespace().rev().chain([file]) {
            if !order.iter().any(|known| known == file) {
                order.push(file.to_owned());
            }
        }
    }
    order
}

/// The name of a module's file without folder and endings.
fn stem(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name)
}

/// An entry of the format `newc` (cpio(5)): numbers in eight hexadecimal digits, name and content filled up to four bytes.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    let inode = archive.len();
    let (size, name_size) = (content.len(), name.len() + 1);
    let fields = [inode, mode as usize, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
    write!(archive, "070701")?;
    for field in fields {
        write!(archive, "{field:08x}")?;
    }
    archive.extend(name.bytes().chain([0]));
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_after_all_that_it_needs_and_once() {
        let listing = "kernel/fs/ext4/ext4.ko: kernel/lib/crc16.ko kernel/fs/mbcache.ko kernel/fs/jbd2/jbd2.ko\n\
                       kernel/fs/jbd2/jbd2.ko:\n\
                       kernel/drivers/block/virtio_blk.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz\n\
                       kernel/x/needs_jbd2.ko: kernel/fs/jbd2/jbd2.ko\n";
        let order = in_order(listing, &["virtio_blk", "ext4", "needs_jbd2", "built_in"]);
        let names: Vec<&str> = order.iter().map(|file| stem(file)).collect();
        assert_eq!(names, ["virtio_ring", "virtio_blk", "jbd2", "mbcache", "crc16", "ext4", "needs_jbd2"]);
    }

    #[test]
    fn an_entry_has_its_sizes_and_begins_at_a_multiple_of_four() {
        let mut archive = Vec::new();
        entry(&mut archive, "init", 0o100_755, b"hello").unwrap();
        assert_eq!(archive.len() % 4, 0);
        let text = String::from_utf8(archive).unwrap();
        assert!(text.starts_with("07070100000000000081ed"), "{text}");
        assert_eq!((&text[54..62], &text[94..102], &text[110..114]), ("00000005", "00000005", "init"));
        assert_eq!(&text[116..121], "hello");
    }
}
