//! The parts of a desire that are the same for every callee, from the wire.

use keelson_desired_set::Want;
use keelson_proto::keelson::common::v1 as common;

/// A field that must be there is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing")]
pub struct Missing(pub &'static str);

/// The field `pod.want`.
///
/// # Errors
/// It is unspecified.
pub const fn want(value: common::Want) -> Result<Want, Missing> {
    Ok(match value {
        common::Want::Unspecified => return Err(Missing("pod.want")),
        common::Want::Run => Want::Run,
        common::Want::Stop => Want::Stop,
        common::Want::Unmount => Want::Unmount,
        common::Want::Forget => Want::Forget,
    })
}

/// A limit, where zero or less is none.
pub fn positive(value: i64) -> Option<u64> {
    u64::try_from(value).ok().filter(|v| *v > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wish_but_the_unspecified_one_is_taken() {
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
    fn zero_and_less_are_no_limit() {
        assert_eq!([-1, 0, 7].map(positive), [None, None, Some(7)]);
    }
}
