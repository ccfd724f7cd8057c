use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

const ON: NodeSupport = NodeSupport { is_enabled: true, labels_all_modes: false };
const ALL_MODES: NodeSupport = NodeSupport { is_enabled: true, labels_all_modes: true };
const OFF: NodeSupport = NodeSupport { is_enabled: false, labels_all_modes: true };

fn level(level: &str) -> SeLinuxOptions {
    SeLinuxOptions { level: level.to_owned(), ..SeLinuxOptions::default() }
}

fn context() -> FileContext {
    FileContext::from_lxc_contexts("file = \"system_u:object_r:container_file_t:s0\"").unwrap()
}

fn label(level: &str) -> FileLabel {
    FileLabel::parse(&format!("system_u:object_r:container_file_t:{level}")).unwrap()
}

fn modes(modes: &[&str]) -> Vec<String> {
    modes.iter().map(|mode| (*mode).to_owned()).collect()
}

fn volume(access_modes: Option<&[String]>) -> VolumeUse<'_> {
    VolumeUse { name: "pv", access_modes, supports_label: true, policy: ChangePolicy::MountOption }
}

#[test]
fn the_default_label_of_files_is_read_from_the_policy() {
    let text = "process = \"system_u:system_r:container_t:s0\"\nro_file=\"a:b:c:s0\"\n\
                file = \"system_u:object_r:container_file_t:s0\"\nsandbox_kvm_process = \"x\"";
    assert_eq!(FileContext::from_lxc_contexts(text), Ok(context()));
    assert_eq!(FileContext::from_lxc_contexts("file=system_u:object_r:container_file_t:s0"), Ok(context()));
    for bad in ["", "process = \"a:b:c:s0\"", "#file", "ro_file = \"a:b:c:s0\""] {
        assert_eq!(FileContext::from_lxc_contexts(bad), Err(SeLinuxError::NoDefault), "{bad}");
    }
    for bad in ["file =", "file = \"a:b:c\"", "file = \"a:b:c:s0", "file = a:b c:d:s0"] {
        let result = FileContext::from_lxc_contexts(bad);
        assert!(matches!(result, Err(SeLinuxError::InvalidLabel { .. })), "{bad} {result:?}");
    }
}

#[test]
fn the_policy_is_the_one_of_the_configuration_or_targeted() {
    for (config, expected) in [
        ("SELINUX=enforcing\nSELINUXTYPE=mls\n", "mls"),
        ("# SELINUXTYPE=mls\n", "targeted"),
        ("", "targeted"),
        (" SELINUXTYPE = minimum \r\n", "minimum"),
    ] {
        assert_eq!(policy_type(config), Ok(expected), "{config:?}");
    }
    for bad in ["", "..", "../x", "a/b", "a b", ".hidden"] {
        let config = format!("SELINUXTYPE={bad}");
        let error = policy_type(&config).unwrap_err();
        assert_eq!(error, SeLinuxError::InvalidPolicy { name: bad.into() });
    }
}

#[test]
fn containers_may_differ_if_the_volume_cannot_have_a_label() {
    let rwop = modes(&["ReadWriteOncePod"]);
    let (one, two) = (level("s0:c1"), level("s0:c2"));
    for volume in [
        VolumeUse { supports_label: false, ..volume(Some(&rwop)) },
        VolumeUse { policy: ChangePolicy::Recursive, ..volume(Some(&rwop)) },
    ] {
        assert_eq!(decide(ON, &volume, &[Some(&one), Some(&two)], &context()), Ok(Labels::default()));
    }
}

#[test]
fn a_label_has_the_level_and_user_of_the_options_and_the_rest_from_the_system() {
    let all = SeLinuxOptions {
        user: "user_u".into(),
        role: "system_r".into(),
        kind: "container_t".into(),
        level: "s0:c15,c25".into(),
    };
    let expected = "user_u:object_r:container_file_t:s0:c15,c25";
    assert_eq!(context().file_label(Some(&all)).unwrap().unwrap().as_str(), expected);
    let label = context().file_label(Some(&level("s0-s15:c0.c1023"))).unwrap().unwrap();
    assert_eq!(label.to_string(), "system_u:object_r:container_file_t:s0-s15:c0.c1023");
}

