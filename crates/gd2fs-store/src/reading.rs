//! Reads of a column, from memory or from the log.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use gd2fs_log::{LogError, Place as LogPlace};
use gd2fs_transport::Slice;
use gd2fs_wire::sums::crc32c;
use gd2fs_wire::{Code, Failure};

use crate::chunk::{Chunk, verify};
use crate::column::Column;
use crate::frame::Frame;
use crate::geometry::Place;
use crate::grains::RunGrains;
use crate::read::{Extent, Learned, ReadView};
use crate::room::Room;
use crate::runs::Run;
use crate::tier::{Tier, failure_of};

/// A record can move, or go, while it is looked up; more often in a row it does not.
const TRIES_MAX: u32 = 16;

/// What a read found under the column's lock.
enum Found {
    /// Nothing: the range lies at or beyond the column's end.
    End,
    Memory {
        frame: Frame,
        place: Place,
        runs: Vec<(Run, Option<RunGrains>)>,
        ahead: bool,
    },
    Log(Where, Place),
}

/// A range of a cold chunk in its log.
struct Where {
    tier: Arc<Tier>,
    place: LogPlace,
    version: u64,
    /// The runs that are wanted, whole.
    runs: Vec<Run>,
    /// Whether most of the chunk is wanted, so that all of it shall be lifted into memory.
    most: bool,
}

impl Where {
    /// These runs of a cold chunk.
    fn of(chunk: &Chunk, runs: Vec<Run>, most: bool) -> Where {
        let record = chunk.record.as_ref().expect("a cold chunk has a record");
        let (tier, place, version) = (Arc::clone(&record.tier), record.place, record.version);
        Where { tier, place, version, runs, most }
    }
}

impl Column {
    /// A view of `[offset, offset + length)`, shorter only where the column ends. `summed` = false skips every verification.
    /// What lies in the log is read from there: all of its chunk, which then stays in memory, or, for a small part, only its blocks.
    pub async fn read(
        self: &Arc<Self>,
        epoch: u32,
        offset: u64,
        length: u32,
        summed: bool,
    ) -> Result<ReadView, Failure> {
        let reading = self.shared.precedence.read(length);
        Ok(self.look(epoch, offset, length, summed).await?.while_it_lives(reading))
    }

    async fn look(
        self: &Arc<Self>,
        epoch: u32,
        offset: u64,
        length: u32,
        summed: bool,
    ) -> Result<ReadView, Failure> {
        let mut cold: Option<Instant> = None;
        for _ in 0..TRIES_MAX {
            let (found, place) = match self.find(epoch, offset, length)? {
                Found::End => return Ok(ReadView::empty()),
                Found::Memory { frame, place, runs, ahead } => {
                    self.hit(cold, ahead);
                    match self.view(&frame, place, runs, summed) {
                        Err(failure) if failure.code == Code::Corrupt && self.heal(place.chunk, &frame) => {
                            continue;
                        }
                        other => return other,
                    }
                }
                Found::Log(found, place) => (found, place),
            };
            cold.get_or_insert_with(Instant::now);
            if found.most {
                self.lift(place.chunk, false).await?;
            } else if let Some(view) = self.fetch(&found, place, summed).await? {
                self.hit(cold, false);
                return Ok(view);
            }
        }
        Err(self.restless())
    }

    /// Counts a read, which waited for the log since then if it did. One for which its chunk was lifted ahead is one from the log.
    fn hit(&self, cold: Option<Instant>, ahead: bool) {
        let counters = &self.shared.counters;
        if let Some(since) = cold {
            counters.cold_read_latency.record(since.elapsed());
        }
        let hits = if cold.is_some() || ahead { &counters.hits_nvme } else { &counters.hits_dram };
        hits.fetch_add(1, Relaxed);
    }

