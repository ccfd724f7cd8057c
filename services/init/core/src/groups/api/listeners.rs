//! The addresses and ports of the three listeners of the kubelet API.

use std::net::IpAddr;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct Listeners {
    enable_server: Option<Sourced<bool>>,
    address: Option<Sourced<String>>,
    port: Option<Sourced<u16>>,
    read_only_port: Option<Sourced<u16>>,
    healthz_address: Option<Sourced<String>>,
    healthz_port: Option<Sourced<u16>>,
}

impl Listeners {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            enable_server: reader.boolean("enableServer"),
            address: reader.text_field("address"),
            // Zero is refused in a flag: `enableServer` turns the server off.
            port: reader.port_field("port"),
            read_only_port: reader.port_field("readOnlyPort"),
            healthz_address: reader.text_field("healthzBindAddress"),
            healthz_port: reader.port_field("healthzPort"),
        }
    }

    /// Applies the fields to the configuration; without TLS, the API may listen on loopback only.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let with_tls = out.config.api.tls.is_some();
        if let Some(address) = self.address.clone() {
            match address.value.parse::<IpAddr>() {
                Ok(ip) if ip.is_loopback() || with_tls => {}
                Ok(_) => out.refuse(
                    &address,
                    "without TLS clients cannot be authenticated, so the API may listen on loopback only; set client CAs \
                     (authentication.x509.clientCAFile), a certificate (tlsCertFile, tlsPrivateKeyFile) or an API server \
                     (--kubeconfig), or write 127.0.0.1 or ::1",
                ),
                Err(_) => out.refuse(&address, "this is not a valid IP address"),
            }
        }
        if let Some(address) = self.healthz_address.clone()
            && address.value.parse::<IpAddr>().is_err()
        {
            out.refuse(&address, "this is not a valid IP address");
        }
        out.set_field(self.address, |c, v| c.api.address = v);
        out.set_field(self.port, |c, v| c.api.port = v);
        if let Some(off) = self.enable_server.filter(|enabled| !enabled.value) {
            out.set_field(Some(off), |c, _| c.api.port = 0);
        }
        let read_only = self.read_only_port;
        if let Some(port) =
            read_only.as_ref().filter(|port| port.value != 0 && port.value == out.config.api.port)
        {
            out.refuse(port, "this is the port of the kubelet API; the read-only port needs another one");
        }
        out.set_field(read_only, |c, v| c.api.read_only_port = v);
        out.set_field(self.healthz_address, |c, v| c.api.healthz_address = v);
        let healthz = self.healthz_port;
        if let Some(port) =
            healthz.as_ref().filter(|port| port.value != 0 && out.config.api.ports().contains(&port.value))
        {
            out.refuse(
                port,
                "the kubelet API already listens on this port; the health port needs another one",
            );
        }
        out.set_field(healthz, |c, v| c.api.healthz_port = v);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::with_kubelet;

    #[test]
    fn enable_server_false_sets_port_zero() {
        assert_eq!(with_kubelet(json!({"enableServer": false, "port": 10250})).api.port, 0);
        assert_eq!(with_kubelet(json!({"enableServer": true})).api.port, 10250);
    }
}
