//! The share of a file that lives on this node, and the rules under which it changes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use gd2fs_wire::capability::{Capability, Right, format_file_id};
use gd2fs_wire::messages::{ColumnStat, SealItem};
use gd2fs_wire::{Code, Failure};
use parking_lot::{Mutex, MutexGuard};

use crate::arena::Arena;
use crate::asks::Asks;
use crate::chunk::Chunk;
use crate::data_dir::DataDir;
use crate::geometry::{Geometry, Place};
use crate::read::ReadView;
use crate::write::WriteTicket;

/// What every column of a store shares.
pub(crate) struct Shared {
    pub arena: Arc<Arena>,
    pub data: DataDir,
    pub asks: Asks,
}

pub struct Column {
    file: u128,
    geometry: Geometry,
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Highest epoch seen; 0 until the first capability or seal.
    pub(crate) epoch: u32,
    /// The node's incarnation when the column was placed here. A smaller one than the current: what is missing is lost.
    born: u32,
    /// Highest write grant seen; 0 is plain file semantics.
    pub(crate) grant: u64,
    /// File offset below which nothing changes any more.
    pub(crate) sealed: u64,
    deleted: bool,
    /// Below this file offset chunks were dropped because their bytes had changed by themselves; 0: none.
    pub(crate) dropped_below: u64,
    pub(crate) chunks: BTreeMap<u64, Chunk>,
}

/// What an OPEN tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Highest acknowledged end in this column, as a file offset.
    pub length: u64,
    pub sealed: u64,
    pub grant: u64,
    pub lost: bool,
}

impl Column {
    pub(crate) fn new(file: u128, geometry: Geometry, shared: Arc<Shared>) -> Column {
        let epoch = shared.data.epochs.highest(file, geometry.column);
        Column { file, geometry, shared, state: Mutex::new(State { epoch, ..State::default() }) }
    }

