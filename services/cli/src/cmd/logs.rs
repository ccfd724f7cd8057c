//! `keelson logs`.

use keelson_config::ServiceName;
use keelson_kube_model::Pod;
use keelson_proto::keelson::runtime::v1::ReadLogsRequest;

use crate::args::LogsArgs;
use crate::error::CliError;
use crate::output::{self, OutputWriter, Target};
use crate::session::Session;
use crate::{pods, sanitize};

/// The annotation that names the default container for tools.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Streams the log of a container to standard output.
pub(crate) async fn run(session: &Session, args: &LogsArgs) -> Result<(), CliError> {
    let all = pods::list(&session.agent).await?;
    let entry = pods::resolve(&session.agent, &all, &session.scope(), &args.target.pod).await?;
    let container = choose_container(entry.typed()?, args.target.container.as_deref())?;
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
    let to_error = |status| session.agent.call_error(ServiceName::RuntimeShim, status);
    let mut stream = session
        .agent
        .runtime()
        .read_logs(session.agent.request(request))
        .await
        .map_err(to_error)?
        .into_inner();
    let mut writer = OutputWriter::start()?;
    let mut sanitizer = args.safe.then(sanitize::LogSanitizer::default);
    loop {
        let (data, end) = match stream.message().await {
            Ok(Some(chunk)) => {
                let data = match &mut sanitizer {
                    Some(sanitizer) => sanitizer.next(&chunk.data),
                    None => chunk.data,
                };
                (data, None)
            }
            Ok(None) => (sanitizer.take().map(sanitize::LogSanitizer::end).unwrap_or_default(), Some(Ok(()))),
            Err(status) => (
                sanitizer.take().map(sanitize::LogSanitizer::end).unwrap_or_default(),
                Some(Err(to_error(status))),
            ),
        };
        if !data.is_empty() {
            writer.write(Target::Stdout, data).await?;
        }
        if let Some(end) = end {
            writer.finish().await?;
            return end;
        }
    }
}

/// Chooses the container: the named one, else the annotated one, else the first.
pub(crate) fn choose_container(pod: &Pod, named: Option<&str>) -> Result<String, CliError> {
    let names: Vec<&str> = pod.containers().map(|(_, c)| c.name.as_str()).collect();
    if let Some(named) = named {
        if names.contains(&named) {
            return Ok(named.to_owned());
        }
        return Err(CliError::NotFound {
            what: format!("the pod {} has no container {named:?}", pod.metadata.name),
            hint: format!("use -c with one of: {}", names.join(", ")),
        });
    }
    let first = pod.spec.containers.first().map_or("", |c| c.name.as_str());
    let annotated = pod.annotation(DEFAULT_CONTAINER).filter(|name| names.contains(name));
    let chosen = annotated.unwrap_or(first);
    if names.len() > 1 && annotated.is_none() {
        output::notice(&format!(
            "Using container {chosen}, the first of: {}; -c chooses another.",
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
    fn default_container_is_the_annotated_one_else_the_first() {
        assert_eq!(choose_container(&pod("proxy"), None).unwrap(), "proxy");
        assert_eq!(choose_container(&pod("gone"), None).unwrap(), "app");
        assert_eq!(choose_container(&pod("proxy"), Some("prepare")).unwrap(), "prepare");
    }

    #[test]
    fn unknown_container_error_lists_the_containers() {
        let error = choose_container(&pod(""), Some("db")).unwrap_err();
        assert!(error.hint().unwrap().contains("app, proxy"), "{error:?}");
    }
}
