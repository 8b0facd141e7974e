//! Records on their way to the device: admission, writing, and completion in the order of the log.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use gd2fs_device::{BLOCK, Op};
use gd2fs_transport::{Memory, Slice};
use gd2fs_wire::guard::{Guard, stands};
use tokio::sync::oneshot;

use crate::entry::{Key, cover};
use crate::error::{LogError, Result};
use crate::inner::{Inner, random_id};
use crate::position::{Place, Position};
use crate::record::{Body, Stamp};
use crate::segment::Live;
use crate::state::{Admission, Ask, Class, Outcome, Slot, Told};

/// The bytes behind a record's header, and who keeps them.
#[derive(Clone)]
pub(crate) struct Payload {
    pub memory: Memory,
    pub keep: Arc<dyn std::any::Any + Send + Sync>,
}

/// An append that has begun: notes that begin later are obeyed. It ends also when the caller drops its future.
pub(crate) struct Begun {
    inner: Arc<Inner>,
    number: u64,
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.inner.state.lock().end(self.number);
    }
}

impl Inner {
    pub fn begin(self: &Arc<Self>) -> Begun {
        Begun { inner: Arc::clone(self), number: self.state.lock().begin() }
    }

    /// Appends a record and completes when it, and everything before it, is written. A write that the device fails is
    /// repeated once, in another segment.
    pub async fn append(
        self: &Arc<Self>,
        begun: Begun,
        class: Class,
        body: &Body,
        payload: Option<&Payload>,
        from: Option<Place>,
    ) -> Result<Position> {
        let says = !matches!(body, Body::Notes(notes) if notes.is_empty());
        let mut ask = Ask { class, blocks: body.blocks(), says, snapshot: None, begun: begun.number, from };
        if let Body::Snapshot { key, version, .. } = body {
            ask.snapshot = Some((*key, *version));
        }
        let mut why = String::new();
        for _ in 0..2 {
            let slot = self.admitted(&ask).await?;
            let at = slot.at;
            match self.write(*slot, body, payload, from).await {
                Ok(Outcome::Written) => return Ok(at),
                Ok(Outcome::Failed(reason)) => why = reason,
                Err(_) => return Err(LogError::Closed),
            }
        }
        Err(LogError::Write(why))
    }

