//! Reads go before writes that push something out.
//!
//! A full store gives something up for whatever is written. What is read is of use now, what is written may be later, and
//! both want the same processors, links and disks: a write to a full store lets a multiple of its bytes be read first, as
//! long as somebody reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes that are read before one is written.
const READ_PER_WRITTEN: u64 = 8;
/// A write waits no longer than its own bytes take at this rate, so that readers who are slow cannot hold writers up.
const BYTES_PER_MS: u64 = 256 << 10;
/// The store counts as full for so long after it gave something up for good.
const FULL_FOR: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What tells whether a write has to wait.
pub(crate) struct Precedence {
    opened: Instant,
    reads_under_way: AtomicU64,
    /// Bytes of reads that have ended.
    bytes_read: AtomicU64,
    /// Milliseconds from `opened` until when the store counts as full.
    full_until: AtomicU64,
}

/// A read under way, until what it has found is sent.
pub(crate) struct Reading {
    precedence: Arc<Precedence>,
    bytes: u32,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.precedence.bytes_read.fetch_add(u64::from(self.bytes), Relaxed);
        self.precedence.reads_under_way.fetch_sub(1, Relaxed);
    }
}

impl Precedence {
    pub fn new() -> Arc<Precedence> {
        Arc::new(Precedence {
            opened: Instant::now(),
            reads_under_way: AtomicU64::default(),
            bytes_read: AtomicU64::default(),
            full_until: AtomicU64::default(),
        })
    }

    /// A read of `bytes` begins.
    pub fn read(self: &Arc<Self>, bytes: u32) -> Reading {
        self.reads_under_way.fetch_add(1, Relaxed);
        Reading { precedence: Arc::clone(self), bytes }
    }

    /// Something was given up for good.
    pub fn gave_up(&self) {
        let until = self.opened.elapsed() + FULL_FOR;
        self.full_until.fetch_max(until.as_millis() as u64, Relaxed);
    }

    fn is_full(&self) -> bool {
        self.opened.elapsed().as_millis() < u128::from(self.full_until.load(Relaxed))
    }

    /// Returns when a write of `bytes` may go on.
    pub async fn await_reads(&self, bytes: u32) {
        let until = Instant::now() + Duration::from_millis(u64::from(bytes) / BYTES_PER_MS);
        let enough = self.bytes_read.load(Relaxed) + READ_PER_WRITTEN * u64::from(bytes);
        let reads = || self.reads_under_way.load(Relaxed) > 0 && self.bytes_read.load(Relaxed) < enough;
        while self.is_full() && reads() && Instant::now() < until {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a write that comes now waits at all.
    async fn waits(precedence: &Precedence, bytes: u32) -> bool {
        let mut write = Box::pin(precedence.await_reads(bytes));
        std::future::poll_fn(|context| std::task::Poll::Ready(write.as_mut().poll(context).is_pending()))
            .await
    }

    #[tokio::test]
    async fn a_write_waits_for_reads_only_while_the_store_is_full() {
        let precedence = Precedence::new();
        let reading = precedence.read(1 << 20);
        assert!(!waits(&precedence, 4 << 20).await, "nothing was given up for it");
        precedence.gave_up();
        assert!(waits(&precedence, 4 << 20).await);
        assert!(!waits(&precedence, 4 << 10).await, "what is small is not worth a wait");
        drop(reading);
        assert!(!waits(&precedence, 4 << 20).await, "no read is under way");
    }

    #[tokio::test]
    async fn a_reader_who_never_ends_does_not_hold_writes_up() {
        let precedence = Precedence::new();
        let _reading = precedence.read(1 << 20);
        precedence.gave_up();
        let begun = Instant::now();
        precedence.await_reads(4 << 20).await;
        assert!(begun.elapsed() >= Duration::from_millis(16));
    }

    #[tokio::test]
    async fn reads_that_end_make_up_for_one_that_does_not() {
        let precedence = Precedence::new();
        let _slow = precedence.read(1 << 20);
        precedence.gave_up();
        let write = tokio::spawn({
            let precedence = Arc::clone(&precedence);
            async move { precedence.await_reads(u32::MAX).await }
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!write.is_finished());
        drop(precedence.read(u32::MAX));
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!write.is_finished(), "what is read first is a multiple of what is written");
        for _ in 1..READ_PER_WRITTEN {
            drop(precedence.read(u32::MAX));
        }
        tokio::time::timeout(Duration::from_secs(10), write).await.expect("it went on").unwrap();
    }
}
