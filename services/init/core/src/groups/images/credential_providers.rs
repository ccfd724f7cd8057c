//! The paths of the configuration and the binaries of credential provider plugins (node-and-api.md §1.4).

use crate::document::{ConfigError, Sourced};
use crate::paths::absolute;

/// The flag that names the configuration.
pub const CREDENTIAL_CONFIG_FLAG: &str = "--image-credential-provider-config";
/// The flag that names the folder of the binaries.
pub const CREDENTIAL_BIN_FLAG: &str = "--image-credential-provider-bin-dir";
/// The file name extensions of configuration files in a folder.
const ENDINGS: [&str; 3] = [".json", ".yaml", ".yml"];

/// The paths in the two flags, made absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialProviderPaths {
    /// A file, or a folder with files.
    pub config: String,
    /// The folder of the binaries.
    pub bin_dir: String,
}

/// Reads the values of both flags; an empty value counts as not given.
///
/// # Errors
/// One flag is given without the other.
pub fn credential_provider_paths(
    config: Option<&str>,
    bin_dir: Option<&str>,
    cwd: &str,
) -> Result<Option<CredentialProviderPaths>, ConfigError> {
    let given = |path: Option<&str>| path.filter(|path| !path.is_empty()).map(|path| absolute(cwd, path));
    let alone = |flag: &str, value: String, remedy: String| {
        let given = Sourced { value, origin: "command line".to_owned(), field: flag.to_owned() };
        Err(given.error(remedy))
    };
    match (given(config), given(bin_dir)) {
        (None, None) => Ok(None),
        (Some(config), Some(bin_dir)) => Ok(Some(CredentialProviderPaths { config, bin_dir })),
        (Some(config), None) => {
            let remedy = format!("the folder of the plugins is missing; set it with {CREDENTIAL_BIN_FLAG}");
            alone(CREDENTIAL_CONFIG_FLAG, config, remedy)
        }
        (None, Some(bin_dir)) => {
            let remedy =
                format!("the configuration of the plugins is missing; set it with {CREDENTIAL_CONFIG_FLAG}");
            alone(CREDENTIAL_BIN_FLAG, bin_dir, remedy)
        }
    }
}

/// The configuration files among the names in a folder, in the order in which they are read.
pub fn credential_config_files(mut names: Vec<String>) -> Vec<String> {
    names.retain(|name| ENDINGS.iter().any(|ending| name.ends_with(ending)));
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_provider_flags_must_be_given_together() {
        let paths = |config, bin_dir| credential_provider_paths(config, bin_dir, "/srv");
        assert_eq!(paths(None, None), Ok(None));
        assert_eq!(paths(Some(""), Some("")), Ok(None));
        let both = CredentialProviderPaths { config: "/etc/c.yaml".into(), bin_dir: "/srv/bin".into() };
        assert_eq!(paths(Some("/etc/c.yaml"), Some("bin")), Ok(Some(both)));
        let text = paths(Some("/etc/c.yaml"), None).unwrap_err().to_string();
        assert!(text.contains("--image-credential-provider-config = \"/etc/c.yaml\""), "{text}");
        assert!(text.contains("set it with --image-credential-provider-bin-dir"), "{text}");
        let text = paths(Some(""), Some("/bin")).unwrap_err().to_string();
        assert!(text.contains("--image-credential-provider-bin-dir = \"/bin\""), "{text}");
        assert!(text.contains("set it with --image-credential-provider-config"), "{text}");
    }

    #[test]
    fn credential_provider_files_of_a_folder_are_read_in_name_order() {
        let names = ["b.yml", "a.txt", "B.json", "10.yaml", "9.yaml", "json", "a.yaml.bak", "c.YAML"];
        let files = credential_config_files(names.map(ToOwned::to_owned).to_vec());
        assert_eq!(files, ["10.yaml", "9.yaml", "B.json", "b.yml"]);
    }
}
