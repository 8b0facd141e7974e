//! Numbers about both tiers.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::histogram::Histogram;
use crate::store::Store;
use crate::tier::live_bytes_max;

/// What the tiers hold, and sums since the store was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct TierStats {
    /// Bytes of all logs.
    pub log_total: u64,
    /// Bytes in them that can be wanted at once: with more, something is given up.
    pub log_capacity: u64,
    /// Bytes in them that are wanted.
    pub log_live: u64,
    /// Bytes in them that can be written before reclaim must free more.
    pub log_free: u64,
    /// Syncs of all logs.
    pub log_syncs: u64,
    /// Logs that take nothing any more.
    pub log_failed: u64,
    /// Logs that do not take what is to become durable at the moment, those that take nothing any more among them.
    pub log_trouble: u64,
    /// Reads that the logs' devices have failed.
    pub log_read_errors: u64,
    /// Bytes in memory that the logs do not have.
    pub dirty_bytes: u64,
    /// How long the oldest bytes that a log does not have are in memory, also while they are being written; zero if there are none.
    pub flush_lag: Duration,
    /// Bytes that would be given up for others: all that is kept, but for what is pinned or just used.
    pub evictable_bytes: u64,
    /// Bytes written to the logs.
    pub flushed_bytes: u64,
    /// Bytes read from the logs into memory to stay.
    pub lifted_bytes: u64,
    /// Bytes of memory that were given up for others.
    pub evicted_dram_bytes: u64,
    /// Bytes of the logs that were given up for others.
    pub evicted_log_bytes: u64,
    /// Reads served from memory.
    pub hits_dram: u64,
    /// Reads that waited for a log.
    pub hits_nvme: u64,
    /// Reads of what was here once.
    pub misses_lost: u64,
    /// Frames and records found not to hold what was written to them.
    pub corrupt: u64,
    /// Ranges that are pinned.
    pub pins: u64,
    /// Bytes that scrubs have gone through.
    pub scrub_bytes: u64,
    /// Chunks that scrubs have dropped.
    pub scrub_corrupt: u64,
    /// Chunks that scrubs have left as they were, since a log could not be read.
    pub scrub_unreadable: u64,
    /// Records that were durable, and did not hold any more what was written when the logs were opened.
    pub log_records_damaged: u64,
    /// Records at the logs' ends that were not durable when the logs were opened, and are gone.
    pub log_records_dropped: u64,
    /// Logs of which nothing was kept when they were opened.
    pub logs_given_up: u64,
}

impl Store {
    pub fn tier_stats(&self) -> TierStats {
        let shared = &self.shared;
        let counters = &shared.counters;
        let scrubbed = self.scrubber.sums();
        let mut stats = TierStats {
            dirty_bytes: shared.dirty_bytes() as u64,
            evictable_bytes: if shared.tiers.is_empty() { shared.arena.used() as u64 } else { 0 },
            flushed_bytes: counters.flushed_bytes.load(Relaxed),
            lifted_bytes: counters.lifted_bytes.load(Relaxed),
            evicted_dram_bytes: counters.evicted_dram_bytes.load(Relaxed),
            evicted_log_bytes: counters.evicted_log_bytes.load(Relaxed),
            hits_dram: counters.hits_dram.load(Relaxed),
            hits_nvme: counters.hits_nvme.load(Relaxed),
            misses_lost: counters.misses_lost.load(Relaxed),
            corrupt: counters.corrupt.load(Relaxed),
            pins: shared.pins.expire(Instant::now()) as u64,
            scrub_bytes: scrubbed.bytes,
            scrub_corrupt: scrubbed.corrupt_chunks,
            scrub_unreadable: scrubbed.unreadable_chunks,
            log_records_damaged: counters.log_records_damaged.load(Relaxed),
            log_records_dropped: counters.log_records_dropped.load(Relaxed),
            logs_given_up: counters.logs_given_up.load(Relaxed),
            ..TierStats::default()
        };
        for tier in &shared.tiers {
            let log = tier.log.stats();
            stats.log_total += log.total_bytes;
            stats.log_capacity += live_bytes_max(&log);
            stats.log_live += log.live_bytes;
            stats.log_free += log.free_bytes;
            stats.evictable_bytes += log.live_bytes;
            stats.log_syncs += log.syncs;
            stats.log_read_errors += log.read_errors;
            stats.log_failed += u64::from(tier.log.failed().is_some());
            stats.log_trouble += u64::from(tier.check().is_err());
            stats.flush_lag = stats.flush_lag.max(tier.behind.lag());
        }
        stats
    }

    /// Bytes that count for a tenant: its frames in memory, also those of reads and writes under way, and its records in the logs.
    pub fn held_by(&self, tenant: &str) -> (u64, u64) {
        let tenant = self.shared.tenants.get(tenant);
        tenant.map_or((0, 0), |tenant| (tenant.dram.held(), tenant.log.held()))
    }

    /// Reads that waited for a log, from their begin to the bytes in memory.
    pub fn cold_read_latency(&self) -> &Histogram {
        &self.shared.counters.cold_read_latency
    }

    /// Snapshots, from the begin of the append to its end.
    pub fn flush_latency(&self) -> &Histogram {
        &self.shared.counters.flush_latency
    }
}
