//! The inputs of a configuration besides the key.

use keelson_config::{AssignedConfiguration, Config};
use keelson_init_core::{
    ConfigError, ConfigFiles, ConfigurationCheckpoint, Document, Flags, Host, Inputs, Resolved, resolve,
    resolve_assigned,
};

use crate::yaml;

/// The command line, the files and the host facts at the start of init.
#[derive(Debug, Default)]
pub(crate) struct ConfigInputs {
    pub(crate) flags: Flags,
    pub(crate) kubelet: Option<Document>,
    pub(crate) drop_ins: Vec<Document>,
    pub(crate) keelson: Option<Document>,
    pub(crate) host: Host,
    /// When they were resolved, in nanoseconds since 1970.
    pub(crate) resolved_unix_nanos: i64,
}

impl ConfigInputs {
    fn core_inputs(&self) -> Inputs<'_> {
        Inputs {
            flags: &self.flags,
            kubelet: self.kubelet.as_ref(),
            drop_ins: &self.drop_ins,
            keelson: self.keelson.as_ref(),
            host: &self.host,
        }
    }

    /// The files, for error messages; those of `--config-dir` are in `folder`.
    pub(crate) fn config_files<'a>(&'a self, folder: Option<&'a str>) -> ConfigFiles<'a> {
        let (kubelet, keelson) = (self.kubelet.as_ref(), self.keelson.as_ref());
        ConfigFiles { kubelet, folder, drop_ins: &self.drop_ins, keelson }
    }

    fn with_time(&self, resolved: Resolved) -> Resolved {
        let config = Config { resolved_unix_nanos: self.resolved_unix_nanos, ..resolved.config };
        Resolved { config, ..resolved }
    }

    /// Resolves the files of the node alone.
    ///
    /// # Errors
    /// All errors in them.
    pub(crate) fn resolve_files(&self) -> Result<Resolved, Vec<ConfigError>> {
        resolve(self.core_inputs()).map(|resolved| self.with_time(resolved))
    }

    /// Resolves the files with `content` merged over them; the error has a line for each reason.
    pub(crate) fn resolve_assigned_content(
        &self,
        content: &AssignedConfiguration,
    ) -> Result<Resolved, String> {
        let name = content.name();
        if let Some(problem) = &content.problem {
            return Err(format!("{name} is not accepted: {problem}"));
        }
        if content.text.trim().is_empty() {
            return Err(format!("{name} is empty; it must begin with apiVersion and kind"));
        }
        let document =
            yaml::parse(&content.text, &name, "").map_err(|text| format!("{name} is not usable: {text}"))?;
        let lines =
            |errors: Vec<ConfigError>| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        let files = self.resolve_files().map_err(lines)?;
        let resolved = resolve_assigned(self.core_inputs(), &files.config, &document).map_err(lines)?;
        Ok(self.with_time(resolved))
    }

    /// Resolves the active configuration of `checkpoint`. A content that does not resolve any more is replaced by the one
    /// before it, and finally by the files alone, which resolved when init started.
    pub(crate) fn resolve_active(
        &self,
        mut checkpoint: ConfigurationCheckpoint,
    ) -> (ConfigurationCheckpoint, Resolved) {
        while let Some(content) = checkpoint.active() {
            match self.resolve_assigned_content(content) {
                Ok(resolved) => return (checkpoint, resolved),
                Err(why) => checkpoint = checkpoint.no_longer_resolves(&why),
            }
        }
        (checkpoint, self.resolve_files().expect("init resolved the same files when it started"))
    }
}
