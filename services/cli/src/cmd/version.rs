//! `keelson version`.

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetProgressResponse;
use serde_json::{Value, json};

use super::Session;
use crate::error::Failure;
use crate::output;
use crate::table::Table;

const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// Shows the versions; those of the services are asked for side by side.
pub(crate) async fn run(session: &Session, only_client: bool) -> Result<(), Failure> {
    let answers = if only_client { Vec::new() } else { session.agent.progress().await };
    let nobody = !answers.is_empty() && answers.iter().all(|(_, answer)| answer.is_err());
    if output::is_document(session.format()) {
        output::print_document(session.format(), &document(&answers))?;
    } else {
        let mut text = format!("keelson {CLIENT}\n");
        if !answers.is_empty() && !nobody {
            text.push('\n');
            text.push_str(&table(&answers).render(0));
        }
        output::print(&text)?;
    }
    match answers.into_iter().next() {
        Some((_, Err(failure))) if nobody => Err(failure),
        _ => Ok(()),
    }
}

type Answers = [(ServiceName, Result<GetProgressResponse, Failure>)];

fn table(answers: &Answers) -> Table {
    let mut table = Table::new(["SERVICE", "VERSION", "MESSAGE"]);
    for (service, answer) in answers {
        let (version, message) = match answer {
            Ok(progress) => (progress.version.clone(), String::new()),
            Err(failure) => ("<unknown>".into(), failure.to_string()),
        };
        table.row(vec![service.to_string(), version, message]);
    }
    table
}

fn document(answers: &Answers) -> Value {
    let services: Vec<Value> = answers
        .iter()
        .map(|(service, answer)| match answer {
            Ok(progress) => json!({"name": service.as_str(), "version": progress.version}),
            Err(failure) => {
                json!({"name": service.as_str(), "version": null, "message": failure.to_string()})
            }
        })
        .collect();
    json!({"client": {"version": CLIENT}, "services": services})
}
