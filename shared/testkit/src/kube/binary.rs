//! The program kube-apiserver: the environment's, or one built once from Debian's source package and kept below the
//! target folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context as _, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::build_cache::{KEYRING, MIRROR, apt_get, cache_dir, execute, remove, write_sources};
use crate::packages::full_path;
use crate::{Component, find_file};

/// The variable that names the folder of the API server's binary, as for envtest.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// The program, and the beginning of the name of each folder that keeps one.
const NAME: &str = "kube-apiserver";
/// The source package.
const PACKAGE: &str = "kubernetes";
/// The binary package of the source package, by which the machine's package lists know its version.
const MADE_PACKAGE: &str = "kubernetes-client";
/// The release whose source package it is; a later one has another Go.
const SUITE: &str = "bookworm";
/// The package of Go in which a release of Kubernetes keeps its version, below GOPATH.
const VERSION_PACKAGES: [&str; 2] = [
    "k8s.io/kubernetes/vendor/k8s.io/component-base/version",
    "k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version",
];

/// A kube-apiserver that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiServerBinary {
    path: PathBuf,
    version: (u32, u32),
}

impl ApiServerBinary {
    /// `kube-apiserver` in the folder `KUBEBUILDER_ASSETS`, when that is set; else the one below the target folder
    /// that was built of the source package which the machine's lists know; else that one is built, which needs
    /// Debian's mirror and takes minutes. Whoever asks meanwhile waits.
    pub fn find_or_build() -> anyhow::Result<Self> {
        if let Some(folder) = std::env::var_os(ASSETS) {
            let path = Path::new(&folder).join(NAME);
            ensure!(path.is_file(), "{ASSETS} is set, but {} does not exist", path.display());
            return Self::at(path);
        }
        let cache = cache_dir()?;
        let lock_path = cache.join(format!("{NAME}.lock"));
        let lock =
            File::create(&lock_path).with_context(|| format!("cannot make {}", lock_path.display()))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let found = match listed_version() {
            Some(version) => Some(cached_program(&cache, &version)).filter(|path| path.is_file()),
            None => newest_cached(&cache),
        };
        match found {
            Some(path) => Self::at(path),
            None => Self::at(build_newest(&cache).context("cannot build kube-apiserver")?),
        }
    }

    fn at(path: PathBuf) -> anyhow::Result<Self> {
        let said = execute(Command::new(&path).arg("--version"))?;
        let version =
            minor_version(&said).with_context(|| format!("{} has no version: {said}", path.display()))?;
        Ok(Self { path, version })
    }

    /// The program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor version, such as `(1, 20)`.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }
}

/// Major and minor of `Kubernetes v1.20.2`.
fn minor_version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.trim().rsplit_once('v')?.1.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The version of the source package in the machine's own lists; `None` when they lack it.
fn listed_version() -> Option<String> {
    let apt_cache = find_file("apt-cache").ok()?;
    let shown = execute(Command::new(apt_cache).args(["show", "--no-all-versions", MADE_PACKAGE])).ok()?;
    source_version(&shown)
}

/// The version of the source of a binary package: its own, unless the field Source has one in brackets.
fn source_version(stanza: &str) -> Option<String> {
    let field = |name: &str| stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    let bracketed = field("Source").and_then(|source| source.split_once('(')?.1.strip_suffix(')'));
    bracketed.or_else(|| field("Version")).map(ToOwned::to_owned)
}

/// The path of the cached program of a version.
fn cached_program(cache: &Path, version: &str) -> PathBuf {
    cache.join(format!("{NAME}-{version}")).join(NAME)
}

/// The program that was built last.
fn newest_cached(cache: &Path) -> Option<PathBuf> {
    let prefix = format!("{NAME}-");
    let named = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&prefix))
    };
    let folders = fs::read_dir(cache).ok()?.flatten().map(|entry| entry.path()).filter(named);
    let built =
        |path: &PathBuf| path.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    folders.map(|folder| folder.join(NAME)).filter(|path| path.is_file()).max_by_key(built)
}

/// Builds the newest source package of the mirror, unless the cache has it already.
fn build_newest(cache: &Path) -> anyhow::Result<PathBuf> {
    let tools = [Component::Go, Component::Jq, Component::Rsync, Component::DpkgDev];
    for tool in tools {
        tool.find()?;
    }
    let work = cache.join(format!("{NAME}.work"));
    // One that was killed has left it.
    remove(&work)?;
    let built = Source::list(&work).and_then(|source| {
        let program = cached_program(cache, &source.version);
        if !program.is_file() {
            source.build(&program)?;
        }
        Ok(program)
    });
    let removed = remove(&work);
    let program = built?;
    removed?;
    Ok(program)
}

