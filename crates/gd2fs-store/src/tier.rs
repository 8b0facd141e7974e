//! A log of this node with what waits for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use gd2fs_log::{Log, LogError, Place, Stats};
use gd2fs_wire::sums::Run;
use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::data_dir::DataDirError;
use crate::dirty::{Behind, Queue};
use crate::ledger::Held;
use crate::room::WAIT_MAX;

/// Of files for which nobody asks for another one (control's default).
pub const STRIPE_UNIT_DEFAULT: u32 = 4 << 20;
/// Of what can live in a log at all. With more than this alive reclaim copies several bytes for each that it frees.
const LIVE_PERCENT_MAX: u64 = 80;
/// So many reads ahead are at the disk at once. The others wait their turn, so that there is a next one as soon as one is over: behind
/// a virtual disk all that is under way ends at once, and nothing more would be asked for until some of that was verified and sent.
const AHEAD_READS: usize = 4;

/// One file or block device that the node writes behind to.
#[derive(Clone, Debug)]
pub struct LogDevice {
    /// The file or block device.
    pub path: PathBuf,
    /// Bytes that a file is made with; 0 takes what exists, as for a block device.
    pub bytes: u64,
    /// How the system is asked.
    pub options: gd2fs_device::Options,
}

/// How a store keeps what does not fit into memory.
#[derive(Clone, Debug)]
pub struct Tiers {
    /// Cluster and node that the logs belong to.
    pub cluster: String,
    /// As above.
    pub node: String,
    /// The logs; none: everything is in memory only.
    pub logs: Vec<LogDevice>,
    /// A chunk that has changed waits so long for further changes before it is written.
    pub flush_delay: Duration,
    /// With more than this in memory alone, writes wait for the log; from half of it on nothing waits for `flush_delay`.
    pub dirty_bytes_max: usize,
    /// The part of each tier that one tenant may hold while others want room; 1: no bound.
    pub tenant_share: f64,
}

/// Why a log cannot be used; whoever tells it names the setting, node.logs.
#[derive(Debug, Error)]
pub enum TierError {
    #[error("{0}")]
    Device(#[from] gd2fs_device::Error),
    #[error("{}", named(path, error))]
    Log { path: PathBuf, error: LogError },
    #[error("{0}")]
    DataDir(#[from] DataDirError),
    #[error(
        "{}: this log has missed a life of its node, or belongs to another data directory than {}: it would bring \
         back bytes that were replaced or deleted since. Use the data directory that it belongs to. If there is none, what the \
         log holds is stale and lost: remove the file (of a block device zero the first MiB) and start again",
        path.display(), data_dir.display()
    )]
    Stranger { path: PathBuf, data_dir: PathBuf },
    #[error(
        "{} is {}, a file that the node keeps for itself in node.data_dir: it would destroy the log; give the log another \
         name or place",
        path.display(), own.display()
    )]
    OwnFile { path: PathBuf, own: PathBuf },
    #[error(
        "{}: {found}, and the log {id} of the node's last life is absent; a new log here would cost what that one holds. \
         Mount its drive, or correct the path. If it is really gone, and what it holds is to be given up, start once without {} in \
         node.logs, then add it again",
        path.display(), path.display()
    )]
    Absent { path: PathBuf, found: &'static str, id: String },
    #[error("{} is a copy of {}; leave one of them out", path.display(), original.display())]
    Copy { path: PathBuf, original: PathBuf },
    #[error(
        "{} has {found} bytes and node.log_bytes is {asked}; a log keeps the size that it was made with: set node.log_bytes to \
         {found}, or to 0, which takes what is there, or, to make it anew with what it holds lost, remove the file, start \
         once without it in node.logs, and add it again",
        path.display()
    )]
    Bytes { path: PathBuf, asked: u64, found: u64 },
}

pub(crate) struct Tier {
    pub path: PathBuf,
    pub log: Log,
    pub queue: Queue,
    pub behind: Arc<Behind>,
    /// Why the last append failed, and when it was begun, until one succeeds.
    pub trouble: Mutex<Option<(Instant, Failure)>>,
    /// One gives chunks up at a time.
    pub evicting: tokio::sync::Mutex<()>,
    /// Of reads ahead at the disk.
    turns: Semaphore,
    closed: AtomicBool,
}