    fn find(&self, epoch: u32, offset: u64, length: u32) -> Result<Found, Failure> {
        let mut place = self.geometry.place(offset, length)?;
        let mut state = self.lock_alive()?;
        let now = self.touch_read();
        let mut ahead = false;
        if let Some(chunk) = state.chunks.get_mut(&place.chunk) {
            chunk.used_at = now;
            ahead = std::mem::take(&mut chunk.ahead);
        }
        self.check_epoch(&state, epoch)?;
        if !self.is_endless(&state) {
            let available = self.length(&state).saturating_sub(offset).min(u64::from(length)) as u32;
            if available == 0 {
                return Ok(Found::End);
            }
            place.end = place.start + available;
        }
        let (start, end) = (place.start, place.end);
        let missing = || {
            let failure = self.missing(&state, offset, offset + u64::from(end - start));
            if failure.code == Code::Lost {
                self.shared.counters.misses_lost.fetch_add(1, Relaxed);
            }
            failure
        };
        let chunk = state.chunks.get(&place.chunk).ok_or_else(missing)?;
        if let Some(frame) = chunk.frame() {
            let runs = chunk.covering(start, end).ok_or_else(missing)?;
            return Ok(Found::Memory { frame: frame.clone(), place, runs, ahead });
        }
        let runs = chunk.runs().covering(start, end).ok_or_else(missing)?.to_vec();
        let most = u64::from(end - start) * 2 >= chunk.runs().bytes();
        Ok(Found::Log(Where::of(chunk, runs, most), place))
    }

    fn view(
        &self,
        frame: &Frame,
        place: Place,
        mut runs: Vec<(Run, Option<RunGrains>)>,
        summed: bool,
    ) -> Result<ReadView, Failure> {
        if !summed {
            runs.clear();
        }
        let extent = Extent { frame: frame.clone(), first: 0 };
        let (view, learned) =
            ReadView::new(extent, place.start, place.end, &runs).map_err(|f| self.explain(f))?;
        self.learn(place.chunk, frame, learned);
        Ok(view)
    }

    fn learn(&self, index: u64, frame: &Frame, learned: Learned) {
        if !learned.is_empty()
            && let Some(chunk) = self.state.lock().chunks.get_mut(&index)
        {
            chunk.learn(frame, learned);
        }
    }

    /// Reads the blocks of a part of a cold chunk into a frame that only this read has. None: the record is another by now.
    async fn fetch(
        self: &Arc<Self>,
        found: &Where,
        place: Place,
        summed: bool,
    ) -> Result<Option<ReadView>, Failure> {
        let blocks = gd2fs_log::cover(&found.runs);
        let frame = self.frame(blocks.len()).await?;
        if !self.read_record(place.chunk, found, &frame, blocks.clone(), blocks.start).await? {
            return Ok(None);
        }
        let extent = Extent { frame, first: blocks.start };
        let mut runs = Vec::new();
        if summed {
            self.verify_record(place.chunk, found, &extent)?;
            runs = found.runs.iter().map(|run| (*run, None)).collect();
        }
        let (view, _) = ReadView::new(extent, place.start, place.end, &runs).map_err(|f| self.explain(f))?;
        Ok(Some(view))
    }

    /// Reads `[blocks)` of a record into a frame that begins with the chunk's byte `first`. False: it is gone or has moved.
    ///
    /// # Errors
    /// INTERNAL: the disk has failed the read. That says nothing of what the log holds: nothing is given up for it, and the next read
    /// asks again.
    async fn read_record(
        &self,
        index: u64,
        found: &Where,
        frame: &Frame,
        blocks: std::ops::Range<u32>,
        first: u32,
    ) -> Result<bool, Failure> {
        let into = frame.address(blocks.start - first, blocks.end - first);
        // SAFETY: the frame is kept by the operation, and nobody else uses it before this is over.
        let memory = unsafe { Slice::new(into, blocks.len()) };
        let read = found.tier.log.read(found.place, blocks.start, blocks.end, memory.into(), frame.clone());
        match read.await {
            Ok(()) => Ok(true),
            Err(LogError::Gone(_)) => Ok(false),
            Err(error) => {
                if let Some(chunk) = self.state.lock().chunks.get_mut(&index) {
                    chunk.unreadable = is_still(chunk, found);
                }
                let Failure { code, message } = failure_of(&error);
                let message = format!(
                    "{}: its log cannot be read now, and nothing is given up for that: {message}",
                    self.title()
                );
                Err(Failure::new(code, message))
            }
        }
    }

