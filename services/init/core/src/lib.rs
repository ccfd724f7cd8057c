//! The pure decisions of init: no clock, no I/O, no runtime.
//!
//! - [`resolve`](resolve()) merges flags, the KubeletConfiguration and the keelson file into the resolved
//!   [`keelson_config::Config`], or returns all their errors at once.
//! - [`folders()`] lists the folders with their owners and modes.
//! - [`privileges`] is the table of the privileges of each service.
//! - [`RestartBackoff`] decides when a service that ended is restarted, [`judge_exit`] whether it is.
//! - [`resolve_assigned`] merges a KubeletConfiguration of the control plane over the node's own; [`ConfigurationCheckpoint`]
//!   decides what happens to it, [`judge_trial`] whether the services are healthy with it.
//! - [`apply_live`] and [`pending_changes`] decide which changes of files are applied while the agent runs, and which wait for a
//!   restart.
//! - [`Health`] turns the answers of a running service into the state that operators see.

mod assigned_config;
mod backoff;
mod certificates;
mod defaults;
mod document;
mod durations;
mod effective;
mod exec_login;
mod exit;
mod field_checks;
mod file_changes;
pub mod flags;
mod flagz;
mod folders;
mod gates;
mod groups;
mod health;
mod inputs;
mod keelson_file;
mod kubeconfig;
mod kubeconfig_context;
mod layering;
mod names;
mod node_configuration;
mod origins;
mod outcome;
mod paths;
pub mod privileges;
mod reader;
mod resolve;
mod settings;
mod startup_errors;
mod strict;
#[cfg(test)]
mod testing;
mod thresholds;
mod trial;

pub use assigned_config::{is_equivalent, resolve_assigned};
pub use backoff::RestartBackoff;
pub use certificates::{Validity, files_to_remove, replaces, stored_name};
pub use document::{ConfigError, Document, Sourced};
pub use exec_login::{EXEC_INFO, ExecAnswerError, ExecCredential, ExecLogin, refresh_at};
pub use exit::{EX_CONFIG, EX_USAGE, Exit, Verdict, judge_exit};
pub use file_changes::{ActiveConfig, PendingChanges, apply_live, pending_changes};
pub use flagz::{configuration_line, flag_lines, shown_flags};
pub use folders::{Folder, Owner, folders};
pub use gates::reference as feature_gates_page;
pub use groups::images::{
    CREDENTIAL_BIN_FLAG, CREDENTIAL_CONFIG_FLAG, CredentialProviderPaths, credential_config_files,
    credential_provider_paths,
};
pub use groups::system_bus::VARIABLE as SYSTEM_BUS_ADDRESS;
pub use health::{ConditionReport, Health, LoopReport, Poll, Report, ServiceState};
pub use inputs::{Flags, Host, Inputs};
pub use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND, endpoint_lock_name};
pub use keelson_file::{KEELSON_API_VERSION, KEELSON_KIND};
pub use kubeconfig::{
    FlatKubeconfig, client_certificates, flatten as flatten_kubeconfig,
    for_certificate as kubeconfig_for_certificate, set_client_pair, set_exec_credential,
};
pub use kubeconfig_context::KubeconfigError;
pub use node_configuration::{ConfigurationCheckpoint, KeyAction, Resolution, ServiceStates, Trial};
pub use outcome::{Level, Note};
pub use resolve::{Resolved, resolve};
pub use startup_errors::{ConfigFiles, load_error, merge_error, startup_error};
pub use trial::{ServiceInTrial, TrialVerdict, judge_trial};
