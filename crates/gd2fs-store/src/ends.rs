//! Where a column ends, who knows it, and what beyond and below that is missing.
//!
//! A node that was started anew has what its logs have. They say of a column of plain file semantics up to where it had reached,
//! and whether that is its end: a flush and a stop in order make it so, and the first write that grows it beyond is answered only
//! once they say that it is not. What is missing below it was never written if nothing was lost before and the last life stopped in
//! order; after any other end it may be what had not reached a log. What a grant writes ends at the seal; beyond it is nobody's yet.

use gd2fs_wire::{Code, Failure};

use crate::column::{Column, State};

/// Who knows where a column ends, beyond what is there of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// The life of the node in which it was placed, and no later one.
    #[default]
    Placed,
    /// This life, and no later one.
    Here,
    /// The logs as well, or will before anything that depends on it is answered.
    Kept,
}

/// Why a chunk is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    Evicted,
    Damaged,
}

impl Column {
    pub(crate) fn length(&self, state: &State) -> u64 {
        // Chunks without runs wait for their first write; there are at most as many as writes in flight.
        let last = state.chunks.iter().rev().find(|(_, chunk)| !chunk.runs().is_empty());
        last.map_or(0, |(index, chunk)| self.geometry.offset(*index, chunk.runs().end())).max(state.reached)
    }

    /// The first file offset of this column below its length or seal whose byte is not there any more. Where the length is not
    /// known, that is where what is there ends.
    pub(crate) fn valid(&self, state: &State) -> Option<u64> {
        let known = !self.is_end_lost(state);
        self.gap(state, 0, if known { self.length(state).max(state.sealed) } else { u64::MAX })
    }

    pub(crate) fn is_lost(&self, state: &State) -> bool {
        state.born < self.shared.data.incarnation
    }

    /// Whether the column may have reached beyond all that is known of it: then nothing is short, only missing.
    pub(crate) fn is_endless(&self, state: &State) -> bool {
        self.is_lost(state) && state.end == End::Placed
    }

    /// The same for who takes a seal for an end: what lies beyond it is nobody's yet.
    pub(crate) fn is_end_lost(&self, state: &State) -> bool {
        self.is_endless(state) && state.sealed == 0
    }

    /// Below this file offset what is missing is lost, beyond it was never written.
    pub(crate) fn lost_below(&self, state: &State) -> u64 {
        if self.is_endless(state) { u64::MAX } else { state.sealed.max(state.lost_end) }
    }

    /// Why not all of a range is there.
    pub(crate) fn missing(&self, state: &State, start: u64, end: u64) -> Failure {
        let name = self.title();
        let gap = self.gap(state, start, end).unwrap_or(end);
        if gap >= self.lost_below(state) {
            let message = format!("{name} [{start}, {end}): not all of it was ever written");
            return Failure::new(Code::Hole, message);
        }
        let why = if state.damaged.contains(&(gap / u64::from(self.geometry.stripe_unit))) {
            "did not match its sum any more and was dropped".to_owned()
        } else if !self.is_lost(state) || gap < state.evicted_end {
            "was given up for want of room".to_owned()
        } else {
            let (born, now) = (state.born, self.shared.data.incarnation);
            format!(
                "did not outlive an earlier life of the node, if it was written (incarnation {born}, now {now})"
            )
        };
        let message =
            format!("{name} [{start}, {end}): what lay at {gap} {why}; write it again or recompute it");
        Failure::new(Code::Lost, message)
    }

    /// From now on the logs shall say where the column ends. False: they do, or shall not. They say nothing of a grant's column:
    /// how much of that counts control knows.
    pub(crate) fn keep_end(&self, state: &mut State) -> bool {
        let may = state.end != End::Kept && !self.is_endless(state) && state.grant == 0;
        if may {
            state.end = End::Kept;
        }
        may
    }

    /// The same at the end of this life, also of a column that was placed here and has nothing yet: what the flushers write from here
    /// on says it, and the checkpoint that ends the life. Nothing is written any more, so that what is missing below the end was
    /// never there, if all that is comes to the logs.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        if state.deleted || (state.born == 0 && !state.logged && state.chunks.is_empty()) {
            return;
        }
        state.logged |= self.keep_end(&mut state);
        state.version = self.shared.next_version();
    }

    /// The column has just grown. Whether that counts only once it is durable: logs say that it ends before.
    pub(crate) fn grew(&self, state: &mut State) -> bool {
        if state.end == End::Kept {
            state.end = End::Here;
            self.owe_state(state);
        }
        // Also while another write waits for it.
        state.grant == 0 && state.owed.names_state()
    }
}
