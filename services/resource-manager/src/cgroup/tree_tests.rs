//! The tree over a kernel and a systemd in memory.

use keelson_resource_manager_core::layout::Driver;

use super::super::fake::{FakeCgroups, FakeSlices};
use super::*;

const V1: &str = "\
32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
33 31 0:30 / /cg/cpuacct rw - cgroup cgroup rw,cpuacct\n\
34 31 0:31 / /cg/cpuset rw - cgroup cgroup rw,cpuset\n\
35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n\
39 31 0:36 / /cg/pids rw - cgroup cgroup rw,pids\n\
40 31 0:37 / /cg/systemd rw - cgroup cgroup rw,name=systemd\n\
41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n";
const V2: &str = "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n";

fn open(fake: &FakeCgroups, mountinfo: &str) -> Result<Tree, TreeError> {
    let layout = Layout::new(Driver::Cgroupfs, "/own").unwrap();
    open_with(fake, mountinfo, DriverConfig { layout, slices: None, owner: "/var/lib/kubelet".into() })
}

fn open_with(fake: &FakeCgroups, mountinfo: &str, driver_config: DriverConfig) -> Result<Tree, TreeError> {
    let node = NodeLimits { pids: Some(64), page_sizes: vec!["2Mi".to_owned()] };
    let mounts = keelson_mountinfo::parse(mountinfo.as_bytes());
    Tree::open(Arc::new(fake.clone()), &mounts, Path::new("/cg"), driver_config, node)
}

/// A tree of slices, and systemd.
fn slices(fake: &FakeCgroups, mountinfo: &str) -> (Tree, FakeSlices) {
    let systemd = FakeSlices::of(fake);
    let layout = Layout::new(Driver::Systemd, "/").unwrap();
    let driver_config =
        DriverConfig { layout, slices: Some(Arc::new(systemd.clone())), owner: "/var/lib/kubelet".into() };
    (open_with(fake, mountinfo, driver_config).unwrap(), systemd)
}

const POD: &str = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poda_b.slice";

#[test]
fn on_v2_systemd_creates_the_slices_with_their_limits() {
    let fake = FakeCgroups::v2(&["cpu", "cpuset", "hugetlb", "memory", "pids"]);
    fake.add_file("/cg", "cpuset.cpus.effective", "0-2\n");
    let (tree, systemd) = slices(&fake, V2);
    tree.set_up().unwrap();
    tree.limit_pods(&limits()).unwrap();
    let path = tree.layout().pod(Qos::Burstable, "a-b");
    assert_eq!(path.to_string(), format!("/{POD}"));
    tree.create_pod(&path, &values()).unwrap();
    // The kernel's files have all values, whether systemd or the service wrote them.
    for (file, value) in [
        ("cpu.max", "50000 100000"),
        ("memory.max", "4096"),
        ("pids.max", "64"),
        ("hugetlb.2MB.max", "2097152"),
    ] {
        assert_eq!(fake.value(&format!("/cg/{POD}/{file}")), value);
    }
    let pod = "kubepods-burstable-poda_b.slice";
    for (unit, property, value) in [
        ("kubepods.slice", "AllowedCPUs", "Bytes([7])"),
        ("kubepods.slice", "MemoryMax", "U64(1048576)"),
        ("kubepods.slice", "TasksMax", "U64(1000)"),
        ("kubepods-besteffort.slice", "CPUWeight", "U64(1)"),
        ("kubepods-burstable.slice", "Wants", "Texts([\"kubepods.slice\"])"),
        (pod, "CPUWeight", "U64(20)"),
        (pod, "CPUQuotaPerSecUSec", "U64(500000)"),
        (pod, "MemoryMax", "U64(4096)"),
        (pod, "TasksMax", "U64(64)"),
    ] {
        assert_eq!(systemd.property(unit, property), value, "{unit} {property}");
    }
    // The slice exists already, as after a restart of the agent.
    tree.create_pod(&path, &PodCgroup { cpu_shares: 2, ..PodCgroup::default() }).unwrap();
    assert_eq!(systemd.property(pod, "MemoryMax"), format!("U64({})", u64::MAX));
    assert_eq!(fake.value(&format!("/cg/{POD}/memory.max")), "max");
    let expected = BTreeMap::from([("a-b".to_owned(), BTreeSet::from([path.clone()]))]);
    assert_eq!(tree.scan().unwrap(), expected);
    tree.remove(&path).unwrap();
    assert!(!systemd.runs(pod) && tree.scan().unwrap().is_empty());
    tree.remove(&path).unwrap();
}

