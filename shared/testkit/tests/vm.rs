//! The emulated machine itself, before anything of ours is in it.

#![allow(clippy::unwrap_used)] // A panic is how a test fails.

use keelson_testkit::{Scratch, Vm, mounts_below};

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn a_machine_runs_what_it_is_told_and_boots_anew() {
    let scratch = Scratch::new().unwrap();
    let payload = scratch.path().join("payload");
    std::fs::create_dir(&payload).unwrap();
    std::fs::write(payload.join("greeting"), "brought along\n").unwrap();
    let mut vm = Vm::boot(&scratch.path().join("vm"), &payload).unwrap();
    assert_eq!(vm.sh("cat /proc/1/comm").unwrap(), "systemd\n");
    assert_eq!(vm.sh("cat /payload/greeting").unwrap(), "brought along\n");
    assert_eq!(vm.sh("stat -f -c %T /sys/fs/cgroup").unwrap(), "cgroup2fs\n");
    assert_eq!(vm.sh("systemctl --failed --plain --no-legend").unwrap(), "");
    let said = vm.run("echo no end >&2; printf out; exit 3").unwrap();
    assert_eq!((said.code, said.stdout.as_str(), said.stderr.as_str()), (3, "out", "no end\n"));
    assert!(vm.sh("false").is_err());

    vm.sh("echo kept > /root/kept; echo lost > /run/lost").unwrap();
    vm.reboot().unwrap();
    assert_eq!(vm.sh("cat /root/kept; ls /run/lost 2>&1 || true").unwrap().lines().count(), 2);
    assert!(vm.run("cat /run/lost").unwrap().code != 0);
    drop(vm);
    assert!(mounts_below(scratch.path()).is_empty());
}
