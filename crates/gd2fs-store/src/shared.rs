//! What all columns of a store share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use gd2fs_log::{Key, LogError, Note};
use gd2fs_wire::{Clock, Failure};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::arena::Arena;
use crate::changed::Changed;
use crate::data_dir::DataDir;
use crate::histogram::Histogram;
use crate::pins::Pins;
use crate::precedence::Precedence;
use crate::tenants::Tenants;
use crate::tier::{Tier, failure_of};

pub(crate) struct Shared {
    pub arena: Arc<Arena>,
    pub data: DataDir,
    /// Whose everything is; here whoever needs room looks for something to give up.
    pub tenants: Tenants,
    /// The logs; none: what is in memory is all there is.
    pub tiers: Vec<Arc<Tier>>,
    pub flush_delay: Duration,
    pub dirty_bytes_max: usize,
    /// Memory may be available that was not.
    pub space: Notify,
    /// How many wait for memory.
    pub pressed: AtomicUsize,
    /// One looks for something to give up at a time.
    pub evicting: Mutex<()>,
    /// Reads before writes, when it is full.
    pub precedence: Arc<Precedence>,
    /// Columns of which control must hear.
    pub changed: Changed,
    pub pins: Pins,
    /// Tasks that lift what WARM has asked for.
    pub warming: Arc<Semaphore>,
    /// Units of what may be lifted ahead of reads, see [`crate::warming`].
    pub ahead: Arc<Semaphore>,
    pub counters: Counters,
    /// Of the last change, in the whole node.
    pub version: AtomicU64,
    pub began: Instant,
    pub clock: Clock,
    /// Everything is written at once: the store is closing.
    pub closing: std::sync::atomic::AtomicBool,
}

/// Sums since the store was opened.
#[derive(Default)]
pub(crate) struct Counters {
    pub flushed_bytes: AtomicU64,
    pub evicted_dram_bytes: AtomicU64,
    pub evicted_log_bytes: AtomicU64,
    pub hits_dram: AtomicU64,
    pub hits_nvme: AtomicU64,
    pub misses_lost: AtomicU64,
    pub lifted_bytes: AtomicU64,
    pub corrupt: AtomicU64,
    pub log_records_damaged: AtomicU64,
    pub log_records_dropped: AtomicU64,
    pub logs_given_up: AtomicU64,
    pub cold_read_latency: Histogram,
    pub flush_latency: Histogram,
}

impl Shared {
    pub fn next_version(&self) -> u64 {
        self.version.fetch_add(1, Relaxed) + 1
    }

    /// Microseconds since the store was opened.
    pub fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    /// The log that a chunk belongs to; None without any. Chunks of one file are spread over all.
    pub fn tier_of(&self, key: &Key) -> Option<&Arc<Tier>> {
        let count = self.tiers.len() as u64;
        let spread = (key.file as u64) ^ u64::from(key.column);
        (count > 0).then(|| &self.tiers[(spread.wrapping_add(key.chunk) % count) as usize])
    }

    /// Begins a note in every log: a chunk may have left records in each if their number has changed.
    pub fn note(
        &self,
        note: Note,
    ) -> impl Iterator<Item = impl Future<Output = Result<(), LogError>> + Send + use<>> + use<'_> {
        self.tiers.iter().map(move |tier| tier.log.note(note))
    }

    /// Why a log takes nothing at the moment, if there is such a one: what waits for it waits for that.
    pub fn trouble(&self) -> Option<Failure> {
        self.tiers.iter().find_map(|tier| tier.check().err())
    }

    /// Makes durable what every log has by now.
    pub async fn sync_logs(&self) -> Result<(), Failure> {
        for tier in &self.tiers {
            tier.log.sync().await.map_err(|error| failure_of(&error))?;
        }
        Ok(())
    }

    /// Bytes of frames that the logs do not have.
    pub fn dirty_bytes(&self) -> usize {
        self.tiers.iter().map(|tier| tier.behind.bytes()).sum()
    }

    /// Whether the flusher shall not leave chunks time to grow.
    pub fn hurries(&self) -> bool {
        self.closing.load(Relaxed)
            || self.pressed.load(Relaxed) > 0
            || self.dirty_bytes() > self.dirty_bytes_max / 2
    }
}
