//! The address of the machine's message bus (D-Bus Specification, "Server Addresses"), from the KeelsonConfiguration or the
//! environment.

use std::path::PathBuf;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};

/// The variable of the environment, as for every client of D-Bus.
pub const VARIABLE: &str = "DBUS_SYSTEM_BUS_ADDRESS";

const NOT_A_SOCKET: &str =
    "this must be one address of a unix socket, such as unix:path=/run/dbus/system_bus_socket";

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct SystemBus {
    address: Option<Sourced<String>>,
}

impl Settings for SystemBus {
    fn read(files: &mut Files<'_>) -> Self {
        Self { address: files.keelson.string("systemBusAddress") }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        let variable = Some(&out.host.system_bus_address).filter(|address| !address.is_empty());
        let from_environment = || {
            let (origin, field) = ("the environment".to_owned(), VARIABLE.to_owned());
            variable.map(|address| Sourced { value: address.clone(), origin, field })
        };
        let Some(address) = self.address.or_else(from_environment) else { return };
        match socket(&address.value) {
            Some(path) => {
                let path = Some(address.map(|_| path));
                out.set("resources.systemBus.socket", path, |c, v| c.resources.system_bus.socket = v);
            }
            None => out.refuse(&address, NOT_A_SOCKET),
        }
    }
}

/// The absolute path in an address `unix:path=PATH`, which may also name the `guid` of the server.
fn socket(address: &str) -> Option<PathBuf> {
    let mut path = None;
    for pair in address.strip_prefix("unix:")?.split(',') {
        match pair.split_once('=')? {
            ("path", value) if path.is_none() => path = Some(unescaped(value)?),
            ("guid", _) => {}
            _ => return None,
        }
    }
    path.filter(|path| path.starts_with('/')).map(PathBuf::from)
}

/// A value without its escapes: `%` and two hexadecimal digits. A value that separates addresses, or is not UTF-8, is none.
fn unescaped(value: &str) -> Option<String> {
    let mut parts = value.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok().filter(|_| !value.contains(';'))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::inputs::{Flags, Host};
    use crate::testing::{host, keelson, run};

    #[test]
    fn only_one_address_of_a_unix_socket_is_accepted() {
        for (address, path) in [
            ("unix:path=/run/dbus/system_bus_socket", Some("/run/dbus/system_bus_socket")),
            ("unix:path=/a%20b%2c,guid=0123", Some("/a b,")),
            ("unix:guid=0123,path=/a", Some("/a")),
            ("unix:path=a", None),
            ("unix:path=", None),
            ("unix:path=/a,path=/b", None),
            ("unix:path=/a,mode=user", None),
            ("unix:path=/a;unix:path=/b", None),
            ("unix:abstract=/a", None),
            ("unix:", None),
            ("unix:path=/a%2", None),
            ("unix:path=/a%+1", None),
            ("unix:path=/%ff", None),
            ("tcp:host=localhost,port=1", None),
            ("UNIX:path=/a", None),
            ("/run/dbus/system_bus_socket", None),
            ("", None),
        ] {
            assert_eq!(socket(address).as_deref(), path.map(Path::new), "{address}");
        }
    }

    #[test]
    fn the_system_bus_is_that_of_the_file_or_else_of_the_environment() {
        let of = |file: Option<&str>, variable: &str| {
            let host = Host { system_bus_address: variable.to_owned(), ..host() };
            let file = file.map(|address| keelson(json!({"systemBusAddress": address})));
            let config = run(&Flags::default(), None, file.as_ref(), &host)?.config;
            let origin = config.provenance.get("resources.systemBus.socket").cloned().unwrap_or_default();
            Ok::<_, Vec<String>>((config.resources.system_bus.socket, origin))
        };
        let default = "/run/dbus/system_bus_socket";
        assert_eq!(of(None, "").unwrap(), (default.into(), String::new()));
        assert_eq!(of(None, "unix:path=/v").unwrap(), ("/v".into(), "the environment".to_owned()));
        let (socket, origin) = of(Some("unix:path=/f"), "tcp:not=read").unwrap();
        assert_eq!(socket, Path::new("/f"));
        assert!(origin.starts_with("keelson.yaml:"), "{origin}");
        for (file, variable, named) in [
            (None, "tcp:host=h", "DBUS_SYSTEM_BUS_ADDRESS = \"tcp:host=h\" (the environment)"),
            (Some(""), "unix:path=/v", "systemBusAddress = \"\""),
        ] {
            let errors = of(file, variable).unwrap_err();
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(named) && errors[0].contains(NOT_A_SOCKET), "{errors:?}");
        }
    }
}
