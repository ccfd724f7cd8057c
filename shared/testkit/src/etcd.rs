//! A private etcd cluster (Debian's etcd-server) on loopback.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::containerd::{open_log, tail};
use crate::process::{ProcessId, Signal};
use crate::relay::Relay;
use crate::scratch::remember;
use crate::{Component, Remains};

/// How long a cluster may take until it has a leader.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of attempts to find ports that are still free.
const TRIES: u32 = 5;

/// Files for TLS, which every member shows, and clients must show too.
#[derive(Debug, Clone)]
pub struct EtcdTls {
    /// The authority of members and clients.
    pub ca: PathBuf,
    /// The members' certificate, for 127.0.0.1.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// A running cluster; its members are ended when it is dropped, their data stays with the folder.
#[derive(Debug)]
pub struct EtcdCluster {
    dir: PathBuf,
    tls: Option<EtcdTls>,
    arguments: Vec<String>,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
    metrics: SocketAddr,
    child: Option<Child>,
}

impl EtcdCluster {
    /// Starts so many members in `dir`, and waits until they have a leader.
    pub fn start(dir: &Path, members: usize) -> anyhow::Result<Self> {
        Self::launch(dir, members, None, &[])
    }

    /// Like [`EtcdCluster::start`], with TLS on both sides.
    pub fn start_with_tls(dir: &Path, members: usize, tls: EtcdTls) -> anyhow::Result<Self> {
        Self::launch(dir, members, Some(tls), &[])
    }

    /// Like [`EtcdCluster::start`], with more arguments for each member.
    pub fn start_with_arguments(dir: &Path, members: usize, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::launch(dir, members, None, arguments)
    }

