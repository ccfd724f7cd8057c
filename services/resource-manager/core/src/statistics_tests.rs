use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

/// `memory.stat` of a v1 cgroup with a limit of 64 MiB, and 96 MiB together with swap.
const V1_STAT: &str = "cache 10158080\nrss 4096\ninactive_file 1\n\
    hierarchical_memory_limit 67108864\ntotal_cache 6000000\ntotal_rss 7000000\ntotal_swap 1000000\n\
    total_pgfault 300\ntotal_pgmajfault 4\ntotal_inactive_anon 5\ntotal_inactive_file 2000000\n";
const V2_STAT: &str = "anon 7000000\nfile 6000000\nkernel 1\ninactive_anon 5\ninactive_file 2000000\n\
    pgfault 300\npgmajfault 4\n";

fn expected() -> Memory {
    Memory {
        usage: 13_000_000,
        working_set: 11_000_000,
        rss: 7_000_000,
        page_faults: 300,
        major_page_faults: 4,
        available: Some((64 << 20) - 11_000_000),
        swap_usage: Some(1_000_000),
        swap_available: Some((32 << 20) - 1_000_000),
    }
}

#[test]
fn cgroup_v1_memory_includes_children_and_excludes_inactive_file_from_working_set() {
    let texts = MemoryTexts {
        usage: "13000000\n",
        stat: V1_STAT,
        limit: "67108864\n",
        swap: "",
        swap_limit: "100663296\n",
    };
    assert_eq!(memory_v1(texts), Some(expected()));
}

#[test]
fn cgroup_v2_memory_matches_v1() {
    let texts = MemoryTexts {
        usage: "13000000\n",
        stat: V2_STAT,
        limit: "67108864\n",
        swap: "1000000\n",
        swap_limit: "33554432\n",
    };
    assert_eq!(memory_v2(texts), Some(expected()));
}

#[test]
fn available_memory_needs_a_limit() {
    for unlimited in ["max\n", "9223372036854771712\n", "4611686018427387904\n", ""] {
        let texts = MemoryTexts { limit: unlimited, swap_limit: unlimited, ..MemoryTexts::default() };
        let v1 = memory_v1(MemoryTexts { usage: "13000000\n", stat: V1_STAT, ..texts }).unwrap();
        let v2 = memory_v2(MemoryTexts { usage: "13000000\n", stat: V2_STAT, ..texts }).unwrap();
        assert_eq!(
            [v1.available, v1.swap_available, v2.available, v2.swap_available],
            [None; 4],
            "{unlimited}"
        );
    }
    let just =
        MemoryTexts { usage: "0", stat: V2_STAT, limit: "4611686018427387903", ..MemoryTexts::default() };
    assert_eq!(memory_v2(just).unwrap().available, Some((1 << 62) - 1));
}

#[test]
fn working_set_is_never_negative_and_missing_files_are_none() {
    let less = MemoryTexts { usage: "1000", stat: V2_STAT, limit: "max", ..MemoryTexts::default() };
    assert_eq!(memory_v2(less).unwrap().working_set, 0);
    assert_eq!(memory_v2(MemoryTexts { usage: "", ..less }), None);
    assert_eq!(memory_v2(MemoryTexts { stat: "", ..less }), None);
    assert_eq!(memory_v1(MemoryTexts { usage: "1000", stat: V2_STAT, ..MemoryTexts::default() }), None);
}

#[test]
fn cpu_time_is_in_nanoseconds_on_v1_and_v2() {
    assert_eq!(cpu_v1("81516166\n"), Some(81_516_166));
    assert_eq!(cpu_v2("usage_usec 81516\nuser_usec 40000\nsystem_usec 41516\n"), Some(81_516_000));
    assert_eq!((cpu_v1(""), cpu_v2("user_usec 1\n")), (None, None));
}

#[test]
fn node_memory_combines_meminfo_and_the_root_cgroup() {
    let meminfo = "MemTotal: 1000 kB\nMemFree: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n";
    let stat = "anon 1024\ninactive_file 102400\npgfault 7\npgmajfault 1\n";
    let top = Memory { usage: 300 << 10, working_set: 200 << 10, rss: 9, ..Memory::default() };
    let v1 = node_memory(Some(top), "", meminfo).unwrap();
    assert_eq!((v1.usage, v1.available, v1.rss), (300 << 10, Some(800 << 10), 9));
    let v2 = node_memory(None, stat, meminfo).unwrap();
    assert_eq!((v2.usage, v2.working_set, v2.available), (600 << 10, 500 << 10, Some(500 << 10)));
    assert_eq!((v2.swap_usage, v2.swap_available), (Some(30 << 10), Some(20 << 10)));
    assert_eq!(node_memory(None, stat, "MemTotal: 1000 kB\n"), None);
}

