use std::collections::BTreeMap;

use keelson_kube_model::{Pod, ResourceList};
use serde_json::{Value, json};

use super::*;
use crate::runtime_version::ImageVolumeSupport;
use crate::testing::{deleting, pod};

mod sandboxes {
    use super::*;

    fn plan(pod: &Pod) -> SandboxSpec {
        let inputs = SandboxInputs {
            attempt: 2,
            cgroup_parent: "/kubepods/podu-1",
            pod_logs_dir: "/var/log/pods/",
            runtime_handler: "kata",
            ..SandboxInputs::default()
        };
        sandbox_plan(pod, &inputs).unwrap()
    }

    #[test]
    fn identity_labels_override_pod_labels_and_annotations_are_copied() {
        let mut pod = pod(json!({"containers": [{"name": "a"}]}));
        pod.metadata.labels =
            BTreeMap::from([("app".into(), "x".into()), (keys::POD_NAME.into(), "fake".into())]);
        pod.metadata.annotations = BTreeMap::from([("note".into(), "y".into())]);
        let got = plan(&pod);
        assert_eq!(
            (got.name.as_str(), got.namespace.as_str(), got.uid.as_str(), got.attempt),
            ("web", "shop", "u-1", 2)
        );
        assert_eq!(got.labels[keys::POD_NAME], "web");
        assert_eq!(
            (got.labels[keys::POD_NAMESPACE].as_str(), got.labels[keys::POD_UID].as_str()),
            ("shop", "u-1")
        );
        assert_eq!(got.labels["app"], "x");
        assert_eq!(got.annotations, pod.metadata.annotations);
        assert_eq!(got.log_directory, "/var/log/pods/shop_web_u-1");
        assert_eq!((got.cgroup_parent.as_str(), got.runtime_handler.as_str()), ("/kubepods/podu-1", "kata"));
    }

    #[test]
    fn a_host_network_pod_has_no_hostname() {
        assert_eq!(plan(&pod(json!({}))).hostname, "web");
        assert_eq!(plan(&pod(json!({"hostNetwork": true}))).hostname, "");
    }

    #[test]
    fn sysctls_are_written_with_dots() {
        let spec =
            json!({"securityContext": {"sysctls": [{"name": "net/ipv4/tcp_syncookies", "value": "1"}]}});
        assert_eq!(plan(&pod(spec)).sysctls["net.ipv4.tcp_syncookies"], "1");
    }

    #[test]
    fn port_mappings_are_those_of_regular_containers_without_duplicates() {
        let port = |value: Value| value;
        let ports = json!([
            port(json!({"containerPort": 80})),
            port(json!({"containerPort": 80})),
            port(json!({"containerPort": 80, "protocol": "UDP"})),
            port(json!({"containerPort": 80, "hostPort": 8080})),
            port(json!({"containerPort": 81, "name": "web"})),
            port(json!({"containerPort": 82, "name": "web"})),
            port(json!({"containerPort": 83, "protocol": "SCTP", "hostIP": "127.0.0.1"})),
            port(json!({"containerPort": 84, "protocol": "ODD"})),
        ]);
        let got = plan(&pod(json!({"containers": [{"name": "a", "ports": ports}],
            "initContainers": [{"name": "i", "ports": [{"containerPort": 99}]}]})));
        let short: Vec<_> =
            got.port_mappings.iter().map(|p| (p.container_port, p.host_port, p.protocol)).collect();
        assert_eq!(
            short,
            [
                (80, 0, Protocol::Tcp),
                (80, 0, Protocol::Udp),
                (80, 8080, Protocol::Tcp),
                (81, 0, Protocol::Tcp),
                (83, 0, Protocol::Sctp),
                (84, 0, Protocol::Tcp)
            ]
        );
        assert_eq!(got.port_mappings[4].host_ip, "127.0.0.1");
    }

