//! The share of a file that lives on this node, and the rules under which it changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gd2fs_log::{ColumnState, Key, Note};
use gd2fs_wire::capability::{Capability, Right, format_file_id};
use gd2fs_wire::guard::{Guard, stands};
use gd2fs_wire::messages::{ColumnStat, SealItem};
use gd2fs_wire::{Code, Failure};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::chunk::{Chunk, Memory};
use crate::columns::Name;
use crate::ends::End;
use crate::geometry::{Geometry, Place};
use crate::hurdle::Hurdle;
use crate::keeping::Owed;
use crate::room::Room;
use crate::shared::Shared;
use crate::standing::{Listed, Standing};

/// Operations on it are in files of their own: `reading`, `writing`, `keeping` (what becomes of it in the log),
/// `standing` and `evict`.
pub struct Column {
    pub(crate) file: u128,
    pub(crate) geometry: Geometry,
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: Mutex<State>,
    /// A snapshot arrived in the log, or will not.
    pub(crate) progress: Notify,
    pub(crate) standing: Standing,
}

#[derive(Default)]
pub(crate) struct State {
    /// Highest epoch seen; 0 until the first capability or seal.
    pub epoch: u32,
    /// The node's incarnation when the column was placed here. A smaller one than the current: what is missing is lost.
    pub born: u32,
    /// Highest write grant seen; 0 is plain file semantics.
    pub grant: u64,
    /// File offset below which nothing changes any more.
    pub sealed: u64,
    /// Version of the last change of what is above.
    pub version: u64,
    pub deleted: bool,
    /// This life is about to end: nothing is written any more.
    pub closed: bool,
    pub chunks: BTreeMap<u64, Chunk>,
    /// Up to where it had reached in an earlier life, or with what is lost.
    pub reached: u64,
    /// Below this file offset what is missing was there once, or may have been: it was evicted, found damaged, or not kept by a
    /// life that did not stop in order.
    pub lost_end: u64,
    /// Chunks that were found damaged and dropped, in this life of the node.
    pub damaged: BTreeSet<u64>,
    /// Up to where something was evicted in this life.
    pub evicted_end: u64,
    pub end: End,
    /// Whether a log may hold something of the column: then changes without bytes must reach it too.
    pub logged: bool,
    /// What must be durable before anything that depends on it is answered.
    pub owed: Owed,
    pub listed: Listed,
}

/// What an OPEN tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Highest acknowledged end in this column, as a file offset.
    pub length: u64,
    pub sealed: u64,
    pub grant: u64,
    /// Nobody knows any more where the column ended.
    pub lost: bool,
}

impl Column {
    pub(crate) fn new(file: u128, geometry: Geometry, shared: Arc<Shared>) -> Column {
        let epoch = shared.data.epochs.highest(file, geometry.column);
        let column = Column::with(file, geometry, shared, State { epoch, ..State::default() });
        column.touch();
        column
    }

    /// One that nobody has used in this life.
    pub(crate) fn with(file: u128, geometry: Geometry, shared: Arc<Shared>, state: State) -> Column {
        let (state, progress) = (Mutex::new(state), Notify::new());
        Column { file, geometry, shared, state, progress, standing: Standing::default() }
    }

