//! What all parts of one log share.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use gd2fs_device::{BLOCK, Device};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::error::LogError;
use crate::notes::Waiting;
use crate::owner::Owner;
use crate::position::Place;
use crate::state::State;

/// A disk that cannot be read fails every read: one line in this time says so, and how many there were.
const READ_ERRORS_TOLD_EVERY: Duration = Duration::from_secs(10);

pub(crate) struct Inner {
    pub device: Arc<Device>,
    pub device_id: [u8; 16],
    pub checkpoint_path: PathBuf,
    pub payload_bytes_max: u32,
    pub checkpoint_bytes: u64,
    pub checkpoint_records: u64,
    pub runtime: Handle,
    pub owner: OnceLock<Weak<dyn Owner>>,
    pub state: Mutex<State>,
    /// Something may be admitted that was not.
    pub room: Notify,
    /// Upkeep may be due.
    pub work: Notify,
    pub closing: Notify,
    /// A write is complete, and the owner has been told.
    pub told: Notify,
    /// A sync has ended, or the log is closed.
    pub synced: Notify,
    /// Snapshots are admitted one after the other, as they came.
    pub turn: tokio::sync::Mutex<()>,
    pub sync_turn: tokio::sync::Mutex<()>,
    /// Checkpoints and moves exclude each other: a checkpoint's position never has a moved record, older than what it
    /// was copied beside, in flight behind it.
    pub upkeep: tokio::sync::Mutex<()>,
    pub notes: Mutex<Waiting>,
    pub counters: Counters,
    /// When a read that failed was last told of.
    pub read_error_told: Mutex<Option<Instant>>,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub appended_bytes: AtomicU64,
    pub reclaimed_bytes: AtomicU64,
    pub checkpoints: AtomicU64,
    pub syncs: AtomicU64,
    pub sync_us: AtomicU64,
    pub sync_us_max: AtomicU64,
    pub read_errors: AtomicU64,
}

impl Counters {
    pub fn synced(&self, took: Duration) {
        let us = took.as_micros() as u64;
        self.syncs.fetch_add(1, Relaxed);
        self.sync_us.fetch_add(us, Relaxed);
        self.sync_us_max.fetch_max(us, Relaxed);
    }
}

impl Inner {
    pub fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.owner.get()?.upgrade()
    }

    pub fn release(&self, place: &Place) {
        let mut state = self.state.lock();
        if state.segments.remove(place) {
            state.exhausted = false;
            drop(state);
            self.work.notify_one();
        }
    }

    /// Counts a read that the device has failed, and says so now and then.
    pub fn read_failed(&self, error: &gd2fs_device::Error) {
        if error.is_retryable() {
            // Nothing was asked of the device.
            return;
        }
        let count = self.counters.read_errors.fetch_add(1, Relaxed) + 1;
        let mut told = self.read_error_told.lock();
        if told.is_none_or(|told| told.elapsed() >= READ_ERRORS_TOLD_EVERY) {
            *told = Some(Instant::now());
            drop(told);
            tracing::warn!("{error} (reads of this log that its device has failed so far: {count})");
        }
    }

    /// Keeps the place's segment from being reused while what is returned lives; None if it was reused already.
    pub fn enter(self: &Arc<Self>, place: &Place) -> Option<Reader> {
        let segment = self.state.lock().segments.enter(place)?;
        Some(Reader { inner: Arc::clone(self), segment })
    }

    pub fn no_space(&self, state: &State, blocks: u32) -> LogError {
        let live: u64 = state.segments.iter().map(|segment| u64::from(segment.live_blocks)).sum();
        let division = state.segments.division;
        LogError::NoSpace {
            bytes: u64::from(blocks) * BLOCK as u64,
            live_bytes: live * BLOCK as u64,
            total_bytes: u64::from(division.segments) * division.segment_bytes,
        }
    }
}

/// A read under way.
pub(crate) struct Reader {
    inner: Arc<Inner>,
    segment: u32,
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.inner.state.lock().segments.leave(self.segment) {
            self.inner.room.notify_waiters();
        }
    }
}

/// 128 bits that nobody who sees the log's clients can guess: SipHash under keys from the system's randomness.
pub(crate) fn random_id() -> [u8; 16] {
    let half = |index: u8| RandomState::new().hash_one(index).to_le_bytes();
    let mut id = [0; 16];
    id[..8].copy_from_slice(&half(0));
    id[8..].copy_from_slice(&half(1));
    id
}
