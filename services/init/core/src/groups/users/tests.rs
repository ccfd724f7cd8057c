use keelson_config::ServiceName;

use crate::inputs::{Flags, Host};
use crate::outcome::{Level, Note};
use crate::testing::{host, run};

#[test]
fn existing_system_users_and_the_group_keelson_are_used() {
    let mut machine = host();
    machine.service_users.insert(ServiceName::PodSync, 998);
    // Services that need root ignore a user of this name.
    machine.service_users.insert(ServiceName::RuntimeShim, 997);
    machine.operator_group = Some(996);
    let config = run(&Flags::default(), None, None, &machine).unwrap().config;
    assert_eq!((config.users.uids["pod-sync"], config.users.uids["pod-config"]), (998, 64_201));
    assert!(!config.users.uids.contains_key("runtime-shim") && !config.users.uids.contains_key("init"));
    assert_eq!(config.users.operator_gid, 996);
    assert_eq!(config.provenance["users.uids.pod-sync"], "user keelson-pod-sync");
    assert_eq!(config.provenance["users.operatorGid"], "group keelson");
}

#[test]
fn without_root_all_services_run_as_the_user_of_init() {
    let machine = Host { uid: 1000, gid: 1001, ..host() };
    let resolved = run(&Flags::default(), None, None, &machine).unwrap();
    assert!(resolved.config.users.uids.is_empty());
    assert_eq!(resolved.config.users.operator_gid, 1001);
    let errors: Vec<&Note> = resolved.notes.iter().filter(|n| n.level == Level::Error).collect();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].text.contains("kubelet needs to run as uid 0, it is being run as 1000"), "{errors:?}");
    let as_root = run(&Flags::default(), None, None, &host()).unwrap();
    assert!(as_root.notes.iter().all(|note| note.level != Level::Error), "{:?}", as_root.notes);
}
