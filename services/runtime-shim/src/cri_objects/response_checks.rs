//! Checks that the runtime's responses have the mandatory fields (runtime-and-resources.md §1.1). The error names the
//! missing fields. Without the check an empty name or a time in 1970 would cause errors elsewhere.

use k8s_cri::v1 as cri;
use tonic::{Code, Status};

/// The error that names the missing fields, if there are any.
fn check_fields(what: &str, lacks: &[(bool, &str)]) -> Result<(), Status> {
    let fields: Vec<&str> = lacks.iter().filter(|(missing, _)| *missing).map(|(_, name)| *name).collect();
    if fields.is_empty() {
        return Ok(());
    }
    let text = format!(
        "the container runtime's response about {what} lacks {}; this is an error of the runtime, update or repair it",
        fields.join(", ")
    );
    Err(Status::new(Code::Internal, text))
}

pub(crate) fn check_sandbox(id: &str, status: &cri::PodSandboxStatus) -> Result<(), Status> {
    let metadata = status.metadata.clone().unwrap_or_default();
    let lacks = [
        (status.id.is_empty(), "id"),
        (metadata.name.is_empty(), "metadata.name"),
        (metadata.namespace.is_empty(), "metadata.namespace"),
        (metadata.uid.is_empty(), "metadata.uid"),
        (status.created_at == 0, "created_at"),
    ];
    check_fields(&format!("sandbox {id}"), &lacks)
}

pub(crate) fn check_container(id: &str, status: &cri::ContainerStatus) -> Result<(), Status> {
    let lacks = [
        (status.id.is_empty(), "id"),
        (status.metadata.as_ref().is_none_or(|metadata| metadata.name.is_empty()), "metadata.name"),
        (status.created_at == 0, "created_at"),
        (status.image.as_ref().is_none_or(|image| image.image.is_empty()), "image.image"),
        (status.image_ref.is_empty(), "image_ref"),
    ];
    check_fields(&format!("container {id}"), &lacks)
}

pub(crate) fn check_version(version: &cri::VersionResponse) -> Result<(), Status> {
    let lacks = [
        (version.version.is_empty(), "version"),
        (version.runtime_name.is_empty(), "runtime_name"),
        (version.runtime_version.is_empty(), "runtime_version"),
        (version.runtime_api_version.is_empty(), "runtime_api_version"),
    ];
    check_fields("its version", &lacks)
}

pub(crate) fn check_image(name: &str, image: &cri::Image) -> Result<(), Status> {
    check_fields(&format!("image {name}"), &[(image.id.is_empty(), "id"), (image.size == 0, "size")])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacks(result: Result<(), Status>) -> String {
        let text = result.err().map(|status| status.message().to_owned()).unwrap_or_default();
        text.split(" lacks ").nth(1).and_then(|t| t.split(';').next()).unwrap_or_default().to_owned()
    }

    #[test]
    fn complete_runtime_response_is_accepted() {
        let metadata = cri::PodSandboxMetadata {
            name: "n".into(),
            uid: "u".into(),
            namespace: "ns".into(),
            ..Default::default()
        };
        let status = cri::PodSandboxStatus {
            id: "s".into(),
            metadata: Some(metadata),
            created_at: 1,
            ..Default::default()
        };
        check_sandbox("s", &status).unwrap();
        let status = cri::ContainerStatus {
            id: "c".into(),
            metadata: Some(cri::ContainerMetadata { name: "n".into(), ..Default::default() }),
            created_at: 1,
            image: Some(cri::ImageSpec { image: "i".into(), ..Default::default() }),
            image_ref: "r".into(),
            ..Default::default()
        };
        check_container("c", &status).unwrap();
        let response = cri::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "containerd".into(),
            runtime_version: "1".into(),
            runtime_api_version: "v1".into(),
        };
        check_version(&response).unwrap();
        check_image("i", &cri::Image { id: "i".into(), size: 1, ..Default::default() }).unwrap();
    }

    #[test]
    fn missing_fields_of_a_runtime_response_are_named() {
        let metadata = "metadata.name, metadata.namespace, metadata.uid";
        assert_eq!(lacks(check_sandbox("s", &Default::default())), format!("id, {metadata}, created_at"));
        let all = "id, metadata.name, created_at, image.image, image_ref";
        assert_eq!(lacks(check_container("c", &Default::default())), all);
        let unnamed = cri::ContainerStatus {
            metadata: Some(Default::default()),
            image: Some(Default::default()),
            ..Default::default()
        };
        assert_eq!(lacks(check_container("c", &unnamed)), all);
        assert_eq!(
            lacks(check_version(&Default::default())),
            "version, runtime_name, runtime_version, runtime_api_version"
        );
        assert_eq!(lacks(check_image("i", &Default::default())), "id, size");
        let text = check_container("c7", &Default::default()).unwrap_err().message().to_owned();
        assert!(text.contains("container c7") && text.contains("update or repair"), "{text}");
    }
}
