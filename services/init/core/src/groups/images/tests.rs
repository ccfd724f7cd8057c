use serde_json::json;

use crate::inputs::Flags;
use crate::outcome::WITHOUT_EFFECT;
use crate::testing::{assert_refused, errors_of, host, keelson, kubelet, run, with_kubelet};

#[test]
fn image_pulls_are_serialized_unless_configured_otherwise() {
    for (fields, pulls) in [
        (json!({}), 1),
        (json!({"serializeImagePulls": true}), 1),
        (json!({"serializeImagePulls": false}), 1000),
        (json!({"serializeImagePulls": false, "maxParallelImagePulls": 3}), 3),
        (json!({"maxParallelImagePulls": 2}), 2),
    ] {
        assert_eq!(with_kubelet(fields.clone()).runtime.max_parallel_pulls, pulls, "{fields}");
    }
}

#[test]
fn image_pull_and_dead_container_settings_are_applied() {
    let flags = Flags {
        minimum_container_ttl: Some("90s".into()),
        max_dead_per_container: Some(2),
        max_dead_containers: Some(-1),
        ..Flags::default()
    };
    let fields = kubelet(json!({
        "registryPullQPS": 0, "registryBurst": 3, "imageServiceEndpoint": "unix:///run/images.sock",
        "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
        "preloadedImagesVerificationAllowlist": ["r.example/*"],
    }));
    let own = keelson(json!({"imagePullProgressTimeout": "90s"}));
    let config = run(&flags, Some(&fields), Some(&own), &host()).unwrap().config;
    let pulls = &config.image_pulls;
    assert_eq!((pulls.registry_qps, pulls.registry_burst, pulls.progress_timeout_ms), (0, 3, 90_000));
    assert_eq!(pulls.credentials_verification, "NeverVerifyAllowlistedImages");
    assert_eq!(pulls.preloaded_allowlist, ["r.example/*"]);
    assert_eq!(config.runtime.image_endpoint.as_deref(), Some("unix:///run/images.sock"));
    let dead = &config.container_collection;
    assert_eq!((dead.minimum_age_ms, dead.max_per_container, dead.max_total), (90_000, 2, -1));
    assert_eq!(config.provenance["containerCollection.minimumAgeMs"], "--minimum-container-ttl-duration");
    // The runtime's own endpoint counts as unset.
    let same = with_kubelet(json!({"imageServiceEndpoint": "unix:///run/containerd/containerd.sock"}));
    assert_eq!(same.runtime.image_endpoint, None);
    let bare = with_kubelet(json!({"imageServiceEndpoint": "/run/images.sock"}));
    assert_eq!(bare.runtime.image_endpoint.as_deref(), Some("unix:///run/images.sock"));
    for (fields, part) in [
        (json!({"registryPullQPS": -1}), "registryPullQPS"),
        (json!({"imageServiceEndpoint": "tcp://1.2.3.4:5"}), "absolute path of a socket"),
        (json!({"imagePullCredentialsVerificationPolicy": "Sometimes"}), "Sometimes"),
        (json!({"preloadedImagesVerificationAllowlist": ["a"]}), "NeverVerifyAllowlistedImages"),
    ] {
        let errors = errors_of(fields);
        assert!(errors.len() == 1 && errors[0].contains(part), "{part}: {errors:?}");
    }
    let bad = Flags { minimum_container_ttl: Some("soon".into()), ..Flags::default() };
    let errors = run(&bad, None, None, &host()).unwrap_err();
    assert!(errors[0].to_string().contains("--minimum-container-ttl-duration"), "{errors:?}");
}

