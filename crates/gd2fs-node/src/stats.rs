//! Counters of a node. Only sums: whoever scrapes them computes rates.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gd2fs_store::Store;
use gd2fs_wire::{Code, Failure};
use serde_json::{Map, Value, json};

/// Upper bounds in microseconds; a last bucket counts what is slower.
pub const LATENCY_BOUNDS_US: [u64; 16] = [
    25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    5_000_000, 30_000_000,
];

#[derive(Default)]
pub struct Histogram {
    counts: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    pub fn record(&self, taken: Duration) {
        let us = taken.as_micros() as u64;
        self.counts[LATENCY_BOUNDS_US.partition_point(|bound| *bound < us)].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    fn to_json(&self) -> Value {
        let counts: Vec<u64> = self.counts.iter().map(|count| count.load(Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        json!({ "bounds_us": LATENCY_BOUNDS_US, "counts": counts, "count": count, "sum_us": self.sum_us.load(Relaxed) })
    }
}

#[derive(Default)]
pub struct Stats {
    /// File data of replies, counted when they begin.
    pub bytes_read: AtomicU64,
    /// File data published.
    pub bytes_written: AtomicU64,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
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
        json!({
            "incarnation": store.incarnation(),
            "bytes_read": self.bytes_read.load(Relaxed),
            "bytes_written": self.bytes_written.load(Relaxed),
            "reads": self.reads.load(Relaxed),
            "writes": self.writes.load(Relaxed),
            "connections": self.connections.load(Relaxed),
            "connections_refused": self.connections_refused.load(Relaxed),
            "files": store.columns(),
            "arena_used": store.arena().used(),
            "arena_mapped": store.arena().mapped(),
            "arena_capacity": store.arena().capacity(),
            "errors": errors,
            "checksum_failures": self.errors(&[Code::Checksum, Code::Corrupt]),
            "stale_refused": self.errors(&[Code::StaleLayout, Code::StaleWriter, Code::StaleIncarnation]),
            "read_latency": self.read_latency.to_json(),
            "write_latency": self.write_latency.to_json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_bucket() {
        let histogram = Histogram::default();
        for us in [0, 25, 26, 30_000_000, 99_000_000] {
            histogram.record(Duration::from_micros(us));
        }
        let json = histogram.to_json();
        assert_eq!(json["count"], 5);
        assert_eq!((&json["counts"][0], &json["counts"][1]), (&json!(2), &json!(1)));
        assert_eq!((&json["counts"][15], &json["counts"][16]), (&json!(1), &json!(1)));
        assert_eq!(json["sum_us"], 129_000_051u64);
    }
}