    pub fn file(&self) -> u128 {
        self.file
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Admits a capability: adopts its epoch if that is higher, and its grant if it may write and the grant is higher. A new
    /// grant drops whatever lies beyond the seal, in the same step in which older grants stop being valid; it is durable, as
    /// far as the log knows the column, when this returns.
    pub(crate) async fn open(
        self: &Arc<Self>,
        capability: &Capability,
        epoch: u32,
        born: u32,
    ) -> Result<Opened, Failure> {
        let mut room = Room::to_write(&self.shared);
        let opened = loop {
            match self.try_open(capability, epoch, born) {
                Ok(opened) => break opened,
                Err(hurdle) => self.take(hurdle, &mut room).await?,
            }
        };
        if capability.rights.contains(&Right::Write) {
            self.settle().await?;
        }
        Ok(opened)
    }

    fn try_open(self: &Arc<Self>, capability: &Capability, epoch: u32, born: u32) -> Result<Opened, Hurdle> {
        let mut state = self.lock_alive()?;
        self.touch();
        self.adopt_epoch(&mut state, epoch, born)?;
        self.belong(&mut state, capability);
        if capability.rights.contains(&Right::Write) {
            self.check_grant(&state, capability.grant)?;
            if capability.grant > state.grant {
                self.drop_beyond_seal(&mut state)?;
                state.grant = capability.grant;
                if state.end == End::Kept {
                    state.end = End::Here;
                }
                self.owe_state(&mut state);
            }
        }
        Ok(Opened {
            length: self.length(&state),
            sealed: state.sealed,
            grant: state.grant,
            lost: self.is_endless(&state),
        })
    }

    /// Takes what stood in the way of an operation, which is then tried again.
    pub(crate) async fn take(self: &Arc<Self>, hurdle: Hurdle, room: &mut Room) -> Result<(), Failure> {
        match hurdle {
            Hurdle::Cold(index) => self.lift(index, false).await,
            Hurdle::Owed => self.settle().await,
            Hurdle::Room(bytes, failure) => room.make(self.tenant(), bytes, failure).await,
            Hurdle::No(failure) => Err(failure),
        }
    }

    /// Makes everything below `item.length` final, after checking that it is there. Idempotent; a seal never sinks. Where the
    /// log knows the column it is durable when `settle` has returned.
    pub(crate) fn seal(&self, item: &SealItem) -> Result<u64, Failure> {
        let mut state = self.lock_alive()?;
        self.adopt_epoch(&mut state, item.epoch, item.born)?;
        self.check_grant(&state, item.grant)?;
        if item.grant > state.grant && self.is_lost(&state) {
            return Err(self.missing(&state, state.sealed, item.length));
        }
        self.check_grant_known(&state, item.grant)?;
        for Place { chunk, start, end } in self.geometry.chunks_between(state.sealed, item.length) {
            let complete =
                state.chunks.get(&chunk).is_some_and(|chunk| chunk.runs().covering(start, end).is_some());
            if !complete {
                let (from, to) = (self.geometry.offset(chunk, start), self.geometry.offset(chunk, end));
                return Err(self.missing(&state, from, to));
            }
        }
        if item.length > state.sealed {
            state.sealed = item.length;
            self.owe_state(&mut state);
        }
        Ok(state.sealed)
    }

    /// Drops every byte and refuses everything from now on. Returns the bytes of memory given back; readers and writers that
    /// still hold frames give theirs back when they end.
    pub(crate) fn delete(&self) -> u64 {
        let mut state = self.state.lock();
        state.deleted = true;
        state.owed = Owed::default();
        self.unlist_dram(&mut state);
        self.unlist_log(&mut state);
        let chunks = std::mem::take(&mut state.chunks);
        if state.logged {
            let (file, column) = self.name();
            // The tombstone is durable already; this only frees what the log would bring back after its time. Nobody waits.
            self.shared
                .note(Note::Delete { file, column, version: self.shared.next_version() })
                .for_each(drop);
        }
        drop(state);
        self.progress.notify_waiters();
        self.shared.space.notify_waiters();
        bytes_of(&chunks)
    }

    pub fn stat(&self) -> ColumnStat {
        let state = self.state.lock();
        ColumnStat {
            // What was sealed was there, whatever became of it.
            length: self.length(&state).max(state.sealed),
            sealed: state.sealed,
            grant: state.grant,
            epoch: state.epoch,
            bytes: bytes_of(&state.chunks),
            deleted: state.deleted,
            end_lost: self.is_end_lost(&state),
        }
    }

    pub(crate) fn lock_alive(&self) -> Result<MutexGuard<'_, State>, Failure> {
        let state = self.state.lock();
        if state.deleted {
            return Err(Failure::new(Code::Deleted, format!("{} was deleted", self.title())));
        }
        Ok(state)
    }

    fn adopt_epoch(&self, state: &mut State, epoch: u32, born: u32) -> Result<(), Failure> {
        if epoch == 0 || born == 0 {
            let message = format!("{}: epoch {epoch} and born {born} must both be above 0", self.title());
            return Err(Failure::new(Code::BadRequest, message));
        }
        if born > self.shared.data.incarnation {
            let mine = self.shared.data.incarnation;
            return Err(Failure::new(
                Code::StaleIncarnation,
                format!(
                    "{} was placed on incarnation {born} of this node, which is still {mine}",
                    self.title()
                ),
            ));
        }
        if epoch > state.epoch {
            // Persisted before use: a restart must not bring an older layout back.
            self.shared.data.epochs.raise(self.file, self.geometry.column, epoch)?;
            (state.epoch, state.born) = (epoch, born);
        }
        self.check_epoch(state, epoch)?;
        if state.born == 0 {
            // The epoch is known from the journal of an earlier incarnation, the rest only from this capability.
            state.born = born;
        }
        Ok(())
    }

    pub(crate) fn check_epoch(&self, state: &State, epoch: u32) -> Result<(), Failure> {
        if epoch != state.epoch && stands(Guard::Epoch) {
            let current = state.epoch;
            return Err(Failure::new(
                Code::StaleLayout,
                format!("{} is at epoch {current}, not {epoch}; fetch the layout again", self.title()),
            ));
        }
        Ok(())
    }

    pub(crate) fn check_grant(&self, state: &State, grant: u64) -> Result<(), Failure> {
        if grant < state.grant && stands(Guard::Grant) {
            let current = state.grant;
            return Err(Failure::new(
                Code::StaleWriter,
                format!("{} went to grant {current}; grant {grant} writes nothing any more", self.title()),
            ));
        }
        Ok(())
    }

