//! The options that a flexVolume driver gets (volumes.md §10.8).

use std::collections::BTreeMap;
use std::fmt;

use crate::flexvolume::driver::Driver;
use crate::objects::Strings;
use crate::sources::FlexSource;

/// What the names of a Secret's values begin with.
const SECRET: &str = "kubernetes.io/secret/";

/// Why a driver cannot get the Secret of a volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// The Secret is not meant for the driver.
    #[error(
        "flexVolume {volume}: Secret {secret} has the type {found:?}, not {driver:?}; \
         create a Secret whose type is the driver's name"
    )]
    SecretType {
        /// The volume's inner name.
        volume: String,
        /// The Secret, `namespace/name`.
        secret: String,
        /// Its type.
        found: String,
        /// The driver's name.
        driver: String,
    },
}

/// A Secret that a volume refers to.
#[derive(Clone, Copy)]
pub struct Secret<'s> {
    /// `namespace/name`.
    pub name: &'s str,
    /// Its type.
    pub kind: &'s str,
    /// Its data as the API sends it: in base64.
    pub data: &'s Strings,
}

/// The pod that a volume is mounted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pod<'p> {
    /// Its name.
    pub name: &'p str,
    /// Its namespace.
    pub namespace: &'p str,
    /// Its UID.
    pub uid: &'p str,
    /// Its service account.
    pub service_account: &'p str,
    /// Its fsGroup.
    pub fs_group: Option<i64>,
}