#[test]
fn on_v2_pods_get_the_controllers_that_systemd_does_not_enable() {
    const ALL: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];
    const KUBEPODS: &str = "/cg/kubepods.slice";
    const BURSTABLE: &str = "/cg/kubepods.slice/kubepods-burstable.slice";
    let fake = FakeCgroups::v2(&["cpu", "cpuset", "hugetlb", "io", "memory", "pids"]);
    fake.add_file("/cg", "cpuset.cpus.effective", "0-2\n");
    let (tree, systemd) = slices(&fake, V2);
    tree.set_up().unwrap();
    let sorted = |file: String| {
        let mut names: Vec<String> = fake.value(&file).split_whitespace().map(ToOwned::to_owned).collect();
        names.sort();
        names
    };
    let has_all = |pod: &CgroupPath| {
        let dirs = pod.lineage().map(|above| format!("/cg{above}")).chain(["/cg".to_owned()]);
        for dir in dirs {
            assert_eq!(sorted(format!("{dir}/cgroup.subtree_control")), ALL, "{dir}");
        }
        assert_eq!(sorted(format!("/cg{pod}/cgroup.controllers")), ALL);
        assert_eq!(fake.value(&format!("/cg{pod}/cpuset.cpus")), "");
        assert_eq!(fake.value(&format!("/cg{pod}/hugetlb.2MB.max")), "2097152");
    };
    systemd.take_disabled();
    let [first, second] = ["a", "b"].map(|uid| tree.layout().pod(Qos::Burstable, uid));
    tree.create_pod(&first, &values()).unwrap();
    assert_eq!(systemd.take_disabled(), [BURSTABLE, KUBEPODS], "otherwise this test proves nothing");
    has_all(&first);
    // The controllers of an existing pod are in use, and stay enabled.
    tree.create_pod(&second, &values()).unwrap();
    tree.set_class_shares(Qos::Burstable, 512).unwrap();
    assert_eq!(systemd.take_disabled(), Vec::<String>::new());
    for pod in [&first, &second] {
        has_all(pod);
    }
    // New properties of an existing pod and of a class without pods.
    tree.create_pod(&first, &values()).unwrap();
    assert_eq!(systemd.take_disabled(), [format!("/cg{first}")]);
    has_all(&first);
    for pod in [&first, &second] {
        tree.remove(pod).unwrap();
    }
    tree.set_class_shares(Qos::Burstable, 2).unwrap();
    assert_eq!(systemd.take_disabled(), [BURSTABLE]);
    for qos in Qos::ALL {
        let pod = tree.layout().pod(qos, "c");
        tree.create_pod(&pod, &values()).unwrap();
        has_all(&pod);
    }
}

#[test]
fn on_v1_hierarchies_not_managed_by_systemd_get_pod_cgroups() {
    let fake = FakeCgroups::v1();
    let (tree, systemd) = slices(&fake, V1);
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Burstable, "a-b");
    tree.create_pod(&path, &values()).unwrap();
    for controller in ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd"] {
        assert!(fake.has(&format!("/cg/{controller}/{POD}")), "{controller}");
    }
    assert_eq!(fake.value(&format!("/cg/cpuset/{POD}/cpuset.cpus")), "0-1");
    assert_eq!(systemd.property("kubepods-burstable-poda_b.slice", "CPUShares"), "U64(512)");
    assert_eq!(systemd.property("kubepods-burstable-poda_b.slice", "MemoryLimit"), "U64(4096)");
    // Leftover processes are killed before systemd stops the slice: it would wait for their end.
    fake.add_processes(&format!("/cg/memory/{POD}"), 2);
    tree.remove(&path).unwrap();
    assert!(!fake.has(&format!("/cg/cpuset/{POD}")));
}