    /// Waits for a place at the append point. Snapshots wait in the order in which they came.
    async fn admitted(&self, ask: &Ask) -> Result<Box<Slot>> {
        let _turn = if ask.class == Class::Snapshot { Some(self.turn.lock().await) } else { None };
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            {
                let mut state = self.state.lock();
                state.check()?;
                if state.closed {
                    return Err(LogError::Closed);
                }
                match state.admit(ask, random_id) {
                    Admission::Now(slot) => {
                        drop(state);
                        self.work.notify_one();
                        return Ok(slot);
                    }
                    Admission::Superseded => return Err(LogError::Superseded),
                    Admission::Failed(error) => {
                        drop(state);
                        self.work.notify_one();
                        return Err(error);
                    }
                    Admission::Full => return Err(self.no_space(&state, ask.blocks)),
                    Admission::Wait => {}
                }
            }
            self.work.notify_one();
            room.await;
        }
    }

    /// Begins the writes of an admitted record; what it gives back completes in the order of the log. Nothing here waits, so
    /// that a place that was taken is always written.
    fn write(
        self: &Arc<Self>,
        slot: Slot,
        body: &Body,
        payload: Option<&Payload>,
        from: Option<Place>,
    ) -> oneshot::Receiver<Outcome> {
        let header = Arc::new(body.encode(&Stamp { segment: slot.segment, at: slot.at, known: slot.known }));
        if let Body::Snapshot { key, version, runs, .. } = body {
            let told = Told { live: live(&slot, body, *key, *version, cover(runs)), from };
            if let Some(flight) = self.state.lock().flight(slot.order) {
                flight.told = Some(told);
            }
        }
        if let Some((order, offset, opening)) = slot.opened {
            let block = Arc::new(opening.encode(&self.device_id));
            // SAFETY: the block is kept by the operation and not written any more.
            let memory = unsafe { block.slice() };
            self.submit(order, Op::write(offset, memory, block));
        }
        // SAFETY: the header is kept by the operation and not written any more.
        let first = unsafe { header.slice() };
        let op = match payload {
            None => Op::write(slot.offset, first, header),
            Some(payload) => {
                let slices: Vec<Slice> = [first].iter().chain(payload.memory.slices()).copied().collect();
                Op::write(slot.offset, Memory::new(slices), (header, Arc::clone(&payload.keep)))
            }
        };
        self.counters.appended_bytes.fetch_add(u64::from(body.blocks()) * BLOCK as u64, Relaxed);
        self.submit(slot.order, op);
        slot.outcome
    }

    fn submit(self: &Arc<Self>, order: u64, op: Op) {
        let inner = Arc::clone(self);
        self.device.submit(
            op,
            Box::new(move |result| inner.settle(order, result.map_err(|error| error.to_string()))),
        );
    }

    /// A write has ended. Completes what is now complete together with all before it.
    fn settle(&self, order: u64, result: std::result::Result<(), String>) {
        let mut state = self.state.lock();
        if let Err(why) = &result {
            tracing::warn!("{}: a write of the log failed: {why}", self.device.path().display());
            state.breaking = true;
        }
        if let Some(flight) = state.flight(order) {
            flight.settled = Some(result);
        }
        // One thread at a time completes, so that the owner learns of records in their order.
        if std::mem::replace(&mut state.draining, true) {
            return;
        }
        while state.in_flight.front().is_some_and(|flight| flight.settled == Some(Ok(()))) {
            let flight = state.in_flight.pop_front().expect("looked at");
            if let Some(told) = &flight.told {
                state.segments.insert(told.live);
            }
            state.told_order = flight.order;
            drop(state);
            if let Some(told) = &flight.told {
                self.tell(told);
            }
            state = self.state.lock();
            state.complete(&flight);
            self.told.notify_waiters();
            if let Some(waiter) = flight.waiter {
                // Nobody listens if the append's future was dropped; the owner has been told all the same.
                let _ = waiter.send(Outcome::Written);
            }
        }
        state.draining = false;
        let over = state.breaking && state.in_flight.iter().all(|flight| flight.settled.is_some());
        let told = if over { state.break_off() } else { Vec::new() };
        drop(state);
        for (waiter, why) in told {
            let _ = waiter.send(Outcome::Failed(why));
        }
        self.room.notify_waiters();
    }

    /// Tells the owner where a snapshot lies now; what it does not want is dead at once.
    fn tell(&self, told: &Told) {
        let Live { key, version, place, .. } = told.live;
        let wanted = || {
            self.owner().is_some_and(|owner| match told.from {
                None => owner.appended(key, version, place),
                Some(from) => owner.moved(key, version, from, place),
            })
        };
        // A panic, reported by its hook, must not end this: whoever completes is the only one, and all records wait for it.
        // Whether the owner took the place in is unknown; dead, it is a miss at worst.
        if !catch_unwind(AssertUnwindSafe(wanted)).unwrap_or(false) {
            self.release(&place);
        }
        // Not wanted, it had been released or replaced there too.
        if let Some(from) = told.from {
            self.release(&from);
        }
    }

    /// Returns when everything is complete that the owner has, or is just being, told of. It never waits long: the owner doesn't.
    pub async fn caught_up(&self) {
        let told_order = self.state.lock().told_order;
        loop {
            let told = self.told.notified();
            tokio::pin!(told);
            // Before the look, so that nothing is missed in between.
            told.as_mut().enable();
            if self.state.lock().completed_order >= told_order {
                return;
            }
            told.await;
        }
    }

    /// Makes everything durable that the owner was told of by now, or that is complete. Callers that come while a sync runs
    /// share the next one.
    pub async fn sync(&self) -> Result<()> {
        let wanted = self.state.lock().told_order;
        let _turn = self.sync_turn.lock().await;
        if self.state.lock().durable_order >= wanted {
            return self.state.lock().check();
        }
        self.sync_device().await
    }

    /// The same, and asks the device in any case. A checkpoint leaves out what notes have voided, and a note may just have failed for
    /// want of the device: then there must be no checkpoint either, or older records behind it would come back.
    pub async fn sync_anyhow(&self) -> Result<()> {
        let _turn = self.sync_turn.lock().await;
        self.sync_device().await
    }

    async fn sync_device(&self) -> Result<()> {
        self.caught_up().await;
        let (order, at, witness) = {
            let state = self.state.lock();
            state.check()?;
            (state.completed_order, state.completed.at, state.witness)
        };
        let began = std::time::Instant::now();
        let result = if stands(Guard::Sync) { self.device.perform(Op::sync()).await } else { Ok(()) };
        self.counters.synced(began.elapsed());
        let mut state = self.state.lock();
        if let Err(error) = result {
            let why = error.to_string();
            tracing::error!("{}: {why}; the log takes no more writes", self.device.path().display());
            state.failed = Some(why.clone());
            drop(state);
            self.room.notify_waiters();
            return Err(LogError::Failed(why));
        }
        (state.durable_order, state.durable) = (order, at);
        state.witness.synced(witness);
        drop(state);
        self.synced.notify_one();
        Ok(())
    }
}

fn live(slot: &Slot, body: &Body, key: Key, version: u64, cover: std::ops::Range<u32>) -> Live {
    let header_blocks = body.header_blocks();
    let place = Place {
        generation: slot.at.generation,
        offset: slot.offset + u64::from(header_blocks) * BLOCK as u64,
        first: cover.start,
        bytes: cover.end - cover.start,
    };
    Live { key, version, place, header_blocks }
}
