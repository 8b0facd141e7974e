//! Chunks that the log does not have yet: how many bytes they are, and in which order they are written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::column::Column;

/// A share of the memory that waits for the log, given back when it goes.
pub(crate) struct Dirty {
    total: Arc<AtomicUsize>,
    bytes: usize,
}

impl Dirty {
    pub fn new(total: &Arc<AtomicUsize>, bytes: usize) -> Dirty {
        total.fetch_add(bytes, Relaxed);
        Dirty { total: Arc::clone(total), bytes }
    }
}

impl Drop for Dirty {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Relaxed);
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

    /// How long the oldest chunk has been waiting.
    pub fn lag(&self) -> Duration {
        self.state.lock().later.front().map_or(Duration::ZERO, |(since, _)| since.elapsed())
    }
}