#[test]
fn cgroups_of_another_driver_are_removed() {
    let fake = FakeCgroups::v2(&["cpu", "memory", "pids"]);
    let cgroupfs = open(&fake, V2).unwrap();
    cgroupfs.set_up().unwrap();
    let made = cgroupfs.layout().pod(Qos::Burstable, "a-b");
    cgroupfs.create_pod(&made, &values()).unwrap();
    let (tree, systemd) = slices(&fake, V2);
    tree.set_up().unwrap();
    let slice = tree.layout().pod(Qos::Burstable, "a-b");
    tree.create_pod(&slice, &values()).unwrap();
    tree.remove(&made).unwrap();
    assert!(!fake.has(&format!("/cg{made}")) && systemd.runs(slice.name()));
    cgroupfs.remove(&slice).unwrap();
    assert!(!fake.has(&format!("/cg{slice}")));
}

#[test]
fn a_reserved_systemd_unit_gets_its_limits() {
    let fake = FakeCgroups::v2(&["cpu", "memory", "pids"]);
    let (tree, systemd) = slices(&fake, V2);
    tree.set_up().unwrap();
    for (name, part) in [("/kube-reserved", "/cg/kube_reserved.slice"), ("/", "root of the tree")] {
        let error = tree.limit_reserved(name, &limits()).unwrap_err();
        let text = keelson_service_kit::status::chain(&error);
        assert!(text.contains(part), "{text}");
    }
    systemd.add("kube_reserved.slice");
    tree.limit_reserved("/kube-reserved", &limits()).unwrap();
    assert_eq!(systemd.property("kube_reserved.slice", "MemoryMax"), "U64(1048576)");
    assert_eq!(fake.value("/cg/kube_reserved.slice/memory.max"), "1048576");
}

fn limits() -> Limits {
    Limits { cpu_milli: Some(2000), memory: Some(1 << 20), pids: Some(1000), ..Limits::default() }
}

#[test]
fn huge_page_limits_are_written_where_the_hierarchy_exists() {
    let fake = FakeCgroups::v1();
    let mounts = format!("{V1}42 31 0:39 / /cg/hugetlb rw - cgroup cgroup rw,hugetlb\n");
    let tree = open(&fake, &mounts).unwrap();
    tree.set_up().unwrap();
    let huge_pages = [("2Mi".to_owned(), 8 << 20)].into();
    tree.limit_pods(&Limits { huge_pages, ..limits() }).unwrap();
    let path = tree.layout().pod(Qos::Guaranteed, "u");
    tree.create_pod(&path, &values()).unwrap();
    let value = |dir: &str| fake.value(&format!("/cg/hugetlb/own/{dir}/hugetlb.2MB.limit_in_bytes"));
    assert_eq!((value("kubepods"), value("kubepods/podu")), ("8388608".into(), "2097152".into()));
    tree.create_pod(&path, &PodCgroup { cpu_shares: 2, ..PodCgroup::default() }).unwrap();
    assert_eq!(value("kubepods/podu"), "0");
}

#[test]
fn a_reserved_cgroup_is_limited_and_a_missing_one_is_an_error() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    for controller in ["cpu", "memory", "pids"] {
        fake.create(Path::new(&format!("/cg/{controller}/kube.slice"))).unwrap();
    }
    tree.limit_reserved("/kube.slice", &limits()).unwrap();
    assert_eq!(fake.value("/cg/cpu/kube.slice/cpu.shares"), "2048");
    assert_eq!(fake.value("/cg/memory/kube.slice/memory.limit_in_bytes"), "1048576");
    let error = tree.limit_reserved("/absent.slice", &limits()).unwrap_err().to_string();
    assert!(error.contains("/absent.slice"), "{error}");
}

