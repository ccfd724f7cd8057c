//! The ids that a container has which the runtime has made, as the runtime tells them: what the pod says, what its image says, and the
//! groups of the image's own `/etc/group`.

use serde_json::Value;

/// User, group and further groups of the container's first process, of the `info` of a verbose `ContainerStatus`: containerd and CRI-O
/// put the runtime specification there (`runtimeSpec.process.user`). `None` where it is not there.
pub fn ids_of_info(info: &str) -> Option<Vec<i64>> {
    let info: Value = serde_json::from_str(info).ok()?;
    let user = info.pointer("/runtimeSpec/process/user")?.as_object()?;
    // What is 0 is left out.
    let id = |field: &str| user.get(field).map_or(Some(0), Value::as_i64);
    let mut ids = vec![id("uid")?, id("gid")?];
    for group in user.get("additionalGids").and_then(Value::as_array).into_iter().flatten() {
        ids.push(group.as_i64()?);
    }
    Some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ids_are_all_of_them_or_none() {
        for (info, expected) in [
            (
                r#"{"runtimeSpec":{"process":{"user":{"uid":1,"gid":2,"additionalGids":[2,64200]}}}}"#,
                Some(vec![1, 2, 2, 64_200]),
            ),
            (r#"{"runtimeSpec":{"process":{"user":{"additionalGids":[10]}}}}"#, Some(vec![0, 0, 10])),
            (r#"{"runtimeSpec":{"process":{"user":{}}}}"#, Some(vec![0, 0])),
            (r#"{"runtimeSpec":{"process":{"user":{"uid":"x"}}}}"#, None),
            (r#"{"runtimeSpec":{"process":{"user":{"additionalGids":["x"]}}}}"#, None),
            (r#"{"runtimeSpec":{"process":{}}}"#, None),
            ("{}", None),
            ("", None),
        ] {
            assert_eq!(ids_of_info(info), expected, "{info}");
        }
    }
}
