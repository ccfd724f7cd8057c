//! `/flagz`: the flags that the agent was started with (node-and-api.md §8.11).

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Map, Value};

use crate::App;
use crate::api_error::ApiError;
use crate::zpages::{format, response};

const KIND: &str = "Flagz";
/// The file that init writes to the run dir: an object with the value of each flag as text.
const FILE: &str = "flags.json";

type Flags = BTreeMap<String, String>;

/// `GET /flagz`; authorized as the subresource `configz` (§7). init has replaced secret values with `CLASSIFIED`. The file is
/// read for each request, as that of `/configz`.
pub(crate) async fn get(State(app): State<App>, headers: HeaderMap) -> Result<Response, ApiError> {
    let format = format(&headers, KIND)?;
    let path = app.ctx.config.paths.run_dir.join(FILE);
    let flags = tokio::fs::read(&path).await.map_err(|error| error.to_string());
    let flags: Flags = flags
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))
        .map_err(|error| {
            let text = format!(
                "cannot read the flags in {}: {error}; keelson-init of this release writes the file",
                path.display()
            );
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text)
        })?;
    Ok(response(format, KIND, |separator| text(&flags, separator), || fields(&flags)))
}

fn text(flags: &Flags, separator: &str) -> String {
    flags.iter().fold(String::new(), |text, (name, value)| format!("{text}{name}{separator}{value}\n"))
}

fn fields(flags: &Flags) -> Map<String, Value> {
    let flags: Map<String, Value> =
        flags.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect();
    Map::from_iter([("flags".to_owned(), flags.into())])
}
