//! `/configz`: the KubeletConfiguration in effect (node-and-api.md §8.11).

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use keelson_config::kubelet_configuration;
use keelson_service_kit::status::chain;
use serde_json::json;

use crate::api_error::ApiError;
use crate::{App, statistics};

/// `GET /configz`. init has merged the configuration and masked secret values; the file is read for each request, since requests
/// are rare. The cgroup driver is the effective one, which the container runtime may have chosen; if resource-manager does not
/// answer, it is the configured one.
pub(crate) async fn get(State(app): State<App>) -> Result<Response, ApiError> {
    let path = app.ctx.config.paths.config_file();
    let internal = |text| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text);
    let document = kubelet_configuration(&path).map_err(|error| internal(chain(&error)))?;
    let mut document = document.ok_or_else(|| {
        internal(format!(
            "{} contains no KubeletConfiguration; keelson-init of this release writes one",
            path.display()
        ))
    })?;
    if let Some(driver) = statistics::cgroup_driver(&app).await {
        document.insert("cgroupDriver".to_owned(), driver.into());
    }
    let body = json!({"kubeletconfig": document}).to_string();
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}
