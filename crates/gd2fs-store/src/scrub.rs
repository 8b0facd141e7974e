//! Reads everything that is kept again, on a thread of its own, and drops what does not match its sums.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gd2fs_wire::messages::ScrubState;
use gd2fs_wire::sums::crc32c;
use parking_lot::Mutex;

use crate::chunk::verify;
use crate::column::Column;

/// After so much work it rests for as long: half a processor, and half of the bandwidth that one can take, stay free.
const WORK: Duration = Duration::from_millis(2);

/// At most one round at a time. Dropping it ends the round within one chunk of at most 64 MiB.
#[derive(Default)]
pub(crate) struct Scrubber {
    progress: Arc<Progress>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Progress {
    state: Mutex<ScrubState>,
    begun: Mutex<Option<Instant>>,
    stop: AtomicBool,
}

/// Marks the end of a round, also if it panics.
struct Round(Arc<Progress>);

impl Drop for Round {
    fn drop(&mut self) {
        let begun = self.0.begun.lock().take();
        let mut state = self.0.state.lock();
        state.running = false;
        state.rounds += 1;
        state.seconds = begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
    }
}

impl Scrubber {
    pub fn state(&self) -> ScrubState {
        let begun = *self.progress.begun.lock();
        let mut state = *self.progress.state.lock();
        if let Some(begun) = begun.filter(|_| state.running) {
            state.seconds = begun.elapsed().as_secs_f64();
        }
        state
    }

    /// Begins a round over these columns, unless one runs.
    pub fn start(&self, columns: impl FnOnce() -> Vec<Arc<Column>>) {
        let mut thread = self.thread.lock();
        if self.progress.state.lock().running {
            return;
        }
        if let Some(former) = thread.take() {
            // It has ended but for its last instructions.
            let _ = former.join();
        }
        let columns = columns();
        let bytes_total = columns.iter().map(|column| column.stat().bytes).sum();
        let rounds = self.progress.state.lock().rounds;
        *self.progress.state.lock() =
            ScrubState { running: true, bytes_total, rounds, ..ScrubState::default() };
        *self.progress.begun.lock() = Some(Instant::now());
        let round = Round(self.progress.clone());
        let spawned =
            std::thread::Builder::new().name("gd2fs-scrub".into()).spawn(move || scrub(&columns, &round));
        match spawned {
            Ok(handle) => *thread = Some(handle),
            // The round, which the closure took with it, is marked as ended by now.
            Err(error) => tracing::error!(%error, "no thread for a scrub"),
        }
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.progress.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.get_mut().take() {
            // A panic in it was reported by itself.
            let _ = thread.join();
        }
    }
}

fn scrub(columns: &[Arc<Column>], round: &Round) {
    let mut since = Instant::now();
    for column in columns {
        let mut from = 0;
        while let Some(looked) = column.scrub_next(from) {
            from = looked.chunk + 1;
            let mut state = round.0.state.lock();
            state.bytes += looked.bytes;
            state.corrupt_chunks += u64::from(looked.corrupt);
            drop(state);
            if round.0.stop.load(Relaxed) {
                return;
            }
            let worked = since.elapsed();
            if worked >= WORK {
                std::thread::sleep(worked);
                since = Instant::now();
            }
        }
    }
}

/// A chunk that was read again.
pub(crate) struct Looked {
    chunk: u64,
    bytes: u64,
    corrupt: bool,
}

impl Column {
    /// Verifies the first chunk from `from` on, and drops it if it does not match its sums; None: there is none.
    fn scrub_next(&self, from: u64) -> Option<Looked> {
        let (chunk, frame, runs) = {
            let state = self.state.lock();
            let (index, chunk) = state.chunks.range(from..).next()?;
            (*index, chunk.frame().clone(), chunk.runs().clone())
        };
        let bytes = frame.capacity() as u64;
        // SAFETY: bytes that were valid under the lock are written by nobody while somebody holds their frame.
        let sum = |start, end| crc32c(unsafe { frame.bytes(start, end) });
        let Some(bad) = runs.iter().find(|run| verify(run, sum(run.start, run.end)).is_err()) else {
            return Some(Looked { chunk, bytes, corrupt: false });
        };
        let mut state = self.state.lock();
        let same = state.chunks.get(&chunk).is_some_and(|now| {
            now.frame().is(&frame) && now.runs().covering(bad.start, bad.end) == Some(&[*bad])
        });
        if same {
            // All of it: a memory cell that fails seldom fails alone. Whoever reads it now learns that it is lost.
            state.chunks.remove(&chunk);
            let end = self.geometry().offset(chunk, runs.end());
            state.dropped_below = state.dropped_below.max(end);
            self.shared.asks.changed.note((self.file(), self.geometry().column));
            tracing::error!(
                file = %format_args!("{:032x}", self.file()), column = self.geometry().column, chunk,
                "memory has changed by itself; the chunk is dropped"
            );
        }
        Some(Looked { chunk, bytes, corrupt: same })
    }
}