    #[test]
    fn user_namespaces_are_an_error_without_runtime_support() {
        let pod = pod(json!({"hostUsers": false}));
        let error = sandbox_plan(&pod, &SandboxInputs::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
        );
        let users = Some(UserNamespace { host_id: 65536, length: 65536 });
        let given = SandboxInputs { users, ..SandboxInputs::default() };
        assert_eq!(sandbox_plan(&pod, &given).unwrap().security.namespaces.users, users);
        let host = super::pod(json!({"hostUsers": true}));
        assert_eq!(sandbox_plan(&host, &given).unwrap().security.namespaces.users, None);
    }
}

mod containers {
    use super::*;

    /// The values that [`ContainerInputs`] borrows.
    #[derive(Default)]
    struct World {
        volumes: BTreeMap<String, VolumePath>,
        subpaths: BTreeMap<usize, String>,
        files: Vec<FileMount>,
        ips: Vec<String>,
        allocatable: ResourceList,
        services: BTreeMap<String, String>,
        assigned: AssignedResources,
        recursive_read_only: bool,
        image_volumes: ImageVolumeSupport,
        images: BTreeMap<String, String>,
        selinux: bool,
        users: Option<UserNamespace>,
    }

    impl World {
        fn new() -> Self {
            let volume = |path: &str, read_only| VolumePath {
                host_path: path.to_owned(),
                read_only,
                ..VolumePath::default()
            };
            let volumes = BTreeMap::from([
                ("data".to_owned(), volume("/pods/u-1/data", false)),
                ("fixed".to_owned(), volume("/pods/u-1/fixed", true)),
            ]);
            Self { volumes, ..Self::default() }
        }

        fn inputs(&self) -> ContainerInputs<'_> {
            ContainerInputs {
                attempt: 3,
                target_id: None,
                image: ResolvedImage { reference: "sha256:abc", user: ImageUser::default() },
                pod: PodInputs { ips: &self.ips, volume_groups: &[], users: self.users },
                node: NodeInputs { name: "node-1", ips: &self.ips, allocatable: &self.allocatable },
                env: EnvSources { objects: &NoObjects, files: &NoObjects, services: &self.services },
                volumes: VolumeInputs {
                    paths: &self.volumes,
                    subpaths: &self.subpaths,
                    images: &self.images,
                    runtime_handler: "kata",
                    files: &self.files,
                },
                machine: MachineInputs::default(),
                security: SecuritySettings {
                    seccomp_dir: "/seccomp",
                    selinux: self.selinux,
                    ..SecuritySettings::default()
                },
                runtime: RuntimeFeatures {
                    name: "containerd",
                    version: "9.8.7",
                    recursive_read_only: self.recursive_read_only,
                    image_volumes: self.image_volumes,
                },
                assigned: &self.assigned,
            }
        }

