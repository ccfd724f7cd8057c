//! `/configz`: the KubeletConfiguration in force (node-and-api.md §8.11).

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use keelson_config::kubelet_configuration;
use keelson_service_kit::status::chain;
use serde_json::json;

use crate::failure::Failure;
use crate::{App, statistics};

/// `GET /configz`. init has merged it and masked what is secret; it is read from the file each time, for it is asked
/// for once in a blue moon. The cgroup driver is the one that is in force, which the container runtime may have named;
/// while resource-manager does not say, it is the configured one.
pub(crate) async fn get(State(app): State<App>) -> Result<Response, Failure> {
    let path = app.ctx.config.paths.config_file();
    let internal = |text| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, text);
    let document = kubelet_configuration(&path).map_err(|problem| internal(chain(&problem)))?;
    let mut document = document.ok_or_else(|| {
        internal(format!(
            "{} holds no KubeletConfiguration; keelson-init of this release writes one",
            path.display()
        ))
    })?;
    if let Some(driver) = statistics::cgroup_driver(&app).await {
        document.insert("cgroupDriver".to_owned(), driver.into());
    }
    let body = json!({"kubeletconfig": document}).to_string();
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}
