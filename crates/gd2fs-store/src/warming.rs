//! Lifting a range into memory before it is needed.

use std::sync::Arc;

use gd2fs_wire::Failure;
use gd2fs_wire::messages::Warmth;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;

use crate::asks::check_span;
use crate::column::Column;

/// Tasks of this kind at once; what is asked beyond is answered, and not lifted: whoever reads it lifts it then.
pub(crate) const WARMING_MAX: usize = 64;
/// Chunks that one of them reads at once.
const LIFTS_MAX: usize = 8;
/// Chunks that are counted before others have the column's lock: a fraction of a millisecond.
const CHUNKS_A_STEP: usize = 256;

/// What is lifted ahead of reads takes at most this share of the memory, and is never so much that a read whose turn has come waits long
/// behind it.
const AHEAD_SHARE: usize = 4;
const AHEAD_MAX: usize = 32;
/// A chunk of the usual size.
const AHEAD_UNIT: usize = 4 << 20;

/// Units of chunks that may be lifted ahead.
pub(crate) fn ahead_units(memory_bytes: usize) -> usize {
    (memory_bytes / AHEAD_SHARE / AHEAD_UNIT).min(AHEAD_MAX)
}

/// A chunk that is lifted ahead has its share of the memory until it is lifted, and for as long as somebody means to read it.
pub struct Ahead(#[allow(dead_code)] Arc<OwnedSemaphorePermit>);

impl Column {
    /// Bytes of `[start, end)` in this column by where they are now. What is cold begins to be lifted in the background, from the
    /// start on, and at most as much as half the memory holds. What could not be lifted counts as unreadable the next time.
    ///
    /// # Errors
    /// BAD_REQUEST for an empty range; DELETED.
    pub fn warm(self: &Arc<Self>, start: u64, end: u64) -> Result<Warmth, Failure> {
        check_span(start, end)?;
        self.touch();
        let unit = u64::from(self.geometry.stripe_unit);
        let (mut next, last) = (start / unit, (end - 1) / unit);
        let (mut dram, mut nvme, mut unreadable) = (0, 0, 0);
        let (mut cold, mut cold_bytes) = (Vec::new(), 0);
        loop {
            let state = self.lock_alive()?;
            let mut seen = 0;
            for (index, chunk) in state.chunks.range(next..=last).take(CHUNKS_A_STEP) {
                let first = self.geometry.offset(*index, 0);
                let (from, to) = (start.saturating_sub(first) as u32, (end - first).min(unit) as u32);
                let bytes =
                    chunk.runs().valid_parts(from, to).map(|(from, to)| u64::from(to - from)).sum::<u64>();
                if !chunk.is_cold() {
                    dram += bytes;
                } else {
                    nvme += bytes;
                    unreadable += if chunk.unreadable { bytes } else { 0 };
                    cold_bytes += u64::from(chunk.runs().end());
                    if bytes > 0 && cold_bytes <= self.shared.arena.capacity() as u64 / 2 {
                        cold.push(*index);
                    }
                }
                (next, seen) = (*index + 1, seen + 1);
            }
            if seen < CHUNKS_A_STEP || next > last {
                break;
            }
        }
        self.lift_all(cold);
        let missing = self.geometry.bytes_between(start, end) - dram - nvme;
        Ok(Warmth { dram, nvme, missing, unreadable })
    }

    /// A read of `[offset, offset + length)` comes soon: a cold chunk of which it wants the most begins to be lifted, while its reader
    /// still does something else. None: there is nothing to lift, or no room for it.
    pub fn read_ahead(self: &Arc<Self>, offset: u64, length: u32) -> Option<Ahead> {
        let place = self.geometry.place(offset, length).ok()?;
        let wanted = u64::from(place.end - place.start);
        let capacity = self.cold(place.chunk, |chunk| {
            let most = wanted * 2 >= chunk.runs().bytes();
            (most && !chunk.is_loading()).then(|| chunk.runs().end() as usize)
        });
        let units = capacity??.div_ceil(AHEAD_UNIT) as u32;
        let ahead = Arc::clone(&self.shared.ahead).try_acquire_many_owned(units).ok()?;
        let column = Arc::clone(self);
        let ahead = Arc::new(ahead);
        let share = Arc::clone(&ahead);
        tokio::spawn(async move {
            // Whoever reads it learns what is wrong with it.
            let _ = column.lift(place.chunk, true).await;
            drop(share);
        });
        Some(Ahead(ahead))
    }

    fn lift_all(self: &Arc<Self>, cold: Vec<u64>) {
        if cold.is_empty() {
            return;
        }
        let Ok(permit) = Arc::clone(&self.shared.warming).try_acquire_owned() else { return };
        let column = Arc::clone(self);
        tokio::spawn(async move {
            let mut lifts = JoinSet::new();
            for index in cold {
                if lifts.len() == LIFTS_MAX {
                    lifts.join_next().await;
                }
                let column = Arc::clone(&column);
                // The log tells of what cannot be lifted, and so does the next one who asks for it.
                lifts.spawn(async move { column.lift(index, false).await });
            }
            lifts.join_all().await;
            drop(permit);
        });
    }
}
