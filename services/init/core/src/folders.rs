//! The folders that the agent needs, with their owners.

use std::path::PathBuf;

use keelson_config::{Config, ServiceName};

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A folder that must exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// The path.
    pub path: PathBuf,
    /// Permission bits.
    pub mode: u32,
    /// The owner; `None` if init is not root and cannot change it.
    pub owner: Option<Owner>,
    /// Whether mode and owner are also set on an existing folder. Folders of the kubelet's layout keep theirs.
    pub enforced: bool,
    /// Whether a change of the owner also applies to the contents.
    pub contents: bool,
}

/// The services that get copies of credentials.
const WITH_CREDENTIALS: [ServiceName; 4] =
    [ServiceName::RuntimeShim, ServiceName::PodConfig, ServiceName::NodeStatus, ServiceName::NodeApi];

/// The folders of `config`, parents first.
///
/// - `<run-dir>` 0751: members of the operator group and the services' users may traverse it.
/// - `<run-dir>/<service>` 0750, owned by the service; the operator group reaches the socket inside.
/// - `<run-dir>/credentials` 0711, owned by root (or init's user); below it a folder 0700 for each service that gets
///   credentials, owned by the service.
/// - `<state-dir>/<service>` 0700, owned by the service; init has one if a control plane may assign a configuration.
/// - the kubelet's root, pod logs and links, created if they are missing.
pub fn folders(config: &Config, init_is_root: bool) -> Vec<Folder> {
    let paths = &config.paths;
    let group = config.users.operator_gid;
    let own = |uid: u32, gid: u32| init_is_root.then_some(Owner { uid, gid });
    let of = |service: ServiceName, gid: u32| own(config.uid_of(service).unwrap_or(0), gid);
    let enforced =
        |path: PathBuf, mode, owner, contents| Folder { path, mode, owner, enforced: true, contents };
    let kubelets = |path: &PathBuf, mode| Folder {
        path: path.clone(),
        mode,
        owner: own(0, 0),
        enforced: false,
        contents: false,
    };

    let mut list = vec![enforced(paths.run_dir.clone(), 0o751, own(0, group), false)];
    for service in ServiceName::ALL {
        list.push(enforced(paths.socket_dir(service), 0o750, of(service, group), false));
    }
    list.push(enforced(paths.run_dir.join("credentials"), 0o711, own(0, 0), false));
    for service in WITH_CREDENTIALS {
        let owner = init_is_root.then(|| Owner { uid: config.uid_of(service).unwrap_or(0), gid: 0 });
        list.push(enforced(paths.credentials(service), 0o700, owner, true));
    }
    list.push(enforced(paths.state_dir.clone(), 0o751, own(0, group), false));
    for service in ServiceName::supervised() {
        list.push(enforced(paths.state(service), 0o700, of(service, group), true));
    }
    if config.control_plane.may_assign_a_configuration() {
        list.push(enforced(paths.state(ServiceName::Init), 0o700, own(0, 0), false));
    }
    list.push(kubelets(&paths.root_dir, 0o750));
    list.push(kubelets(&paths.pod_logs_dir, 0o750));
    list.push(kubelets(&paths.container_links_dir, 0o755));
    list
}

#[cfg(test)]
mod tests {
    use keelson_config::ControlPlane;

    use super::*;

    fn config() -> Config {
        let mut config = Config::default();
        config.users.operator_gid = 700;
        config.users.uids.insert("pod-sync".into(), 64_205);
        config
    }

    fn find<'a>(list: &'a [Folder], path: &str) -> &'a Folder {
        list.iter().find(|f| f.path.to_str() == Some(path)).unwrap_or_else(|| panic!("no {path}"))
    }

    #[test]
    fn init_has_a_state_folder_if_a_configuration_can_be_assigned() {
        let has_one = |config: &Config| {
            folders(config, true).iter().any(|f| f.path.ends_with("keelson/init") && f.mode == 0o700)
        };
        let mut config = config();
        assert!(!has_one(&config));
        config.control_plane = ControlPlane::Etcd(keelson_config::Etcd::plain(Vec::new()));
        assert!(has_one(&config));
    }

    #[test]
    fn sockets_and_state_belong_to_the_user_of_the_service() {
        let list = folders(&config(), true);
        let sockets = find(&list, "/run/keelson/pod-sync");
        assert_eq!((sockets.mode, sockets.owner), (0o750, Some(Owner { uid: 64_205, gid: 700 })));
        let state = find(&list, "/var/lib/keelson/pod-sync");
        assert_eq!((state.mode, state.owner), (0o700, Some(Owner { uid: 64_205, gid: 700 })));
        assert!(state.contents && state.enforced);
        let run = find(&list, "/run/keelson");
        assert_eq!((run.mode, run.owner), (0o751, Some(Owner { uid: 0, gid: 700 })));
    }

    #[test]
    fn a_root_service_has_folders_of_root() {
        let list = folders(&config(), true);
        assert_eq!(find(&list, "/run/keelson/volume-manager").owner, Some(Owner { uid: 0, gid: 700 }));
        assert_eq!(find(&list, "/run/keelson/init").owner, Some(Owner { uid: 0, gid: 700 }));
    }

    #[test]
    fn credential_folders_belong_to_their_reader() {
        let mut config = config();
        config.users.uids.insert("pod-config".into(), 64_201);
        for init_is_root in [true, false] {
            let list = folders(&config, init_is_root);
            for (path, mode, uid) in [
                ("/run/keelson/credentials", 0o711, 0),
                ("/run/keelson/credentials/runtime-shim", 0o700, 0),
                ("/run/keelson/credentials/pod-config", 0o700, 64_201),
                ("/run/keelson/credentials/node-status", 0o700, 0),
                ("/run/keelson/credentials/node-api", 0o700, 0),
            ] {
                let folder = find(&list, path);
                let owner = init_is_root.then_some(Owner { uid, gid: 0 });
                assert_eq!((folder.mode, folder.owner, folder.enforced), (mode, owner, true), "{path}");
            }
        }
    }

    #[test]
    fn existing_kubelet_folders_keep_owner_and_mode() {
        let list = folders(&config(), true);
        for path in ["/var/lib/kubelet", "/var/log/pods", "/var/log/containers"] {
            assert!(!find(&list, path).enforced, "{path}");
        }
    }

    #[test]
    fn without_root_no_folder_changes_its_owner() {
        assert!(folders(&config(), false).iter().all(|f| f.owner.is_none()));
    }

    #[test]
    fn parent_folders_come_before_their_children() {
        let list = folders(&config(), true);
        for (i, folder) in list.iter().enumerate() {
            assert!(list[..i].iter().all(|earlier| !earlier.path.starts_with(&folder.path)));
        }
    }
}
