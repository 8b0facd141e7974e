//! Chunks that the log does not have yet: how many bytes they are, and in which order they are written.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::column::Column;

/// What one log is behind: memory that holds bytes which it does not have, and since when.
#[derive(Default)]
pub(crate) struct Behind {
    bytes: AtomicUsize,
    since: Mutex<Since>,
}

/// Numbered as they came, so that the first is the oldest. At most two for each dirty chunk.
#[derive(Default)]
struct Since {
    next: u64,
    begun: BTreeMap<u64, Instant>,
}

impl Behind {
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// How long the oldest bytes that the log does not have are there; zero if it has all.
    pub fn lag(&self) -> Duration {
        let since = self.since.lock().begun.first_key_value().map(|(_, begun)| *begun);
        since.map_or(Duration::ZERO, |begun| begun.elapsed())
    }
}

/// Since when a log lacks something.
struct Age {
    behind: Arc<Behind>,
    number: u64,
}

impl Age {
    fn new(behind: &Arc<Behind>) -> Age {
        let mut since = behind.since.lock();
        let number = since.next;
        since.next += 1;
        // The time is taken under the lock: the order of the numbers is that of the times.
        since.begun.insert(number, Instant::now());
        Age { behind: Arc::clone(behind), number }
    }
}

impl Drop for Age {
    fn drop(&mut self) {
        self.behind.since.lock().begun.remove(&self.number);
    }
}

/// A chunk's share of what its log is behind, given back when it goes.
pub(crate) struct Dirty {
    behind: Arc<Behind>,
    bytes: usize,
    age: Age,
    /// Of what has changed since the snapshot that is on its way was taken.
    later: Option<Age>,
}

impl Dirty {
    /// A chunk that has just become newer than its log.
    pub fn new(behind: &Arc<Behind>, bytes: usize) -> Dirty {
        behind.bytes.fetch_add(bytes, Relaxed);
        Dirty { behind: Arc::clone(behind), bytes, age: Age::new(behind), later: None }
    }

    /// It has changed again; `appending`: a snapshot without the change is on its way.
    pub fn change(&mut self, bytes: usize, appending: bool) {
        self.behind.bytes.fetch_add(bytes, Relaxed);
        self.behind.bytes.fetch_sub(std::mem::replace(&mut self.bytes, bytes), Relaxed);
        if appending && self.later.is_none() {
            self.later = Some(Age::new(&self.behind));
        }
    }

    /// The snapshot is in the log; what has changed since it was taken is not.
    pub fn appended(&mut self) {
        if let Some(later) = self.later.take() {
            self.age = later;
        }
    }

    /// The snapshot did not reach the log: all is as old as before.
    pub fn not_appended(&mut self) {
        self.later = None;
    }
}

impl Drop for Dirty {
    fn drop(&mut self) {
        self.behind.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// A chunk by its column and index.
pub(crate) type Due = (Weak<Column>, u64);

/// The chunks that one log shall get. A chunk is in it at most once by itself, and as often as somebody waits for it.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<Waiting>,
    pub wake: Notify,
}

#[derive(Default)]
struct Waiting {
    urgent: VecDeque<Due>,
    later: VecDeque<(Instant, Due)>,
}

/// What the queue has for its flusher.
pub(crate) enum Next {
    Chunk(Due),
    /// Nothing before then.
    At(Instant),
    Nothing,
}

impl Queue {
    /// To be written when it has been dirty for the delay. Wakes the flusher if nothing waited before.
    pub fn push(&self, due: Due) {
        let mut state = self.state.lock();
        state.later.push_back((Instant::now(), due));
        let first = state.later.len() == 1;
        drop(state);
        if first {
            self.wake.notify_one();
        }
    }

    /// To be written now.
    pub fn hurry(&self, due: Due) {
        self.state.lock().urgent.push_back(due);
        self.wake.notify_one();
    }

    /// What is next for a flusher that leaves chunks `delay` long to grow.
    pub fn next(&self, delay: Duration) -> Next {
        let mut state = self.state.lock();
        if let Some(due) = state.urgent.pop_front() {
            return Next::Chunk(due);
        }
        match state.later.front() {
            None => Next::Nothing,
            Some((since, _)) if since.elapsed() < delay => Next::At(*since + delay),
            Some(_) => Next::Chunk(state.later.pop_front().expect("just seen").1),
        }
    }
}