#[test]
fn container_log_and_image_gc_settings_are_applied_with_their_origin() {
    let config = with_kubelet(json!({
        "containerLogMaxSize": "1Mi", "containerLogMaxFiles": 3, "containerLogMaxWorkers": 2,
        "containerLogMonitorInterval": "3s", "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 0,
        "imageMinimumGCAge": "1m", "imageMaximumGCAge": "24h",
    }));
    let logs = &config.container_logs;
    assert_eq!((logs.max_size_bytes, logs.max_files, logs.max_workers), (Some(1 << 20), 3, 2));
    assert_eq!(logs.monitor_interval_ms, 3_000);
    let images = &config.image_collection;
    assert_eq!((images.high_threshold_percent, images.low_threshold_percent), (100, 0));
    assert_eq!((images.minimum_age_ms, images.maximum_age_ms), (60_000, 86_400_000));
    for (path, line) in [
        ("containerLogs.maxSizeBytes", 3),
        ("containerLogs.maxFiles", 4),
        ("containerLogs.maxWorkers", 5),
        ("containerLogs.monitorIntervalMs", 6),
        ("imageCollection.highThresholdPercent", 7),
        ("imageCollection.lowThresholdPercent", 8),
        ("imageCollection.minimumAgeMs", 9),
        ("imageCollection.maximumAgeMs", 10),
    ] {
        assert_eq!(config.provenance[path], format!("kubelet.yaml:{line}"), "{path}");
    }
    let fields = kubelet(json!({"containerLogMaxSize": "1Mi", "imageMaximumGCAge": "24h"}));
    let notes = run(&Flags::default(), Some(&fields), None, &host()).unwrap().notes;
    assert!(notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{notes:?}");
}

#[test]
fn container_log_and_image_gc_defaults_are_those_of_a_kubelet() {
    for fields in [
        json!({}),
        json!({"containerLogMaxSize": "", "imageMinimumGCAge": "0s", "imageMaximumGCAge": "0s"}),
        json!({"containerLogMaxFiles": null, "imageGCHighThresholdPercent": null}),
    ] {
        let config = with_kubelet(fields);
        let logs = &config.container_logs;
        assert_eq!((logs.max_size_bytes, logs.max_files, logs.max_workers), (Some(10 << 20), 5, 1));
        assert_eq!(logs.monitor_interval_ms, 10_000);
        let images = &config.image_collection;
        assert_eq!((images.high_threshold_percent, images.low_threshold_percent), (85, 80));
        assert_eq!((images.minimum_age_ms, images.maximum_age_ms), (120_000, 0));
    }
    assert_eq!(with_kubelet(json!({"containerLogMaxSize": "-1"})).container_logs.max_size_bytes, None);
    assert_eq!(with_kubelet(json!({"containerLogMaxSize": "0"})).container_logs.max_size_bytes, Some(0));
}

#[test]
fn invalid_container_log_and_image_gc_settings_are_refused() {
    for (fields, part) in [
        (json!({"containerLogMaxSize": "ten"}), "containerLogMaxSize = \"ten\""),
        (json!({"containerLogMaxSize": "1500m"}), "a whole number of bytes"),
        (json!({"containerLogMaxFiles": 1}), "containerLogMaxFiles = 1"),
        (json!({"containerLogMaxWorkers": 0}), "containerLogMaxWorkers = 0"),
        (json!({"containerLogMonitorInterval": "2s"}), "containerLogMonitorInterval"),
        (json!({"imageGCHighThresholdPercent": 101}), "imageGCHighThresholdPercent = 101"),
        (json!({"imageGCLowThresholdPercent": -1}), "imageGCLowThresholdPercent = -1"),
        (
            json!({"imageGCHighThresholdPercent": 80}),
            "must be below imageGCHighThresholdPercent, which is 80",
        ),
        (json!({"imageGCLowThresholdPercent": 85}), "imageGCLowThresholdPercent, which is 85"),
        (json!({"imageMinimumGCAge": "-1s"}), "imageMinimumGCAge"),
        (json!({"imageMaximumGCAge": "2m"}), "must be longer than imageMinimumGCAge, which is 120s"),
        (json!({"imageMaximumGCAge": "5m", "imageMinimumGCAge": "6m"}), "which is 360s"),
    ] {
        let errors = errors_of(fields);
        assert_eq!(errors.len(), 1, "{part}: {errors:?}");
        assert!(errors[0].contains(part), "{part}: {errors:?}");
    }
}

#[test]
fn invalid_image_names_are_refused_with_a_remedy() {
    assert_refused(&[
        (
            json!({
                "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
                "preloadedImagesVerificationAllowlist": ["r.example:5000/*", "r.example/app", "app:1"],
            }),
            "preloadedImagesVerificationAllowlist[2] = \"app:1\"",
            "without tag and digest",
        ),
        (
            json!({
                "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
                "preloadedImagesVerificationAllowlist": ["r.example/*/app"],
            }),
            "preloadedImagesVerificationAllowlist[0]",
            "ends in /*",
        ),
    ]);
}
