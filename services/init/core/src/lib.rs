//! The pure decisions of init: no clock, no I/O, no runtime.
//!
//! - [`resolve`](resolve()) merges flags, the KubeletConfiguration and the keelson file into the resolved
//!   [`keelson_config::Config`], or says everything that is wrong with them at once.
//! - [`folders()`] says which folders exist, with which owner and mode.
//! - [`privileges`] is the table of what each service may still do.
//! - [`Restarts`] says when a process that ended is started again, [`judge_exit`] whether it is at all.
//! - [`resolve_over`] lays a KubeletConfiguration of the control plane over the node's own; [`Kept`] says what becomes of it,
//!   [`judge_trial`] whether the services do well with it.
//! - [`with_live`] and [`waiting`] say what of changed files is taken while the agent runs, and what waits for whom.
//! - [`Health`] turns the answers of a running service into the state that people see.

mod api_access;
mod api_handlers;
mod api_tls;
mod backoff;
mod certificates;
mod change;
mod control_plane;
mod credential_providers;
mod document;
mod effective;
mod exec_login;
mod exit;
pub mod flags;
mod flagz;
mod folders;
mod gates;
mod health;
mod idle;
mod keelson_file;
mod kubeconfig;
mod kubelet_file;
mod labels;
mod laying;
mod leftovers;
mod manifest_url;
mod node_configuration;
mod node_ip;
mod node_status;
mod offline;
mod origins;
mod own_flags;
mod own_processes;
mod pressure;
pub mod privileges;
mod reserved;
mod resolve;
mod rules;
mod running_pods;
mod source_limits;
mod strict;
mod system_cgroups;
mod taints;
mod telemetry;
mod told;
mod trial;
mod under_key;

pub use backoff::Restarts;
pub use certificates::{Validity, goes_before, outlived, stored_name};
pub use change::{InForce, Waiting, waiting, with_live};
pub use credential_providers::{
    CREDENTIAL_BIN_FLAG, CREDENTIAL_CONFIG_FLAG, CredentialProviderPaths, credential_config_files,
    credential_provider_paths,
};
pub use document::{ConfigProblem, Document, Sourced};
pub use exec_login::{EXEC_INFO, ExecAnswerError, ExecCredential, ExecLogin, refresh_at};
pub use exit::{EX_CONFIG, EX_USAGE, Exit, Verdict, judge_exit};
pub use flagz::{configuration_line, flag_lines, shown_flags};
pub use folders::{Folder, Owner, folders};
pub use health::{ConditionReport, Health, LoopReport, Poll, Report, ServiceState};
pub use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND, endpoint_lock_name};
pub use keelson_file::{KEELSON_API_VERSION, KEELSON_KIND};
pub use kubeconfig::{
    Flat, KubeconfigProblem, client_certificates, flatten as flatten_kubeconfig,
    for_certificate as kubeconfig_for_certificate, set_client_pair, set_exec_credential,
};
pub use node_configuration::{Judgement, Kept, Step, Trial, Wellness};
pub use resolve::{Flags, Host, Inputs, Level, Note, Resolved, resolve};
pub use told::{Files, not_loaded, not_merged, told};
pub use trial::{TrialVerdict, Tried, judge_trial};
pub use under_key::{means_the_same, resolve_over};
