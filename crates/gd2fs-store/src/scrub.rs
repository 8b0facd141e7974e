//! Reads everything that is kept again, on a thread of its own, and drops what does not match its sums. What cannot be read is
//! counted, and left as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gd2fs_device::Buffer;
use gd2fs_log::{LogError, Place};
use gd2fs_wire::messages::ScrubState;
use gd2fs_wire::sums::crc32c;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::chunk::verify;
use crate::column::{Column, bytes_of};
use crate::ends::Loss;
use crate::frame::Frame;
use crate::runs::Run;
use crate::tier::Tier;

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
    /// Of all rounds, for those who compute rates.
    sums: Mutex<ScrubSums>,
    begun: Mutex<Option<Instant>>,
    stop: AtomicBool,
}

/// Of all rounds since the store was opened.
#[derive(Clone, Copy, Default)]
pub(crate) struct ScrubSums {
    /// Gone through.
    pub bytes: u64,
    /// Dropped.
    pub corrupt_chunks: u64,
    /// Not verified, since the log could not be read.
    pub unreadable_chunks: u64,
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

    pub fn sums(&self) -> ScrubSums {
        *self.progress.sums.lock()
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
        let bytes_total = columns.iter().map(|column| column.scrub_bytes()).sum();
        let rounds = self.progress.state.lock().rounds;
        *self.progress.state.lock() =
            ScrubState { running: true, bytes_total, rounds, ..ScrubState::default() };
        *self.progress.begun.lock() = Some(Instant::now());
        let round = Round(self.progress.clone());
        let runtime = Handle::try_current().ok();
        let spawned = std::thread::Builder::new()
            .name("gd2fs-scrub".into())
            .spawn(move || scrub(&columns, &round, runtime.as_ref()));
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

fn scrub(columns: &[Arc<Column>], round: &Round, runtime: Option<&Handle>) {
    let mut since = Instant::now();
    for column in columns {
        let mut from = 0;
        while let Some(looked) = column.scrub_next(from, runtime) {
            from = looked.chunk + 1;
            let mut state = round.0.state.lock();
            state.bytes += looked.bytes;
            state.corrupt_chunks += u64::from(looked.corrupt);
            state.unreadable_chunks += u64::from(looked.unreadable);
            drop(state);
            let mut sums = round.0.sums.lock();
            sums.bytes += looked.bytes;
            sums.corrupt_chunks += u64::from(looked.corrupt);
            sums.unreadable_chunks += u64::from(looked.unreadable);
            drop(sums);
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
    /// Something of it did not match its sums, and was given up.
    corrupt: bool,
    /// Its log could not be read.
    unreadable: bool,
}

/// What a record turned out to be.
enum Verdict {
    /// What was written, or gone meanwhile.
    Well,
    Corrupt,
    Unreadable,
}

/// What is kept of a chunk, in either tier.
struct Kept {
    chunk: u64,
    runs: Vec<Run>,
    frame: Option<Frame>,
    record: Option<(Arc<Tier>, Place, u64, Vec<Run>)>,
}

impl Column {
    /// Bytes that a scrub reads.
    fn scrub_bytes(&self) -> u64 {
        let state = self.state.lock();
        let records = state.chunks.values().filter_map(|chunk| chunk.record.as_ref());
        bytes_of(&state.chunks) + records.map(|record| u64::from(record.place.bytes)).sum::<u64>()
    }

    /// Verifies the first chunk from `from` on, and gives up what does not match its sums; None: there is none.
    fn scrub_next(self: &Arc<Self>, from: u64, runtime: Option<&Handle>) -> Option<Looked> {
        let kept = {
            let state = self.state.lock();
            let (index, chunk) = state.chunks.range(from..).next()?;
            let runs = chunk.runs().as_slice().to_vec();
            let record = chunk.record.as_ref().map(|record| {
                let runs = record.runs.as_deref().map_or_else(|| runs.clone(), <[Run]>::to_vec);
                (Arc::clone(&record.tier), record.place, record.version, runs)
            });
            Kept { chunk: *index, frame: chunk.frame().cloned(), runs, record }
        };
        let mut looked = Looked { chunk: kept.chunk, bytes: 0, corrupt: false, unreadable: false };
        if let Some(frame) = &kept.frame {
            looked.bytes += frame.capacity() as u64;
            // SAFETY: bytes that were valid under the lock are written by nobody while somebody holds their frame.
            let sum = |run: &Run| crc32c(unsafe { frame.bytes(run.start, run.end) });
            if kept.runs.iter().any(|run| verify(run, sum(run)).is_err()) {
                looked.corrupt = true;
                self.rotted(kept.chunk, frame);
            }
        }
        // A record lies in a log, which only a store on a runtime has.
        if let (Some((tier, place, version, runs)), Some(runtime)) = (kept.record, runtime) {
            looked.bytes += u64::from(place.bytes);
            match runtime.block_on(self.scrub_record(kept.chunk, &tier, place, version, &runs)) {
                Verdict::Well => {}
                Verdict::Corrupt => looked.corrupt = true,
                Verdict::Unreadable => looked.unreadable = true,
            }
        }
        Some(looked)
    }

    /// Memory has changed by itself. Where the log has the same bytes they are read from there; else the chunk is lost, all of
    /// it: a memory cell that fails seldom fails alone.
    fn rotted(&self, index: u64, frame: &Frame) {
        tracing::error!("{}: chunk {index}: memory has changed by itself", self.title());
        if !self.heal(index, frame) {
            let mut state = self.state.lock();
            if state.chunks.get(&index).is_some_and(|chunk| chunk.is_in(frame)) {
                self.lose(&mut state, index, Loss::Damaged);
            }
        }
    }

    /// Reads a record, and gives it up if it does not hold what was written to it.
    async fn scrub_record(
        self: &Arc<Self>,
        index: u64,
        tier: &Tier,
        place: Place,
        version: u64,
        runs: &[Run],
    ) -> Verdict {
        let buffer = Arc::new(Buffer::new(place.bytes as usize));
        // SAFETY: the operation keeps the buffer, which is read only after it.
        let memory = unsafe { buffer.slice() };
        let (first, end) = (place.first, place.first + place.bytes);
        match tier.log.read(place, first, end, memory.into(), Arc::clone(&buffer)).await {
            // Released, or moved by reclaim, which has verified it.
            Err(LogError::Gone(_)) => return Verdict::Well,
            // It says nothing of what the log holds. The log has told of it.
            Err(_) => return Verdict::Unreadable,
            Ok(()) => {}
        }
        let bytes = |run: &Run| &buffer[(run.start - first) as usize..(run.end - first) as usize];
        let holds = runs.iter().all(|run| verify(run, crc32c(bytes(run))).is_ok());
        if holds {
            return Verdict::Well;
        }
        let (path, title) = (tier.path.display(), self.title());
        tracing::error!("{path}: {title}: chunk {index}: {place:?} does not hold what was written");
        self.damaged(index, version);
        Verdict::Corrupt
    }
}