#[test]
fn options_without_a_level_fix_no_label() {
    let no_level =
        SeLinuxOptions { user: "user_u".into(), kind: "spc_t".into(), ..SeLinuxOptions::default() };
    for options in [None, Some(&SeLinuxOptions::default()), Some(&no_level)] {
        assert_eq!(context().file_label(options), Ok(None), "{options:?}");
    }
}

#[test]
fn a_label_that_would_end_the_quoted_option_is_refused() {
    for bad in ["s0\",exec,suid,x=\"", "s0 c1", "s0\\", "s0\n", "s0:", ":s0", "s0,,c1", "s0:c1,", "é", "s0'"]
    {
        let error = context().file_label(Some(&level(bad))).unwrap_err();
        assert!(matches!(&error, SeLinuxError::InvalidLabel { label } if label.ends_with(bad)), "{error}");
        assert!(error.to_string().contains("seLinuxOptions"));
    }
    for user in ["a:b", "a,b", "a\"", " ", "a/b"] {
        let options = SeLinuxOptions { user: user.into(), ..level("s0") };
        assert!(context().file_label(Some(&options)).is_err(), "{user}");
    }
    for bad in ["", "a", "a:b:c", "a:b:c:", ":b:c:s0", "a::c:s0", "a:b:c:s0\0"] {
        assert!(FileLabel::parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn the_mount_option_quotes_the_label() {
    let option = label("s0:c1,c2").mount_option();
    assert_eq!(option, "context=\"system_u:object_r:container_file_t:s0:c1,c2\"");
}

#[test]
fn the_change_policy_of_a_pod_is_one_of_two() {
    for (field, expected) in [
        (None, ChangePolicy::MountOption),
        (Some(""), ChangePolicy::MountOption),
        (Some("MountOption"), ChangePolicy::MountOption),
        (Some("Recursive"), ChangePolicy::Recursive),
    ] {
        assert_eq!(ChangePolicy::parse(field), Ok(expected));
    }
    let text = ChangePolicy::parse(Some("recursive")).unwrap_err().to_string();
    assert!(text.contains("\"recursive\"") && text.contains("MountOption or Recursive"), "{text}");
}

#[test]
fn the_label_is_a_mount_option_only_if_node_plugin_policy_and_mode_allow_it() {
    let rwop = modes(&["ReadWriteOncePod"]);
    let rwo = modes(&["ReadWriteOnce"]);
    let both = modes(&["ReadWriteOncePod", "ReadWriteOnce"]);
    let none = modes(&[]);
    let recursive = VolumeUse { policy: ChangePolicy::Recursive, ..volume(Some(&rwop)) };
    let unsupported = VolumeUse { supports_label: false, ..volume(Some(&rwop)) };
    for (node, volume, is_wanted, is_mounted) in [
        (ON, volume(Some(&rwop)), true, true),
        (ON, volume(Some(&rwo)), true, false),
        (ON, volume(Some(&both)), true, false),
        (ON, volume(Some(&none)), true, false),
        (ON, volume(None), true, false),
        (ON, recursive, false, false),
        (ON, unsupported, false, false),
        (OFF, volume(Some(&rwop)), false, false),
        (ALL_MODES, volume(Some(&rwop)), true, true),
        (ALL_MODES, volume(Some(&rwo)), true, true),
        (ALL_MODES, volume(Some(&both)), true, true),
        (ALL_MODES, volume(None), true, false),
        (ALL_MODES, recursive, false, false),
        (ALL_MODES, unsupported, false, false),
    ] {
        let options = level("s0:c1,c2");
        let labels = decide(node, &volume, &[Some(&options), Some(&options)], &context()).unwrap();
        let expected = |is: bool| is.then(|| label("s0:c1,c2"));
        let expected = Labels { wanted: expected(is_wanted), mounted: expected(is_mounted) };
        assert_eq!(labels, expected, "{node:?} {volume:?}");
    }
}

#[test]
fn a_volume_without_a_fixed_label_has_none() {
    let rwop = modes(&["ReadWriteOncePod"]);
    for containers in [&[][..], &[None], &[None, Some(&level(""))]] {
        let labels = decide(ON, &volume(Some(&rwop)), containers, &context());
        assert_eq!(labels, Ok(Labels::default()), "{containers:?}");
    }
}

#[test]
fn different_labels_in_a_pod_are_an_error_where_labels_are_mounted_else_a_warning() {
    let (rwop, rwo) = (modes(&["ReadWriteOncePod"]), modes(&["ReadWriteOnce"]));
    let (one, two) = (level("s0:c1"), level("s0:c2"));
    let mut same_file_label = one.clone();
    same_file_label.kind = "spc_t".into();
    let differ = "volume_manager_selinux_pod_context_mismatch";
    for (node, volume, suffix) in [
        (ON, volume(Some(&rwop)), "errors"),
        (ON, volume(Some(&rwo)), "warnings"),
        (ON, volume(None), "warnings"),
        (ALL_MODES, volume(Some(&rwo)), "errors"),
        (ALL_MODES, volume(None), "warnings"),
    ] {
        for containers in [[Some(&one), Some(&two)], [Some(&two), None], [None, Some(&one)]] {
            let finding = decide(node, &volume, &containers, &context()).unwrap_err();
            assert_eq!(finding.metric(), format!("{differ}_{suffix}_total"), "{node:?} {volume:?}");
            assert_eq!(matches!(finding, Finding::Refusal(_)), suffix == "errors");
            assert!(matches!(finding.error(), SeLinuxError::ContainersDiffer { .. }));
        }
        assert!(decide(node, &volume, &[Some(&one), Some(&same_file_label)], &context()).is_ok());
        assert!(decide(OFF, &volume, &[Some(&one), Some(&two)], &context()).is_ok());
    }
    let finding = decide(ON, &volume(Some(&rwop)), &[Some(&two), None, Some(&one)], &context()).unwrap_err();
    let prefix = "system_u:object_r:container_file_t";
    let text = finding.error().to_string();
    assert!(
        text.contains("volume pv") && text.contains(&format!("none, {prefix}:s0:c1, {prefix}:s0:c2;")),
        "{text}"
    );
}

#[test]
fn an_invalid_label_counts_for_the_container() {
    let (rwop, rwo) = (modes(&["ReadWriteOncePod"]), modes(&["ReadWriteOnce"]));
    for (modes, suffix) in [(&rwop, "errors"), (&rwo, "warnings")] {
        let finding = decide(ON, &volume(Some(modes)), &[Some(&level("\""))], &context()).unwrap_err();
        assert_eq!(finding.metric(), format!("volume_manager_selinux_container_{suffix}_total"));
    }
}

#[test]
fn a_second_pod_with_another_label_is_refused_where_labels_are_mounted_else_warned() {
    let (rwop, rwo) = (modes(&["ReadWriteOncePod"]), modes(&["ReadWriteOnce"]));
    let (one, two) = (label("s0:c1"), label("s0:c2"));
    let metric = "volume_manager_selinux_volume_context_mismatch";
    for (modes, suffix) in [(&rwop, "errors"), (&rwo, "warnings")] {
        let volume = volume(Some(modes));
        for (first, second) in [(Some(&one), Some(&two)), (None, Some(&one)), (Some(&one), None)] {
            let finding = check_second_pod(ON, &volume, first, second).unwrap_err();
            assert_eq!(finding.metric(), format!("{metric}_{suffix}_total"));
            let text = finding.error().to_string();
            assert!(text.contains("conflicting SELinux labels of volume pv"), "{text}");
            assert_eq!(check_second_pod(OFF, &volume, first, second), Ok(()));
            let unsupported = VolumeUse { supports_label: false, ..volume };
            assert_eq!(check_second_pod(ON, &unsupported, first, second), Ok(()));
        }
        assert_eq!(check_second_pod(ON, &volume, Some(&one), Some(&one)), Ok(()));
        assert_eq!(check_second_pod(ON, &volume, None, None), Ok(()));
    }
}

#[test]
fn metrics_name_the_widest_access_mode_and_the_plugin() {
    for (names, expected) in [
        (&["ReadWriteOncePod"][..], "RWOP"),
        (&["ReadWriteOncePod", "ReadWriteOnce"], "RWO"),
        (&["ReadWriteOnce", "ReadOnlyMany"], "ROX"),
        (&["ReadOnlyMany", "ReadWriteOnce", "ReadWriteMany"], "RWX"),
        (&[], ""),
        (&["Unknown"], ""),
    ] {
        assert_eq!(access_mode_label(Some(&modes(names))), expected, "{names:?}");
    }
    assert_eq!(access_mode_label(None), "inline");
    assert_eq!(plugin_label("kubernetes.io/csi", "d.example.com"), "kubernetes.io/csi/d.example.com");
    assert_eq!(plugin_label("kubernetes.io/iscsi", ""), "kubernetes.io/iscsi");
}

#[test]
fn the_runtime_relabels_managed_volumes_that_are_not_mounted_with_a_label() {
    let label = label("s0");
    for (managed, read_only, supports, mounted, expected) in [
        (Managed::Always, false, true, None, true),
        (Managed::Always, true, true, None, true),
        (Managed::UnlessReadOnly, false, true, None, true),
        (Managed::UnlessReadOnly, true, true, None, false),
        (Managed::UnlessReadOnly, false, false, None, false),
        (Managed::UnlessReadOnly, false, true, Some(&label), false),
        (Managed::Never, false, true, None, false),
    ] {
        let wants = wants_relabel(managed, read_only, supports, mounted);
        assert_eq!(wants, expected, "{managed:?} {read_only} {supports} {mounted:?}");
    }
    assert!(shows_seclabel("rw,seclabel,relatime"));
    assert!(
        !shows_seclabel("rw,context=\"a,seclabel,b\"")
            && !shows_seclabel("noseclabel")
            && !shows_seclabel("")
    );
}

#[test]
fn labels_are_the_same_however_their_categories_are_written() {
    for (one, other, expected) in [
        ("s0", "s0", true),
        ("s0:c1,c2", "s0:c2,c1", true),
        ("s0:c1,c2,c3", "s0:c1.c3", true),
        ("s0:c1.c2", "s0:c1,c2", true),
        ("s0-s0", "s0", true),
        ("s0-s0:c0.c1023", "s0-s0:c0,c1.c1023", true),
        ("s0:c1,c1", "s0:c1", true),
        ("s0:c1,c2", "s0:c1,c3", false),
        ("s0", "s1", false),
        ("s0", "s0:c0", false),
        ("s0:c2.c1", "s0", false),
        ("s0-s0:c1", "s0:c1", false),
        ("s0:secret", "s0:secret", true),
        ("s0:secret,c1", "s0:c1,secret", false),
        ("s0:c70000", "s0:c70001", false),
    ] {
        let (one, other) = (label(one), label(other));
        assert_eq!(is_same_label(one.as_str(), other.as_str()), expected, "{one} {other}");
        assert_eq!(is_same_label(other.as_str(), one.as_str()), expected, "{other} {one}");
    }
    assert!(!is_same_label("a:r:t:s0:c1,c2", "b:r:t:s0:c2,c1"), "another user");
    assert!(!is_same_label("", "a:r:t:s0") && is_same_label("", ""));
}

#[test]
fn an_accepted_label_stays_one_option_of_a_list() {
    let reached = &Reached::default();
    let text = prop_oneof!["s0(:c[0-9]{1,2}(,c[0-9]{1,2})?)?", "[sc0-9:,. \"\\\\]{0,8}"];
    proptest!(ProptestConfig::with_cases(1024), |(text in text)| {
        let label = context().file_label(Some(&level(&text)));
        if let Ok(Some(label)) = &label {
            let option = label.mount_option();
            let list = format!("noexec,{option},ro");
            prop_assert_eq!(mount_options::split(&list), ["noexec", &option, "ro"]);
            prop_assert_eq!(&FileLabel::parse(label.as_str()).unwrap(), label);
        }
        reached.case([
            ("a label with a comma", text.contains(',') && label.is_ok()),
            ("a refused label", label.is_err()),
            ("no level", text.is_empty()),
        ]);
    });
    // The rarest: "no level", in one case of 14.
    reached.assert_each();
}
