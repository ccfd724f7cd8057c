//! Converts the parts of a desire that are the same for every callee.

use keelson_desired_set::{DesireHeader, PodRef, Want};
use keelson_proto::keelson::common::v1 as common;

/// A required field is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing")]
pub struct MissingField(pub &'static str);

/// The fields `pod.pod`, `pod.revision` and `pod.want`. The callee must check the UID.
///
/// # Errors
/// The pod is missing, or the want is unspecified.
pub fn header(
    pod: Option<common::PodRef>,
    revision: u64,
    wanted: common::Want,
) -> Result<DesireHeader, MissingField> {
    let want = want(wanted)?;
    let common::PodRef { uid, namespace, name } = pod.ok_or(MissingField("pod.pod"))?;
    Ok(DesireHeader { pod: PodRef { uid, namespace, name }, revision, want })
}

const fn want(value: common::Want) -> Result<Want, MissingField> {
    Ok(match value {
        common::Want::Unspecified => return Err(MissingField("pod.want")),
        common::Want::Run => Want::Run,
        common::Want::Stop => Want::Stop,
        common::Want::Unmount => Want::Unmount,
        common::Want::Forget => Want::Forget,
    })
}

/// A limit; zero or less means no limit.
pub fn positive(value: i64) -> Option<u64> {
    u64::try_from(value).ok().filter(|v| *v > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_want_except_unspecified_is_accepted() {
        use common::Want as Wire;
        assert_eq!(want(Wire::Unspecified).unwrap_err().to_string(), "pod.want is missing");
        let pairs = [
            (Wire::Run, Want::Run),
            (Wire::Stop, Want::Stop),
            (Wire::Unmount, Want::Unmount),
            (Wire::Forget, Want::Forget),
        ];
        for (wire, own) in pairs {
            assert_eq!(want(wire), Ok(own));
        }
    }

    #[test]
    fn header_without_pod_is_refused() {
        let pod = common::PodRef { uid: "u".into(), namespace: "shop".into(), name: "web".into() };
        let found = header(Some(pod), 7, common::Want::Stop).unwrap();
        let pod = PodRef { uid: "u".into(), namespace: "shop".into(), name: "web".into() };
        assert_eq!(found, DesireHeader { pod, revision: 7, want: Want::Stop });
        assert_eq!(header(None, 7, common::Want::Stop).unwrap_err().to_string(), "pod.pod is missing");
    }

    #[test]
    fn zero_or_negative_means_no_limit() {
        assert_eq!([-1, 0, 7].map(positive), [None, None, Some(7)]);
    }
}
