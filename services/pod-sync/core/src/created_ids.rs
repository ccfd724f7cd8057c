//! The user and group ids of a created container, as the runtime reports them: those of the pod, of its image, and of the
//! image's `/etc/group`.

use serde_json::Value;

/// User, group and supplemental groups of the container's first process, from the `info` of a verbose `ContainerStatus`:
/// containerd and CRI-O put the runtime specification there (`runtimeSpec.process.user`). `None` if it is missing.
pub fn ids_of_info(info: &str) -> Option<Vec<i64>> {
    let info: Value = serde_json::from_str(info).ok()?;
    let user = info.pointer("/runtimeSpec/process/user")?.as_object()?;
    // The specification omits ids that are 0.
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
    fn container_ids_are_read_completely_or_not_at_all() {
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