/// The source package, with package lists separate from the machine's.
struct Source {
    work: PathBuf,
    version: String,
}

impl Source {
    /// Asks the mirror for the newest version.
    fn list(work: &Path) -> anyhow::Result<Self> {
        for folder in ["go/src/k8s.io", "home"] {
            let folder = work.join(folder);
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        write_sources(work, &sources(std::env::var("MIRROR").ok().as_deref(), &machine_lists()))?;
        let mut source = Self { work: work.to_owned(), version: String::new() };
        execute(apt_get(work)?.args(["--quiet", "update"]))?;
        let said = execute(apt_get(work)?.args(["source", "--print-uris", PACKAGE]))?;
        source.version = described_version(&said).with_context(|| format!("no source package in: {said}"))?;
        Ok(source)
    }

    /// Builds the program, which has its name last.
    fn build(&self, program: &Path) -> anyhow::Result<()> {
        eprintln!("building kube-apiserver of {PACKAGE} {}; it takes minutes, once", self.version);
        execute(apt_get(&self.work)?.args(["--quiet", "source", PACKAGE]))?;
        let unpacked = self.unpacked()?;
        let tree = self.work.join("go/src/k8s.io/kubernetes");
        fs::rename(&unpacked, &tree).with_context(|| format!("cannot rename {}", unpacked.display()))?;
        execute(self.tool(find_file("make")?, &tree)?.arg("generated_files"))?;
        let unfinished = self.work.join(NAME);
        let mut go = self.tool(Component::Go.find()?, &tree)?;
        go.args(["build", "-trimpath", "-ldflags", &linker_flags(&self.version), "-o"]);
        execute(go.arg(&unfinished).arg(format!("k8s.io/kubernetes/cmd/{NAME}")))?;
        let folder = program.parent().context("a program is in a folder")?;
        fs::create_dir_all(folder)
            .and_then(|()| fs::rename(&unfinished, program))
            .with_context(|| format!("cannot make {}", program.display()))
    }

    /// The folder that apt-get has unpacked.
    fn unpacked(&self) -> anyhow::Result<PathBuf> {
        let unpacked = fs::read_dir(&self.work)?.flatten().map(|entry| entry.path()).find(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            path.is_dir() && name.starts_with(&format!("{PACKAGE}-"))
        });
        unpacked.with_context(|| format!("apt-get has unpacked nothing in {}", self.work.display()))
    }

    /// A tool with nothing but what the build is to see.
    fn tool(&self, program: PathBuf, tree: &Path) -> anyhow::Result<Command> {
        let go = Component::Go.find()?;
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", full_path(go.parent())?)
            .env("HOME", self.work.join("home"))
            .env("GOPATH", self.work.join("go"))
            .env("GOCACHE", self.work.join("home/cache"))
            .env("GO111MODULE", "off")
            .env("CGO_ENABLED", "0")
            // The version is not that of the repository which the target folder may be in.
            .env("GIT_CEILING_DIRECTORIES", &self.work)
            .current_dir(tree);
        Ok(command)
    }
}

/// The machine's package lists as apt prints them: origin, code name, address, release and component, one list per line.
fn machine_lists() -> String {
    let format = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)";
    let ask = |program: PathBuf| {
        execute(Command::new(program).args(["indextargets", "--format", format, "Created-By: Packages"]))
    };
    find_file("apt-get").and_then(ask).unwrap_or_default()
}

/// The lines of the list of sources: of `mirror`, else of Debian's among the machine's lists, else of the usual one.
fn sources(mirror: Option<&str>, machine: &str) -> Vec<String> {
    let line = |address: &str, release: &str| {
        let keys =
            if Path::new(KEYRING).is_file() { format!("[signed-by={KEYRING}] ") } else { String::new() };
        format!("deb-src {keys}{address} {release} main")
    };
    if let Some(mirror) = mirror {
        return vec![line(mirror, SUITE)];
    }
    let of_list = |list: &str| {
        let fields: Vec<&str> = list.split('|').collect();
        let ["Debian", code_name, address, release, "main"] = fields[..] else { return None };
        code_name.starts_with(SUITE).then(|| line(address, release))
    };
    let found: Vec<String> = machine.lines().filter_map(of_list).collect();
    if found.is_empty() { vec![line(MIRROR, SUITE)] } else { found }
}

/// The version in the name of the description (`.dsc`) among the addresses that apt-get prints.
fn described_version(addresses: &str) -> Option<String> {
    let prefix = format!("{PACKAGE}_");
    let of_word = |word: &str| Some(word.strip_prefix(&prefix)?.strip_suffix(".dsc")?.to_owned());
    addresses.split_whitespace().find_map(of_word)
}

