//! When a transfer has to end: its deadline, or somebody who no longer wants it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::connection::Connection;

/// Ends every `Stop` that was made from it.
pub(crate) struct Stopper {
    cancelled: AtomicBool,
    changed: Notify,
    deadline: Instant,
    /// Where a request is that no task looks after: its connection, and its number there.
    alone: Mutex<Option<(Arc<Connection>, u64)>>,
}

/// Every await of a transfer races with one of these.
#[derive(Clone)]
pub(crate) struct Stop(Arc<Stopper>);

impl Stopper {
    pub fn new(timeout: Duration) -> Arc<Stopper> {
        Arc::new(Stopper {
            cancelled: AtomicBool::new(false),
            changed: Notify::new(),
            deadline: Instant::now() + timeout,
            alone: Mutex::default(),
        })
    }

    pub fn stop(self: &Arc<Self>) -> Stop {
        Stop(self.clone())
    }

    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
        self.give_up();
    }

    /// Ends a request that no task looks after, if its time is over.
    pub fn expire(&self, now: Instant) {
        if now >= self.deadline {
            self.give_up();
        }
    }

    /// The request runs by itself from here on; whoever stops it gives it up there.
    pub fn leave_alone(&self, connection: Arc<Connection>, number: u64) {
        *self.alone.lock() = Some((connection, number));
        if self.cancelled.load(Ordering::SeqCst) {
            self.give_up();
        }
    }

    /// Why it has to end, if it has to.
    pub fn ended(&self) -> Option<Failure> {
        if self.cancelled.load(Ordering::SeqCst) {
            return Some(Failure::new(Code::Cancelled, "cancelled by the caller"));
        }
        (Instant::now() >= self.deadline).then(|| Failure::new(Code::Timeout, "its time is over"))
    }

    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn give_up(&self) {
        let alone = self.alone.lock().take();
        if let (Some((connection, number)), Some(failure)) = (alone, self.ended()) {
            connection.give_up(number, failure);
        }
    }
}

impl Stop {
    /// Resolves with TIMEOUT or CANCELLED; never earlier.
    pub async fn wait(&mut self) -> Failure {
        let changed = self.0.changed.notified();
        tokio::pin!(changed);
        // Registered before the look, so that no cancellation in between is missed.
        changed.as_mut().enable();
        if self.0.ended().is_none() {
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(self.0.deadline) => {}
            }
        }
        self.0.ended().unwrap_or_else(|| Failure::new(Code::Cancelled, "cancelled by the caller"))
    }

    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Runs `work` until it is done or the transfer has to end; `work` is then dropped.
    pub async fn race<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            failure = self.wait() => Err(failure),
        }
    }
}
