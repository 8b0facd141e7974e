//! What a client has admitted and not yet handed back.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_wire::code::{Code, Failure};
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use crate::client::closed;
use crate::completion::{Completion, Completions};
use crate::stop::Stopper;

/// Requests admitted and not yet reaped: more is a caller that does not reap.
pub const REQUESTS_MAX: usize = 65_536;
/// How late a request that runs by itself notices that its time is over.
const LATENESS: Duration = Duration::from_millis(20);

pub(crate) struct Requests {
    table: Mutex<Table>,
    ended: Condvar,
    admitted: Notify,
    pub completions: Completions,
}

#[derive(Default)]
struct Table {
    last: u64,
    closed: bool,
    stoppers: HashMap<u64, Arc<Stopper>, BuildHasherDefault<Number>>,
}

/// Numbers rise by one: they are their own hashes.
#[derive(Default)]
struct Number(u64);

impl Hasher for Number {
    fn finish(&self) -> u64 {
        // The table looks at the highest bits too.
        self.0 ^ (self.0 << 57)
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only numbers are keys");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

impl Requests {
    pub fn new(completions: Completions) -> Requests {
        Requests { table: Mutex::default(), ended: Condvar::new(), admitted: Notify::new(), completions }
    }

    /// A number for a new request.
    pub fn admit(&self, stopper: &Arc<Stopper>) -> Result<u64, Failure> {
        let mut table = self.table.lock();
        if table.closed {
            return Err(closed());
        }
        if table.stoppers.len() + self.completions.len() >= REQUESTS_MAX {
            let why =
                format!("{REQUESTS_MAX} requests are under way or not reaped; reap before submitting more");
            return Err(Failure::new(Code::Overloaded, why));
        }
        table.last += 1;
        let number = table.last;
        table.stoppers.insert(number, stopper.clone());
        if table.stoppers.len() == 1 {
            self.admitted.notify_one();
        }
        Ok(number)
    }

    pub fn end(&self, number: u64, result: Result<u64, Failure>) {
        let mut table = self.table.lock();
        table.stoppers.remove(&number);
        // Under the lock, so that admitted plus unreaped never counts one too few.
        self.completions.push(Completion::new(number, result));
        if table.closed {
            self.ended.notify_all();
        }
    }

    pub fn cancel(&self, number: u64) {
        // Not under the lock: a request that is free ends at once.
        let stopper = self.table.lock().stoppers.get(&number).cloned();
        if let Some(stopper) = stopper {
            stopper.cancel();
        }
    }

    pub fn pending(&self) -> usize {
        self.table.lock().stoppers.len()
    }

    /// Ends requests that run by themselves when their time is over. Runs as long as the client does.
    pub async fn watch(&self) {
        loop {
            if self.pending() == 0 {
                self.admitted.notified().await;
            }
            tokio::time::sleep(LATENESS).await;
            let now = tokio::time::Instant::now();
            let stoppers: Vec<Arc<Stopper>> = self.table.lock().stoppers.values().cloned().collect();
            stoppers.iter().for_each(|stopper| stopper.expire(now));
        }
    }

    /// Admits nothing more, cancels all, and waits for their end at most until `until`.
    pub fn close(&self, until: Instant) {
        let stoppers: Vec<Arc<Stopper>> = {
            let mut table = self.table.lock();
            table.closed = true;
            table.stoppers.values().cloned().collect()
        };
        stoppers.iter().for_each(|stopper| stopper.cancel());
        let mut table = self.table.lock();
        while !table.stoppers.is_empty() && !self.ended.wait_until(&mut table, until).timed_out() {}
    }

    /// Completes what is left, once nothing can touch its memory any more.
    pub fn complete_rest(&self) {
        let rest: Vec<u64> = self.table.lock().stoppers.drain().map(|(number, _)| number).collect();
        for number in rest {
            let failure = Failure::new(Code::Cancelled, "the client was closed");
            self.completions.push(Completion::new(number, Err(failure)));
        }
    }
}
