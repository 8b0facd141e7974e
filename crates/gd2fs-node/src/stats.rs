//! Counters of a node. Only sums: whoever scrapes them computes rates.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use gd2fs_store::{Histogram, LATENCY_BOUNDS_US, Store, TierStats};
use gd2fs_wire::{Code, Failure};
use serde_json::{Map, Value, json};

fn latency(histogram: &Histogram) -> Value {
    let counts = histogram.counts();
    let count: u64 = counts.iter().sum();
    json!({ "bounds_us": LATENCY_BOUNDS_US, "counts": counts, "count": count, "sum_us": histogram.sum_us() })
}

fn of_tiers(tiers: &TierStats) -> Map<String, Value> {
    let numbers = [
        ("log_total", tiers.log_total),
        ("log_capacity", tiers.log_capacity),
        ("log_live", tiers.log_live),
        ("log_free", tiers.log_free),
        ("log_failed", tiers.log_failed),
        ("log_trouble", tiers.log_trouble),
        ("log_read_errors", tiers.log_read_errors),
        ("dirty_bytes", tiers.dirty_bytes),
        ("evictable_bytes", tiers.evictable_bytes),
        ("flush_lag_ms", tiers.flush_lag.as_millis() as u64),
        ("flushed_bytes", tiers.flushed_bytes),
        ("lifted_bytes", tiers.lifted_bytes),
        ("evicted_dram_bytes", tiers.evicted_dram_bytes),
        ("evicted_log_bytes", tiers.evicted_log_bytes),
        ("hits_dram", tiers.hits_dram),
        ("hits_nvme", tiers.hits_nvme),
        ("misses_lost", tiers.misses_lost),
        ("corrupt", tiers.corrupt),
        ("pins", tiers.pins),
        ("scrub_bytes", tiers.scrub_bytes),
        ("scrub_corrupt", tiers.scrub_corrupt),
        ("scrub_unreadable", tiers.scrub_unreadable),
        ("log_records_damaged", tiers.log_records_damaged),
        ("log_records_dropped", tiers.log_records_dropped),
        ("logs_given_up", tiers.logs_given_up),
    ];
    numbers.into_iter().map(|(name, number)| (name.to_owned(), Value::from(number))).collect()
}

#[derive(Default)]
pub struct Stats {
    /// File data of replies, counted when they begin.
    pub bytes_read: AtomicU64,
    /// File data published.
    pub bytes_written: AtomicU64,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    /// Writes refused before any of their payload was taken in.
    pub refused_unread: AtomicU64,
    /// Open now.
    pub connections: AtomicU64,
    /// Closed at once because `connections_max` was reached.
    pub connections_refused: AtomicU64,
    /// From the header's arrival to the reply's end.
    pub read_latency: Histogram,
    pub write_latency: Histogram,
    errors: Errors,
}

struct Errors([AtomicU64; Code::ALL.len()]);

impl Default for Errors {
    fn default() -> Errors {
        Errors(std::array::from_fn(|_| AtomicU64::default()))
    }
}

impl Stats {
    pub fn refused(&self, failure: &Failure) {
        let index = Code::ALL.iter().position(|code| *code == failure.code).expect("ALL lists every code");
        self.errors.0[index].fetch_add(1, Relaxed);
    }

    fn errors(&self, codes: &[Code]) -> u64 {
        let counted = Code::ALL.iter().zip(&self.errors.0).filter(|(code, _)| codes.contains(code));
        counted.map(|(_, count)| count.load(Relaxed)).sum()
    }

    pub fn to_json(&self, store: &Store) -> Value {
        let errors: Map<String, Value> = Code::ALL
            .iter()
            .zip(&self.errors.0)
            .map(|(code, count)| (code.name().to_owned(), Value::from(count.load(Relaxed))))
            .filter(|(_, count)| count != &Value::from(0))
            .collect();
        let mut all = json!({
            "incarnation": store.incarnation(),
            "bytes_read": self.bytes_read.load(Relaxed),
            "bytes_written": self.bytes_written.load(Relaxed),
            "reads": self.reads.load(Relaxed),
            "writes": self.writes.load(Relaxed),
            "writes_refused_unread": self.refused_unread.load(Relaxed),
            "connections": self.connections.load(Relaxed),
            "connections_refused": self.connections_refused.load(Relaxed),
            "files": store.columns(),
            "arena_used": store.arena().used(),
            "arena_mapped": store.arena().mapped(),
            "arena_capacity": store.arena().capacity(),
            "errors": errors,
            "checksum_failures": self.errors(&[Code::Checksum, Code::Corrupt]),
            "stale_refused": self.errors(&[Code::StaleLayout, Code::StaleWriter, Code::StaleIncarnation]),
            "read_latency": latency(&self.read_latency),
            "write_latency": latency(&self.write_latency),
            "cold_read_latency": latency(store.cold_read_latency()),
            "flush_latency": latency(store.flush_latency()),
        });
        all.as_object_mut().expect("made above").append(&mut of_tiers(&store.tier_stats()));
        all
    }
}
