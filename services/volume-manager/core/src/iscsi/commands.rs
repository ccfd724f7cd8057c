//! Calls of iscsiadm (volumes.md §10.4): their arguments, and what their exit codes mean.
//!
//! All calls about one target are made under a lock of that target.

use std::collections::BTreeMap;
use std::fmt;

use crate::iscsi::disk::Disk;
use crate::iscsi::record::Record;

/// The program.
pub const PROGRAM: &str = "iscsiadm";

/// ISCSI_ERR_SESS_NOT_FOUND.
const SESSION_NOT_FOUND: i32 = 2;
/// ISCSI_ERR_TRANS_NOT_FOUND: the kernel has no driver for the transport of the interface.
const TRANSPORT_NOT_FOUND: i32 = 12;
/// ISCSI_ERR_SESS_EXISTS.
const SESSION_EXISTS: i32 = 15;
/// ISCSI_ERR_NO_OBJS_FOUND.
const NO_OBJECTS_FOUND: i32 = 21;

/// What to do on the node about an exit code of iscsiadm, if that is known.
pub const fn advice(exit: Option<i32>) -> Option<&'static str> {
    match exit {
        Some(TRANSPORT_NOT_FOUND) => {
            Some("the kernel has no driver for iSCSI; load it on the node with `modprobe iscsi_tcp`")
        }
        _ => None,
    }
}

/// The keys of a Secret for discovery.
const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
/// The keys of a Secret for sessions.
const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// Why the output of a call cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutputError {
    /// The interface has no transport.
    #[error(
        "iscsiadm shows no iface.transport_name for the interface {interface}; correct the interface on the node"
    )]
    NoTransport {
        /// The interface.
        interface: String,
    },
    /// A setting is not of the form `name = value`.
    #[error(
        "iscsiadm shows the setting {line:?} of the interface {interface}, which is not of the form name = value"
    )]
    InvalidSetting {
        /// The interface.
        interface: String,
        /// The line.
        line: String,
    },
}

/// How an interface reaches a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Over the node's own network stack.
    Tcp,
    /// By a host bus adapter.
    Adapter,
}

/// What follows a failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnError {
    /// The sequence ends with an error.
    Fail,
    /// The next call, as if it had succeeded.
    Continue,
    /// iscsiadm is called with these arguments, whose result does not matter; the sequence ends with an error.
    Undo(Vec<String>),
}

/// What follows a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next<'c> {
    /// The next call of the sequence.
    Proceed,
    /// The next call; the error is worth a warning.
    Warn,
    /// The sequence ends with an error.
    Fail,
    /// The sequence ends with an error after iscsiadm was called with these arguments.
    Undo(&'c [String]),
}

/// One call of iscsiadm. Its `Debug` and `Display` forms do not show secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    arguments: Vec<String>,
    ends_with_secret: bool,
    accepted: &'static [i32],
    on_error: OnError,
}

impl Call {
    fn new(arguments: Vec<String>, on_error: OnError) -> Self {
        Self { arguments, ends_with_secret: false, accepted: &[], on_error }
    }

    fn accepting(mut self, codes: &'static [i32]) -> Self {
        self.accepted = codes;
        self
    }

    fn secret(mut self) -> Self {
        self.ends_with_secret = true;
        self
    }

    /// The arguments. The last one may be a secret.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Whether the last argument is a secret, so that the output is not shown either.
    pub fn ends_with_secret(&self) -> bool {
        self.ends_with_secret
    }

    /// What follows when the call ends with `exit`; `None` after a signal, or if the program cannot be run.
    pub fn next(&self, exit: Option<i32>) -> Next<'_> {
        if exit.is_some_and(|code| code == 0 || self.accepted.contains(&code)) {
            return Next::Proceed;
        }
        match &self.on_error {
            OnError::Fail => Next::Fail,
            OnError::Continue => Next::Warn,
            OnError::Undo(arguments) => Next::Undo(arguments),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.arguments.len() - usize::from(self.ends_with_secret);
        write!(f, "{PROGRAM} {}", self.arguments[..shown].join(" "))?;
        if self.ends_with_secret { f.write_str(" <masked>") } else { Ok(()) }
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({self}, accepts {:?}, then {:?})", self.accepted, self.on_error)
    }
}

