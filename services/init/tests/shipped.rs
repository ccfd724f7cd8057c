//! The configuration files of the units and packages: commented defaults are the defaults.

#![allow(clippy::unwrap_used)] // Tests may panic.

mod common;

use std::fs;
use std::path::Path;

use common::Scene;
use serde_json::Value;

/// The files, with the number of their commented defaults.
const FILES: [(&str, usize); 2] = [("kubelet.yaml", 13), ("keelson.yaml", 7)];

fn shipped(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd").join(name)).unwrap()
}

/// A text with its commented defaults, `#field: value`, turned into settings, and their number. A comment in prose has a
/// space after the `#`.
fn uncommented(text: &str) -> (String, usize) {
    let mut fields = 0;
    let mut in_field = false;
    let lines = text.lines().map(|line| {
        let bare = line.strip_prefix('#').filter(|rest| {
            let starts = rest.starts_with(char::is_alphabetic);
            in_field = starts || (in_field && rest.starts_with("  "));
            in_field
        });
        fields += usize::from(bare.is_some_and(|rest| rest.starts_with(char::is_alphabetic)));
        format!("{}\n", bare.unwrap_or(line))
    });
    (lines.collect(), fields)
}

/// The configuration of all services, without the provenance.
fn resolved(scene: &Scene, files: [String; 2]) -> (Value, String) {
    // The result must not depend on cgroups and swap of the test machine.
    let kubelet = format!("{}failCgroupV1: false\nfailSwapOn: false\n", files[0]);
    fs::write(scene.path("kubelet.yaml"), kubelet).unwrap();
    fs::write(scene.path("keelson.yaml"), &files[1]).unwrap();
    let output = scene.command().arg("--resolve-only").output().unwrap();
    let output_text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{output_text}");
    let text = fs::read_to_string(scene.path("run/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for changing in ["resolvedUnixNanos", "provenance"] {
        config.as_object_mut().unwrap().remove(changing).unwrap();
    }
    (config, output_text)
}

#[test]
fn every_commented_default_in_shipped_files_is_the_default() {
    let scene = Scene::new();
    let (as_shipped, output) = resolved(&scene, FILES.map(|(name, _)| shipped(name)));
    assert!(!output.contains("unknown"), "{output}");
    let all = FILES.map(|(name, expected)| {
        let (text, fields) = uncommented(&shipped(name));
        assert_eq!(fields, expected, "{name}:\n{text}");
        text
    });
    let (spelt_out, output) = resolved(&scene, all);
    assert!(!output.contains("unknown"), "{output}");
    assert_eq!(spelt_out, as_shipped);
}

/// A wrong default is detected.
#[test]
fn a_wrong_commented_default_is_detected() {
    let scene = Scene::new();
    let (as_shipped, _) = resolved(&scene, FILES.map(|(name, _)| shipped(name)));
    for (place, from, to) in
        [(0, "maxPods: 110", "maxPods: 111"), (1, "relistPeriod: 1m", "relistPeriod: 2m")]
    {
        let mut files = FILES.map(|(name, _)| uncommented(&shipped(name)).0);
        assert!(files[place].contains(from));
        files[place] = files[place].replace(from, to);
        assert_ne!(resolved(&scene, files).0, as_shipped, "{to}");
    }
}