    /// A grant counts from its OPEN on, which drops what others wrote beyond the seal.
    pub(crate) fn check_grant_known(&self, state: &State, grant: u64) -> Result<(), Failure> {
        if grant > state.grant {
            let current = state.grant;
            return Err(Failure::new(
                Code::StaleWriter,
                format!("{} is at grant {current}; grant {grant} was never opened here", self.title()),
            ));
        }
        Ok(())
    }

    pub(crate) fn check_writable(
        &self,
        state: &State,
        epoch: u32,
        grant: u64,
        offset: u64,
    ) -> Result<(), Failure> {
        if state.closed {
            return Err(Failure::new(Code::ShuttingDown, format!("{}: the node is stopping", self.title())));
        }
        self.check_epoch(state, epoch)?;
        self.check_grant(state, grant)?;
        self.check_grant_known(state, grant)?;
        if offset < state.sealed && stands(Guard::Seal) {
            let sealed = state.sealed;
            return Err(Failure::new(
                Code::Sealed,
                format!("{} is sealed below {sealed}, so offset {offset} cannot change", self.title()),
            ));
        }
        Ok(())
    }

    /// All or nothing: what can fail, the cut through the chunk that the seal divides, comes first.
    fn drop_beyond_seal(self: &Arc<Self>, state: &mut State) -> Result<(), Hurdle> {
        let unit = u64::from(self.geometry.stripe_unit);
        let (divided, inside) = (state.sealed / unit, (state.sealed % unit) as u32);
        let mut keeps = false;
        if inside > 0
            && let Some(chunk) = state.chunks.get_mut(&divided)
        {
            if chunk.runs().end() > inside {
                if chunk.frame().is_none() {
                    return Err(Hurdle::Cold(divided));
                }
                let logged = chunk.contradicts_log(inside, u32::MAX);
                chunk.truncate(inside).map_err(|f| self.explain(f))?;
                if !chunk.runs().is_empty() {
                    self.changed(state, divided, logged);
                }
            }
            keeps = state.chunks.get(&divided).is_some_and(|chunk| !chunk.runs().is_empty());
        }
        for (index, chunk) in state.chunks.split_off(&(divided + u64::from(keeps))) {
            if chunk.record.is_some() || chunk.appending.is_some() {
                self.owe_forget(state, index);
            }
        }
        state.reached = state.reached.min(state.sealed);
        state.lost_end = state.lost_end.min(state.sealed);
        state.evicted_end = state.evicted_end.min(state.sealed);
        Ok(())
    }

    /// The first file offset of this column in `[start, end)` whose byte is not there.
    pub(crate) fn gap(&self, state: &State, start: u64, end: u64) -> Option<u64> {
        self.geometry.chunks_between(start, end).find_map(|Place { chunk, start, end }| {
            let runs = state.chunks.get(&chunk).map(Chunk::runs);
            let at = runs.map_or(start, |runs| runs.covered_to(start)).min(end);
            (at < end).then(|| self.geometry.offset(chunk, at))
        })
    }

    pub(crate) fn key(&self, chunk: u64) -> Key {
        Key { file: self.file, column: self.geometry.column, chunk }
    }

    pub(crate) fn name(&self) -> Name {
        (self.file, self.geometry.column)
    }

    pub(crate) fn log_state(&self, state: &State) -> ColumnState {
        ColumnState {
            epoch: state.epoch,
            born: state.born,
            grant: state.grant,
            sealed: state.sealed,
            stripe_unit: self.geometry.stripe_unit,
            width: self.geometry.width,
            end: self.length(state),
            exact: state.end == End::Kept,
            whole: state.lost_end == 0,
        }
    }

    pub(crate) fn memory(&self) -> Memory<'_> {
        Memory { arena: &self.shared.arena, tenant: self.tenant() }
    }

    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        Failure::new(failure.code, format!("{}: {}", self.title(), failure.message))
    }

    pub(crate) fn title(&self) -> String {
        format!("file {} column {}", format_file_id(self.file), self.geometry.column)
    }

    /// Flips a bit of a stored byte, as failing memory would.
    #[cfg(feature = "fault-hooks")]
    pub fn flip_bit(&self, offset: u64) {
        let place = self.geometry.place(offset, 1).expect("an offset in this column");
        let state = self.state.lock();
        let chunk = state.chunks.get(&place.chunk).expect("a stored byte");
        // SAFETY: inside the frame. Racing readers is what failing memory does; tests read afterwards.
        unsafe { *chunk.frame().expect("a byte in memory").address(place.start, place.end) ^= 0x10 };
    }
}

pub(crate) fn bytes_of(chunks: &BTreeMap<u64, Chunk>) -> u64 {
    chunks.values().filter_map(Chunk::frame).map(|frame| frame.capacity() as u64).sum()
}
