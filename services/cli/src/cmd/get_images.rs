//! `keelson get images`.

use keelson_proto::keelson::runtime::v1::{ContainerState, ImageUser, RuntimeImage};
use serde_json::{Value, json};

use crate::error::CliError;
use crate::human;
use crate::output;
use crate::session::Session;
use crate::table::Table;

/// The number of characters of an abbreviated id.
const SHORT_ID: usize = 12;

/// Shows the images of the container runtime, or the named ones.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), CliError> {
    let mut images = session.agent.images().await?;
    if let Some(unknown) = names.iter().find(|name| !images.iter().any(|image| matches_name(image, name))) {
        return Err(CliError::NotFound {
            what: format!("the container runtime has no image {unknown:?}"),
            hint: "`keelson get images` lists all images".into(),
        });
    }
    images.retain(|image| names.is_empty() || names.iter().any(|name| matches_name(image, name)));
    if output::is_document(session.format()) {
        let items: Vec<Value> = images.iter().map(document).collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    if images.is_empty() {
        output::notice("The container runtime has no images.");
        return Ok(());
    }
    output::print(&table(session, &images).render(0))
}

/// Whether a name matches the image: one of its tags or digests, with or without the part before the last slash and
/// the part after the tag's colon, or the beginning of its id.
fn matches_name(image: &RuntimeImage, name: &str) -> bool {
    let id = digits(&image.id);
    let begins = name.len() >= 4 && id.starts_with(digits(name));
    begins
        || image.repo_digests.iter().any(|digest| digest == name)
        || image.repo_tags.iter().any(|tag| {
            let (repository, _) = split_tag(tag);
            let short = repository.rsplit('/').next().unwrap_or(repository);
            [tag.as_str(), repository, short].contains(&name)
                || tag.strip_suffix(name).is_some_and(|before| before.ends_with('/'))
        })
}

/// An id without the prefix of its algorithm.
fn digits(id: &str) -> &str {
    id.split_once(':').map_or(id, |(_, digits)| digits)
}

/// Splits a tag into repository and tag. A colon before the last slash belongs to a port.
fn split_tag(tag: &str) -> (&str, &str) {
    match tag.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (tag, "<none>"),
    }
}

fn table(session: &Session, images: &[RuntimeImage]) -> Table {
    let mut header = vec!["IMAGE", "TAG", "ID", "SIZE", "PINNED", "USED BY"];
    if session.is_wide() {
        header.push("DIGESTS");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for image in images {
        let id: String = digits(&image.id).chars().take(SHORT_ID).collect();
        let none = ["<none>".to_owned()];
        let tags = if image.repo_tags.is_empty() { &none[..] } else { &image.repo_tags };
        for tag in tags {
            let (repository, tag) = match image.repo_digests.first() {
                Some(digest) if image.repo_tags.is_empty() => {
                    (digest.split('@').next().unwrap_or_default(), "<none>")
                }
                _ => split_tag(tag),
            };
            let mut cells = vec![
                repository.to_owned(),
                tag.to_owned(),
                id.clone(),
                size(image.size_bytes),
                image.pinned.to_string(),
                users(&image.used_by),
            ];
            if session.is_wide() {
                cells.push(image.repo_digests.join(","));
            }
            table.row(cells);
        }
    }
    table
}

/// A size in KiB below one MiB, else in MiB with one digit.
fn size(bytes: u64) -> String {
    let kib = bytes.div_ceil(1024);
    if kib < 1024 { format!("{kib}Ki") } else { human::mebibytes(kib) }
}

/// The pods that use an image, each once.
fn users(users: &[ImageUser]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for user in users {
        let name = match &user.pod {
            Some(pod) if !pod.name.is_empty() => pod.name.as_str(),
            _ => user.container_id.get(..SHORT_ID).unwrap_or(&user.container_id),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() { "-".into() } else { names.join(",") }
}

fn document(image: &RuntimeImage) -> Value {
    let users: Vec<Value> = image
        .used_by
        .iter()
        .map(|user| {
            let pod = user.pod.clone().unwrap_or_default();
            json!({
                "namespace": pod.namespace,
                "pod": pod.name,
                "uid": pod.uid,
                "container": user.container,
                "container_id": user.container_id,
                "state": state(user.state()),
            })
        })
        .collect();
    json!({
        "id": image.id,
        "tags": image.repo_tags,
        "digests": image.repo_digests,
        "size_bytes": image.size_bytes,
        "pinned": image.pinned,
        "used_by": users,
    })
}

fn state(state: ContainerState) -> &'static str {
    match state {
        ContainerState::Created => "created",
        ContainerState::Running => "running",
        ContainerState::Exited => "exited",
        ContainerState::Unknown | ContainerState::Unspecified => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> RuntimeImage {
        RuntimeImage {
            id: "sha256:4c5f6a7b8c9d0e1f".into(),
            repo_tags: vec!["registry.example:5000/team/web:1.2".into()],
            repo_digests: vec!["registry.example:5000/team/web@sha256:aa".into()],
            ..RuntimeImage::default()
        }
    }

    #[test]
    fn image_matches_tag_repository_digest_or_id_prefix() {
        for name in [
            "registry.example:5000/team/web:1.2",
            "registry.example:5000/team/web",
            "registry.example:5000/team/web@sha256:aa",
            "team/web:1.2",
            "web:1.2",
            "web",
            "4c5f6a",
            "sha256:4c5f6a",
        ] {
            assert!(matches_name(&image(), name), "{name}");
        }
        for name in ["", "4c5", "eb:1.2", "team", "web:1", "registry.example", "5000/team/web"] {
            assert!(!matches_name(&image(), name), "{name}");
        }
    }

    #[test]
    fn port_of_a_registry_is_not_taken_for_a_tag() {
        assert_eq!(split_tag("registry.example:5000/web:1"), ("registry.example:5000/web", "1"));
        assert_eq!(split_tag("registry.example:5000/web"), ("registry.example:5000/web", "<none>"));
    }

    #[test]
    fn small_image_sizes_are_rounded_up() {
        for (bytes, text) in [(0, "0Ki"), (700, "1Ki"), (1_048_575, "1.0Mi"), (4_500_000, "4.2Mi")] {
            assert_eq!(size(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn pod_with_two_containers_of_an_image_is_listed_once() {
        let user = |pod: &str, id: &str| ImageUser {
            pod: Some(keelson_proto::keelson::common::v1::PodRef { name: pod.into(), ..Default::default() }),
            container_id: id.into(),
            ..ImageUser::default()
        };
        assert_eq!(
            users(&[user("web", "1"), user("web", "2"), user("", "0123456789abcdef")]),
            "web,0123456789ab"
        );
        assert_eq!(users(&[]), "-");
    }
}