/// The CHAP credentials of a volume.
#[derive(Clone, Copy)]
pub struct Chap<'s> {
    /// Discovery authenticates.
    pub discovery: bool,
    /// Sessions authenticate.
    pub session: bool,
    /// The data of the Secret. Unknown keys and empty values are ignored.
    pub secret: &'s BTreeMap<String, String>,
}

fn args(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn interface_args(interface: &str, rest: &[&str]) -> Vec<String> {
    args(&[&["-m", "iface", "-I", interface][..], rest].concat())
}

fn discovery_args(portal: &str, interface: &str, rest: &[&str]) -> Vec<String> {
    args(&[&["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", interface][..], rest].concat())
}

fn node_args(portal: &str, iqn: &str, interface: &str, rest: &[&str]) -> Vec<String> {
    args(&[&["-m", "node", "-p", portal, "-T", iqn, "-I", interface][..], rest].concat())
}

/// Shows the settings of an interface, for [`transport`] and [`make_interface`].
pub fn show_interface(interface: &str) -> Call {
    Call::new(interface_args(interface, &["-o", "show"]), OnError::Fail)
}

/// The transport in the output of [`show_interface`].
pub fn transport(interface: &str, output: &str) -> Result<Transport, OutputError> {
    output
        .lines()
        .find_map(|line| line.strip_prefix("iface.transport_name = "))
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .map(|name| if matches!(name, "tcp" | "<empty>") { Transport::Tcp } else { Transport::Adapter })
        .ok_or_else(|| OutputError::NoTransport { interface: interface.to_owned() })
}

/// The calls that make the disk's own interface: a copy of its base interface, whose output of [`show_interface`] is
/// `shown`, with the initiator name. None if the disk has no initiator name.
pub fn make_interface(disk: &Disk, shown: &str) -> Result<Vec<Call>, OutputError> {
    let Some(initiator) = disk.initiator() else {
        return Ok(Vec::new());
    };
    let mut settings = settings(disk.base_interface(), shown)?;
    settings.insert("iface.initiatorname", initiator);
    let own = disk.interface();
    // The interface may exist from an earlier attempt.
    let new = Call::new(interface_args(&own, &["-o", "new"]), OnError::Fail).accepting(&[SESSION_EXISTS]);
    let updates = settings.into_iter().map(|(name, value)| {
        let undo = OnError::Undo(interface_args(&own, &["-o", "delete"]));
        Call::new(interface_args(&own, &["-o", "update", "-n", name, "-v", value]), undo)
    });
    Ok([new].into_iter().chain(updates).collect())
}

/// The settings that have a value, without the name of the interface.
fn settings<'o>(interface: &str, shown: &'o str) -> Result<BTreeMap<&'o str, &'o str>, OutputError> {
    let mut settings = BTreeMap::new();
    for line in shown.lines().filter(|line| line.starts_with("iface.") && !line.contains("<empty>")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["iface.iscsi_ifacename", "=", _] => {}
            [name, "=", value] => {
                settings.insert(*name, *value);
            }
            _ => {
                let (interface, line) = (interface.to_owned(), line.to_owned());
                return Err(OutputError::InvalidSetting { interface, line });
            }
        }
    }
    Ok(settings)
}

