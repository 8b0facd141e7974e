//! How long operations took. Only sums: whoever scrapes them computes rates.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

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

    /// How many took up to each bound, and how many longer than the last.
    pub fn counts(&self) -> Vec<u64> {
        self.counts.iter().map(|count| count.load(Relaxed)).collect()
    }

    /// All of them together, in microseconds.
    pub fn sum_us(&self) -> u64 {
        self.sum_us.load(Relaxed)
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
        let counts = histogram.counts();
        assert_eq!((counts[0], counts[1], counts[15], counts[16]), (2, 1, 1, 1));
        assert_eq!(counts.iter().sum::<u64>(), 5);
        assert_eq!(histogram.sum_us(), 129_000_051);
    }
}
