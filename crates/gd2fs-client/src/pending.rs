//! The requests of one connection that have no answer yet.

use std::collections::VecDeque;
use std::time::Instant;

use gd2fs_transport::{Frame, Memory};
use gd2fs_wire::code::Failure;
use gd2fs_wire::header::{Header, Opcode};
use parking_lot::MutexGuard;

use crate::call::{Outgoing, Reply};
use crate::one_sided::Held;
use crate::trouble::Trouble;

/// Called once, when nothing touches the request's memory any more; by whoever finds that out, so it must not wait.
pub(crate) type Done = Box<dyn FnOnce(Result<Reply, Trouble>) + Send>;

pub(crate) struct Table {
    /// Number of the request in `pending[0]`. A node answers in the order of sending, so the requests that wait lie close.
    pub first: u64,
    pub pending: VecDeque<Option<Pending>>,
    /// Bounded by the link's window, as `pending` is.
    pub outbox: VecDeque<Queued>,
    /// Everything from this number on waits in the outbox.
    pub unsent: u64,
    /// Requests of the batch that is being sent which the node has refused already.
    pub refused_early: Vec<u64>,
    /// Set once: nothing is sent or received any more.
    pub end: Option<Failure>,
    pub frames_heard: u64,
}

pub(crate) struct Queued {
    pub frame: Frame,
    pub out: Outgoing,
}

pub(crate) struct Pending {
    pub asked: Header,
    pub landing: Option<Memory>,
    pub held: Held,
    pub done: Done,
    /// The reader is receiving into `landing`.
    pub receiving: bool,
    /// How it ends, whatever comes: it was given up, or refused, while its memory was in use.
    pub outcome: Option<Trouble>,
    pub since: Instant,
    pub frames_heard: u64,
}

impl Table {
    pub fn new() -> Table {
        Table {
            // Number 0 was HELLO's.
            first: 1,
            pending: VecDeque::new(),
            outbox: VecDeque::new(),
            unsent: 1,
            refused_early: Vec::new(),
            end: None,
            frames_heard: 0,
        }
    }

    pub fn next(&self) -> u64 {
        self.first + self.pending.len() as u64
    }

    pub fn pending(&mut self, number: u64) -> Option<&mut Option<Pending>> {
        let index = number.checked_sub(self.first)?;
        self.pending.get_mut(usize::try_from(index).ok()?)
    }

    pub fn remove(&mut self, number: u64) -> Option<Pending> {
        let removed = self.pending(number)?.take();
        while matches!(self.pending.front(), Some(None)) {
            self.pending.pop_front();
            self.first += 1;
        }
        removed
    }

    /// The node has refused what it has not received completely, and drops the rest of it: the request ends when that is sent.
    pub fn refuse_early(&mut self, number: u64, trouble: Trouble) {
        let Some(Some(pending)) = self.pending(number) else { return };
        pending.receiving = false;
        pending.outcome.get_or_insert(trouble);
        if !self.refused_early.contains(&number) {
            self.refused_early.push(number);
        }
    }

    /// What was refused early, once all that was being sent is sent.
    pub fn take_refused(&mut self) -> Vec<Pending> {
        std::mem::take(&mut self.refused_early).into_iter().filter_map(|number| self.remove(number)).collect()
    }
}

impl Pending {
    pub fn is_write(&self) -> bool {
        self.asked.opcode == Opcode::Write as u8
    }

    /// Ends it as was decided before.
    pub fn finish(self) {
        let trouble = self.outcome.expect("set by whoever left it here");
        (self.done)(Err(trouble));
    }
}

/// Ends a request whose memory nothing touches any more.
pub(crate) fn finish(mut table: MutexGuard<'_, Table>, number: u64, failure: Failure) {
    let Some(Some(pending)) = table.pending(number) else { return };
    let sent = pending.outcome.is_some();
    let done = if sent && pending.held.is_staged() {
        // Slots stay where they are until the node has answered; their user does not wait for that.
        std::mem::replace(&mut pending.done, Box::new(|_| ()))
    } else {
        table.remove(number).expect("just seen").done
    };
    drop(table);
    done(Err(Trouble::Stopped(failure)));
}
