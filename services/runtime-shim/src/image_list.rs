//! ListImages: the runtime's images, and the containers that use them.

use std::collections::HashMap;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use tonic::Status;

use crate::cri::Cri;
use crate::cri_objects::{ContainerEntry, Image};

/// Every image, with the containers that were created from it.
///
/// # Errors
/// The runtime's error.
pub async fn list(cri: &Cri) -> Result<Vec<pb::RuntimeImage>, Status> {
    // Containers after the images: the image of a container exists as long as the container does.
    let images = cri.list_images().await?;
    let containers = cri.list(None).await?.containers;
    Ok(with_users(images, containers))
}

fn with_users(images: Vec<Image>, containers: Vec<ContainerEntry>) -> Vec<pb::RuntimeImage> {
    let mut images: Vec<pb::RuntimeImage> = images.into_iter().map(message).collect();
    images.sort_by(|a, b| display_name(a).cmp(display_name(b)));
    let names = |image: &pb::RuntimeImage| {
        let names = image.repo_tags.iter().chain(&image.repo_digests).chain([&image.id]);
        names.cloned().collect::<Vec<_>>()
    };
    let by_name: HashMap<String, usize> = images
        .iter()
        .enumerate()
        .flat_map(|(index, image)| names(image).into_iter().map(move |name| (name, index)))
        .collect();
    for container in containers {
        // The reference identifies the image it was created from; the name in the spec may mean another image by now.
        let index = by_name.get(&container.image_ref).or_else(|| by_name.get(&container.image_name));
        if let Some(image) = index.and_then(|index| images.get_mut(*index)) {
            image.used_by.push(user(container));
        }
    }
    for image in &mut images {
        image.used_by.sort_by(|a, b| sort_key(a).cmp(&sort_key(b)));
    }
    images
}

fn message(image: Image) -> pb::RuntimeImage {
    pb::RuntimeImage {
        id: image.id,
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size_bytes: image.bytes,
        pinned: image.pinned,
        used_by: Vec::new(),
    }
}

fn display_name(image: &pb::RuntimeImage) -> &str {
    image.repo_tags.first().or(image.repo_digests.first()).unwrap_or(&image.id)
}

fn user(container: ContainerEntry) -> pb::ImageUser {
    let pod = PodRef::from(container.pod);
    pb::ImageUser {
        pod: (pod != PodRef::default()).then_some(pod),
        container: container.name,
        state: container.state as i32,
        container_id: container.id,
    }
}

/// Sort key: running containers first, then by pod and container.
fn sort_key(user: &pb::ImageUser) -> impl Ord + '_ {
    let pod = user.pod.as_ref().map(|pod| (&pod.namespace, &pod.name));
    (user.state != pb::ContainerState::Running as i32, pod, &user.container, &user.container_id)
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1 as cri;

    use super::*;
    use crate::tests::fake_runtime::{FakeRuntime, refusal};
    use tonic::Code;

    fn image(id: &str, tags: &[&str], digests: &[&str]) -> cri::Image {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        cri::Image {
            id: id.into(),
            repo_tags: owned(tags),
            repo_digests: owned(digests),
            size: 7,
            ..Default::default()
        }
    }

    fn users(image: &pb::RuntimeImage) -> Vec<String> {
        let name = |user: &pb::ImageUser| {
            let pod = user.pod.clone().unwrap_or_default();
            format!("{}/{}/{} {}", pod.namespace, pod.name, user.container, user.state().as_str_name())
        };
        image.used_by.iter().map(name).collect()
    }

    #[tokio::test]
    async fn every_image_is_listed_with_the_containers_that_use_it() {
        use cri::ContainerState::{ContainerExited, ContainerRunning};
        let fake = FakeRuntime::start().await;
        fake.add_image(image("sha256:3", &[], &[]));
        fake.add_image(image("sha256:2", &["b:1", "b:latest"], &["b@sha256:d2"]));
        fake.add_image(cri::Image { pinned: true, ..image("sha256:1", &["a:1"], &["a@sha256:d1"]) });
        for (container, uid, state, image_ref) in [
            ("ended", "u1", ContainerExited, "sha256:2"),
            ("by-tag", "u2", ContainerRunning, "b:latest"),
            ("by-digest", "u1", ContainerRunning, "b@sha256:d2"),
            ("lost", "u1", ContainerRunning, "sha256:unknown"),
        ] {
            fake.container(container, uid, state);
            fake.set_image_ref(container, image_ref);
        }
        let images = list(&fake.cri).await.unwrap();
        let titles: Vec<_> = images.iter().map(display_name).collect();
        assert_eq!(titles, ["a:1", "b:1", "sha256:3"]);
        assert_eq!((images[0].pinned, images[0].size_bytes, images[1].pinned), (true, 7, false));
        assert_eq!(users(&images[0]), [""; 0]);
        assert_eq!(users(&images[2]), [""; 0]);
        assert_eq!(
            users(&images[1]),
            [
                "default/u1/by-digest CONTAINER_STATE_RUNNING",
                "default/u2/by-tag CONTAINER_STATE_RUNNING",
                "default/u1/ended CONTAINER_STATE_EXITED",
            ]
        );
    }

    #[test]
    fn image_of_a_container_falls_back_to_the_name_in_the_spec() {
        let mut container = cri::Container { id: "c".into(), ..Default::default() };
        container.image = Some(cri::ImageSpec { image: "a:1".into(), ..Default::default() });
        container.image_ref = "elsewhere".into();
        let images = with_users(vec![image("sha256:1", &["a:1"], &[]).into()], vec![container.into()]);
        assert_eq!(images[0].used_by.len(), 1);
        assert_eq!((images[0].used_by[0].pod.as_ref(), images[0].used_by[0].container.as_str()), (None, ""));
    }

    #[tokio::test]
    async fn failed_image_list_is_an_error_and_not_an_empty_list() {
        let fake = FakeRuntime::start().await;
        for method in ["ListImages", "ListContainers"] {
            match method {
                "ListImages" => fake.images.list_images.answer_once(Err(refusal(Code::Unknown))),
                _ => fake.runtime.list_containers.answer_once(Err(refusal(Code::Unknown))),
            }
            assert_eq!(list(&fake.cri).await.unwrap_err().code(), Code::Unknown, "{method}");
        }
    }
}
