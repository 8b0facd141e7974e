//! What a node is told at its start.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use gd2fs_device::EngineKind;
use gd2fs_store::{DataDirError, LogDevice, STRIPE_UNIT_DEFAULT, TierError, Tiers};
use gd2fs_transport::Address;
use gd2fs_wire::{Code, Failure, Keys, SigningError};
use serde::Deserialize;
use thiserror::Error;

/// Room for the frames of a few small files; less is surely a mistake in the unit.
const MEMORY_BYTES_MIN: u64 = 1 << 20;
/// An overwrite of what the log has needs a second frame beside the chunk's own.
const MEMORY_BYTES_USUAL: u64 = 2 * STRIPE_UNIT_DEFAULT as u64;
/// Each connection costs about 100 KiB of buffers.
const CONNECTIONS_MAX: usize = 65_536;

/// Not `Debug`: it holds the cluster's keys.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub cluster: String,
    pub node: String,
    /// Number of this registration; above every earlier one of this node.
    pub incarnation: u32,
    /// What control said that it is at the registration, in unix seconds; none: the machine's clock counts.
    #[serde(default)]
    pub now: Option<f64>,
    /// As in `GD2FS_CLUSTER_KEYS`; empty: the development key, on loopback only.
    #[serde(default)]
    pub keys: String,
    /// `tcp://IP[:PORT]`; port 0 takes a free one.
    pub listen: Vec<String>,
    pub memory_bytes: u64,
    pub data_dir: PathBuf,
    /// Files or block devices that the node writes behind to; none: what is in memory is all there is.
    #[serde(default)]
    pub logs: Vec<PathBuf>,
    /// Bytes that a file among them is made with; 0: all exist, or are block devices.
    #[serde(default)]
    pub log_bytes: u64,
    /// How the system is asked: `auto`, `uring` or `pool`.
    #[serde(default = "default_log_engine")]
    pub log_engine: String,
    /// A chunk that has changed waits so long for further changes before it is written to the log.
    #[serde(default = "default_flush_delay_ms")]
    pub flush_delay_ms: u64,
    /// With more than this in memory alone, writes wait for the log; 0: half of `memory_bytes`.
    #[serde(default)]
    pub dirty_bytes_max: u64,
    /// The part of each tier that one tenant may hold while others want room; 1: no bound.
    #[serde(default = "default_tenant_share")]
    pub tenant_share: f64,
    /// A stop gives the log so long to take what it does not have yet.
    #[serde(default = "default_flush_s")]
    pub flush_s: u64,
    #[serde(default = "default_connections_max")]
    pub connections_max: usize,
    /// For clients of this host, which share memory with the node: `auto` (an abstract socket), `off`, or the path of a socket.
    #[serde(default = "default_shm")]
    pub shm: String,
    /// Threads that serve connections; 0: one for each core, at most 16.
    #[serde(default)]
    pub io_threads: usize,
    /// Spare threads that take over from an I/O thread while it copies much; 0: it copies, and what else it serves waits.
    #[serde(default)]
    pub memory_threads: usize,
}

fn default_log_engine() -> String {
    "auto".into()
}

fn default_flush_delay_ms() -> u64 {
    200
}

fn default_tenant_share() -> f64 {
    1.0
}

fn default_flush_s() -> u64 {
    60
}

fn default_shm() -> String {
    "auto".into()
}

fn default_connections_max() -> usize {
    4096
}

/// A node with more disks than this is better run as several.
const LOGS_MAX: usize = 64;
const LOG_UNIT: u64 = 1 << 20;
const IO_THREADS_MAX: usize = 256;