/// The calls that log in to the target of `disk` at `portal`.
pub fn log_in(disk: &Disk, portal: &str, chap: Chap<'_>) -> Vec<Call> {
    let (iqn, interface) = (disk.iqn(), disk.interface());
    let discovery = |rest: &[&str]| discovery_args(portal, &interface, rest);
    let node = |rest: &[&str]| node_args(portal, iqn, &interface, rest);
    // The record may exist already.
    let mut calls = vec![Call::new(discovery(&["-o", "new"]), OnError::Continue)];
    if chap.discovery {
        let method = "discovery.sendtargets.auth.authmethod";
        calls.push(Call::new(discovery(&["-o", "update", "-n", method, "-v", "CHAP"]), OnError::Fail));
        calls.extend(credentials(&DISCOVERY_KEYS, chap.secret, &discovery));
    }
    calls.push(Call::new(discovery(&["--discover"]), OnError::Undo(discovery(&["-o", "delete"]))));
    // Old versions of iscsiadm do not know the setting.
    let scan = ["-o", "update", "-n", "node.session.scan", "-v", "manual"];
    calls.push(Call::new(node(&scan), OnError::Continue));
    if chap.session {
        let method = "node.session.auth.authmethod";
        calls.push(Call::new(node(&["-o", "update", "-n", method, "-v", "CHAP"]), OnError::Fail));
        calls.extend(credentials(&SESSION_KEYS, chap.secret, &node));
    }
    calls.push(Call::new(node(&["--login"]), OnError::Undo(node(&["-o", "delete"]))));
    // Otherwise the next boot would hang on a target that is gone. The setting is that of all interfaces.
    let startup =
        ["-m", "node", "-p", portal, "-T", iqn, "-o", "update", "-n", "node.startup", "-v", "manual"];
    calls.push(Call::new(args(&startup), OnError::Continue));
    calls
}

fn credentials(
    keys: &[&str],
    secret: &BTreeMap<String, String>,
    arguments: &dyn Fn(&[&str]) -> Vec<String>,
) -> Vec<Call> {
    keys.iter()
        .filter_map(|key| secret.get(*key).filter(|value| !value.is_empty()).map(|value| (key, value)))
        .map(|(key, value)| {
            Call::new(arguments(&["-o", "update", "-n", key, "-v", value]), OnError::Fail).secret()
        })
        .collect()
}

/// The calls that log out of `portals`, remove their node records, and remove the interface that was made for the
/// volume.
pub fn log_out(record: &Record, portals: &[String]) -> Vec<Call> {
    let gone = &[SESSION_NOT_FOUND, NO_OBJECTS_FOUND];
    let node = |portal: &str, rest: &[&str]| {
        let arguments = node_args(portal, &record.iqn, &record.interface, rest);
        Call::new(arguments, OnError::Fail).accepting(gone)
    };
    let mut calls: Vec<Call> = portals
        .iter()
        .flat_map(|portal| [node(portal, &["--logout"]), node(portal, &["-o", "delete"])])
        .collect();
    if record.owns_interface() {
        let delete = interface_args(&record.interface, &["-o", "delete"]);
        calls.push(Call::new(delete, OnError::Fail).accepting(gone));
    }
    calls
}

