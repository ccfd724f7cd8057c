//! `keelson version`.

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetProgressResponse;
use serde_json::{Value, json};

use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::table::Table;

/// The version of this command.
const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// Shows the versions of this command and of the services.
pub(crate) async fn run(session: &Session, only_client: bool) -> Result<(), CliError> {
    let answers = if only_client { Vec::new() } else { session.agent.progress().await };
    let all_failed = !answers.is_empty() && answers.iter().all(|(_, answer)| answer.is_err());
    if output::is_document(session.format()) {
        output::print_document(session.format(), &document(&answers))?;
    } else {
        let mut text = format!("keelson {CLIENT}\n");
        if !answers.is_empty() && !all_failed {
            text.push('\n');
            text.push_str(&table(&answers).render(0));
        }
        output::print(&text)?;
    }
    match answers.into_iter().next() {
        Some((_, Err(error))) if all_failed => Err(error),
        _ => Ok(()),
    }
}

/// The answer of each service.
type Answers = [(ServiceName, Result<GetProgressResponse, CliError>)];

fn table(answers: &Answers) -> Table {
    let mut table = Table::new(["SERVICE", "VERSION", "MESSAGE"]);
    for (service, answer) in answers {
        let (version, message) = match answer {
            Ok(progress) => (progress.version.clone(), String::new()),
            Err(error) => ("<unknown>".into(), error.to_string()),
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
            Err(error) => {
                json!({"name": service.as_str(), "version": null, "message": error.to_string()})
            }
        })
        .collect();
    json!({"client": {"version": CLIENT}, "services": services})
}
