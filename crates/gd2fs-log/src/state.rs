//! The append point and what is in flight behind it: everything that one lock guards.

use std::collections::VecDeque;

use gd2fs_device::BLOCK;
use tokio::sync::oneshot;

use crate::entry::{Key, Note};
use crate::error::{LogError, Result};
use crate::position::{Mark, Position};
use crate::record::{Known, SEGMENT_HEADER_BLOCKS, SegmentHeader, SegmentId};
use crate::segment::{Live, Segments};
use crate::witness::Witness;

/// Records in flight at once; what is appended beyond waits. It keeps the device's queue (64 calls) full several times over,
/// and bounds how much has to be written again when a write fails.
pub(crate) const IN_FLIGHT_MAX: usize = 256;

/// Free segments that snapshots leave to notes and reclaim. Reclaim needs one to move a segment's records before that
/// segment is free, so notes leave it that one; they have one more, since deletions make room in a full log.
pub(crate) const RESERVED: u32 = 2;

/// On whose behalf something is appended: how far it may use up free segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Snapshot,
    Note,
    Reclaim,
}

impl Class {
    fn leaves(self) -> u32 {
        match self {
            Class::Snapshot => RESERVED,
            Class::Note => 1,
            Class::Reclaim => 0,
        }
    }
}

/// How a write that was in flight ended, as its waiter learns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Written,
    /// The device failed this write or one before it; nothing of it counts.
    Failed(String),
}

/// What the owner is told when a snapshot is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub live: Live,
    /// Where reclaim took it from.
    pub from: Option<crate::Place>,
}

pub(crate) struct Flight {
    pub order: u64,
    /// What is complete once this and all before it are. None for a segment's header: alone it completes nothing, so that a
    /// segment that never gets a record can be taken back.
    pub end: Option<Mark>,
    /// Whether it says anything beyond what all headers do.
    pub says: bool,
    /// What its header calls durable.
    pub called: Position,
    pub settled: Option<Result<(), String>>,
    pub told: Option<Told>,
    /// None for a segment's header, for which nobody waits.
    pub waiter: Option<oneshot::Sender<Outcome>>,
}

/// A place for a record, at the append point.
pub(crate) struct Slot {
    pub order: u64,
    pub at: Position,
    pub segment: SegmentId,
    pub offset: u64,
    pub known: Known,
    /// The header to be written first, if the record opened its segment, with its order and offset.
    pub opened: Option<(u64, u64, SegmentHeader)>,
    pub outcome: oneshot::Receiver<Outcome>,
}

pub(crate) enum Admission {
    Now(Box<Slot>),
    /// There may be room later.
    Wait,
    /// Nobody knows: upkeep, which would make room, has failed.
    Failed(LogError),
    /// There is none until the owner releases something.
    Full,
    Superseded,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    pub segment: u32,
    pub id: SegmentId,
    pub block: u32,
}

/// What an append asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub class: Class,
    pub blocks: u32,
    /// Whether it says anything beyond what all headers do.
    pub says: bool,
    /// The record of a snapshot that is void if a note that was begun later says so.
    pub snapshot: Option<(Key, u64)>,
    /// Number of the append's beginning, see [`State::begin`].
    pub begun: u64,
    pub from: Option<crate::Place>,
}

pub(crate) struct State {
    pub segments: Segments,
    pub open: Option<Open>,
    /// Where the next record stands.
    pub tail: Position,
    pub generation_next: u64,
    pub in_flight: VecDeque<Flight>,
    pub order_next: u64,
    /// Order of the last write of which the owner was, or is just being, told.
    pub told_order: u64,
    /// Order of the last complete write: what comes before it is written, and the owner knows of it.
    pub completed_order: u64,
    pub completed: Mark,
    pub durable_order: u64,
    pub durable: Position,
    pub witness: Witness,
    pub floor: Position,
    /// A write has failed: nothing is admitted until all that is in flight has ended.
    pub breaking: bool,
    pub draining: bool,
    /// Reclaim can make no room until something is released.
    pub exhausted: bool,
    /// Why upkeep makes no room at the moment, until it tries again.
    pub trouble: Option<LogError>,
    /// Somebody makes room: without upkeep nothing is worth waiting for.
    pub kept: bool,
    /// A checkpoint waits for the notes that its entries have obeyed.
    pub checkpointing: bool,
    pub failed: Option<String>,
    pub closed: bool,
    pub version_max: u64,
    /// Appends that have begun and have no place yet, oldest first.
    begun: VecDeque<u64>,
    begun_next: u64,
    /// Notes that were begun while older appends had no place yet.
    voids: VecDeque<(u64, Note)>,
    /// Blocks that upkeep has freed, less those that it has used up itself.
    pub gain: i64,
    pub bytes_since_checkpoint: u64,
    pub records_since_checkpoint: u64,
}