#[test]
fn pressure_is_read_with_totals_in_nanoseconds() {
    let text =
        "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=7\n";
    let found = pressure(text).unwrap();
    assert_eq!(found.some, PressureShare { total_nanos: 1_234_000, avg10: 1.5, avg60: 0.25, avg300: 0.0 });
    assert_eq!((found.full.total_nanos, found.full.avg10), (7_000, 0.5));
    let old = pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n").unwrap();
    assert_eq!(old.full, PressureShare::default());
    assert_eq!((pressure(""), pressure("some avg10=x avg60=0 avg300=0 total=1\n")), (None, None));
}

#[test]
fn external_network_interfaces_are_listed_with_eth0_first() {
    let text = "Inter-|   Receive    |  Transmit\n face |bytes    packets errs\n\
        \x20   lo:  237424 2502 0 0 0 0 0 0 237424 2502 0 0 0 0 0 0\n\
        \x20 net1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n\
        veth12ab: 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n\
        \x20 eth0:1000 10 1 0 0 0 0 0 2000 20 2 0 0 0 0 0\n";
    let found = interfaces(text);
    let names: Vec<&str> = found.iter().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["eth0", "net1"]);
    let eth0 = &found[0];
    assert_eq!((eth0.rx_bytes, eth0.rx_errors, eth0.tx_bytes, eth0.tx_errors), (1000, 1, 2000, 2));
    let net1 = &found[1];
    let packets = (net1.rx_packets, net1.rx_dropped, net1.tx_packets, net1.tx_dropped);
    assert_eq!(packets, (2, 4, 10, 12));
    assert_eq!((net1.rx_bytes, net1.rx_errors, net1.tx_bytes, net1.tx_errors), (1, 3, 9, 11));
    assert_eq!(interfaces("eth0: 1 2 3\n"), []);
}

#[test]
fn thread_count_and_boot_time_are_parsed() {
    assert_eq!(threads("0.28 1.30 3.42 1/150 28803\n"), Some(150));
    assert_eq!(threads("0.28 1.30\n"), None);
    assert_eq!(boot_seconds("cpu 1 2 3\nctxt 5\nbtime 1700000000\nprocesses 9\n"), Some(1_700_000_000));
}

fn sample(seconds: u64, cpu_seconds: u64) -> Sample {
    Sample { at_nanos: seconds * SECOND, cpu_nanos: cpu_seconds * SECOND }
}

#[test]
fn a_cpu_rate_needs_one_second_and_covers_at_least_ten_when_possible() {
    let mut rate = Rate::default();
    assert_eq!(rate.observe(sample(0, 0)), None);
    assert_eq!(rate.observe(Sample { at_nanos: SECOND - 1, cpu_nanos: 5 }), None);
    assert_eq!(rate.observe(sample(4, 2)), Some(SECOND / 2));
    assert_eq!(rate.observe(sample(10, 5)), Some(SECOND / 2));
    // A second reader right after the first gets the rate of the whole window.
    assert_eq!(rate.observe(sample(10, 5)), Some(SECOND / 2));
    assert_eq!(rate.observe(sample(15, 15)), Some(SECOND));
    // The window starts at 10 now.
    assert_eq!(rate.observe(sample(20, 25)), Some(2 * SECOND));
}

#[test]
fn a_recreated_cgroup_starts_a_new_cpu_rate() {
    let mut rate = Rate::default();
    rate.observe(sample(0, 100));
    assert_eq!(rate.observe(sample(20, 1)), None);
    assert_eq!(rate.observe(sample(22, 3)), Some(SECOND));
}

#[test]
fn a_cpu_rate_lies_between_the_slowest_and_the_fastest_step() {
    let reached = &Reached::default();
    let steps = prop::collection::vec((1_u64..30, 0_u64..8), 1..20);
    proptest!(ProptestConfig::with_cases(512), |(steps in steps)| {
        let mut rate = Rate::default();
        let mut now = sample(0, 0);
        rate.observe(now);
        let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
        let (mut of_a_step, mut of_several) = (false, false);
        for (seconds, cpu) in steps {
            now = Sample { at_nanos: now.at_nanos + seconds * SECOND, cpu_nanos: now.cpu_nanos + cpu * SECOND };
            let step = cpu as f64 / seconds as f64;
            (least, most) = (least.min(step), most.max(step));
            let measured = rate.observe(now).unwrap() as f64 / SECOND as f64;
            prop_assert!(measured >= least - 1e-6 && measured <= most + 1e-6, "{measured} is not within {least}..{most}");
            if (measured - step).abs() < 1e-6 { of_a_step = true } else { of_several = true }
        }
        reached.case([
            ("the rate of the last step", of_a_step),
            ("the rate of several steps", of_several),
            ("nothing is used", least == 0.0),
        ]);
    });
    // The rarest: "nothing is used", in one case of 2.
    reached.assert_each();
}
