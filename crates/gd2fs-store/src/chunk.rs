//! One stripe unit of one column: what of it is valid, the frame and the log's record that hold it, and who is receiving
//! into it.
//!
//! A chunk is *dirty* (in a frame, newer than any record), *clean* (in a frame and in a record) or *cold* (in a record). Without a
//! log it is always dirty, and nobody minds.
//!
//! The rule that everything else leans on: bytes of a frame that were valid once are never written again while anybody else
//! holds the frame. A write goes straight into the chunk's frame only where nothing was ever valid; otherwise it gets a
//! frame of its own. When that is published, the smaller part is copied: the write into the chunk's frame if nobody else holds
//! that, or else the rest of the chunk into the new frame, which takes over.

use std::sync::{Arc, Weak};

use gd2fs_log::RUNS_MAX;
use gd2fs_wire::guard::{Guard, stands};
use gd2fs_wire::sums::crc32c;
use gd2fs_wire::{Code, Failure};

use crate::arena::Arena;
use crate::dirty::Dirty;
use crate::frame::Frame;
use crate::grains::{Grains, RunGrains};
use crate::hurdle::Hurdle;
use crate::read::Learned;
use crate::runs::{Run, Runs};
use crate::tenants::Tenant;
use crate::tier::Record;

/// Runs that every chunk may have: 12 KiB of them.
const RUNS_FREE: usize = 1024;
/// And one more for each of these bytes of its frame, up to what a record of the log holds; whole pieces need one for 32 KiB.
const BYTES_PER_RUN_MIN: usize = 4096;

pub(crate) struct Chunk {
    /// None: cold.
    frame: Option<Frame>,
    runs: Runs,
    /// Of runs that were read in parts.
    grains: Grains,
    /// Ranges of `frame` that unpublished writes receive into. One for each connection in the middle of a write at most.
    held: Vec<(u32, u32)>,
    /// From here on `frame` may hold bytes that were valid before a truncation and that a reader may still be sending.
    tainted_from: u32,
    /// When it was last used, as for the column.
    pub used_at: u64,
    /// Version of the last change of the bytes.
    pub changed: u64,
    /// What the bytes take of the memory that waits for the log; None: no log, or the record is as new.
    pub dirty: Option<Dirty>,
    /// The newest snapshot that the log has.
    pub record: Option<Record>,
    /// A snapshot on its way to the log.
    pub appending: Option<Appending>,
    /// Whoever holds it reads the chunk from the log into a frame; the others wait for it. It ends with the last of them: one that
    /// fails, or is not waited for any more, leaves nothing behind.
    loading: Weak<tokio::sync::Mutex<()>>,
    /// The last try to read it from the log has failed.
    pub unreadable: bool,
    /// It was lifted for a read that has not come yet, and that counts as one from the log.
    pub ahead: bool,
}

/// A snapshot of the change `changed`, under its own version.
pub(crate) struct Appending {
    pub version: u64,
    pub changed: u64,
    pub runs: Box<[Run]>,
}

impl Chunk {
    /// A chunk around a frame in which nothing is valid yet.
    pub fn new(frame: Frame) -> Chunk {
        Chunk { frame: Some(frame), ..Chunk::cold(Runs::default(), None) }
    }

    /// A chunk as the log has it.
    pub fn cold(runs: Runs, record: Option<Record>) -> Chunk {
        Chunk {
            frame: None,
            runs,
            grains: Grains::default(),
            held: Vec::new(),
            tainted_from: u32::MAX,
            used_at: 0,
            changed: record.as_ref().map_or(0, |record| record.changed),
            dirty: None,
            record,
            appending: None,
            loading: Weak::new(),
            unreadable: false,
            ahead: false,
        }
    }

    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    pub fn is_cold(&self) -> bool {
        self.frame.is_none()
    }

    /// None if the chunk is cold.
    pub fn frame(&self) -> Option<&Frame> {
        self.frame.as_ref()
    }

    fn own(&self) -> &Frame {
        self.frame.as_ref().expect("asked only of chunks that are in memory")
    }

    /// Whether the log has, or is about to have, bytes that a change of `[start, end)` would contradict.
    pub fn contradicts_log(&self, start: u32, end: u32) -> bool {
        (self.record.is_some() || self.appending.is_some()) && self.runs.overlaps(start, end)
    }

    /// Whether the chunk is in both tiers.
    pub fn is_clean(&self) -> bool {
        self.frame.is_some() && self.is_kept()
    }

