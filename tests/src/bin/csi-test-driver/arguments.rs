//! The command line.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};

/// The command line.
#[derive(Debug, Clone, Default)]
pub(super) struct Arguments {
    pub(super) name: String,
    pub(super) endpoint: PathBuf,
    pub(super) registration: PathBuf,
    pub(super) state: PathBuf,
    pub(super) node_id: String,
    pub(super) version: String,
    pub(super) stages: bool,
    pub(super) capabilities: Vec<i32>,
    pub(super) max_volumes: i64,
    pub(super) topology: HashMap<String, String>,
    pub(super) faults: Option<PathBuf>,
    pub(super) call_time: Duration,
    pub(super) ends_with_stdin: bool,
}

fn capability(name: &str) -> anyhow::Result<i32> {
    Ok(match name {
        "stats" => 2,
        "expand" => 3,
        "condition" => 4,
        "multi-writer" => 5,
        "mount-group" => 6,
        _ => bail!("unknown capability {name:?}"),
    })
}

pub(super) fn parse(arguments: impl Iterator<Item = String>) -> anyhow::Result<Arguments> {
    let mut parsed = Arguments {
        node_id: "test-node".to_owned(),
        version: "1.0.0".to_owned(),
        capabilities: vec![2, 3],
        ..Arguments::default()
    };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--name" => parsed.name = value()?,
            "--endpoint" => {
                let endpoint = value()?;
                parsed.endpoint = endpoint.strip_prefix("unix://").unwrap_or(&endpoint).into();
            }
            "--registration-dir" => parsed.registration = value()?.into(),
            "--state" => parsed.state = value()?.into(),
            "--node-id" => parsed.node_id = value()?,
            "--version" => parsed.version = value()?,
            "--faults" => parsed.faults = Some(value()?.into()),
            "--call-millis" => parsed.call_time = Duration::from_millis(value()?.parse()?),
            "--max-volumes" => parsed.max_volumes = value()?.parse()?,
            "--topology" => {
                let text = value()?;
                let (key, topology) = text.split_once('=').context("--topology needs KEY=VALUE")?;
                parsed.topology.insert(key.to_owned(), topology.to_owned());
            }
            "--capabilities" => {
                let names = value()?;
                let names = names.split(',').filter(|name| !name.is_empty());
                parsed.capabilities = names.map(capability).collect::<anyhow::Result<_>>()?;
            }
            "--stage" => parsed.stages = true,
            "--end-with-stdin" => parsed.ends_with_stdin = true,
            other => bail!("unknown argument {other:?}"),
        }
    }
    for (name, path) in [
        ("--endpoint", &parsed.endpoint),
        ("--registration-dir", &parsed.registration),
        ("--state", &parsed.state),
    ] {
        if !path.is_absolute() {
            bail!("{name} must be an absolute path");
        }
    }
    if parsed.name.is_empty() {
        bail!("--name is missing");
    }
    if parsed.stages {
        parsed.capabilities.push(1);
    }
    Ok(parsed)
}