    fn launch(dir: &Path, members: usize, tls: Option<EtcdTls>, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut last = None;
        for _ in 0..TRIES {
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
            let addresses = free_addresses(members * 3)?;
            let named = |(n, of): (usize, &[SocketAddr])| Member {
                name: format!("m{n}"),
                client: of[0],
                peer: of[1],
                metrics: of[2],
                child: None,
            };
            let members = addresses.chunks(3).enumerate().map(named).collect();
            let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
            let mut cluster = Self { dir: dir.to_owned(), tls: tls.clone(), arguments, members };
            let started = (0..cluster.members.len()).try_for_each(|n| cluster.run(n));
            match started.and_then(|()| cluster.wait_for_all()) {
                Ok(()) => return Ok(cluster),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| anyhow::anyhow!("no member was asked for")))
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Runs a member with what it has in its folder.
    fn run(&mut self, n: usize) -> anyhow::Result<()> {
        let program = Component::EtcdServer.find()?;
        let peers: Vec<String> =
            self.members.iter().map(|member| format!("{}=http://{}", member.name, member.peer)).collect();
        let (scheme, member) = (self.scheme(), &self.members[n]);
        let client = format!("{scheme}://{}", member.client);
        let peer = format!("http://{}", member.peer);
        let output = open_log(&self.log(n))?;
        let mut command = Command::new(program);
        command
            .args(["--name", &member.name, "--data-dir"])
            .arg(self.dir.join(&member.name))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--listen-metrics-urls", &format!("http://{}", member.metrics)])
            .args(["--initial-cluster", &peers.join(","), "--initial-cluster-state", "new"])
            // A machine that builds at the same time must not make the cluster lose its leader.
            .args(["--heartbeat-interval", "100", "--election-timeout", "1000", "--logger", "zap"])
            .args(&self.arguments);
        if let Some(tls) = &self.tls {
            command
                .arg("--client-cert-auth")
                .arg("--trusted-ca-file")
                .arg(&tls.ca)
                .arg("--cert-file")
                .arg(&tls.cert)
                .arg("--key-file")
                .arg(&tls.key);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot run etcd")?;
        let processes = ProcessId::of(child.id()).into_iter().collect();
        self.members[n].child = Some(child);
        remember(&self.dir, &Remains { processes, ..Remains::default() })
    }

    fn log(&self, n: usize) -> PathBuf {
        self.dir.join(format!("{}.log", self.members[n].name))
    }

    fn wait_for_all(&mut self) -> anyhow::Result<()> {
        (0..self.members.len()).try_for_each(|n| self.wait_for(n))
    }

    /// Waits until a member is healthy, that is, has a leader.
    fn wait_for(&mut self, n: usize) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if is_well(self.members[n].metrics) {
                return Ok(());
            }
            let log = self.log(n);
            if let Some(child) = &mut self.members[n].child
                && let Some(status) = child.try_wait()?
            {
                bail!("etcd has ended with {status}:\n{}", tail(&log, 30));
            }
            if Instant::now() >= deadline {
                bail!("etcd does not get well:\n{}", tail(&log, 30));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The addresses at which the members answer clients.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("{}://{}", self.scheme(), member.client)).collect()
    }

    /// A network to each member that can be cut, in the order of [`EtcdCluster::endpoints`].
    pub fn relays(&self) -> anyhow::Result<Vec<Relay>> {
        self.members.iter().map(|member| Relay::to(member.client)).collect()
    }

    /// Kills a member (SIGKILL).
    pub fn kill(&mut self, n: usize) {
        if let Some(mut child) = self.members[n].child.take() {
            // Both fail only when it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Runs a member again that was killed, and waits until it is well.
    pub fn restart(&mut self, n: usize) -> anyhow::Result<()> {
        self.kill(n);
        self.run(n)?;
        self.wait_for(n)
    }

    /// Recreates the whole cluster, empty, at the same addresses.
    pub fn wipe(&mut self) -> anyhow::Result<()> {
        for n in 0..self.members.len() {
            self.kill(n);
            let data = self.dir.join(&self.members[n].name);
            fs::remove_dir_all(&data).with_context(|| format!("cannot remove {}", data.display()))?;
        }
        (0..self.members.len()).try_for_each(|n| self.run(n))?;
        self.wait_for_all()
    }

    /// Stops a member where it is (SIGSTOP): its connections stay open and unanswered.
    pub fn freeze(&self, n: usize) -> anyhow::Result<()> {
        self.signal(n, Signal::STOP)
    }

    /// Resumes a member (SIGCONT).
    pub fn thaw(&self, n: usize) -> anyhow::Result<()> {
        self.signal(n, Signal::CONT)
    }

    fn signal(&self, n: usize, signal: Signal) -> anyhow::Result<()> {
        let child = self.members[n].child.as_ref().context("the member does not run")?;
        let id = ProcessId::of(child.id()).context("the member has ended")?;
        anyhow::ensure!(id.signal(signal), "cannot signal the member {}", self.members[n].name);
        Ok(())
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|n| self.kill(n));
    }
}

/// Free loopback addresses. Their ports are below the ephemeral range of the kernel, so that the port of a killed member is still
/// free when the member restarts.
pub(crate) fn free_addresses(number: usize) -> anyhow::Result<Vec<SocketAddr>> {
    // All listeners stay open until the last port is chosen, so that no port is chosen twice.
    let mut held: Vec<TcpListener> = Vec::new();
    for _ in 0..number * 100 {
        held.extend(TcpListener::bind(("127.0.0.1", fastrand::u16(16_384..32_768))));
        if held.len() == number {
            let address = |listener: &TcpListener| listener.local_addr().context("a listener has an address");
            return held.iter().map(address).collect();
        }
    }
    bail!("there are no {number} free ports on loopback")
}

/// The response of `/health` at the address of the metrics, which has no TLS.
fn is_well(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains("\"health\":\"true\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn a_killed_etcd_member_rejoins_its_cluster() {
        let scratch = Scratch::new().unwrap();
        let mut cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
        let endpoints = cluster.endpoints();
        assert!(endpoints[0].starts_with("http://127.0.0.1:"), "{endpoints:?}");
        cluster.kill(0);
        assert!(!is_well(cluster.members[0].metrics));
        cluster.restart(0).unwrap();
        assert_eq!(cluster.endpoints(), endpoints);
    }
}
