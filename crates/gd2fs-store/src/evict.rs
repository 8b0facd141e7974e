//! Giving up memory, and space in the logs, for what is needed more: least recently used columns first, and of each its tail
//! first, since the prefix that remains is of use.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use gd2fs_wire::Failure;

use crate::column::Column;
use crate::shared::Shared;
use crate::tier::Tier;

/// At least this share of a tier is given up at once, so that the search pays.
const SHARE: u64 = 64;
/// What was used so lately is not given up for good: whoever is about to use it, or still writes it, would lose it at once.
const RECENT_MS: u64 = 250;

impl Shared {
    /// Gives up at least `bytes` of memory if there is something to give up, and returns how many. `spare`: nothing that is
    /// being read, as long as the log is about to make other memory free.
    pub fn evict(&self, bytes: usize, spare: bool) -> usize {
        let _one = self.evicting.lock();
        let goal = bytes.max(self.arena.capacity() / SHARE as usize);
        let mut freed = 0;
        let (read, other): (Vec<_>, Vec<_>) =
            self.least_recent().into_iter().partition(|column| self.is_being_read(column));
        for column in other.into_iter().chain(read.into_iter().take_while(|_| !spare)) {
            if freed >= goal {
                break;
            }
            freed += if self.tiers.is_empty() {
                if self.is_recent(&column) {
                    break;
                }
                column.drop_tail(goal - freed)
            } else {
                column.cool_tail(goal - freed)
            };
        }
        self.counters.evicted_dram_bytes.fetch_add(freed as u64, Relaxed);
        freed
    }

    /// Gives up chunks of one log so that `bytes` or more can be written, and returns how many bytes that was once it is
    /// durable that they are gone.
    pub async fn evict_log(&self, tier: &Arc<Tier>, bytes: u64) -> Result<u64, Failure> {
        let goal = bytes.max(tier.log.stats().total_bytes / SHARE);
        let mut freed = 0;
        for column in self.least_recent() {
            if freed >= goal || self.is_recent(&column) {
                break;
            }
            let of_column = column.forget_tail(tier, goal - freed);
            if of_column > 0 {
                column.settle().await?;
            }
            freed += of_column;
        }
        self.counters.evicted_log_bytes.fetch_add(freed, Relaxed);
        Ok(freed)
    }

    fn least_recent(&self) -> Vec<Arc<Column>> {
        let mut all = self.columns.upgrade().map(|columns| columns.all()).unwrap_or_default();
        all.sort_by_cached_key(|column| column.used_at.load(Relaxed));
        all
    }

    fn is_recent(&self, column: &Column) -> bool {
        self.now_ms().saturating_sub(column.used_at.load(Relaxed)) < RECENT_MS
    }

    fn is_being_read(&self, column: &Column) -> bool {
        let read_at = column.read_at.load(Relaxed);
        read_at > 0 && self.now_ms().saturating_sub(read_at) < RECENT_MS
    }
}

impl Column {
    /// Gives up the frames of clean chunks, from the last on, until `goal` bytes are free.
    fn cool_tail(&self, goal: usize) -> usize {
        let mut state = self.state.lock();
        let mut freed = 0;
        for (_, chunk) in state.chunks.iter_mut().rev() {
            if freed >= goal {
                break;
            }
            if chunk.can_cool() {
                freed += chunk.cool();
            }
        }
        freed
    }

    /// Without a log: gives up whole chunks, from the last on, until `goal` bytes are free.
    fn drop_tail(&self, goal: usize) -> usize {
        let mut state = self.state.lock();
        let mut freed = 0;
        while freed < goal
            && let Some((index, chunk)) = state.chunks.last_key_value()
            && chunk.can_go()
            && !self.is_pinned(*index)
        {
            freed += chunk.frame().map_or(0, |frame| frame.capacity());
            let index = *index;
            self.lose(&mut state, index);
        }
        freed
    }

    /// Gives up chunks that `tier` has, from the last on, until `goal` bytes of it are free.
    fn forget_tail(&self, tier: &Arc<Tier>, goal: u64) -> u64 {
        let mut state = self.state.lock();
        let mut going = Vec::new();
        let mut freed = 0;
        for (index, chunk) in state.chunks.iter().rev() {
            if freed >= goal || !chunk.can_go() || self.is_pinned(*index) {
                break;
            }
            if let Some(record) = chunk.record.as_ref().filter(|record| Arc::ptr_eq(&record.tier, tier)) {
                freed += u64::from(record.place.bytes);
            }
            // Also those of other logs: a hole in the middle makes what lies behind it useless.
            going.push(*index);
        }
        going.into_iter().for_each(|index| self.lose(&mut state, index));
        freed
    }

    fn is_pinned(&self, index: u64) -> bool {
        let (file, column) = self.name();
        self.shared.pins.is_pinned(file, column, index..index + 1, Instant::now())
    }
}