impl State {
    pub fn new(segments: Segments) -> State {
        State {
            segments,
            open: None,
            tail: Position::default(),
            generation_next: 1,
            in_flight: VecDeque::new(),
            order_next: 1,
            told_order: 0,
            completed_order: 0,
            completed: Mark::default(),
            durable_order: 0,
            durable: Position::default(),
            witness: Witness::default(),
            floor: Position::default(),
            breaking: false,
            draining: false,
            exhausted: false,
            trouble: None,
            kept: false,
            checkpointing: false,
            failed: None,
            closed: false,
            version_max: 0,
            begun: VecDeque::new(),
            begun_next: 0,
            voids: VecDeque::new(),
            gain: 0,
            bytes_since_checkpoint: 0,
            records_since_checkpoint: 0,
        }
    }

    /// # Errors
    /// `Failed`.
    pub fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |why| Err(LogError::Failed(why.clone())))
    }

    /// An append waits for room from here on. Whatever a later note makes void will not be appended behind that note, where
    /// a recovery from a checkpoint between both would take it for the newer.
    pub fn begin(&mut self) -> u64 {
        self.begun_next += 1;
        self.begun.push_back(self.begun_next);
        self.begun_next
    }

    /// The append has its place, or has given up.
    pub fn end(&mut self, begun: u64) {
        self.begun.retain(|other| *other != begun);
        let oldest = self.begun.front().copied().unwrap_or(u64::MAX);
        while self.voids.front().is_some_and(|(at, _)| *at < oldest) {
            self.voids.pop_front();
        }
    }

    /// A note is on its way: older appends that have no place yet must obey it.
    pub fn announce(&mut self, note: Note) {
        self.version_max = self.version_max.max(note.version());
        if !self.begun.is_empty() {
            self.voids.push_back((self.begun_next, note));
        }
    }

    pub fn admit(&mut self, ask: &Ask, id: impl FnOnce() -> SegmentId) -> Admission {
        if let Some((key, version)) = ask.snapshot {
            let voided = self.voids.iter().any(|(at, note)| *at >= ask.begun && note.voids(&key, version));
            let released = ask.from.is_some_and(|from| !self.segments.is_live(&from));
            if voided || released {
                return Admission::Superseded;
            }
        }
        if self.breaking || self.in_flight.len() >= IN_FLIGHT_MAX {
            return Admission::Wait;
        }
        let fits = self.open.is_some_and(|open| open.block + ask.blocks <= self.segments.division.blocks());
        let free = self.segments.free_count();
        // Once reclaim works with what is reserved for it, the room that it has opened is its own.
        let urgent = ask.class == Class::Reclaim || (ask.class == Class::Note && self.checkpointing);
        let leaves = if urgent { 0 } else { ask.class.leaves() };
        if !(if fits { free >= leaves } else { free > leaves }) {
            // Whether a log is full cannot be told while upkeep fails: to release something would not help.
            if let Some(error) = self.trouble.as_ref().filter(|_| !urgent) {
                return Admission::Failed(error.clone());
            }
            // Reclaim, and what a checkpoint waits for, do not wait for room: nobody else makes it.
            let over = self.exhausted || !self.kept || urgent;
            return if over { Admission::Full } else { Admission::Wait };
        }
        let before = self.free_blocks();
        let opened = if fits { None } else { self.open_segment(id()) };
        let slot = self.take(ask, opened);
        if ask.class == Class::Reclaim {
            self.gain -= (before - self.free_blocks()) as i64;
        }
        Admission::Now(Box::new(slot))
    }

    /// Blocks that can be written before anything more is freed. What a change costs is read off here, so that nothing is
    /// left out: not the record alone, but the unused end of the segment before it and its own segment's header too.
    pub fn free_blocks(&self) -> u64 {
        let blocks = self.segments.division.blocks();
        let rest = self.open.map_or(0, |open| blocks - open.block);
        u64::from(self.segments.free_count()) * u64::from(blocks) + u64::from(rest)
    }

    fn open_segment(&mut self, id: SegmentId) -> Option<(u64, u64, SegmentHeader)> {
        if let Some(open) = self.open.take() {
            self.segments.close(open.segment);
            // The segment that was closed may be one that reclaim can empty.
            self.exhausted = false;
        }
        let generation = self.generation_next;
        self.generation_next += 1;
        let segment = self.segments.open(generation).expect("a free segment was counted");
        let division = self.segments.division;
        let offset = division.start(segment);
        let header = SegmentHeader { id, generation, previous: self.tail, known: self.known() };
        self.open = Some(Open { segment, id, block: SEGMENT_HEADER_BLOCKS });
        self.tail = Position { generation, sequence: 0 };
        let order = self.push(None, false, None);
        Some((order, offset, header))
    }

    fn take(&mut self, ask: &Ask, opened: Option<(u64, u64, SegmentHeader)>) -> Slot {
        let division = self.segments.division;
        let open = self.open.as_mut().expect("a segment is open");
        let (segment, id, offset) = (open.segment, open.id, division.offset(open.segment, open.block));
        open.block += ask.blocks;
        self.segments.use_blocks(segment, ask.blocks);
        let at = self.tail;
        self.tail.sequence += 1;
        let bytes = u64::from(ask.blocks) * BLOCK as u64;
        self.bytes_since_checkpoint += bytes;
        self.records_since_checkpoint += 1;
        if let Some((_, version)) = ask.snapshot {
            self.version_max = self.version_max.max(version);
        }
        let (waiter, outcome) = oneshot::channel();
        let end = Mark { at: self.tail, offset: offset + bytes };
        let order = self.push(Some(end), ask.says, Some(waiter));
        Slot { order, at, segment: id, offset, known: self.known(), opened, outcome }
    }

    fn push(&mut self, end: Option<Mark>, says: bool, waiter: Option<oneshot::Sender<Outcome>>) -> u64 {
        let called = self.durable;
        let order = self.order_next;
        self.order_next += 1;
        self.in_flight.push_back(Flight { order, end, says, called, settled: None, told: None, waiter });
        order
    }

    fn known(&self) -> Known {
        Known { durable: self.durable, floor: self.floor }
    }

    /// A write, and everything before it, is complete, and the owner knows of it.
    pub fn complete(&mut self, flight: &Flight) {
        self.completed_order = flight.order;
        self.completed = flight.end.unwrap_or(self.completed);
        if flight.says {
            self.witness.said = self.completed.at;
        }
        self.witness.called = self.witness.called.max(flight.called);
    }

    pub fn flight(&mut self, order: u64) -> Option<&mut Flight> {
        let first = self.in_flight.front()?.order;
        self.in_flight.get_mut(usize::try_from(order.checked_sub(first)?).ok()?)
    }

    /// After a failed write, once nothing is in flight any more: the log goes on, in a new segment, where the last complete
    /// record ends. Returns whom to tell, with why.
    ///
    /// Segments that were opened behind that record are free at once, without a checkpoint: what a header promises about them
    /// is nothing. No position that was ever complete, durable, or a checkpoint's lies in them, and no place. What the device
    /// may have of them is void as soon as the next segment's header is there, which names the same last record: a recovery
    /// finds its number behind theirs. Without it, the last of them, as far as it is whole, is what it always was, a tail that
    /// nobody acknowledged. So an outage uses up the rest of one segment, however often writes are tried.
    pub fn break_off(&mut self) -> Vec<(oneshot::Sender<Outcome>, String)> {
        let why = self.in_flight.iter().find_map(|flight| flight.settled.clone()?.err()).unwrap_or_default();
        let told =
            self.in_flight.drain(..).filter_map(|flight| flight.waiter).map(|waiter| (waiter, why.clone()));
        let told = told.collect();
        let before = self.free_blocks();
        if let Some(open) = self.open.take() {
            self.segments.close(open.segment);
        }
        self.segments.take_back(self.completed.at.generation);
        // Reclaim may be able to empty the one that was closed.
        self.exhausted = false;
        // Otherwise reclaim would gain by every write that fails.
        self.gain -= before.saturating_sub(self.free_blocks()) as i64;
        self.tail = self.completed.at;
        self.breaking = false;
        told
    }
}
