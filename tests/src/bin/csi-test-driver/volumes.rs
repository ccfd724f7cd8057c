//! Volumes: folders that are bind-mounted, and loop devices.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, OpenOptions};
use std::hash::{Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use keelson_proto::csi::v1 as pb;
use keelson_tests::csi_driver::{loop_devices, mount_points};
use rustix::mount::{MountFlags, UnmountFlags};
use tonic::Status;

use crate::arguments::Arguments;

/// The size of a new block volume in bytes.
const DISK_BYTES: u64 = 16 << 20;

fn invalid(text: &str) -> Status {
    Status::invalid_argument(text)
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> Status {
    Status::internal(format!("cannot {what}: {error}"))
}

/// Whether it is a block volume.
fn is_block(capability: Option<&pb::VolumeCapability>) -> Result<bool, Status> {
    use pb::volume_capability::AccessType;
    let capability = capability.ok_or_else(|| invalid("volume_capability is missing"))?;
    if capability.access_mode.as_ref().is_none_or(|mode| mode.mode == 0) {
        return Err(invalid("access_mode is missing"));
    }
    match capability.access_type {
        Some(AccessType::Block(_)) => Ok(true),
        Some(AccessType::Mount(_)) => Ok(false),
        None => Err(invalid("access_type is missing")),
    }
}

fn check(fields: &[(&str, &str)]) -> Result<(), Status> {
    match fields.iter().find(|(_, value)| value.is_empty()) {
        Some((name, _)) => Err(invalid(&format!("{name} is empty"))),
        None => Ok(()),
    }
}

impl Arguments {
    /// The folder of a volume's files.
    fn volume(&self, id: &str) -> Result<PathBuf, Status> {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        let folder = self.state.join("volumes").join(format!("{:016x}", hasher.finish()));
        fs::create_dir_all(&folder).map_err(|error| failed("create the volume", &error))?;
        fs::write(folder.join("id"), id).map_err(|error| failed("create the volume", &error))?;
        Ok(folder)
    }

    /// The folder that is mounted.
    fn data(&self, id: &str) -> Result<PathBuf, Status> {
        let data = self.volume(id)?.join("data");
        fs::create_dir_all(&data).map_err(|error| failed("create the volume", &error))?;
        Ok(data)
    }

    /// The loop device of a block volume.
    fn device(&self, id: &str) -> Result<PathBuf, Status> {
        let disk = self.volume(id)?.join("disk.img");
        if !disk.exists() {
            let file = fs::File::create(&disk).map_err(|error| failed("create the disk", &error))?;
            file.set_len(DISK_BYTES).map_err(|error| failed("create the disk", &error))?;
        }
        if let Some(device) = loop_devices(&disk).pop() {
            return Ok(device);
        }
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output();
        let output = output.map_err(|error| failed("run losetup", &error))?;
        if !output.status.success() {
            return Err(failed("attach a loop device", &String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().into())
    }

    fn detach(&self, id: &str) -> Result<(), Status> {
        for device in loop_devices(&self.volume(id)?.join("disk.img")) {
            let status = Command::new("losetup").arg("--detach").arg(&device).status();
            status.map_err(|error| failed("detach a loop device", &error))?;
        }
        Ok(())
    }

    fn bind(&self, source: &Path, target: &Path, read_only: bool) -> Result<(), Status> {
        let file = self.state.join("mounts");
        let opened = OpenOptions::new().create(true).append(true).open(file);
        let mut recorded = opened.map_err(|error| failed("record the mount", &error))?;
        let line = format!("{}\n", target.display());
        recorded.write_all(line.as_bytes()).map_err(|error| failed("record the mount", &error))?;
        rustix::mount::mount_bind(source, target).map_err(|error| failed("bind-mount", &error))?;
        if read_only {
            let flags = MountFlags::BIND | MountFlags::RDONLY;
            rustix::mount::mount_remount(target, flags, c"").map_err(|error| failed("remount", &error))?;
        }
        Ok(())
    }

    pub(super) fn stage(
        &self,
        request: &pb::NodeStageVolumeRequest,
    ) -> Result<pb::NodeStageVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("staging_target_path", &request.staging_target_path)])?;
        if !self.stages {
            return Err(Status::unimplemented("the driver does not stage volumes"));
        }
        let staging = Path::new(&request.staging_target_path);
        if is_block(request.volume_capability.as_ref())? {
            self.device(&request.volume_id)?;
        } else if !is_mounted(staging)? {
            self.bind(&self.data(&request.volume_id)?, staging, false)?;
        }
        fs::write(self.volume(&request.volume_id)?.join("staged"), &request.staging_target_path)
            .map_err(|error| failed("record the stage", &error))?;
        Ok(pb::NodeStageVolumeResponse {})
    }

    pub(super) fn unstage(
        &self,
        request: &pb::NodeUnstageVolumeRequest,
    ) -> Result<pb::NodeUnstageVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("staging_target_path", &request.staging_target_path)])?;
        unmount(Path::new(&request.staging_target_path))?;
        self.detach(&request.volume_id)?;
        let _ = fs::remove_file(self.volume(&request.volume_id)?.join("staged"));
        Ok(pb::NodeUnstageVolumeResponse {})
    }

    pub(super) fn publish(
        &self,
        request: &pb::NodePublishVolumeRequest,
    ) -> Result<pb::NodePublishVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let block = is_block(request.volume_capability.as_ref())?;
        let target = Path::new(&request.target_path);
        if !target.parent().is_some_and(Path::is_dir) {
            return Err(invalid("the folder of target_path does not exist"));
        }
        let is_inline =
            request.volume_context.get("csi.storage.k8s.io/ephemeral").is_some_and(|text| text == "true");
        if self.stages && !is_inline {
            check(&[("staging_target_path", &request.staging_target_path)])?;
            if !self.volume(&request.volume_id)?.join("staged").exists() {
                return Err(Status::failed_precondition("the volume is not staged"));
            }
        } else if !request.staging_target_path.is_empty() {
            return Err(invalid("staging_target_path of a volume that is not staged"));
        }
        if is_mounted(target)? {
            return Ok(pb::NodePublishVolumeResponse {});
        }
        if block {
            let device = self.device(&request.volume_id)?;
            fs::write(target, b"").map_err(|error| failed("create target_path", &error))?;
            self.bind(&device, target, false)?;
        } else {
            fs::create_dir_all(target).map_err(|error| failed("create target_path", &error))?;
            self.bind(&self.data(&request.volume_id)?, target, request.readonly)?;
        }
        Ok(pb::NodePublishVolumeResponse {})
    }

    pub(super) fn unpublish(
        &self,
        request: &pb::NodeUnpublishVolumeRequest,
    ) -> Result<pb::NodeUnpublishVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let target = Path::new(&request.target_path);
        unmount(target)?;
        let removed = fs::remove_dir(target).or_else(|_| fs::remove_file(target));
        if let Err(error) = removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(failed("remove target_path", &error));
        }
        if !self.stages {
            self.detach(&request.volume_id)?;
        }
        Ok(pb::NodeUnpublishVolumeResponse {})
    }

    pub(super) fn expand(
        &self,
        request: &pb::NodeExpandVolumeRequest,
    ) -> Result<pb::NodeExpandVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
        if !is_mounted(Path::new(&request.volume_path))? {
            return Err(Status::not_found("volume_path is not published"));
        }
        let bytes = request.capacity_range.as_ref().map_or(0, |range| range.required_bytes);
        let folder = self.volume(&request.volume_id)?;
        fs::write(folder.join("size"), bytes.to_string())
            .map_err(|error| failed("record the size", &error))?;
        let disk = folder.join("disk.img");
        if disk.exists() {
            let file = OpenOptions::new()
                .write(true)
                .open(&disk)
                .map_err(|error| failed("open the disk", &error))?;
            file.set_len(u64::try_from(bytes).unwrap_or(0))
                .map_err(|error| failed("grow the disk", &error))?;
            for device in loop_devices(&disk) {
                let status = Command::new("losetup").arg("--set-capacity").arg(&device).status();
                status.map_err(|error| failed("grow the loop device", &error))?;
            }
        }
        Ok(pb::NodeExpandVolumeResponse { capacity_bytes: bytes })
    }
}