    pub fn file(&self) -> u128 {
        self.file
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Admits a capability: adopts its epoch if that is higher, and its grant if it may write and the grant is higher. A new
    /// grant drops whatever lies beyond the seal, in the same step in which older grants stop being valid.
    pub(crate) fn open(&self, capability: &Capability, epoch: u32, born: u32) -> Result<Opened, Failure> {
        let mut state = self.lock_alive()?;
        self.adopt_epoch(&mut state, epoch, born)?;
        if capability.rights.contains(&Right::Write) {
            self.check_grant(&state, capability.grant)?;
            if capability.grant > state.grant {
                self.drop_beyond_seal(&mut state)?;
                state.grant = capability.grant;
            }
        }
        Ok(Opened {
            length: self.length(&state),
            sealed: state.sealed,
            grant: state.grant,
            lost: self.is_lost(&state),
        })
    }

    /// Reserves memory for a write, or says why it could not be published anyway. Nothing is visible yet.
    pub fn begin_write(
        self: &Arc<Self>,
        epoch: u32,
        grant: u64,
        offset: u64,
        length: u32,
    ) -> Result<WriteTicket, Failure> {
        let place = self.geometry.place(offset, length)?;
        let mut state = self.lock_alive()?;
        self.check_writable(&state, epoch, grant, offset)?;
        let arena = &self.shared.arena;
        let chunk = match state.chunks.entry(place.chunk) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Chunk::new(arena.allocate(place.end as usize)?)),
        };
        let frame = chunk.reserve(arena, place.start, place.end)?;
        drop(state);
        let column = self.clone();
        Ok(WriteTicket { column, frame, place, offset, epoch, grant, published: false })
    }

    /// The second half of `WriteTicket::publish`: every rule is checked again, since all may have changed while bytes came in.
    pub(crate) fn publish(
        &self,
        ticket: &mut WriteTicket,
        sums: &[u32],
        fenced: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let Place { chunk: index, start, end } = ticket.place;
        let mut state = self.lock_alive()?;
        self.check_writable(&state, ticket.epoch, ticket.grant, ticket.offset)?;
        if fenced() {
            return Err(Failure::new(
                Code::StaleWriter,
                "a newer connection of this client has taken over; this late write changes nothing",
            ));
        }
        let arena = &self.shared.arena;
        let chunk = match state.chunks.entry(index) {
            Entry::Occupied(entry) => entry.into_mut(),
            // The chunk went when the writer it had grown for gave up. Other writers may still receive into the frame from
            // before, and the new chunk knows nothing of them: only a frame without them may become its own.
            Entry::Vacant(entry) if ticket.frame.is_exclusive() => {
                entry.insert(Chunk::new(ticket.frame.clone()))
            }
            Entry::Vacant(entry) => entry.insert(Chunk::new(arena.allocate(ticket.frame.capacity())?)),
        };
        if ticket.grant > 0 && !chunk.agrees(&ticket.frame, start, end) {
            // Two engines under one plan (a proxy that repeats a request): a mixture of both would be nobody's KV cache.
            let message = format!(
                "{}: other bytes were written under grant {} already; a grant writes each byte once",
                self.name(),
                ticket.grant
            );
            return Err(Failure::new(Code::StaleWriter, message));
        }
        chunk.publish(arena, &ticket.frame, start, end, sums).map_err(|f| self.explain(f))?;
        ticket.published = true;
        Ok(())
    }

    pub(crate) fn abandon(&self, ticket: &WriteTicket) {
        let Place { chunk: index, start, end } = ticket.place;
        let mut state = self.state.lock();
        if let Some(chunk) = state.chunks.get_mut(&index) {
            chunk.release(&ticket.frame, start, end);
            if chunk.is_idle() {
                state.chunks.remove(&index);
            }
        }
    }

    /// A view of `[offset, offset + length)`, shorter only where the column ends. `summed` = false skips every verification.
    pub fn read(&self, epoch: u32, offset: u64, length: u32, summed: bool) -> Result<ReadView, Failure> {
        let mut place = self.geometry.place(offset, length)?;
        let state = self.lock_alive()?;
        self.check_epoch(&state, epoch)?;
        if !self.is_lost(&state) {
            // Where something may be lost, nobody can know where the column ended: then nothing is short, only missing.
            let available = self.length(&state).saturating_sub(offset).min(u64::from(length)) as u32;
            if available == 0 {
                return Ok(ReadView::empty());
            }
            place.end = place.start + available;
        }
        let chunk = state.chunks.get(&place.chunk);
        let covering = chunk.and_then(|chunk| chunk.covering(place.start, place.end));
        let (Some(chunk), Some(mut runs)) = (chunk, covering) else {
            return Err(self.missing(&state, offset, offset + u64::from(place.end - place.start)));
        };
        let frame = chunk.frame().clone();
        drop(state);
        if !summed {
            runs.clear();
        }
        let (view, learned) =
            ReadView::new(frame.clone(), place.start, place.end, &runs).map_err(|f| self.explain(f))?;
        if !learned.is_empty()
            && let Some(chunk) = self.state.lock().chunks.get_mut(&place.chunk)
        {
            chunk.learn(&frame, learned);
        }
        Ok(view)
    }

    /// Makes everything below `item.length` final, after checking that it is there. Idempotent; a seal never sinks.
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
        state.sealed = state.sealed.max(item.length);
        Ok(state.sealed)
    }

    /// Drops every byte and refuses everything from now on. Returns the bytes of memory given back; readers and writers that
    /// still hold frames give theirs back when they end.
    pub(crate) fn delete(&self) -> u64 {
        let mut state = self.state.lock();
        state.deleted = true;
        let chunks = std::mem::take(&mut state.chunks);
        drop(state);
        bytes_of(&chunks)
    }

    pub fn stat(&self) -> ColumnStat {
        let state = self.state.lock();
        ColumnStat {
            length: self.length(&state),
            sealed: state.sealed,
            grant: state.grant,
            epoch: state.epoch,
            bytes: bytes_of(&state.chunks),
        }
    }

    pub(crate) fn lock_alive(&self) -> Result<MutexGuard<'_, State>, Failure> {
        let state = self.state.lock();
        if state.deleted {
            return Err(Failure::new(Code::Deleted, format!("{} was deleted", self.name())));
        }
        Ok(state)
    }

    fn adopt_epoch(&self, state: &mut State, epoch: u32, born: u32) -> Result<(), Failure> {
        if epoch == 0 || born == 0 {
            let message = format!("{}: epoch {epoch} and born {born} must both be above 0", self.name());
            return Err(Failure::new(Code::BadRequest, message));
        }
        if born > self.shared.data.incarnation {
            let mine = self.shared.data.incarnation;
            return Err(Failure::new(
                Code::StaleIncarnation,
                format!(
                    "{} was placed on incarnation {born} of this node, which is still {mine}",
                    self.name()
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
        if epoch != state.epoch {
            let current = state.epoch;
            return Err(Failure::new(
                Code::StaleLayout,
                format!("{} is at epoch {current}, not {epoch}; fetch the layout again", self.name()),
            ));
        }
        Ok(())
    }

    fn check_grant(&self, state: &State, grant: u64) -> Result<(), Failure> {
        if grant < state.grant {
            let current = state.grant;
            return Err(Failure::new(
                Code::StaleWriter,
                format!("{} went to grant {current}; grant {grant} writes nothing any more", self.name()),
            ));
        }
        Ok(())
    }

    /// A grant counts from its OPEN on, which drops what others wrote beyond the seal.
    fn check_grant_known(&self, state: &State, grant: u64) -> Result<(), Failure> {
        if grant > state.grant {
            let current = state.grant;
            return Err(Failure::new(
                Code::StaleWriter,
                format!("{} is at grant {current}; grant {grant} was never opened here", self.name()),
            ));
        }
        Ok(())
    }

    fn check_writable(&self, state: &State, epoch: u32, grant: u64, offset: u64) -> Result<(), Failure> {
        self.check_epoch(state, epoch)?;
        self.check_grant(state, grant)?;
        self.check_grant_known(state, grant)?;
        if offset < state.sealed {
            let sealed = state.sealed;
            return Err(Failure::new(
                Code::Sealed,
                format!("{} is sealed below {sealed}, so offset {offset} cannot change", self.name()),
            ));
        }
        Ok(())
    }

    /// All or nothing: the only step that can fail, the cut through the chunk that the seal divides, comes first.
    fn drop_beyond_seal(&self, state: &mut State) -> Result<(), Failure> {
        let unit = u64::from(self.geometry.stripe_unit);
        let (divided, inside) = (state.sealed / unit, (state.sealed % unit) as u32);
        let mut first_dropped = divided;
        if inside > 0 {
            if let Some(chunk) = state.chunks.get_mut(&divided) {
                chunk.truncate(inside).map_err(|f| self.explain(f))?;
            }
            first_dropped += 1;
        }
        drop(state.chunks.split_off(&first_dropped));
        state.dropped_below = state.dropped_below.min(state.sealed);
        Ok(())
    }

    pub(crate) fn length(&self, state: &State) -> u64 {
        // Chunks without runs wait for their first write; there are at most as many as writes in flight.
        let last = state.chunks.iter().rev().find(|(_, chunk)| !chunk.runs().is_empty());
        last.map_or(0, |(index, chunk)| self.geometry.offset(*index, chunk.runs().end()))
    }

    pub(crate) fn is_lost(&self, state: &State) -> bool {
        state.born < self.shared.data.incarnation || state.dropped_below > 0
    }

    fn missing(&self, state: &State, start: u64, end: u64) -> Failure {
        let name = self.name();
        if state.dropped_below > 0 {
            let message =
                format!("{name} [{start}, {end}): dropped, since its bytes had changed by themselves");
            return Failure::new(Code::Lost, message);
        }
        if self.is_lost(state) {
            let (born, now) = (state.born, self.shared.data.incarnation);
            let message = format!(
                "{name} [{start}, {end}): written to incarnation {born} of this node if at all, now is {now}; its memory is gone"
            );
            return Failure::new(Code::Lost, message);
        }
        Failure::new(Code::Hole, format!("{name} [{start}, {end}): not all of it was ever written"))
    }

    fn explain(&self, failure: Failure) -> Failure {
        Failure::new(failure.code, format!("{}: {}", self.name(), failure.message))
    }

    fn name(&self) -> String {
        format!("file {} column {}", format_file_id(self.file), self.geometry.column)
    }

    /// Flips a bit of a stored byte, as failing memory would.
    #[cfg(feature = "fault-hooks")]
    pub fn flip_bit(&self, offset: u64) {
        let place = self.geometry.place(offset, 1).expect("an offset in this column");
        let state = self.state.lock();
        let chunk = state.chunks.get(&place.chunk).expect("a stored byte");
        // SAFETY: inside the frame. Racing readers is what failing memory does; tests read afterwards.
        unsafe { *chunk.frame().address(place.start, place.end) ^= 0x10 };
    }
}

pub(crate) fn bytes_of(chunks: &BTreeMap<u64, Chunk>) -> u64 {
    chunks.values().map(|chunk| chunk.frame().capacity() as u64).sum()
}
