//! What a configuration is made of besides the key.

use keelson_config::{AssignedConfiguration, Config};
use keelson_init_core::{
    ConfigProblem, Document, Files, Flags, Host, Inputs, Kept, Resolved, resolve, resolve_over,
};

use crate::yaml;

/// The command line, the files and the machine, as they were when init started.
#[derive(Debug, Default)]
pub(crate) struct Ingredients {
    pub(crate) flags: Flags,
    pub(crate) kubelet: Option<Document>,
    pub(crate) drop_ins: Vec<Document>,
    pub(crate) keelson: Option<Document>,
    pub(crate) host: Host,
    /// When they were resolved.
    pub(crate) resolved_unix_nanos: i64,
}

impl Ingredients {
    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            flags: &self.flags,
            kubelet: self.kubelet.as_ref(),
            drop_ins: &self.drop_ins,
            keelson: self.keelson.as_ref(),
            host: &self.host,
        }
    }

    /// The files, for what is told of them; those of `--config-dir` lie in `folder`.
    pub(crate) fn files<'a>(&'a self, folder: Option<&'a str>) -> Files<'a> {
        let (kubelet, keelson) = (self.kubelet.as_ref(), self.keelson.as_ref());
        Files { kubelet, folder, drop_ins: &self.drop_ins, keelson }
    }

    fn stamped(&self, resolved: Resolved) -> Resolved {
        let config = Config { resolved_unix_nanos: self.resolved_unix_nanos, ..resolved.config };
        Resolved { config, ..resolved }
    }

    /// What the files of the node alone resolve to.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub(crate) fn alone(&self) -> Result<Resolved, Vec<ConfigProblem>> {
        resolve(self.inputs()).map(|resolved| self.stamped(resolved))
    }

    /// What they resolve to with `content` over them; an error has a line for each reason.
    pub(crate) fn with(&self, content: &AssignedConfiguration) -> Result<Resolved, String> {
        let name = content.name();
        if let Some(problem) = &content.problem {
            return Err(format!("{name} is not taken: {problem}"));
        }
        if content.text.trim().is_empty() {
            return Err(format!("{name} is empty; it must begin with apiVersion and kind"));
        }
        let document =
            yaml::parse(&content.text, &name, "").map_err(|text| format!("{name} is not usable: {text}"))?;
        let lines = |problems: Vec<ConfigProblem>| {
            problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        let alone = self.alone().map_err(lines)?;
        let resolved = resolve_over(self.inputs(), &alone.config, &document).map_err(lines)?;
        Ok(self.stamped(resolved))
    }

    /// What is in force by `kept`. A content that does not resolve any more gives way to the one before it, and to the
    /// files alone at the end, which did resolve when init started.
    pub(crate) fn in_force(&self, mut kept: Kept) -> (Kept, Resolved) {
        while let Some(content) = kept.active() {
            match self.with(content) {
                Ok(resolved) => return (kept, resolved),
                Err(why) => kept = kept.unfit(&why),
            }
        }
        (kept, self.alone().expect("init has resolved the same files when it started"))
    }
}