impl Tier {
    pub fn new(path: PathBuf, log: Log) -> Tier {
        Tier {
            path,
            log,
            queue: Queue::default(),
            behind: Arc::default(),
            trouble: Mutex::default(),
            evicting: tokio::sync::Mutex::default(),
            turns: Semaphore::new(AHEAD_READS),
            closed: AtomicBool::default(),
        }
    }

    /// The right to read ahead of somebody.
    pub async fn turn_ahead(&self) -> SemaphorePermit<'_> {
        self.turns.acquire().await.expect("it is never closed")
    }

    /// Says which files it refuses, if those of the default shape are among them: none of them says so before it is opened.
    pub fn warn_if_small(&self) {
        let most = self.log.payload_bytes_max();
        if most < STRIPE_UNIT_DEFAULT {
            tracing::warn!(
                "{}: the log is so small that files with stripe units above {most} bytes are refused, and the default is \
                 {STRIPE_UNIT_DEFAULT}; make it larger (node.log_bytes), or create files with smaller units",
                self.path.display()
            );
        }
    }

    /// Bytes that may live in it.
    pub fn live_bytes_max(&self) -> u64 {
        live_bytes_max(&self.log.stats())
    }

    /// Bytes that live in the log beyond its share.
    pub fn surplus(&self) -> Option<u64> {
        let stats = self.log.stats();
        stats.live_bytes.checked_sub(live_bytes_max(&stats)).filter(|surplus| *surplus > 0)
    }

    /// Ends the flusher; what waits is not written any more.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        self.queue.wake.notify_one();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Why nothing becomes durable here at the moment, if that is so.
    pub fn check(&self) -> Result<(), Failure> {
        match self.log.failed() {
            Some(why) => Err(Failure::new(Code::Internal, why)),
            None => self.trouble.lock().clone().map_or(Ok(()), |(_, failure)| Err(failure)),
        }
    }

    /// The same for somebody who has been waiting since then: what failed before says nothing, and a log that is full may have
    /// room as soon as what is in it was not used just now.
    pub fn check_since(&self, since: Instant) -> Result<(), Failure> {
        let tried = self.trouble.lock().as_ref().is_some_and(|(begun, _)| *begun >= since);
        if !tried && self.log.failed().is_none() {
            return Ok(());
        }
        let waits = |failure: &Failure| failure.code == Code::NoSpace && since.elapsed() < WAIT_MAX;
        self.check().or_else(|failure| if waits(&failure) { Ok(()) } else { Err(failure) })
    }
}

/// A snapshot in a log; its space comes back when this goes.
pub(crate) struct Record {
    pub tier: Arc<Tier>,
    pub place: Place,
    pub version: u64,
    /// Version of the change that it holds.
    pub changed: u64,
    /// What it holds; None: what the chunk is now.
    pub runs: Option<Box<[Run]>>,
    /// For the column's tenant.
    pub held: Held,
}

impl Drop for Record {
    fn drop(&mut self) {
        self.tier.log.release(self.place);
    }
}

/// The error with its log's path; those of the device begin with it.
fn named(path: &Path, error: &LogError) -> String {
    match error {
        LogError::Superblock { .. } | LogError::Device(_) => error.to_string(),
        _ => format!("{}: {error}", path.display()),
    }
}

/// Bytes that may live in a log with these numbers.
pub(crate) fn live_bytes_max(stats: &Stats) -> u64 {
    stats.usable_bytes / 100 * LIVE_PERCENT_MAX
}

/// A log's answer as a client learns it.
pub(crate) fn failure_of(error: &LogError) -> Failure {
    let code = match error {
        // Its own words are for whoever owns the log.
        LogError::NoSpace { .. } => {
            let message = "the log of the node is full, and what is in it was used just now, is pinned, or is a tenant's share; \
                           try again later, delete files, or give the node a larger log (node.log_bytes)";
            return Failure::new(Code::NoSpace, message);
        }
        LogError::Overloaded => Code::Overloaded,
        LogError::Closed => Code::ShuttingDown,
        LogError::Device(error) if error.is_retryable() => Code::Overloaded,
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}