/// Removes the interface that [`make_interface`] has made, after no portal gave a path. None if the disk uses an
/// interface of the node.
///
/// Parity: the kubelet tries to delete the interface in every case.
pub fn drop_interface(disk: &Disk) -> Option<Call> {
    disk.initiator()?;
    Some(Call::new(interface_args(&disk.interface(), &["-o", "delete"]), OnError::Continue))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::IscsiSource;

    const IQN: &str = "iqn.2001-04.com.example:a";
    const PORTAL: &str = "10.0.0.1:3260";

    fn disk(initiator: &str) -> Disk {
        let source = IscsiSource {
            target_portal: "10.0.0.1".into(),
            portals: vec!["10.0.0.2".into()],
            iqn: IQN.into(),
            lun: 3,
            initiator_name: initiator.into(),
            ..IscsiSource::default()
        };
        Disk::new("pv", &source).unwrap()
    }

    fn shown(calls: &[Call]) -> Vec<String> {
        calls.iter().map(ToString::to_string).collect()
    }

    fn secret() -> BTreeMap<String, String> {
        let keys = DISCOVERY_KEYS.iter().chain(&SESSION_KEYS);
        let mut secret: BTreeMap<String, String> =
            keys.map(|key| ((*key).to_owned(), format!("hunter2-{key}"))).collect();
        secret.insert("node.session.auth.username_in".into(), String::new());
        secret.insert("other".into(), "hunter2".into());
        secret
    }

    #[test]
    fn a_login_discovers_logs_in_and_leaves_the_next_boot_alone() {
        let secret = BTreeMap::new();
        let chap = Chap { discovery: false, session: false, secret: &secret };
        let discovery = "iscsiadm -m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default";
        let node = format!("iscsiadm -m node -p {PORTAL} -T {IQN}");
        assert_eq!(
            shown(&log_in(&disk(""), PORTAL, chap)),
            [
                format!("{discovery} -o new"),
                format!("{discovery} --discover"),
                format!("{node} -I default -o update -n node.session.scan -v manual"),
                format!("{node} -I default --login"),
                format!("{node} -o update -n node.startup -v manual"),
            ]
        );
    }

    #[test]
    fn chap_credentials_are_set_before_discovery_and_before_the_login() {
        let secret = secret();
        let chap = Chap { discovery: true, session: true, secret: &secret };
        let calls = log_in(&disk("me"), PORTAL, chap);
        let words: Vec<&str> = calls
            .iter()
            .map(|call| {
                let list = call.arguments();
                list.iter().position(|word| word == "-n").map_or_else(
                    || list.iter().rfind(|word| word.starts_with("--")).map_or("new", String::as_str),
                    |at| list[at + 1].as_str(),
                )
            })
            .collect();
        assert_eq!(
            words,
            [
                "new",
                "discovery.sendtargets.auth.authmethod",
                "discovery.sendtargets.auth.username",
                "discovery.sendtargets.auth.password",
                "discovery.sendtargets.auth.username_in",
                "discovery.sendtargets.auth.password_in",
                "--discover",
                "node.session.scan",
                "node.session.auth.authmethod",
                "node.session.auth.username",
                "node.session.auth.password",
                "node.session.auth.password_in",
                "--login",
                "node.startup",
            ]
        );
        let password =
            calls.iter().find(|call| call.arguments().contains(&DISCOVERY_KEYS[1].to_owned())).unwrap();
        assert_eq!(password.arguments().last().unwrap(), &format!("hunter2-{}", DISCOVERY_KEYS[1]));
        assert_eq!(calls.iter().filter(|call| call.ends_with_secret()).count(), 7);
    }

    #[test]
    fn no_form_of_a_call_shows_a_secret() {
        let secret = secret();
        let calls = log_in(&disk(""), PORTAL, Chap { discovery: true, session: true, secret: &secret });
        let text = format!("{calls:?} {:?}", shown(&calls));
        assert!(!text.contains("hunter2"), "{text}");
        assert!(text.contains("-n node.session.auth.password -v <masked>"), "{text}");
    }

    #[test]
    fn only_a_missing_driver_of_the_kernel_has_the_advice_to_load_its_module() {
        assert!(advice(Some(TRANSPORT_NOT_FOUND)).unwrap().contains("`modprobe iscsi_tcp`"));
        for exit in [None, Some(0), Some(1), Some(SESSION_EXISTS), Some(NO_OBJECTS_FOUND)] {
            assert_eq!(advice(exit), None);
        }
    }

    #[test]
    fn exit_codes_decide_whether_a_login_proceeds_warns_or_is_undone() {
        let secret = secret();
        let calls = log_in(&disk(""), PORTAL, Chap { discovery: true, session: true, secret: &secret });
        for call in &calls {
            assert_eq!(call.next(Some(0)), Next::Proceed, "{call}");
            let text = call.to_string();
            for exit in [Some(1), Some(SESSION_NOT_FOUND), Some(SESSION_EXISTS), Some(NO_OBJECTS_FOUND), None]
            {
                let next = call.next(exit);
                if text.ends_with("-o new") || text.ends_with("manual") {
                    assert_eq!(next, Next::Warn, "{text}");
                } else if text.ends_with("--discover") {
                    let undo = discovery_args(PORTAL, "default", &["-o", "delete"]);
                    assert_eq!(next, Next::Undo(&undo), "{text}");
                } else if text.ends_with("--login") {
                    let undo = node_args(PORTAL, IQN, "default", &["-o", "delete"]);
                    assert_eq!(next, Next::Undo(&undo), "{text}");
                } else {
                    assert_eq!(next, Next::Fail, "{text}");
                }
            }
        }
    }

    const SHOWN: &str = "# BEGIN RECORD 2.1.8\niface.iscsi_ifacename = default\niface.net_ifacename = <empty>\n\
        iface.transport_name = tcp\niface.initiatorname = <empty>\niface.mtu = 0\n# END RECORD\n";

    #[test]
    fn an_own_interface_copies_the_settings_of_its_base_in_order() {
        let calls = make_interface(&disk("iqn.me"), SHOWN).unwrap();
        let own = "iscsiadm -m iface -I 10.0.0.1:3260:pv -o";
        assert_eq!(
            shown(&calls),
            [
                format!("{own} new"),
                format!("{own} update -n iface.initiatorname -v iqn.me"),
                format!("{own} update -n iface.mtu -v 0"),
                format!("{own} update -n iface.transport_name -v tcp"),
            ]
        );
        assert_eq!(calls[0].next(Some(15)), Next::Proceed);
        assert_eq!(calls[0].next(Some(6)), Next::Fail);
        let undo = interface_args("10.0.0.1:3260:pv", &["-o", "delete"]);
        assert!(calls[1..].iter().all(|call| call.next(Some(15)) == Next::Undo(&undo)));
        assert_eq!(make_interface(&disk(""), SHOWN), Ok(Vec::new()));
        assert_eq!(show_interface("eth0").to_string(), "iscsiadm -m iface -I eth0 -o show");
    }

    #[test]
    fn a_setting_of_another_form_is_refused() {
        for line in ["iface.mtu", "iface.mtu = ", "iface.mtu 0", "iface.mtu : 0", "iface.mtu = 0 1"] {
            let error = make_interface(&disk("iqn.me"), line).unwrap_err();
            assert!(matches!(&error, OutputError::InvalidSetting { .. }), "{line}: {error}");
        }
    }

    #[test]
    fn the_transport_is_tcp_unless_the_interface_names_another() {
        assert_eq!(transport("i", SHOWN), Ok(Transport::Tcp));
        assert_eq!(transport("i", "iface.transport_name = <empty>\n"), Ok(Transport::Tcp));
        assert_eq!(transport("i", "x\niface.transport_name = be2iscsi"), Ok(Transport::Adapter));
        for output in ["", "iface.transport_name = ", "iface.transport = tcp"] {
            let text = transport("i", output).unwrap_err().to_string();
            assert!(text.contains("no iface.transport_name for the interface i"), "{text}");
        }
    }

    #[test]
    fn a_logout_forgets_every_portal_and_only_an_own_interface() {
        let portals = ["10.0.0.1:3260".to_owned(), "10.0.0.2:3260".to_owned()];
        let node =
            |portal: &str, interface: &str| format!("iscsiadm -m node -p {portal} -T {IQN} -I {interface}");
        let calls = log_out(&Record::of(&disk("")), &portals);
        assert_eq!(
            shown(&calls),
            [
                format!("{} --logout", node(&portals[0], "default")),
                format!("{} -o delete", node(&portals[0], "default")),
                format!("{} --logout", node(&portals[1], "default")),
                format!("{} -o delete", node(&portals[1], "default")),
            ]
        );
        let own = log_out(&Record::of(&disk("me")), &portals[..1]);
        assert_eq!(own.len(), 3);
        assert_eq!(own[2].to_string(), "iscsiadm -m iface -I 10.0.0.1:3260:pv -o delete");
        for call in calls.iter().chain(&own) {
            for exit in [0, SESSION_NOT_FOUND, NO_OBJECTS_FOUND] {
                assert_eq!(call.next(Some(exit)), Next::Proceed, "{call}");
            }
            for exit in [Some(1), Some(SESSION_EXISTS), None] {
                assert_eq!(call.next(exit), Next::Fail, "{call}");
            }
        }
    }

    #[test]
    fn an_interface_of_the_node_is_never_dropped() {
        assert_eq!(drop_interface(&disk("")), None);
        let call = drop_interface(&disk("me")).unwrap();
        assert_eq!(call.to_string(), "iscsiadm -m iface -I 10.0.0.1:3260:pv -o delete");
        assert_eq!(call.next(Some(1)), Next::Warn);
    }
}
