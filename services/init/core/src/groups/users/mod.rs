//! The users that the services run as, and the group of the operators.

use keelson_config::ServiceName;

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::settings::{Files, Settings};

/// The first user ID for services without a system user.
const UID_BASE: u32 = 64_200;
/// The largest user ID: 2^32 - 1 means "no user" (chown(2)).
const MAX_ID: u32 = u32::MAX - 1;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Users {
    uid_base: Option<Sourced<u32>>,
    operator_gid: Option<Sourced<u32>>,
}

impl Settings for Users {
    fn read(files: &mut Files<'_>) -> Self {
        Self {
            uid_base: files.keelson.u32("uidBase", 1..=MAX_ID - 16),
            operator_gid: files.keelson.u32("operatorGid", 0..=MAX_ID),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        if out.host.uid != 0 {
            out.config.users.operator_gid = out.host.gid;
            out.note(
                Level::Error,
                format!(
                    "the kubelet needs to run as uid 0, it is being run as {}: all services run as this user and without \
                     additional privileges",
                    out.host.uid
                ),
            );
            return;
        }
        let base = self.uid_base.as_ref().map_or(UID_BASE, |base| base.value);
        for (index, service) in (0u32..).zip(ServiceName::ALL) {
            if service.needs_root() {
                continue;
            }
            let system = out.host.service_users.get(&service).copied();
            let uid = system.unwrap_or(base + index);
            let origin = match (system, &self.uid_base) {
                (Some(_), _) => format!("user keelson-{service}"),
                (None, Some(base)) => base.origin.clone(),
                (None, None) => String::new(),
            };
            let uid = Sourced { value: uid, origin, field: String::new() };
            out.set(&format!("users.uids.{service}"), Some(uid), |c, v| {
                c.users.uids.insert(service.to_string(), v);
            });
        }
        let group = self.operator_gid.unwrap_or_else(|| match out.host.operator_group {
            Some(gid) => Sourced { value: gid, origin: "group keelson".into(), field: String::new() },
            None => {
                let origin = self.uid_base.as_ref().map_or_else(String::new, |base| base.origin.clone());
                Sourced { value: base, origin, field: String::new() }
            }
        });
        out.set("users.operatorGid", Some(group), |c, v| c.users.operator_gid = v);
    }
}

#[cfg(test)]
mod tests;