fn values() -> PodCgroup {
    PodCgroup {
        cpu_shares: 512,
        cpu_quota_us: Some(50_000),
        cpu_period_us: None,
        memory_limit: Some(4096),
        huge_pages: [("2Mi".to_owned(), 2 << 20)].into(),
    }
}

#[test]
fn on_v1_a_pod_gets_a_cgroup_in_every_hierarchy_but_the_unified_one() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    tree.limit_pods(&limits()).unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    for controller in ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd"] {
        assert!(fake.has(&format!("/cg/{controller}/own/kubepods/burstable/podu")), "{controller}");
        assert!(fake.has(&format!("/cg/{controller}/own/kubepods/besteffort")), "{controller}");
    }
    assert!(!fake.has("/cg/unified/own"));
    let value = |file: &str| fake.value(&format!("/cg/{file}"));
    assert_eq!(value("cpu/own/kubepods/cpu.shares"), "2048");
    assert_eq!(value("memory/own/kubepods/memory.limit_in_bytes"), "1048576");
    assert_eq!(value("pids/own/kubepods/pids.max"), "1000");
    assert_eq!(value("cpu/own/kubepods/besteffort/cpu.shares"), "2");
    assert_eq!(value("cpu/own/kubepods/burstable/podu/cpu.shares"), "512");
    assert_eq!(value("cpu/own/kubepods/burstable/podu/cpu.cfs_quota_us"), "50000");
    assert_eq!(value("memory/own/kubepods/burstable/podu/memory.limit_in_bytes"), "4096");
    assert_eq!(value("pids/own/kubepods/burstable/podu/pids.max"), "64");
    assert_eq!(value("cpuset/own/kubepods/burstable/podu/cpuset.cpus"), "0-1");
    assert_eq!(value("cpuset/own/kubepods/burstable/podu/cpuset.mems"), "0");
}

#[test]
fn on_v2_controllers_are_enabled_from_the_top_down() {
    let fake = FakeCgroups::v2(&["cpu", "io", "memory", "pids"]);
    let tree = open(&fake, V2).unwrap();
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Guaranteed, "u");
    tree.create_pod(&path, &values()).unwrap();
    for dir in ["/cg", "/cg/own", "/cg/own/kubepods", "/cg/own/kubepods/podu"] {
        assert_eq!(fake.value(&format!("{dir}/cgroup.subtree_control")), "cpu memory pids", "{dir}");
    }
    assert_eq!(fake.value("/cg/own/kubepods/podu/cpu.max"), "50000 100000");
    assert_eq!(fake.value("/cg/own/kubepods/podu/memory.max"), "4096");
    assert_eq!(fake.value("/cg/own/kubepods/podu/pids.max"), "64");
}

#[test]
fn a_missing_required_controller_is_named() {
    let error = open(&FakeCgroups::v2(&["cpu", "pids"]), V2).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
}

#[test]
fn removed_pod_limits_are_reset_in_the_tree() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    tree.create_pod(&path, &PodCgroup { cpu_shares: 2, ..PodCgroup::default() }).unwrap();
    assert_eq!(fake.value("/cg/cpu/own/kubepods/burstable/podu/cpu.cfs_quota_us"), "-1");
    assert_eq!(fake.value("/cg/memory/own/kubepods/burstable/podu/memory.limit_in_bytes"), "-1");
}

#[test]
fn a_removed_qos_cgroup_is_recreated_for_the_next_pod() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    fake.remove(Path::new("/cg/memory/own/kubepods/burstable")).unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    assert!(fake.has("/cg/memory/own/kubepods/burstable/podu"));
}

#[test]
fn pod_cgroups_are_found_in_any_hierarchy() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    for dir in ["/cg/memory/own/kubepods/poda", "/cg/cpu/own/kubepods/besteffort/podb"] {
        fake.create(Path::new(dir)).unwrap();
    }
    let found = tree.scan().unwrap();
    let expected = [("a", Qos::Guaranteed), ("b", Qos::BestEffort)]
        .map(|(uid, qos)| (uid.to_owned(), BTreeSet::from([tree.layout().pod(qos, uid)])));
    assert_eq!(found, BTreeMap::from(expected));
}

