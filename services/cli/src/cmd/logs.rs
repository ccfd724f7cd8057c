//! `keelson logs`.

use keelson_config::ServiceName;
use keelson_kube_model::Pod;
use keelson_proto::keelson::runtime::v1::ReadLogsRequest;

use super::Session;
use crate::args::LogsArgs;
use crate::error::Failure;
use crate::output::{self, Pump, Target};
use crate::{plain, pods};

/// The annotation that names the container which tools mean when none is given.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Streams the log of a container to standard output.
pub(crate) async fn run(session: &Session, args: &LogsArgs) -> Result<(), Failure> {
    let all = pods::list(&session.agent).await?;
    let entry = pods::resolve(&session.agent, &all, &session.scope(), &args.pod).await?;
    let container = choose(entry.typed()?, args.container.as_deref())?;
    let since = args
        .since
        .map_or(0, |d| session.now.saturating_sub(i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)).max(1));
    let request = ReadLogsRequest {
        pod_uid: entry.document.uid.clone(),
        container,
        follow: args.follow,
        previous: args.previous,
        timestamps: args.timestamps,
        tail_lines: args.tail.map(i64::from),
        limit_bytes: args.limit_bytes.map(i64::from),
        since_unix_nanos: since,
    };
    let fail = |status| session.agent.failure(ServiceName::RuntimeShim, status);
    let mut stream =
        session.agent.runtime().read_logs(session.agent.request(request)).await.map_err(fail)?.into_inner();
    let mut pump = Pump::start()?;
    let mut safe = args.safe.then(plain::Bytes::default);
    loop {
        let told = stream.message().await;
        let (data, end) = match told {
            Ok(Some(chunk)) => {
                let data = match &mut safe {
                    Some(safe) => safe.next(&chunk.data),
                    None => chunk.data,
                };
                (data, None)
            }
            Ok(None) => (safe.take().map(plain::Bytes::end).unwrap_or_default(), Some(Ok(()))),
            Err(status) => (safe.take().map(plain::Bytes::end).unwrap_or_default(), Some(Err(fail(status)))),
        };
        if !data.is_empty() {
            pump.write(Target::Stdout, data).await?;
        }
        if let Some(end) = end {
            pump.finish().await?;
            return end;
        }
    }
}

/// The container that is meant: the one named, else the annotated, else the first.
pub(crate) fn choose(pod: &Pod, named: Option<&str>) -> Result<String, Failure> {
    let names: Vec<&str> = pod.containers().map(|(_, c)| c.name.as_str()).collect();
    if let Some(named) = named {
        if names.contains(&named) {
            return Ok(named.to_owned());
        }
        return Err(Failure::NotFound {
            what: format!("the pod {} has no container {named:?}", pod.metadata.name),
            hint: format!("-c with one of: {}", names.join(", ")),
        });
    }
    let first = pod.spec.containers.first().map_or("", |c| c.name.as_str());
    let annotated = pod.annotation(DEFAULT_CONTAINER).filter(|name| names.contains(name));
    let chosen = annotated.unwrap_or(first);
    if names.len() > 1 && annotated.is_none() {
        output::notice(&format!(
            "Container {chosen}, the first of: {}; -c chooses another.",
            names.join(", ")
        ));
    }
    Ok(chosen.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(annotation: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "annotations": {DEFAULT_CONTAINER: annotation}},
            "spec": {"initContainers": [{"name": "prepare"}], "containers": [{"name": "app"}, {"name": "proxy"}]},
        }))
        .unwrap()
    }

    #[test]
    fn without_a_name_the_annotated_container_is_meant_else_the_first_regular_one() {
        assert_eq!(choose(&pod("proxy"), None).unwrap(), "proxy");
        assert_eq!(choose(&pod("gone"), None).unwrap(), "app");
        assert_eq!(choose(&pod("proxy"), Some("prepare")).unwrap(), "prepare");
    }

    #[test]
    fn a_container_that_does_not_exist_is_answered_with_those_that_do() {
        let failure = choose(&pod(""), Some("db")).unwrap_err();
        assert!(failure.hint().unwrap().contains("app, proxy"), "{failure:?}");
    }
}
