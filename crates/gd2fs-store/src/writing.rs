//! Writes of a column, from the reservation of memory to the publication.

use std::collections::btree_map::Entry;
use std::sync::Arc;

use gd2fs_wire::{Code, Failure};

use crate::chunk::Chunk;
use crate::column::Column;
use crate::geometry::Place;
use crate::hurdle::Hurdle;
use crate::room::Room;
use crate::write::WriteTicket;

impl Column {
    /// Reserves memory for a write, or says why it could not be published anyway. Nothing is visible yet. Waits a little while
    /// memory is short and the log is about to make some free.
    pub async fn begin_write(
        self: &Arc<Self>,
        epoch: u32,
        grant: u64,
        offset: u64,
        length: u32,
    ) -> Result<WriteTicket, Failure> {
        let place = self.geometry.place(offset, length)?;
        let mut room = Room::to_write(&self.shared);
        let full = || {
            let bytes = self.shared.dirty_bytes();
            Failure::new(
                Code::NoSpace,
                format!("{bytes} bytes wait for the log, which does not keep up; try again later"),
            )
        };
        room.wait_clean(full).await?;
        room.make_log(self, place.chunk).await?;
        self.shared.precedence.await_reads(length).await;
        loop {
            match self.reserve(epoch, grant, offset, place) {
                Ok(frame) => {
                    let column = self.clone();
                    return Ok(WriteTicket { column, frame, place, offset, epoch, grant, published: false });
                }
                Err(hurdle) => self.take(hurdle, &mut room).await?,
            }
        }
    }

    fn reserve(
        &self,
        epoch: u32,
        grant: u64,
        offset: u64,
        place: Place,
    ) -> Result<crate::frame::Frame, Hurdle> {
        let mut state = self.lock_alive()?;
        let now = self.touch();
        self.check_writable(&state, epoch, grant, offset)?;
        if state.owed.forgets(place.chunk) {
            return Err(Hurdle::Owed);
        }
        let memory = self.memory();
        let chunk = match state.chunks.entry(place.chunk) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Chunk::new(memory.frame(place.end as usize)?)),
        };
        chunk.used_at = now;
        if chunk.is_cold() {
            return Err(Hurdle::Cold(place.chunk));
        }
        chunk.reserve(&memory, place.start, place.end)
    }

    /// The second half of `WriteTicket::publish`: every rule is checked again, since all may have changed while bytes came in.
    /// Bytes that replace others which the log has are durable when this returns, and so is that the column may have grown beyond
    /// the end that the log had of it.
    pub(crate) async fn publish(
        self: &Arc<Self>,
        ticket: &mut WriteTicket,
        sums: &[u32],
        fenced: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let mut room = Room::to_write(&self.shared);
        loop {
            match self.try_publish(ticket, sums, &fenced) {
                Ok(false) => return Ok(()),
                Ok(true) => return self.settle().await,
                Err(hurdle) => self.take(hurdle, &mut room).await?,
            }
        }
    }

    /// Whether the log contradicts what was published: it has other bytes there, or says that the column ends before.
    fn try_publish(
        self: &Arc<Self>,
        ticket: &mut WriteTicket,
        sums: &[u32],
        fenced: &impl Fn() -> bool,
    ) -> Result<bool, Hurdle> {
        let Place { chunk: index, start, end } = ticket.place;
        let mut state = self.lock_alive()?;
        self.check_writable(&state, ticket.epoch, ticket.grant, ticket.offset)?;
        if fenced() {
            return Err(Hurdle::No(Failure::new(
                Code::StaleWriter,
                "a newer connection of this client has taken over; this late write changes nothing",
            )));
        }
        if state.owed.forgets(index) {
            return Err(Hurdle::Owed);
        }
        let (memory, length) = (self.memory(), self.length(&state));
        let chunk = match state.chunks.entry(index) {
            Entry::Occupied(entry) => entry.into_mut(),
            // The chunk went when the writer it had grown for gave up. Other writers may still receive into the frame from
            // before, and the new chunk knows nothing of them: only a frame without them may become its own.
            Entry::Vacant(entry) if ticket.frame.is_exclusive() => {
                entry.insert(Chunk::new(ticket.frame.clone()))
            }
            Entry::Vacant(entry) => entry.insert(Chunk::new(memory.frame(ticket.frame.capacity())?)),
        };
        if chunk.frame().is_none() {
            return Err(Hurdle::Cold(index));
        }
        if ticket.grant > 0 && !chunk.agrees(&ticket.frame, start, end) {
            // Two engines under one plan (a proxy that repeats a request): a mixture of both would be nobody's KV cache.
            let message = format!(
                "{}: other bytes were written under grant {} already; a grant writes each byte once",
                self.title(),
                ticket.grant
            );
            return Err(Hurdle::No(Failure::new(Code::StaleWriter, message)));
        }
        let through = chunk.contradicts_log(start, end);
        let published = chunk.publish(&memory, &ticket.frame, start, end, sums);
        published.map_err(|hurdle| hurdle.explained(|f| self.explain(f)))?;
        ticket.published = true;
        if self.shared.tiers.is_empty() {
            self.list_dram(&mut state);
        }
        self.changed(&mut state, index, through);
        let grew = self.length(&state) > length && self.grew(&mut state);
        Ok(through || grew)
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
}