/// Why a node does not start. A field that is a setting has its name there.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("{field}: {reason}")]
    Config { field: &'static str, reason: String },
    #[error(transparent)]
    Keys(#[from] SigningError),
    #[error("node.data_dir: {0}")]
    DataDir(#[from] DataDirError),
    #[error("node.logs: {0}")]
    Logs(TierError),
    #[error("node.listen: {address} cannot be listened on: {error}")]
    Listen { address: String, error: std::io::Error },
    #[error("the runtime does not start: {0}")]
    Runtime(std::io::Error),
}

impl From<TierError> for StartError {
    fn from(error: TierError) -> StartError {
        match error {
            TierError::DataDir(error) => StartError::DataDir(error),
            error => StartError::Logs(error),
        }
    }
}

impl StartError {
    /// The same with the code that other languages know it by.
    pub fn failure(&self) -> Failure {
        let code = match self {
            StartError::Config { .. }
            | StartError::Keys(_)
            | StartError::DataDir(_)
            | StartError::Logs(_) => Code::Invalid,
            StartError::Listen { .. } | StartError::Runtime(_) => Code::Unavailable,
        };
        Failure::new(code, self.to_string())
    }
}

pub(crate) fn wrong(field: &'static str, reason: impl Into<String>) -> StartError {
    StartError::Config { field, reason: reason.into() }
}

impl Config {
    pub fn from_json(text: &str) -> Result<Config, StartError> {
        serde_json::from_str(text).map_err(|error| wrong("config", error.to_string()))
    }

    /// Refuses what a start would refuse at once: for whoever has to know before there is an incarnation.
    pub fn validate(&self) -> Result<(), StartError> {
        self.check().map(drop)
    }

    /// Checks everything that can be checked without touching the machine.
    pub(crate) fn check(&self) -> Result<(Keys, Vec<SocketAddr>), StartError> {
        if self.incarnation == 0 {
            return Err(wrong("incarnation", "0 means none; register with control first"));
        }
        if self.memory_bytes < MEMORY_BYTES_MIN {
            return Err(wrong(
                "node.memory_bytes",
                format!("{} is below 1 MiB; write for example 4GiB", self.memory_bytes),
            ));
        }
        if self.memory_bytes < MEMORY_BYTES_USUAL {
            tracing::warn!(
                "node.memory_bytes: {} hold less than two stripe units of the default {STRIPE_UNIT_DEFAULT} bytes, and writes of \
                 files with those are refused with NO_SPACE; give {MEMORY_BYTES_USUAL} at least, or create files with smaller units",
                self.memory_bytes
            );
        }
        if self.io_threads > IO_THREADS_MAX {
            return Err(wrong(
                "node.io_threads",
                format!("{} is over {IO_THREADS_MAX}; 0 chooses by itself", self.io_threads),
            ));
        }
        if self.memory_threads > IO_THREADS_MAX {
            return Err(wrong(
                "node.memory_threads",
                format!("{} is over {IO_THREADS_MAX}; 0 needs none", self.memory_threads),
            ));
        }
        if self.connections_max == 0 || self.connections_max > CONNECTIONS_MAX {
            let reason = format!("{} is not in 1..{CONNECTIONS_MAX}", self.connections_max);
            return Err(wrong("node.connections_max", reason));
        }
        self.tiers()?;
        let keys = Keys::parse(&self.keys)?;
        let addresses: Vec<SocketAddr> =
            self.listen.iter().map(|text| parse_address(text)).collect::<Result<_, _>>()?;
        if addresses.is_empty() {
            return Err(wrong("node.listen", "no address; give one such as tcp://127.0.0.1:7528"));
        }
        if let Some(open) = addresses.iter().find(|a| keys.is_development() && !a.ip().is_loopback()) {
            let reason = format!(
                "{open} is reachable from elsewhere, and the built-in development key protects nothing; set GD2FS_CLUSTER_KEYS"
            );
            return Err(wrong("node.listen", reason));
        }
        Ok((keys, addresses))
    }

    /// The logs and how they are written.
    pub(crate) fn tiers(&self) -> Result<Tiers, StartError> {
        let engine: EngineKind =
            self.log_engine.parse().map_err(|reason: String| wrong("node.log_engine", reason))?;
        if !self.log_bytes.is_multiple_of(LOG_UNIT) {
            return Err(wrong(
                "node.log_bytes",
                format!("{} is not a multiple of 1 MiB; write for example 100GiB", self.log_bytes),
            ));
        }
        if self.logs.len() > LOGS_MAX {
            return Err(wrong(
                "node.logs",
                format!("{} are given, at most {LOGS_MAX} are used", self.logs.len()),
            ));
        }
        if let Some(twice) =
            (1..self.logs.len()).find(|index| self.logs[..*index].contains(&self.logs[*index]))
        {
            return Err(wrong("node.logs", format!("{} is given twice", self.logs[twice].display())));
        }
        if !(self.tenant_share > 0.0 && self.tenant_share <= 1.0) {
            let reason = format!("{} is not a share above 0 and up to 1", self.tenant_share);
            return Err(wrong("node.tenant_share", reason));
        }
        let options = gd2fs_device::Options { engine, ..gd2fs_device::Options::default() };
        let device = |path: &PathBuf| LogDevice {
            path: path.clone(),
            bytes: self.log_bytes,
            options: options.clone(),
        };
        Ok(Tiers {
            cluster: self.cluster.clone(),
            node: self.node.clone(),
            logs: self.logs.iter().map(device).collect(),
            flush_delay: Duration::from_millis(self.flush_delay_ms),
            dirty_bytes_max: usize::try_from(self.dirty_bytes_max).unwrap_or(usize::MAX),
            tenant_share: self.tenant_share,
        })
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, StartError> {
    match text.strip_prefix("tcp://").map(|_| Address::parse(text)) {
        Some(Ok(Address::Tcp(address))) => Ok(address),
        _ => Err(wrong("node.listen", format!("{text:?} is not tcp://IP[:PORT]"))),
    }
}

pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    let attempt = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    attempt().map_err(|error| StartError::Listen { address: address.to_string(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl Fn(&mut Config)) -> Result<Vec<SocketAddr>, String> {
        let mut config = Config::from_json(
            r#"{"cluster": "c", "node": "n", "incarnation": 1, "listen": ["tcp://127.0.0.1:0"], "memory_bytes": 1048576, "data_dir": "/d"}"#,
        )
        .unwrap();
        change(&mut config);
        config.check().map(|(_, addresses)| addresses).map_err(|error| error.to_string())
    }

    #[test]
    fn addresses() {
        let parse = |text: &str| check(|c| c.listen = vec![text.into()]).unwrap()[0].to_string();
        assert_eq!(parse("tcp://127.0.0.1"), "127.0.0.1:7528");
        assert_eq!(parse("tcp://[::1]:9"), "[::1]:9");
        assert_eq!(parse("tcp://[::1]"), "[::1]:7528");
    }

    #[test]
    fn refusals_name_the_field() {
        let refused = |change: &dyn Fn(&mut Config)| check(change).unwrap_err();
        assert!(refused(&|c| c.listen = vec!["127.0.0.1:1".into()]).starts_with("node.listen: "));
        assert!(refused(&|c| c.listen = vec!["shm://h/@x".into()]).starts_with("node.listen: "));
        assert!(refused(&|c| c.listen = vec![]).starts_with("node.listen: "));
        assert!(refused(&|c| c.io_threads = 1000).starts_with("node.io_threads: "));
        assert!(refused(&|c| c.memory_threads = 1000).starts_with("node.memory_threads: "));
        assert!(refused(&|c| c.memory_bytes = 5).starts_with("node.memory_bytes: "));
        for share in [0.0, 1.5, -0.5, f64::NAN] {
            assert!(refused(&|c| c.tenant_share = share).starts_with("node.tenant_share: "));
        }
        assert!(refused(&|c| c.incarnation = 0).starts_with("incarnation: "));
        assert!(refused(&|c| c.connections_max = 0).starts_with("node.connections_max: "));
        assert!(refused(&|c| c.keys = "1:00".into()).contains("GD2FS_CLUSTER_KEYS"));
        assert!(Config::from_json(r#"{"listne": []}"#).err().unwrap().to_string().contains("listne"));
    }

    #[test]
    fn the_development_key_stays_on_loopback() {
        let error =
            check(|c| c.listen = vec!["tcp://127.0.0.1:0".into(), "tcp://0.0.0.0:0".into()]).unwrap_err();
        assert!(error.contains("GD2FS_CLUSTER_KEYS"), "{error}");
        check(|c| {
            c.listen = vec!["tcp://0.0.0.0:0".into()];
            c.keys = format!("1:{}", "ab".repeat(16));
        })
        .unwrap();
    }
}
