//! Runs the examples of docs/api as they are written.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use keelson_config::ServiceName;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::{LIMIT, sleeper, until_ready};
use serde_json::Value;

/// The commands in the shell blocks of a page.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.flat_map(str::lines).map(ToOwned::to_owned).collect()
}

#[tokio::test]
async fn every_example_command_of_the_api_docs_prints_json() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    // The volume statistics of the example are measured shortly after the volumes exist.
    eventually(LIMIT, "the pod's volumes are measured", async || {
        let output = agent.keelson(&["grpc", "call", "volume-manager", "PodVolumeStats"]).await.unwrap();
        output.status.success() && !output.stdout.is_empty()
    })
    .await
    .unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api");
    let mut ran = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        for command in commands(&std::fs::read_to_string(&path).unwrap()) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let ["keelson", args @ ..] = words.as_slice() else { panic!("{command}: no command of ours") };
            let output = agent.keelson(args).await.unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {command}: {stderr}", path.display());
            let lines: Vec<Value> = String::from_utf8(output.stdout)
                .unwrap()
                .lines()
                .map(|l| serde_json::from_str(l).unwrap())
                .collect();
            ran += 1;
            match path.file_stem().unwrap().to_str().unwrap() {
                "pod-sync" => assert_eq!(lines[0]["podJson"]["status"]["phase"], "Running", "{lines:?}"),
                "supervisor" => assert_eq!(lines[0]["services"].as_array().unwrap().len(), 8, "{lines:?}"),
                "volume-manager" => assert_eq!(lines[0]["volumes"][0]["name"], "scratch", "{lines:?}"),
                _ => assert!(
                    lines[0].as_object().is_some_and(|answer| !answer.is_empty()),
                    "{command}: {lines:?}"
                ),
            }
        }
    }
    assert_eq!(ran, 11, "one example for each method, and two more of the common ones");

    let output = agent.keelson(&["grpc", "list"]).await.unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    for service in ServiceName::ALL {
        let is_named = listed.lines().any(|line| line.split_whitespace().next() == Some(service.as_str()));
        assert!(is_named, "{service} is not in:\n{listed}");
    }
}