#[test]
fn pod_cgroups_are_classified_by_their_owner_mark() {
    for (fake, mountinfo) in
        [(FakeCgroups::v1(), V1), (FakeCgroups::v2(&["cpu", "cpuset", "memory", "pids"]), V2)]
    {
        let tree = open(&fake, mountinfo).unwrap();
        tree.set_up().unwrap();
        let path = |uid: &str| tree.layout().pod(Qos::Burstable, uid);
        for uid in ["own", "others", "unmarked", "taken"] {
            tree.create_pod(&path(uid), &values()).unwrap();
        }
        let mark = |uid: &str, owner: Option<&str>| {
            for mount in tree.pod_mounts() {
                fake.mark_owner(&dir_in(mount, &path(uid)), owner);
            }
        };
        mark("others", Some("/var/lib/other"));
        mark("unmarked", None);
        mark("taken", None);
        // An unmarked pod that is assigned to this agent becomes its own; another agent's pod does not.
        tree.create_pod(&path("taken"), &values()).unwrap();
        tree.create_pod(&path("others"), &values()).unwrap();
        let by_owner = tree.scan_by_owner().unwrap();
        let found = |uids: &[&str]| -> PodCgroups {
            uids.iter().map(|uid| ((*uid).to_owned(), BTreeSet::from([path(uid)]))).collect()
        };
        assert_eq!(by_owner, FoundPods { own: found(&["own", "taken"]), unmarked: found(&["unmarked"]) });
        assert_eq!(tree.scan().unwrap().len(), 4);
    }
}

#[test]
fn a_partly_removed_pod_cgroup_keeps_its_owner_mark() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    // The runtime creates a cgroup in the hierarchy without controllers; it has no mark.
    for dir in ["own", "own/kubepods", "own/kubepods/burstable", "own/kubepods/burstable/podu"] {
        fake.create(&Path::new("/cg/unified").join(dir)).unwrap();
    }
    let mut left = usize::MAX;
    // The directories are removed in turn, and the mark exists until the last one is removed.
    while !tree.scan().unwrap().is_empty() {
        assert_eq!(tree.scan_by_owner().unwrap().own.len(), 1);
        let removed = fake.removes_at_most(1, || tree.remove(&path).is_ok());
        let now = fake.count("podu");
        assert!(now < left, "{now} of {left}, {removed}");
        left = now;
    }
}

#[test]
fn removing_a_pod_cgroup_kills_leftover_processes_and_removes_children_first() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    // Leftovers of a runtime: a child in some hierarchies, with a process that needs two kills.
    for mount in ["/cg/memory", "/cg/unified"] {
        for dir in ["own", "own/kubepods", "own/kubepods/burstable", "own/kubepods/burstable/podu"] {
            fake.create(&Path::new(mount).join(dir)).unwrap();
        }
        fake.create(&Path::new(mount).join("own/kubepods/burstable/podu/child")).unwrap();
    }
    fake.add_processes("/cg/memory/own/kubepods/burstable/podu/child", 2);
    tree.remove(&path).unwrap();
    assert!(tree.scan().unwrap().is_empty());
    tree.remove(&path).unwrap();
}

#[test]
fn a_process_that_does_not_die_is_reported_with_its_cgroup() {
    let fake = FakeCgroups::v1();
    let tree = open(&fake, V1).unwrap();
    tree.set_up().unwrap();
    let path = tree.layout().pod(Qos::Burstable, "u");
    tree.create_pod(&path, &values()).unwrap();
    fake.add_processes("/cg/memory/own/kubepods/burstable/podu", 99);
    let error = tree.remove(&path).unwrap_err();
    assert!(matches!(&error, TreeError::Busy { path } if path.starts_with("/cg/memory")), "{error}");
}
