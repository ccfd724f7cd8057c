//! Where the configuration and the binaries of credential provider plugins are (node-and-api.md §1.4).

use crate::document::{ConfigProblem, Sourced};
use crate::kubelet_file::absolute;

/// The flag that names the configuration.
pub const CREDENTIAL_CONFIG_FLAG: &str = "--image-credential-provider-config";
/// The flag that names the folder of the binaries.
pub const CREDENTIAL_BIN_FLAG: &str = "--image-credential-provider-bin-dir";
/// The configuration files of a folder end so.
const ENDINGS: [&str; 3] = [".json", ".yaml", ".yml"];

/// What the two flags name, as absolute paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialProviderPaths {
    /// A file, or a folder with files.
    pub config: String,
    /// The folder of the binaries.
    pub bin_dir: String,
}

/// Takes the values of both flags; an empty one is as if it were not given.
///
/// # Errors
/// One is given without the other.
pub fn credential_provider_paths(
    config: Option<&str>,
    bin_dir: Option<&str>,
    cwd: &str,
) -> Result<Option<CredentialProviderPaths>, ConfigProblem> {
    let given = |path: Option<&str>| path.filter(|path| !path.is_empty()).map(|path| absolute(cwd, path));
    let alone = |flag: &str, value: String, way_out: String| {
        let given = Sourced { value, origin: "command line".to_owned(), field: flag.to_owned() };
        Err(given.problem(way_out))
    };
    match (given(config), given(bin_dir)) {
        (None, None) => Ok(None),
        (Some(config), Some(bin_dir)) => Ok(Some(CredentialProviderPaths { config, bin_dir })),
        (Some(config), None) => {
            let way_out = format!("the folder of the plugins is missing; name it with {CREDENTIAL_BIN_FLAG}");
            alone(CREDENTIAL_CONFIG_FLAG, config, way_out)
        }
        (None, Some(bin_dir)) => {
            let way_out = format!("their configuration is missing; name it with {CREDENTIAL_CONFIG_FLAG}");
            alone(CREDENTIAL_BIN_FLAG, bin_dir, way_out)
        }
    }
}

/// Of the names in a folder, those that are configuration files, in the order in which they are read.
pub fn credential_config_files(mut names: Vec<String>) -> Vec<String> {
    names.retain(|name| ENDINGS.iter().any(|ending| name.ends_with(ending)));
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_flags_are_given_or_none() {
        let paths = |config, bin_dir| credential_provider_paths(config, bin_dir, "/srv");
        assert_eq!(paths(None, None), Ok(None));
        assert_eq!(paths(Some(""), Some("")), Ok(None));
        let both = CredentialProviderPaths { config: "/etc/c.yaml".into(), bin_dir: "/srv/bin".into() };
        assert_eq!(paths(Some("/etc/c.yaml"), Some("bin")), Ok(Some(both)));
        let text = paths(Some("/etc/c.yaml"), None).unwrap_err().to_string();
        assert!(text.contains("--image-credential-provider-config = \"/etc/c.yaml\""), "{text}");
        assert!(text.contains("name it with --image-credential-provider-bin-dir"), "{text}");
        let text = paths(Some(""), Some("/bin")).unwrap_err().to_string();
        assert!(text.contains("--image-credential-provider-bin-dir = \"/bin\""), "{text}");
        assert!(text.contains("name it with --image-credential-provider-config"), "{text}");
    }

    #[test]
    fn files_of_a_folder_are_read_in_the_order_of_their_names() {
        let names = ["b.yml", "a.txt", "B.json", "10.yaml", "9.yaml", "json", "a.yaml.bak", "c.YAML"];
        let files = credential_config_files(names.map(ToOwned::to_owned).to_vec());
        assert_eq!(files, ["10.yaml", "9.yaml", "B.json", "b.yml"]);
    }
}
