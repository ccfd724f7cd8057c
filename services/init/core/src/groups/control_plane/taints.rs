//! `registerWithTaints`: the initial taints of a Node that the agent registers (node-and-api.md §2.5, §9.1).

use keelson_config::Taint;
use serde_json::Value;

use crate::document::Sourced;
use crate::names::{is_label_value, is_qualified_name};
use crate::reader::Reader;

const FIELD: &str = "registerWithTaints";
const EFFECTS: &[&str] = &["NoSchedule", "PreferNoSchedule", "NoExecute"];
const NOT_A_STRING: &str = "this must be a string; put it in quotes";

/// Reads the taints; an invalid one is reported with its field, and the others are still read.
pub(super) fn read(reader: &mut Reader<'_>) -> Option<Sourced<Vec<Taint>>> {
    let list = reader.list(FIELD)?;
    let taints = list.iter().enumerate().filter_map(|(index, value)| taint(reader, index, value)).collect();
    Some(Sourced { value: taints, origin: reader.origin(FIELD), field: FIELD.to_owned() })
}

fn taint(reader: &mut Reader<'_>, index: usize, whole: &Value) -> Option<Taint> {
    let at = format!("{FIELD}[{index}]");
    let Some(fields) = whole.as_object() else {
        report_mistyped(reader, at, whole, "a taint must be a map with key, value and effect");
        return None;
    };
    let mut good = true;
    let mut text = |reader: &mut Reader<'_>, name: &str| match fields.get(name) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => {
            good = false;
            report_mistyped(reader, format!("{at}.{name}"), other, NOT_A_STRING);
            String::new()
        }
    };
    let taint =
        Taint { key: text(reader, "key"), value: text(reader, "value"), effect: text(reader, "effect") };
    if !good {
        return None;
    }
    let wrong = if fields.get("timeAdded").is_some_and(|time| !time.is_null()) {
        "timeAdded is not allowed here; remove it"
    } else if !is_qualified_name(&taint.key) || !is_label_value(&taint.value) {
        "the key of a taint must be a qualified name, and its value a label value"
    } else if !taint.effect.is_empty() && !EFFECTS.contains(&taint.effect.as_str()) {
        "the effect of a taint must be one of: NoSchedule, PreferNoSchedule, NoExecute"
    } else {
        return Some(taint);
    };
    let origin = reader.origin_in(FIELD, &at);
    reader.report_entry(&Sourced { value: whole, origin, field: at }, wrong.to_owned());
    None
}

fn report_mistyped(reader: &mut Reader<'_>, field: String, value: &Value, remedy: &str) {
    let origin = reader.origin_in(FIELD, &field);
    reader.report_mistyped_entry(&Sourced { value, origin, field }, remedy.to_owned());
}

#[cfg(test)]
mod tests {
    use keelson_config::ControlPlane;
    use serde_json::json;

    use super::*;
    use crate::document::Document;
    use crate::inputs::Flags;
    use crate::outcome::WITHOUT_EFFECT;
    use crate::resolve::Resolved;
    use crate::testing::{host, kubelet, run};

    fn with(taints: Value, more: &[(&'static str, &str)]) -> Result<Resolved, Vec<String>> {
        let document = kubelet(json!({"registerWithTaints": taints}));
        let lines = [("registerWithTaints".to_owned(), 9), ("registerWithTaints[1].value".to_owned(), 14)];
        let document = Document { lines: lines.into(), ..document };
        let others =
            [("kubeconfig", "/k")].iter().chain(more).map(|(name, text)| (*name, (*text).to_owned()));
        run(&Flags { others: others.collect(), ..Flags::default() }, Some(&document), None, &host())
    }

    fn taints(resolved: &Resolved) -> Vec<(&str, &str, &str)> {
        match &resolved.config.control_plane {
            ControlPlane::Kubernetes(api) => api
                .taints
                .iter()
                .map(|taint| (taint.key.as_str(), taint.value.as_str(), taint.effect.as_str()))
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn register_with_taints_is_applied_and_null_is_empty() {
        let resolved = with(
            json!([
                {"key": "example.com/a", "value": "b", "effect": "NoExecute"},
                {"key": "c", "value": null, "effect": "NoSchedule", "timeAdded": null},
                {"key": "d", "effect": null},
            ]),
            &[],
        )
        .unwrap();
        let expected = [("example.com/a", "b", "NoExecute"), ("c", "", "NoSchedule"), ("d", "", "")];
        assert_eq!(taints(&resolved), expected);
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
        assert_eq!(resolved.config.provenance["controlPlane.kubernetes.taints"], "kubelet.yaml:9");
    }

    #[test]
    fn a_mistyped_taint_value_is_reported_with_its_line() {
        for (value, shown) in [(json!(true), "true"), (json!(1), "1"), (json!(1.5), "1.5"), (json!([]), "[]")]
        {
            let errors = with(
                json!([{"key": "a", "effect": "NoSchedule"}, {"key": "b", "value": value, "effect": "NoSchedule"}]),
                &[],
            )
            .unwrap_err();
            assert_eq!(errors.len(), 1, "{errors:?}");
            let expected = format!(
                "invalid configuration: registerWithTaints[1].value = {shown} (kubelet.yaml:14; --register-with-taints): {NOT_A_STRING}"
            );
            assert_eq!(errors[0], expected);
        }
    }

    #[test]
    fn all_taint_errors_are_reported_at_once() {
        let errors = with(
            json!([
                5, {"key": "-a", "effect": "NoSchedule"}, {"key": "a", "value": "b c"}, {"key": "a", "effect": "No"},
                {"key": "a", "timeAdded": "2026-01-01T00:00:00Z"}, {"key": 1, "effect": false},
            ]),
            &[],
        )
        .unwrap_err();
        let parts = ["[0] = 5", "[1]", "[2]", "[3]", "[4]", "[5].key = 1", "[5].effect = false"];
        assert_eq!(errors.len(), parts.len(), "{errors:#?}");
        for (error, part) in errors.iter().zip(parts) {
            assert!(error.contains(&format!("registerWithTaints{part}")), "{error} lacks {part}");
        }
        assert!(with(json!({"key": "a"}), &[]).unwrap_err()[0].contains("this must be a list"));
    }

    #[test]
    fn the_cloud_taint_has_an_origin() {
        let cloud = "node.cloudprovider.kubernetes.io/uninitialized";
        for (given, origin) in
            [(json!([]), "--cloud-provider"), (json!([{"key": "a"}]), "kubelet.yaml:9, --cloud-provider")]
        {
            let resolved = with(given, &[("cloud-provider", "external")]).unwrap();
            assert_eq!(taints(&resolved).last(), Some(&(cloud, "true", "NoSchedule")));
            assert_eq!(resolved.config.provenance["controlPlane.kubernetes.taints"], origin);
            assert_eq!(resolved.config.provenance["nodeStatus.externalCloud"], "--cloud-provider");
        }
    }
}