    /// Whether the record is as new as the chunk.
    fn is_kept(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.changed == self.changed)
    }

    /// Whether nobody reads the chunk's frame, writes into it or writes it to the log.
    pub fn can_go(&self) -> bool {
        self.held.is_empty()
            && self.appending.is_none()
            && self.loading.strong_count() == 0
            && !self.runs.is_empty()
            && self.frame.as_ref().is_none_or(Frame::is_exclusive)
    }

    /// Whether somebody lifts it just now.
    pub fn is_loading(&self) -> bool {
        self.loading.strong_count() > 0
    }

    /// The turn of whoever lifts the chunk; while somebody has it or waits for it the chunk stays.
    pub fn loading(&mut self) -> Arc<tokio::sync::Mutex<()>> {
        self.loading.upgrade().unwrap_or_else(|| {
            let loading = Arc::default();
            self.loading = Arc::downgrade(&loading);
            loading
        })
    }

    /// Gives the frame up. The bytes that this frees.
    pub fn cool(&mut self) -> usize {
        self.grains = Grains::default();
        self.tainted_from = u32::MAX;
        self.frame.take().map_or(0, |frame| frame.capacity())
    }

    /// Gives up a frame whose bytes are wrong, if the log has them right. Readers that hold it will find out by themselves.
    pub fn fall_back(&mut self) -> bool {
        let may = self.is_kept() && self.held.is_empty() && self.appending.is_none();
        if may {
            self.cool();
        }
        may
    }

    /// Takes a frame that has been filled from the record.
    pub fn lift(&mut self, frame: Frame, ahead: bool) {
        self.frame = Some(frame);
        self.unreadable = false;
        self.ahead = ahead;
    }

    /// The runs that hold `[start, end)`, with the grains of those of which only a part is wanted.
    pub fn covering(&self, start: u32, end: u32) -> Option<Vec<(Run, Option<RunGrains>)>> {
        let part = |run: &Run| run.start < start || run.end > end;
        let runs = self.runs.covering(start, end)?.iter();
        Some(runs.map(|run| (*run, part(run).then(|| self.grains.of(run)).flatten())).collect())
    }

    /// Keeps what a reader of `frame` has found out, unless its run has changed meanwhile.
    pub fn learn(&mut self, frame: &Frame, learned: Learned) {
        if !self.is_in(frame) {
            return;
        }
        for (run, grains) in learned {
            if self.runs.covering(run.start, run.end) == Some(&[run]) {
                self.grains.remember(run, grains);
            }
        }
    }

    /// Nothing is valid, and nobody is about to change that: the chunk may go.
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && self.held.is_empty()
    }

    pub fn is_in(&self, frame: &Frame) -> bool {
        self.frame.as_ref().is_some_and(|own| own.is(frame))
    }

    /// A frame into whose `[start, end)` a new write may be received: the chunk's own, or a private one.
    pub fn reserve(&mut self, memory: &Memory, start: u32, end: u32) -> Result<Frame, Hurdle> {
        self.check_runs(start, end)?;
        if self.runs.overlaps(start, end) {
            return memory.frame(self.own().capacity().max(end as usize));
        }
        if end as usize > self.own().capacity() {
            let larger = memory.frame(end as usize)?;
            self.move_to(larger, end, end);
        } else if !self.is_untouched(start, end) {
            return memory.frame(self.own().capacity());
        }
        self.held.push((start, end));
        Ok(self.own().clone())
    }

    /// Runs live beside the arena: so that they stay small against the frame that pays for them, a chunk in too many separate
    /// pieces takes only writes that touch one of them until they have grown together.
    fn check_runs(&self, start: u32, end: u32) -> Result<(), Failure> {
        let most = RUNS_FREE + self.own().capacity().max(end as usize) / BYTES_PER_RUN_MIN;
        let most = most.min(RUNS_MAX);
        if self.runs.count() >= most && !self.runs.overlaps(start.saturating_sub(1), end + 1) {
            let message =
                format!("this stripe unit is in {most} separate pieces already; write contiguous ranges");
            return Err(Failure::new(Code::NoSpace, message));
        }
        Ok(())
    }

    /// Whether what is valid in `[start, end)` is what `received` holds there; its receive must be over.
    pub fn agrees(&self, received: &Frame, start: u32, end: u32) -> bool {
        self.runs.touched(start, end).iter().all(|run| {
            let (from, to) = (run.start.max(start), run.end.min(end));
            // SAFETY: valid bytes are written by nobody, and the receive is over.
            unsafe { self.own().bytes(from, to) == received.bytes(from, to) }
        })
    }

    /// A write that `reserve` admitted to `frame` ended without being published.
    pub fn release(&mut self, frame: &Frame, start: u32, end: u32) {
        if self.is_in(frame) {
            self.held.retain(|held| *held != (start, end));
        }
    }

    /// Makes `[start, end)` of `received`, whose sums were verified, part of the chunk; all of it or, on an error, nothing.
    pub fn publish(
        &mut self,
        memory: &Memory,
        received: &Frame,
        start: u32,
        end: u32,
        sums: &[u32],
    ) -> Result<(), Hurdle> {
        for run in self.runs.straddling(start, end) {
            self.verify(run)?;
        }
        self.part_from_record();
        if !self.is_in(received) {
            if self.may_copy_into(start, end) {
                // SAFETY: the receive into `received` is over; nobody reads or writes the target range, and the column's lock
                // keeps it so.
                unsafe { self.own().copy_from(received, start, end) };
            } else {
                let target = self.target_for(memory, received, start, end)?;
                self.move_to(target, start, end);
            }
        }
        self.grains.forget(start, end);
        let frame = self.own().clone();
        // SAFETY: what stays valid beside the range is written by nobody.
        self.runs.replace(start, end, sums, |from, to| crc32c(unsafe { frame.bytes(from, to) }));
        self.release(received, start, end);
        Ok(())
    }

    /// Whether `[start, end)` of the chunk's frame may be written under the column's lock: nothing there is valid or held by an
    /// unpublished write, or nobody else holds the frame at all, and it is the smaller part that moves.
    fn may_copy_into(&self, start: u32, end: u32) -> bool {
        if end as usize > self.own().capacity() {
            return false;
        }
        if !self.runs.overlaps(start, end) {
            return self.is_untouched(start, end);
        }
        // Whoever reads got its frame under the lock that is held now. A small write into a large chunk would copy a thousand
        // times its own bytes otherwise.
        let kept: u64 = self.runs.outside(start, end).map(|(from, to)| u64::from(to - from)).sum();
        u64::from(end - start) <= kept && self.own().is_exclusive()
    }

    /// A frame that holds `[start, end)` of `received` and has room for the rest of the chunk: `received` itself where
    /// possible. Only overlapping writes beside a growing chunk need a new one here, and may meet NO_SPACE this late.
    fn target_for(&self, memory: &Memory, received: &Frame, start: u32, end: u32) -> Result<Frame, Hurdle> {
        let capacity = self.own().capacity().max(end as usize);
        if received.is_exclusive() && received.capacity() >= capacity {
            return Ok(received.clone());
        }
        let target = memory.frame(capacity)?;
        // SAFETY: the receive into `received` is over, and the target is new.
        unsafe { target.copy_from(received, start, end) };
        Ok(target)
    }

    /// Copies what is valid outside `[start, end)` into `target`, which nobody else uses, and continues there. Writers into the
    /// former frame keep it alive and are copied over when they publish.
    fn move_to(&mut self, target: Frame, start: u32, end: u32) {
        for (from, to) in self.runs.outside(start, end) {
            // SAFETY: valid bytes are written by nobody; the target's are used by nobody else.
            unsafe { target.copy_from(self.own(), from, to) };
        }
        self.frame = Some(target);
        self.held.clear();
        self.tainted_from = u32::MAX;
    }

    /// Drops everything from `end` on; fails, changing nothing, if the run that is cut does not match its sum.
    pub fn truncate(&mut self, end: u32) -> Result<(), Failure> {
        if end >= self.runs.end() {
            return Ok(());
        }
        for run in self.runs.straddling(end, u32::MAX) {
            self.verify(run)?;
        }
        self.part_from_record();
        if !self.own().is_exclusive() {
            self.tainted_from = self.tainted_from.min(end);
        }
        self.grains.forget(end, u32::MAX);
        let frame = self.own().clone();
        // SAFETY: valid bytes are written by nobody.
        self.runs.truncate(end, |from, to| crc32c(unsafe { frame.bytes(from, to) }));
        Ok(())
    }

    /// The runs are about to change: those of the record stay with it.
    fn part_from_record(&mut self) {
        if let Some(record) = &mut self.record {
            record.runs.get_or_insert_with(|| self.runs.as_slice().into());
        }
    }

    fn is_untouched(&self, start: u32, end: u32) -> bool {
        end <= self.tainted_from && self.held.iter().all(|(from, to)| end <= *from || *to <= start)
    }

    fn verify(&self, run: &Run) -> Result<(), Failure> {
        // SAFETY: valid bytes are written by nobody.
        verify(run, crc32c(unsafe { self.own().bytes(run.start, run.end) }))
    }
}

/// Where the frames of a chunk come from, and for whom they count.
pub(crate) struct Memory<'a> {
    pub arena: &'a Arc<Arena>,
    pub tenant: &'a Tenant,
}

impl Memory<'_> {
    /// A frame of at least `bytes`.
    pub fn frame(&self, bytes: usize) -> Result<Frame, Hurdle> {
        self.tenant.frame(self.arena, bytes).map_err(|failure| Hurdle::room(bytes, failure))
    }
}

pub(crate) fn verify(run: &Run, actual: u32) -> Result<(), Failure> {
    if actual != run.crc && stands(Guard::Checksum) {
        let Run { start, end, crc } = run;
        return Err(Failure::new(
            Code::Corrupt,
            format!("bytes [{start}, {end}) of the chunk sum to {actual:#010x}, stored was {crc:#010x}"),
        ));
    }
    Ok(())
}