/// What is used of a volume.
pub(super) fn usage(
    request: &pb::NodeGetVolumeStatsRequest,
) -> Result<pb::NodeGetVolumeStatsResponse, Status> {
    use pb::volume_usage::Unit;
    check(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
    let path = Path::new(&request.volume_path);
    let facts = fs::metadata(path).map_err(|_| Status::not_found("volume_path does not exist"))?;
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let entry = |unit: Unit, total: u64, available: u64| pb::VolumeUsage {
        available: number(available),
        total: number(total),
        used: number(total.saturating_sub(available)),
        unit: unit as i32,
    };
    let usage = if facts.is_dir() {
        let stat = rustix::fs::statvfs(path).map_err(|error| failed("measure the volume", &error))?;
        vec![
            entry(Unit::Bytes, stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize),
            entry(Unit::Inodes, stat.f_files, stat.f_ffree),
        ]
    } else {
        vec![entry(Unit::Bytes, DISK_BYTES, 0)]
    };
    let volume_condition = Some(pb::VolumeCondition { abnormal: false, message: "all is well".to_owned() });
    Ok(pb::NodeGetVolumeStatsResponse { usage, volume_condition })
}

fn is_mounted(path: &Path) -> Result<bool, Status> {
    let points = mount_points().map_err(|error| failed("read mountinfo", &error))?;
    Ok(points.iter().any(|point| point == path))
}

fn unmount(path: &Path) -> Result<(), Status> {
    while is_mounted(path)? {
        rustix::mount::unmount(path, UnmountFlags::empty()).map_err(|error| failed("unmount", &error))?;
    }
    Ok(())
}
