//! A log of this node with what waits for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use gd2fs_device::Device;
use gd2fs_log::{Log, LogError, Options, Place, Recovered, Stats};
use gd2fs_wire::sums::{Run, crc32c};
use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;
use thiserror::Error;

use crate::data_dir::DataDir;
use crate::dirty::Queue;
use crate::geometry::STRIPE_UNIT_MAX;
use crate::ledger::Held;

/// A log has room for so many of its largest records, so that reclaim has something to choose from.
const RECORDS_MIN: u64 = 32;
const RECORD_BYTES_MIN: u64 = 64 << 10;
/// Of what can live in a log at all. With more than this alive reclaim copies several bytes for each that it frees.
const LIVE_PERCENT_MAX: u64 = 80;

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

/// Why a log cannot be used.
#[derive(Debug, Error)]
pub enum TierError {
    #[error("{0}")]
    Device(#[from] gd2fs_device::Error),
    #[error("{}: {error}", path.display())]
    Log { path: PathBuf, error: LogError },
}

pub(crate) struct Tier {
    pub path: PathBuf,
    pub log: Log,
    pub queue: Queue,
    /// Why the last append failed, until one succeeds.
    pub trouble: Mutex<Option<Failure>>,
    /// One gives chunks up at a time.
    pub evicting: tokio::sync::Mutex<()>,
    closed: AtomicBool,
}

impl Tier {
    pub async fn open(
        wanted: &LogDevice,
        tiers: &Tiers,
        data: &DataDir,
    ) -> Result<(Arc<Tier>, Recovered), TierError> {
        let path = &wanted.path;
        let device = match wanted.bytes {
            0 => Device::open(path, &wanted.options)?,
            bytes => Device::create(path, bytes, &wanted.options)?,
        };
        let largest = (device.bytes() / RECORDS_MIN).clamp(RECORD_BYTES_MIN, u64::from(STRIPE_UNIT_MAX));
        // By the path, so that another order in the configuration changes nothing.
        let name = format!("checkpoint-{:08x}", crc32c(path.as_os_str().as_encoded_bytes()));
        let mut options = Options::new(&tiers.cluster, &tiers.node, data.path().join(name));
        options.payload_bytes_max = 1 << largest.ilog2();
        let opened = Log::open(Arc::new(device), options).await;
        let (log, recovered) = opened.map_err(|error| TierError::Log { path: path.clone(), error })?;
        let tier = Tier {
            path: path.clone(),
            log,
            queue: Queue::default(),
            trouble: Mutex::default(),
            evicting: tokio::sync::Mutex::default(),
            closed: AtomicBool::default(),
        };
        Ok((Arc::new(tier), recovered))
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
            None => self.trouble.lock().clone().map_or(Ok(()), Err),
        }
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

/// Bytes that may live in a log with these numbers.
pub(crate) fn live_bytes_max(stats: &Stats) -> u64 {
    stats.usable_bytes / 100 * LIVE_PERCENT_MAX
}

/// A log's answer as a client learns it.
pub(crate) fn failure_of(error: &LogError) -> Failure {
    let code = match error {
        LogError::NoSpace { .. } => Code::NoSpace,
        LogError::Overloaded => Code::Overloaded,
        LogError::Closed => Code::ShuttingDown,
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}
