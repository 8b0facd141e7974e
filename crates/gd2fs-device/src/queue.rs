//! What waits for a device and what is under way on it.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::vec;

use parking_lot::{Condvar, Mutex};

use crate::request::{Part, Request, Step};
use crate::{Attempt, Done, Engine, Error, Op, Options};

/// Feeds an engine: never more than `depth` attempts at once, the rest first in, first out.
pub(crate) struct Queue {
    pub path: Arc<Path>,
    pub bytes: u64,
    pub engine: Box<dyn Engine>,
    depth: usize,
    waiting_max: usize,
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Default)]
struct State {
    /// Operations of which parts have not begun; only the first may have begun in part.
    waiting: VecDeque<vec::IntoIter<Part>>,
    under_way: usize,
    closed: bool,
}

impl Queue {
    pub fn new(path: &Path, bytes: u64, engine: Box<dyn Engine>, options: &Options) -> Arc<Queue> {
        let (depth, waiting_max) = (options.depth as usize, options.waiting_max);
        let state = Mutex::default();
        Arc::new(Queue { path: path.into(), bytes, engine, depth, waiting_max, state, idle: Condvar::new() })
    }

    /// Takes `op` in, or tells `done` at once why not.
    pub fn submit(self: &Arc<Self>, op: Op, done: Done) {
        if let Err(reason) = op.check(self.bytes) {
            return done(Err(Error::Invalid { path: self.path.to_path_buf(), reason }));
        }
        let parts = Request::parts(Arc::clone(&self.path), op, done);
        let refused = {
            let mut state = self.state.lock();
            if state.waiting.len() >= self.waiting_max {
                Some((
                    parts,
                    Error::Overloaded { path: self.path.to_path_buf(), waiting_max: self.waiting_max },
                ))
            } else {
                state.waiting.push_back(parts.into_iter());
                None
            }
        };
        match refused {
            Some((parts, error)) => parts[0].request.finish(parts.len(), Err(error)),
            None => self.fill(),
        }
    }

    /// Attempts under way and operations waiting.
    pub fn load(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.under_way, state.waiting.len())
    }

    /// Refuses what has not begun; what has begun goes on.
    pub fn close(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        for parts in waiting {
            if let Some(part) = parts.as_slice().first() {
                part.request.finish(parts.len(), Err(Error::Closed { path: self.path.to_path_buf() }));
            }
        }
    }

    /// Waits until nothing is under way, then for the engine's threads. Not to be called on one of them.
    pub fn drain(&self) {
        let mut state = self.state.lock();
        while state.under_way > 0 {
            self.idle.wait(&mut state);
        }
        drop(state);
        self.engine.stop();
    }

    fn fill(self: &Arc<Self>) {
        while let Some(part) = self.next() {
            self.start(part);
        }
    }

    fn next(&self) -> Option<Part> {
        let mut state = self.state.lock();
        if state.under_way == self.depth {
            return None;
        }
        let first = state.waiting.front_mut()?;
        let part = first.next();
        if first.as_slice().is_empty() {
            state.waiting.pop_front();
        }
        state.under_way += part.is_some() as usize;
        part
    }

    fn start(self: &Arc<Self>, part: Part) {
        let queue = Arc::clone(self);
        let (kind, offset, memory) = (part.request.kind, part.offset, part.memory.clone());
        let done = Box::new(move |moved| queue.moved(part, moved));
        self.engine.start(Attempt { kind, offset, memory, done });
    }

    fn moved(self: Arc<Self>, part: Part, moved: std::io::Result<usize>) {
        match part.advance(moved) {
            Step::Again(part) => self.start(part),
            Step::Finished(request, result) => {
                {
                    let mut state = self.state.lock();
                    state.under_way -= 1;
                    if state.under_way == 0 && state.closed {
                        self.idle.notify_all();
                    }
                }
                // First the next part: the device works while the caller's callback runs.
                self.fill();
                request.finish(1, result);
            }
        }
    }
}