/// The version variables that upstream's build sets in the program.
fn linker_flags(package_version: &str) -> String {
    let upstream = upstream_version(package_version);
    let mut numbers = upstream.split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let of_package = |package: &&str| {
        let set =
            [("gitVersion", format!("v{upstream}")), ("gitMajor", major.into()), ("gitMinor", minor.into())];
        set.map(|(name, value): (_, String)| format!(" -X {package}.{name}={value}")).concat()
    };
    format!("-s -w{}", VERSION_PACKAGES.iter().map(of_package).collect::<String>())
}

/// Upstream's version in that of a package (deb-version(7)): without epoch and revision, and what was really packaged
/// where Debian went back to an earlier one.
fn upstream_version(package_version: &str) -> &str {
    let version = package_version.split_once(':').map_or(package_version, |(_epoch, rest)| rest);
    let version = version.rsplit_once('-').map_or(version, |(version, _revision)| version);
    version.split_once("+really").map_or(version, |(_, really)| really)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn the_version_is_read_from_what_the_program_says() {
        assert_eq!(minor_version("Kubernetes v1.20.2\n"), Some((1, 20)));
        assert_eq!(minor_version("Kubernetes v1.36.0-rc.1\n"), Some((1, 36)));
        assert_eq!(minor_version("no such flag"), None);
    }

    #[test]
    fn the_version_of_the_source_is_the_packages_own_or_in_brackets() {
        let own = "Package: kubernetes-client\nSource: kubernetes\nVersion: 1.20.2-1\n";
        assert_eq!(source_version(own).as_deref(), Some("1.20.2-1"));
        let rebuilt = "Package: kubernetes-client\nSource: kubernetes (1.20.2-1)\nVersion: 1.20.2-1+b3\n";
        assert_eq!(source_version(rebuilt).as_deref(), Some("1.20.2-1"));
        assert_eq!(source_version(""), None);
    }

    #[test]
    fn upstreams_version_has_no_epoch_no_revision_and_nothing_that_was_taken_back() {
        assert_eq!(upstream_version("1.20.5+really1.20.2-1.1+deb12u1"), "1.20.2");
        assert_eq!(upstream_version("1:1.32.3-2"), "1.32.3");
        let flags = linker_flags("1.20.5+really1.20.2-1");
        assert!(flags.contains("component-base/version.gitVersion=v1.20.2 "), "{flags}");
        assert!(flags.ends_with("client-go/pkg/version.gitMinor=20"), "{flags}");
    }

    #[test]
    fn the_description_names_the_version() {
        let said = "Need to get 34.5 MB of source archives.\n\
            'http://m/kubernetes_1.20.2-1.dsc' kubernetes_1.20.2-1.dsc 1973 SHA256:1\n\
            'http://m/kubernetes_1.20.2.orig.tar.gz' kubernetes_1.20.2.orig.tar.gz 3 SHA256:2\n";
        assert_eq!(described_version(said).as_deref(), Some("1.20.2-1"));
        assert_eq!(described_version("Need to get 0 B.\n"), None);
    }

    #[test]
    fn sources_are_of_the_mirror_that_is_named_or_of_the_machines_lists_of_debian() {
        let machine = "Debian|bookworm|http://m/debian/|bookworm|main\n\
            Debian|bookworm-security|http://m/security/|bookworm-security|main\n\
            Debian|bookworm|http://m/debian/|bookworm|contrib\n\
            Debian|trixie|http://m/debian/|trixie|main\n\
            Docker|bookworm|http://docker/|bookworm|main\n";
        let without_keys = |lines: Vec<String>| -> Vec<String> {
            lines.iter().map(|line| line.replace(&format!("[signed-by={KEYRING}] "), "")).collect()
        };
        assert_eq!(
            without_keys(sources(None, machine)),
            ["deb-src http://m/debian/ bookworm main", "deb-src http://m/security/ bookworm-security main"]
        );
        assert_eq!(without_keys(sources(Some("http://x"), machine)), ["deb-src http://x bookworm main"]);
        assert_eq!(without_keys(sources(None, "")), [format!("deb-src {MIRROR} bookworm main")]);
    }

    #[test]
    fn the_most_recently_built_cached_version_is_used() {
        let scratch = Scratch::new().unwrap();
        assert_eq!(newest_cached(scratch.path()), None);
        for (version, age) in [("1.2-1", 5), ("1.1-1", 50)] {
            let path = cached_program(scratch.path(), version);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let built = SystemTime::now() - std::time::Duration::from_secs(age);
            File::create(path).unwrap().set_modified(built).unwrap();
        }
        // Unfinished builds have other names.
        fs::create_dir_all(scratch.path().join("kube-apiserver-1.3-1")).unwrap();
        assert_eq!(newest_cached(scratch.path()), Some(cached_program(scratch.path(), "1.2-1")));
    }
}