/// Options as a driver gets them. Their `Debug` form shows no values of a Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// The options of every command about the volume with the inner name `volume`. Those of the volume itself win.
    pub fn of_volume(volume: &str, source: &FlexSource, read_only: bool) -> Self {
        Self::with(Self::base(volume, source, read_only), source)
    }

    /// The options of `mount`. Those of the volume itself win.
    pub fn of_mount(
        (volume, driver): (&str, &Driver),
        source: &FlexSource,
        read_only: bool,
        pod: Pod<'_>,
        secret: Option<Secret<'_>>,
    ) -> Result<Self, OptionsError> {
        let mut options = Self::base(volume, source, read_only);
        for (name, value) in [
            ("kubernetes.io/pod.name", pod.name),
            ("kubernetes.io/pod.namespace", pod.namespace),
            ("kubernetes.io/pod.uid", pod.uid),
            ("kubernetes.io/serviceAccount.name", pod.service_account),
        ] {
            options.insert(name.to_owned(), value.to_owned());
        }
        if let Some(fs_group) = pod.fs_group {
            options.insert("kubernetes.io/mounterArgs.FsGroup".to_owned(), fs_group.to_string());
        }
        if let Some(secret) = secret {
            if secret.kind != driver.name() {
                return Err(OptionsError::SecretType {
                    volume: volume.to_owned(),
                    secret: secret.name.to_owned(),
                    found: secret.kind.to_owned(),
                    driver: driver.name().to_owned(),
                });
            }
            options.extend(secret.data.iter().map(|(key, value)| (format!("{SECRET}{key}"), value.clone())));
        }
        Ok(Self::with(options, source))
    }

    fn base(volume: &str, source: &FlexSource, read_only: bool) -> BTreeMap<String, String> {
        [
            ("kubernetes.io/fsType", source.fs_type.as_str()),
            ("kubernetes.io/readwrite", if read_only { "ro" } else { "rw" }),
            ("kubernetes.io/pvOrVolumeName", volume),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    fn with(mut options: BTreeMap<String, String>, source: &FlexSource) -> Self {
        options.extend(source.options.iter().map(|(name, value)| (name.clone(), value.clone())));
        Self(options)
    }

    /// The value of an option.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The JSON object that a driver gets, its names in order. It may contain secrets.
    pub fn to_json(&self) -> String {
        let pairs = self.0.iter().map(|(name, value)| (name.clone(), value.clone().into()));
        serde_json::Value::Object(pairs.collect()).to_string()
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self
            .0
            .iter()
            .map(|(name, value)| (name, if name.starts_with(SECRET) { "<masked>" } else { value.as_str() }));
        f.debug_map().entries(shown).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: Pod<'_> =
        Pod { name: "p", namespace: "ns", uid: "u", service_account: "sa", fs_group: Some(2000) };

    fn strings(pairs: &[(&str, &str)]) -> Strings {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn source(options: &[(&str, &str)]) -> FlexSource {
        FlexSource {
            driver: "v/d".into(),
            fs_type: "xfs".into(),
            options: strings(options),
            ..FlexSource::default()
        }
    }

    fn driver() -> Driver {
        Driver::new("v/d").unwrap()
    }

    #[test]
    fn every_command_gets_the_filesystem_the_mode_and_the_name() {
        let options = Options::of_volume("pv", &source(&[("b", "2"), ("a", "\"")]), true);
        assert_eq!(
            options.to_json(),
            concat!(
                r#"{"a":"\"","b":"2","kubernetes.io/fsType":"xfs","#,
                r#""kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"ro"}"#
            )
        );
        let options = Options::of_volume("pv", &source(&[]), false);
        assert_eq!(options.get("kubernetes.io/readwrite"), Some("rw"));
    }

    #[test]
    fn a_mount_also_gets_the_pod_and_the_secret_in_base64() {
        let data = strings(&[("user", "YQ=="), ("password", "aHVudGVyMg==")]);
        let secret = Secret { name: "ns/s", kind: "v/d", data: &data };
        let options = Options::of_mount(("pv", &driver()), &source(&[]), false, POD, Some(secret)).unwrap();
        for (name, value) in [
            ("kubernetes.io/fsType", "xfs"),
            ("kubernetes.io/readwrite", "rw"),
            ("kubernetes.io/pvOrVolumeName", "pv"),
            ("kubernetes.io/pod.name", "p"),
            ("kubernetes.io/pod.namespace", "ns"),
            ("kubernetes.io/pod.uid", "u"),
            ("kubernetes.io/serviceAccount.name", "sa"),
            ("kubernetes.io/mounterArgs.FsGroup", "2000"),
            ("kubernetes.io/secret/user", "YQ=="),
            ("kubernetes.io/secret/password", "aHVudGVyMg=="),
        ] {
            assert_eq!(options.get(name), Some(value), "{name}");
        }
        assert_eq!(options.0.len(), 10);
    }

    #[test]
    fn without_an_fs_group_or_a_secret_there_is_no_option_for_them() {
        let pod = Pod { fs_group: None, ..POD };
        let options = Options::of_mount(("pv", &driver()), &source(&[]), false, pod, None).unwrap();
        assert_eq!(options.0.len(), 7);
        assert_eq!(options.get("kubernetes.io/mounterArgs.FsGroup"), None);
    }

    #[test]
    fn an_option_of_the_volume_wins_over_every_one_of_the_agent() {
        let data = strings(&[("k", "YQ==")]);
        let secret = Secret { name: "ns/s", kind: "v/d", data: &data };
        let options = Options::of_mount(("pv", &driver()), &source(&[]), false, POD, Some(secret)).unwrap();
        let own: Vec<(&str, &str)> = options.0.keys().map(|name| (name.as_str(), "mine")).collect();
        let own = source(&own);
        let options = Options::of_mount(("pv", &driver()), &own, false, POD, Some(secret)).unwrap();
        assert_eq!(options.0.len(), 9);
        assert!(options.0.values().all(|value| value == "mine"), "{options:?}");
        let options = Options::of_volume("pv", &own, true);
        assert_eq!(options.get("kubernetes.io/readwrite"), Some("mine"));
    }

    #[test]
    fn a_secret_of_another_type_is_refused_without_showing_its_data() {
        let data = strings(&[("k", "aHVudGVyMg==")]);
        let secret = Secret { name: "ns/s", kind: "Opaque", data: &data };
        let text = Options::of_mount(("pv", &driver()), &source(&[]), false, POD, Some(secret))
            .unwrap_err()
            .to_string();
        assert!(text.contains("flexVolume pv: Secret ns/s has the type \"Opaque\", not \"v/d\""), "{text}");
        assert!(!text.contains("aHVudGVyMg"), "{text}");
    }

    #[test]
    fn the_debug_form_of_options_shows_no_secret() {
        let data = strings(&[("k", "aHVudGVyMg==")]);
        let secret = Secret { name: "ns/s", kind: "v/d", data: &data };
        let options = Options::of_mount(("pv", &driver()), &source(&[]), false, POD, Some(secret)).unwrap();
        let text = format!("{options:?}");
        assert!(text.contains("<masked>") && text.contains("xfs") && !text.contains("aHVudGVyMg"), "{text}");
    }
}