    /// What does not hold what was written is given up: the chunk is lost.
    fn verify_record(self: &Arc<Self>, index: u64, found: &Where, extent: &Extent) -> Result<(), Failure> {
        // SAFETY: the read is over, and nobody writes the frame.
        let sum = |run: &Run| crc32c(unsafe { extent.bytes(run.start, run.end) });
        let damage = found.runs.iter().find_map(|run| verify(run, sum(run)).err());
        let Some(failure) = damage else { return Ok(()) };
        let (path, title, place) = (found.tier.path.display(), self.title(), found.place);
        tracing::error!("{path}: {title}: chunk {index}: {place:?}: {}", failure.message);
        self.damaged(index, found.version);
        Err(self.explain(failure))
    }

    /// A frame that nobody has yet.
    async fn frame(self: &Arc<Self>, bytes: usize) -> Result<Frame, Failure> {
        let mut room = Room::to_read(&self.shared);
        loop {
            match self.tenant().frame(&self.shared.arena, bytes) {
                Err(failure) if failure.code == Code::NoSpace => {
                    room.make(self.tenant(), bytes, failure).await?;
                }
                other => return other,
            }
        }
    }

    /// The same for something that nobody waits for: it takes the place of what may go, and gives up otherwise.
    fn frame_at_once(&self, bytes: usize) -> Result<Frame, Failure> {
        match self.tenant().frame(&self.shared.arena, bytes) {
            Err(failure)
                if failure.code == Code::NoSpace && self.shared.evict(bytes, self.tenant(), false) > 0 =>
            {
                self.tenant().frame(&self.shared.arena, bytes)
            }
            other => other,
        }
    }

    /// Lifts a cold chunk into memory, together with others who want it too. Ok also if it went meanwhile. `ahead`: for a read that has
    /// not come yet.
    pub(crate) async fn lift(self: &Arc<Self>, index: u64, ahead: bool) -> Result<(), Failure> {
        for _ in 0..TRIES_MAX {
            let Some(loading) = self.cold(index, Chunk::loading) else { return Ok(()) };
            let _turn = loading.lock_owned().await;
            let look = |chunk: &mut Chunk| {
                (Where::of(chunk, chunk.runs().as_slice().to_vec(), true), chunk.runs().end() as usize)
            };
            let Some((found, capacity)) = self.cold(index, look) else { return Ok(()) };
            let frame = if ahead { self.frame_at_once(capacity)? } else { self.frame(capacity).await? };
            let blocks = gd2fs_log::cover(&found.runs);
            let turn = if ahead { Some(found.tier.turn_ahead().await) } else { None };
            let read = self.read_record(index, &found, &frame, blocks, 0).await;
            if turn.is_some() {
                // Whoever is next asks the disk before this one is verified.
                drop(turn);
                tokio::task::yield_now().await;
            }
            if !read? {
                continue;
            }
            self.verify_record(index, &found, &Extent { frame: frame.clone(), first: 0 })?;
            let mut state = self.state.lock();
            if let Some(chunk) = state.chunks.get_mut(&index).filter(|chunk| is_still(chunk, &found)) {
                self.shared.counters.lifted_bytes.fetch_add(frame.capacity() as u64, Relaxed);
                chunk.lift(frame, ahead);
                chunk.used_at = self.shared.now_us();
                self.list_dram(&mut state);
                return Ok(());
            }
        }
        Err(self.restless())
    }

    /// Looks at a chunk that is cold; None: it is not, or has gone.
    pub(crate) fn cold<T>(&self, index: u64, look: impl FnOnce(&mut Chunk) -> T) -> Option<T> {
        self.state.lock().chunks.get_mut(&index).filter(|chunk| chunk.is_cold()).map(look)
    }

    /// What is wanted is somewhere else whenever it is looked at.
    fn restless(&self) -> Failure {
        let message =
            format!("{}: memory is short, so that what was read went again; try again", self.title());
        Failure::new(Code::Overloaded, message)
    }
}

/// Whether what was read is what the chunk is.
fn is_still(chunk: &Chunk, found: &Where) -> bool {
    chunk.is_cold() && chunk.record.as_ref().is_some_and(|record| record.version == found.version)
}
