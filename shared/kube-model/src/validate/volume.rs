//! Volumes.

use super::fields::{self, Shown};
use super::resources::check_resource_field;
use super::{Findings, claim_volume, names, plugin_volume};
use crate::types::{DownwardApiVolumeFile, KeyToPath, ProjectedVolumeSource, Volume};

pub(super) fn check_volume(found: &mut Findings, field: &str, volume: &Volume) {
    if volume.name.is_empty() {
        found.required(format!("{field}.name"), "");
    } else {
        found.name(format!("{field}.name"), &volume.name, names::dns_label);
    }
    let kinds = volume.source_kinds();
    match kinds.as_slice() {
        [] => found.required(field, "must specify a volume type"),
        [_] => check_source(found, field, volume),
        [_, more @ ..] => {
            for kind in more {
                found.forbidden(format!("{field}.{kind}"), "may not specify more than 1 volume type");
            }
        }
    }
}

fn check_source(found: &mut Findings, field: &str, volume: &Volume) {
    if let Some(limit) = volume.empty_dir.as_ref().and_then(|dir| dir.size_limit).filter(|l| l.is_negative())
    {
        let detail = "must be greater than or equal to 0";
        found.invalid(format!("{field}.emptyDir.sizeLimit"), limit.to_string(), detail);
    }
    if let Some(host_path) = &volume.host_path {
        required_path(found, &format!("{field}.hostPath.path"), &host_path.path);
        let types = [
            "",
            "BlockDevice",
            "CharDevice",
            "Directory",
            "DirectoryOrCreate",
            "File",
            "FileOrCreate",
            "Socket",
        ];
        found.one_of(&format!("{field}.hostPath.type"), host_path.type_.as_deref().unwrap_or(""), &types);
    }
    if let Some(secret) = &volume.secret {
        required(found, format!("{field}.secret.secretName"), &secret.secret_name);
        check_mode(found, &format!("{field}.secret.defaultMode"), secret.default_mode);
        check_keys(found, &format!("{field}.secret"), &secret.items);
    }
    if let Some(config_map) = &volume.config_map {
        required(found, format!("{field}.configMap.name"), &config_map.name);
        check_mode(found, &format!("{field}.configMap.defaultMode"), config_map.default_mode);
        check_keys(found, &format!("{field}.configMap"), &config_map.items);
    }
    if let Some(downward) = &volume.downward_api {
        check_mode(found, &format!("{field}.downwardAPI.defaultMode"), downward.default_mode);
        check_downward_items(found, &format!("{field}.downwardAPI"), &downward.items);
    }
    if let Some(projected) = &volume.projected {
        check_projected(found, &format!("{field}.projected"), projected);
    }
    if let Some(claim) = &volume.persistent_volume_claim {
        required(found, format!("{field}.persistentVolumeClaim.claimName"), &claim.claim_name);
    }
    if let Some(ephemeral) = &volume.ephemeral {
        claim_volume::check_ephemeral(found, &format!("{field}.ephemeral"), ephemeral);
    }
    for (kind, source) in volume.other.iter().filter(|(_, source)| !source.is_null()) {
        plugin_volume::check_source(found, &format!("{field}.{kind}"), kind, source);
    }
    if let Some(image) = &volume.image {
        required(found, format!("{field}.image.reference"), &image.reference);
        let policies = ["Always", "IfNotPresent", "Never"];
        found.one_of(&format!("{field}.image.pullPolicy"), &image.pull_policy, &policies);
    }
}

fn check_projected(found: &mut Findings, field: &str, projected: &ProjectedVolumeSource) {
    check_mode(found, &format!("{field}.defaultMode"), projected.default_mode);
    for (index, source) in projected.sources.iter().enumerate() {
        let field = format!("{field}.sources[{index}]");
        let set = [
            source.secret.is_some(),
            source.config_map.is_some(),
            source.downward_api.is_some(),
            source.service_account_token.is_some(),
            source.cluster_trust_bundle.is_some(),
            source.pod_certificate.is_some(),
        ];
        if set.iter().filter(|set| **set).count() > 1 {
            found.forbidden(&field, "may not specify more than 1 volume type per source");
        }
        for (kind, object) in [("secret", &source.secret), ("configMap", &source.config_map)] {
            if let Some(object) = object {
                required(found, format!("{field}.{kind}.name"), &object.name);
                check_keys(found, &format!("{field}.{kind}"), &object.items);
            }
        }
        if let Some(downward) = &source.downward_api {
            check_downward_items(found, &format!("{field}.downwardAPI"), &downward.items);
        }
        if let Some(token) = &source.service_account_token {
            let field = format!("{field}.serviceAccountToken");
            check_projected_path(found, &field, &token.path);
            if let Some(seconds) = token.expiration_seconds.filter(|seconds| *seconds < 600) {
                found.invalid(format!("{field}.expirationSeconds"), seconds, "must be at least 10 minutes");
            }
        }
        if let Some(bundle) = &source.cluster_trust_bundle {
            check_projected_path(found, &format!("{field}.clusterTrustBundle"), &bundle.path);
        }
    }
}

fn check_downward_items(found: &mut Findings, field: &str, items: &[DownwardApiVolumeFile]) {
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}.items[{index}]");
        check_projected_path(found, &field, &item.path);
        check_mode(found, &format!("{field}.mode"), item.mode);
        if let Some(selector) = &item.field_ref {
            fields::check_field(found, &format!("{field}.fieldRef"), selector, Shown::InFile);
        }
        if let Some(selector) = &item.resource_field_ref {
            check_resource_field(found, &format!("{field}.resourceFieldRef"), selector, true);
        }
        if item.field_ref.is_some() && item.resource_field_ref.is_some() {
            found.invalid(&field, "", "fieldRef and resourceFieldRef can not be specified simultaneously");
        } else if item.field_ref.is_none() && item.resource_field_ref.is_none() {
            found.required(&field, "one of fieldRef and resourceFieldRef is required");
        }
    }
}

fn check_keys(found: &mut Findings, field: &str, items: &[KeyToPath]) {
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}.items[{index}]");
        required(found, format!("{field}.key"), &item.key);
        check_projected_path(found, &field, &item.path);
        check_mode(found, &format!("{field}.mode"), item.mode);
    }
}

fn check_projected_path(found: &mut Findings, field: &str, path: &str) {
    let field = format!("{field}.path");
    if path.is_empty() {
        found.required(field, "");
    } else {
        found.name(field, path, names::projected_path);
    }
}

fn check_mode(found: &mut Findings, field: &str, mode: Option<i32>) {
    if let Some(mode) = mode.filter(|mode| !(0..=0o777).contains(mode)) {
        found.invalid(field, mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

fn required(found: &mut Findings, field: String, value: &str) {
    if value.is_empty() {
        found.required(field, "");
    }
}

fn required_path(found: &mut Findings, field: &str, path: &str) {
    if path.is_empty() {
        found.required(field, "");
    } else {
        found.name(field, path, names::no_backsteps);
    }
}