        fn plan(&self, pod: &Pod) -> Result<ContainerSpec, ConfigError> {
            container_plan(pod, &pod.spec.containers[0], &self.inputs())
        }
    }

    fn with(container: Value) -> Pod {
        let mut container = container;
        container["name"] = json!("test_container");
        container["image"] = json!("foo/image:v1");
        pod(json!({"containers": [container], "volumes": [
            {"name": "data", "emptyDir": {}}, {"name": "fixed", "emptyDir": {}},
            {"name": "oci", "image": {"reference": "registry/data:v1"}}]}))
    }

    #[test]
    fn labels_and_annotations_let_a_later_process_stop_the_container() {
        let mut pod = with(json!({"terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File", "ports": [{"containerPort": 80}],
            "lifecycle": {"preStop": {"exec": {"command": ["sync"]}}}}));
        pod.spec.termination_grace_period_seconds = Some(30);
        let mut world = World::new();
        world.assigned.annotations =
            BTreeMap::from([("vendor/x".into(), "1".into()), (keys::CONTAINER_HASH.into(), "fake".into())]);
        let got = world.plan(&pod).unwrap();
        let labels = ["web", "shop", "u-1", "test_container"];
        for (key, value) in
            [keys::POD_NAME, keys::POD_NAMESPACE, keys::POD_UID, keys::CONTAINER_NAME].iter().zip(labels)
        {
            assert_eq!(got.labels[*key], value);
        }
        let expected = [
            (keys::CONTAINER_HASH, "8e45cbd0"),
            (keys::RESTART_COUNT, "3"),
            (keys::TERMINATION_MESSAGE_PATH, "/dev/termination-log"),
            (keys::TERMINATION_MESSAGE_POLICY, "File"),
            (keys::TERMINATION_GRACE_PERIOD, "30"),
            (keys::PRE_STOP_HANDLER, "{\"exec\":{\"command\":[\"sync\"]}}"),
            (keys::PORTS, "[{\"containerPort\":80}]"),
            ("vendor/x", "1"),
        ];
        assert_eq!(got.annotations.len(), expected.len());
        for (key, value) in expected {
            assert_eq!(got.annotations[key], value, "{key}");
        }
        let mut gone = deleting(pod);
        gone.metadata.deletion_grace_period_seconds = Some(5);
        assert_eq!(world.plan(&gone).unwrap().annotations[keys::DELETION_GRACE_PERIOD], "5");
    }

    #[test]
    fn container_identity_log_path_and_streams_come_from_the_spec() {
        let got = World::new()
            .plan(&with(json!({"stdin": true, "stdinOnce": true, "tty": true, "workingDir": "/srv"})))
            .unwrap();
        assert_eq!(
            (got.name.as_str(), got.attempt, got.image_ref.as_str()),
            ("test_container", 3, "sha256:abc")
        );
        assert_eq!(got.user_specified_image, "foo/image:v1");
        assert_eq!(got.log_path, "test_container/3.log");
        assert!(got.stdin && got.stdin_once && got.tty);
        assert_eq!(got.working_dir, "/srv");
    }

    #[test]
    fn command_and_arguments_are_expanded_with_the_whole_environment() {
        let mut world = World::new();
        world.services.insert("DB".into(), "10.0.0.5".into());
        world.assigned.envs.push(("DEVICE".into(), "7".into()));
        let got = world
            .plan(&with(
                json!({"command": ["run", "$(A)", "$(NONE)"], "args": ["$(DB)", "$(DEVICE)", "$$(A)"],
                "env": [{"name": "A", "value": "1"}]}),
            ))
            .unwrap();
        assert_eq!(got.command, ["run", "1", "$(NONE)"]);
        assert_eq!(got.args, ["10.0.0.5", "7", "$(A)"]);
    }

    #[test]
    fn the_environment_is_also_built_alone() {
        let pod =
            with(json!({"env": [{"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}));
        let world = World::new();
        let got = environment(&pod, &pod.spec.containers[0], &world.inputs()).unwrap();
        assert_eq!(got, [("N".to_owned(), "node-1".to_owned())]);
    }

    fn mount(value: Value) -> Pod {
        let mut value = value;
        value["mountPath"] = json!("/m");
        with(json!({ "volumeMounts": [value] }))
    }

    #[test]
    fn a_mount_is_read_only_if_the_mount_or_the_volume_is() {
        let world = World::new();
        let one = |value| world.plan(&mount(value)).unwrap().mounts.remove(0);
        let got = one(json!({"name": "data"}));
        assert_eq!((got.host_path.as_str(), got.container_path.as_str()), ("/pods/u-1/data", "/m"));
        assert!(!got.readonly && got.propagation == Propagation::Private);
        assert!(one(json!({"name": "data", "readOnly": true})).readonly);
        assert!(one(json!({"name": "fixed"})).readonly);
    }

    #[test]
    fn selinux_relabels_each_agent_volume_once_per_container() {
        let volumes = [
            ("empty", json!({"emptyDir": {}}), true),
            ("map", json!({"configMap": {"name": "c"}}), true),
            ("secret", json!({"secret": {"secretName": "s"}}), true),
            ("fields", json!({"downwardAPI": {"items": []}}), true),
            ("all", json!({"projected": {"sources": []}}), true),
            ("host", json!({"hostPath": {"path": "/tmp"}}), false),
        ];
        let mounts = |at: &str| {
            volumes
                .iter()
                .map(move |(name, ..)| json!({"name": name, "mountPath": format!("/{at}/{name}")}))
                .collect::<Vec<_>>()
        };
        let mounts = [mounts("first"), mounts("second")].concat();
        let sources: Vec<Value> = volumes
            .iter()
            .map(|(name, source, _)| {
                let mut volume = source.clone();
                volume["name"] = json!(name);
                volume
            })
            .collect();
        let pod = pod(
            json!({"containers": [{"name": "a", "image": "i", "volumeMounts": mounts}], "volumes": sources}),
        );
        let path = |name: &str| {
            (name.to_owned(), VolumePath { host_path: format!("/v/{name}"), ..VolumePath::default() })
        };
        let files =
            vec![FileMount { container_path: "/etc/hosts".into(), host_path: "/h".into(), read_only: false }];
        for selinux in [true, false] {
            let world = World {
                volumes: volumes.iter().map(|(name, ..)| path(name)).collect(),
                files: files.clone(),
                selinux,
                ..World::new()
            };
            let spec = world.plan(&pod).unwrap();
            let labelled: Vec<bool> = spec.mounts.iter().map(|mount| mount.selinux_relabel).collect();
            let first = volumes.iter().map(|(.., managed)| selinux && *managed);
            let expected: Vec<bool> = first.chain([false; 6]).chain([selinux]).collect();
            assert_eq!(labelled, expected);
        }
    }

    #[test]
    fn selinux_relabels_volumes_of_plugins_as_volume_manager_says() {
        let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
        let mount = |name: &str, at: &str| json!({"name": name, "mountPath": at});
        let pod = pod(json!({
            "containers": [{"name": "a", "image": "i",
                "volumeMounts": [mount("own", "/own"), mount("own", "/again"), mount("labelled", "/labelled")]}],
            "volumes": [claim("own"), claim("labelled")],
        }));
        let path = |name: &str, selinux_relabel| {
            let host_path = format!("/v/{name}");
            (name.to_owned(), VolumePath { host_path, selinux_relabel, ..VolumePath::default() })
        };
        for selinux in [true, false] {
            let volumes = BTreeMap::from([path("own", true), path("labelled", false)]);
            let spec = World { volumes, selinux, ..World::new() }.plan(&pod).unwrap();
            let labelled: Vec<bool> = spec.mounts.iter().map(|mount| mount.selinux_relabel).collect();
            assert_eq!(labelled, [selinux, false, false]);
        }
    }

    #[test]
    fn mount_propagation_follows_the_mount() {
        let world = World::new();
        for (text, expected) in [
            ("None", Propagation::Private),
            ("HostToContainer", Propagation::HostToContainer),
            ("Bidirectional", Propagation::Bidirectional),
        ] {
            let pod = with(json!({
                "volumeMounts": [{"name": "data", "mountPath": "/m", "mountPropagation": text}],
                "securityContext": {"privileged": true},
            }));
            let spec = world.plan(&pod).unwrap();
            assert_eq!(spec.mounts[0].propagation, expected);
        }
    }

    #[test]
    fn a_mount_of_an_unknown_volume_is_an_error() {
        let error = World::new().plan(&mount(json!({"name": "none"}))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot find volume \"none\" to mount into container \"test_container\""
        );
    }

    #[test]
    fn a_subpath_is_validated_and_uses_the_prepared_path() {
        let pod = mount(json!({"name": "data", "subPathExpr": "$(WHO)/logs"}));
        let env = [("WHO".to_owned(), "me".to_owned())];
        let asked = subpaths(&pod, &pod.spec.containers[0], &env).unwrap();
        assert_eq!(
            (asked[0].path.as_str(), asked[0].volume.as_str(), asked[0].index),
            ("me/logs", "data", 0)
        );
        assert!(matches!(subpaths(&pod, &pod.spec.containers[0], &[]), Err(ConfigError::SubPath { .. })));
        for bad in ["/abs", "a/../b", ".."] {
            let pod = mount(json!({"name": "data", "subPath": bad}));
            assert!(
                matches!(subpaths(&pod, &pod.spec.containers[0], &[]), Err(ConfigError::SubPath { .. })),
                "{bad}"
            );
        }
        let pod = mount(json!({"name": "data", "subPath": "a..b/c"}));
        let mut world = World::new();
        assert!(matches!(world.plan(&pod), Err(ConfigError::SubPathNotPrepared { .. })));
        world.subpaths.insert(0, "/pods/u-1/volume-subpaths/data/c/0".into());
        assert_eq!(world.plan(&pod).unwrap().mounts[0].host_path, "/pods/u-1/volume-subpaths/data/c/0");
    }

    #[test]
    fn sub_path_expr_with_missing_variables_is_an_error_that_names_them() {
        let pod = mount(json!({"name": "data", "readOnly": true, "subPathExpr": "$(B)/$(HERE)/$(A)/$$(C)"}));
        let env = [("HERE", "x"), ("A", "")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let error = subpaths(&pod, &pod.spec.containers[0], &env).unwrap_err().to_string();
        assert!(error.contains("subPath") && error.ends_with(": missing value for A, B"), "{error}");
        let env = [("HERE", "x"), ("A", "a"), ("B", "b")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let asked = subpaths(&pod, &pod.spec.containers[0], &env).unwrap();
        assert_eq!((asked[0].path.as_str(), asked[0].read_only), ("b/x/a/$(C)", true));
    }

    #[test]
    fn the_subpath_of_an_image_volume_is_left_to_the_runtime() {
        let mut pod = mount(json!({"name": "data", "subPath": "a"}));
        let image = json!({"name": "data", "image": {"reference": "busybox"}});
        pod.spec.volumes = vec![serde_json::from_value(image).unwrap()];
        assert_eq!(subpaths(&pod, &pod.spec.containers[0], &[]), Ok(Vec::new()));
    }

    #[test]
    fn recursive_read_only_mounts_need_runtime_support() {
        let run = |supported, mode: &str, read_only: bool| {
            let world = World { recursive_read_only: supported, ..World::new() };
            let pod = mount(json!({"name": "data", "readOnly": read_only, "recursiveReadOnly": mode}));
            world.plan(&pod).map(|spec| spec.mounts[0].recursive_read_only).ok()
        };
        for (supported, mode, read_only, expected) in [
            (true, "Enabled", true, Some(true)),
            (false, "Enabled", true, None),
            (true, "Enabled", false, None),
            (true, "IfPossible", true, Some(true)),
            (false, "IfPossible", true, Some(false)),
            (true, "Disabled", true, Some(false)),
        ] {
            assert_eq!(run(supported, mode, read_only), expected, "{supported} {mode} {read_only}");
        }
    }

    #[test]
    fn an_image_volume_is_mounted_by_its_resolved_reference() {
        let mut pod = mount(json!({"name": "oci", "subPathExpr": "d"}));
        pod.metadata.annotations.insert("a".into(), "b".into());
        let images = BTreeMap::from([("oci".to_owned(), "sha256:1".to_owned())]);
        let world = World { image_volumes: ImageVolumeSupport::SubPaths, images, ..World::new() };
        let got = world.plan(&pod).unwrap().mounts.remove(0);
        let image = got.image.unwrap();
        assert_eq!(
            (image.reference.as_str(), image.user_specified_image.as_str(), image.runtime_handler.as_str(),),
            ("sha256:1", "registry/data:v1", "kata")
        );
        assert_eq!(image.annotations, pod.metadata.annotations);
        assert_eq!(got.image_sub_path, "d");
        assert!(got.readonly && got.host_path.is_empty());
        let world = World { image_volumes: ImageVolumeSupport::SubPaths, ..World::new() };
        assert!(matches!(world.plan(&pod), Err(ConfigError::VolumeMissing { .. })), "no image is present");
    }

    #[test]
    fn an_image_volume_or_subpath_that_the_runtime_ignores_is_refused() {
        use ImageVolumeSupport::{None as No, SubPaths, WholeImages};
        let images = BTreeMap::from([("oci".to_owned(), "sha256:1".to_owned())]);
        for (support, sub_path, refusal) in [
            (
                No,
                "",
                Some(
                    "volume \"oci\" is an image, which containerd 9.8.7 cannot mount: use containerd 2.1 or",
                ),
            ),
            (
                No,
                "d",
                Some(
                    "volume \"oci\" is an image, which containerd 9.8.7 cannot mount: use containerd 2.2 or",
                ),
            ),
            (WholeImages, "", None),
            (
                WholeImages,
                "d",
                Some("subPath \"d\" of volume \"oci\" is in an image, which containerd 9.8.7 would"),
            ),
            (SubPaths, "d", None),
        ] {
            let pod = mount(json!({"name": "oci", "subPath": sub_path}));
            let world = World { image_volumes: support, images: images.clone(), ..World::new() };
            let message = world.plan(&pod).err().map(|error| error.to_string());
            match refusal {
                Some(start) => assert!(message.as_ref().is_some_and(|m| m.starts_with(start)), "{message:?}"),
                None => assert_eq!(message, None, "{support:?} {sub_path}"),
            }
        }
    }

    #[test]
    fn the_image_volumes_of_a_container_are_those_that_it_mounts() {
        let pod = mount(json!({"name": "oci"}));
        let of = |pod: &Pod| {
            image_volumes(pod, &pod.spec.containers[0]).into_keys().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(of(&pod), ["oci"]);
        assert!(of(&mount(json!({"name": "data"}))).is_empty());
    }

    #[test]
    fn agent_files_follow_volumes_and_yield_only_on_etc_hosts() {
        let file = |path: &str| FileMount {
            container_path: path.to_owned(),
            host_path: format!("/agent{path}"),
            read_only: false,
        };
        let mut world = World::new();
        world.files = vec![file("/etc/hosts"), file("/dev/termination-log")];
        world.files[1].read_only = true;
        world.assigned.mounts = vec![MountSpec { container_path: "/dev/x".into(), ..MountSpec::default() }];
        let paths = |pod: &Pod| {
            let mounts = world.plan(pod).unwrap().mounts;
            mounts.into_iter().map(|mount| mount.host_path).collect::<Vec<_>>()
        };
        let plain = paths(&mount(json!({"name": "data"})));
        assert_eq!(plain, ["/pods/u-1/data", "/agent/etc/hosts", "/agent/dev/termination-log", ""]);
        let of_agent: Vec<_> = world.plan(&mount(json!({"name": "data"}))).unwrap().mounts[1..3]
            .iter()
            .map(|mount| (mount.container_path.clone(), mount.readonly))
            .collect();
        assert_eq!(of_agent, [("/etc/hosts".to_owned(), false), ("/dev/termination-log".to_owned(), true)]);
        let own = with(json!({"volumeMounts": [{"name": "data", "mountPath": "/etc/hosts"}]}));
        assert_eq!(paths(&own), ["/pods/u-1/data", "/agent/dev/termination-log", ""]);
    }

    #[test]
    fn a_relative_mount_path_is_made_absolute() {
        let pod = with(json!({"volumeMounts": [{"name": "data", "mountPath": "m"}]}));
        assert_eq!(World::new().plan(&pod).unwrap().mounts[0].container_path, "/m");
    }

    /// A world with the block devices `disk` and, read-only, `copy`.
    fn world_with_devices() -> World {
        let device = |name: &str, read_only| {
            let host_path = format!("/pods/u-1/volumeDevices/p/{name}");
            (
                name.to_owned(),
                VolumePath { host_path, read_only, block_device: true, ..VolumePath::default() },
            )
        };
        let mut world = World::new();
        world.volumes.extend([device("disk", false), device("copy", true)]);
        world
    }

    #[test]
    fn block_volumes_are_devices_before_those_of_device_plugins() {
        let pod = with(json!({"volumeDevices": [
            {"name": "disk", "devicePath": "/dev/a"}, {"name": "copy", "devicePath": "/dev/b"}]}));
        let mut world = world_with_devices();
        world.assigned.devices =
            vec![DeviceSpec { container_path: "/dev/gpu".into(), ..DeviceSpec::default() }];
        world.assigned.cdi_devices = vec!["vendor/class=x".into()];
        let got = world.plan(&pod).unwrap();
        let short: Vec<_> = got
            .devices
            .iter()
            .map(|d| (d.container_path.as_str(), d.host_path.as_str(), d.permissions.as_str()))
            .collect();
        let expected = [
            ("/dev/a", "/pods/u-1/volumeDevices/p/disk", "mrw"),
            ("/dev/b", "/pods/u-1/volumeDevices/p/copy", "r"),
            ("/dev/gpu", "", ""),
        ];
        assert_eq!(short, expected);
        assert_eq!(got.cdi_devices, ["vendor/class=x"]);
        assert_eq!(got.mounts, []);
    }

    #[test]
    fn a_block_volume_without_a_device_is_an_error_that_names_it() {
        let pod = with(json!({"volumeDevices": [
            {"name": "none", "devicePath": "/dev/a"}, {"name": "disk", "devicePath": "/dev/b"}]}));
        let error = world_with_devices().plan(&pod).unwrap_err().to_string();
        let text = "cannot pass volume \"none\" to container \"test_container\" as the device \"/dev/a\": \
                    volume-manager has not mapped its device";
        assert_eq!(error, text);
    }

    #[test]
    fn a_block_volume_is_never_mounted_and_a_filesystem_is_no_device() {
        let world = world_with_devices();
        let text = |pod: Pod| world.plan(&pod).unwrap_err().to_string();
        let mounted = text(mount(json!({"name": "disk"})));
        assert_eq!(mounted, "cannot find volume \"disk\" to mount into container \"test_container\"");
        let device =
            |name: &str, path: &str| with(json!({"volumeDevices": [{"name": name, "devicePath": path}]}));
        let begin = "cannot pass volume";
        let expected = format!(
            "{begin} \"data\" to container \"test_container\" as the device \"/dev/a\": the volume is no block device; \
             mount it with volumeMounts"
        );
        assert_eq!(text(device("data", "/dev/a")), expected);
        let relative = text(device("disk", "dev/a"));
        assert!(relative.starts_with(begin) && relative.ends_with("must be an absolute path"), "{relative}");
    }

    #[test]
    fn assigned_cpus_are_passed_to_the_runtime() {
        let mut world = World::new();
        world.assigned.cpuset_cpus = "2-3".into();
        world.assigned.cpuset_mems = "0".into();
        world.assigned.exclusive_cpus = true;
        let got = world.plan(&with(json!({}))).unwrap().resources;
        assert_eq!((got.cpuset_cpus.as_str(), got.cpuset_mems.as_str(), got.cpu_quota), ("2-3", "0", -1));
    }

    #[test]
    fn mounts_of_a_pod_with_a_user_namespace_have_the_id_mapping() {
        let users = Some(UserNamespace { host_id: 65536, length: 65536 });
        let mut pod = mount(json!({"name": "data"}));
        pod.spec.host_users = Some(false);
        assert_eq!(World::new().plan(&pod).unwrap_err(), ConfigError::UserNamespaces);
        let files =
            vec![FileMount { container_path: "/f".into(), host_path: "/agent/f".into(), read_only: false }];
        let got = World { users, files, ..World::new() }.plan(&pod).unwrap();
        assert_eq!((got.mounts[0].users, got.mounts[1].users), (users, users));
        assert_eq!(got.security.namespaces.users, users);
    }
}

#[test]
fn a_cgroup_driver_mismatch_is_recognised_from_the_runc_error() {
    let answer = "OCI runtime create failed: runc create failed: expected cgroupsPath to be of format \
                  \"slice:prefix:name\" for systemd cgroups, got \"/kubepods/podu/1\" instead: unknown";
    assert!(remedy(answer).unwrap().contains("cgroupDriver to systemd"));
    assert_eq!(remedy("failed to setup network for sandbox"), None);
}
