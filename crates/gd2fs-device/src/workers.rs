//! Threads that run what they are given, in order of arrival.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

thread_local! {
    static OF_AN_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread belongs to an engine, so that waiting for one here would never end.
pub(crate) fn on_engine_thread() -> bool {
    OF_AN_ENGINE.get()
}

/// A thread of an engine, known to `on_engine_thread`.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.into()).spawn(move || {
        OF_AN_ENGINE.set(true);
        body();
    })
}

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads. How much may wait is for the caller to bound: an engine's depth does.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    stopping: bool,
}

impl Workers {
    pub fn new(name: &str, count: u32) -> io::Result<Workers> {
        let workers = Workers { shared: Arc::default(), threads: Mutex::default() };
        for _ in 0..count {
            let shared = Arc::clone(&workers.shared);
            workers.threads.lock().push(spawn(name, move || shared.run())?);
        }
        Ok(workers)
    }

    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.shared.state.lock().jobs.push_back(Box::new(job));
        self.shared.changed.notify_one();
    }

    /// Waits until all jobs are done, those included that jobs add, and the threads have ended.
    pub fn stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.changed.notify_all();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A job that panics has been reported by the panic's hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    /// Lets the threads end by themselves: this may be one of them.
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.stopping {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}
