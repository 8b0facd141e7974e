//! What the log asks of the layer above, which decides what is kept.

use gd2fs_wire::sums::Run;

use crate::entry::{ColumnEntry, Key};
use crate::error::Result;
use crate::position::Place;

/// The layer above. The log calls it without holding a lock of its own; calls may come from threads of the device: they take
/// short locks at most and never wait.
///
/// What keeps recovery right:
/// - one append of a chunk is in flight at a time, and versions rise;
/// - a change that a note stands for is made in the owner's own state before the note is given to the log, and from then on
///   no append begins that the note makes void (both calls return at once, so that the owner can make them under its lock);
/// - the deletion of a column and its note are one step to [`Owner::live`]: behind a checkpoint that lacks the column and did
///   not wait for the note, what is still on its way of it could be found alone, with an older state;
/// - a place is released only once [`Owner::live`] does not name it any more.
pub trait Owner: Send + Sync + 'static {
    /// A snapshot is written (not yet durable) and lies at `place`. False: it is not wanted any more, and is dead at once.
    fn appended(&self, key: Key, version: u64, place: Place) -> bool;

    /// Reclaim has copied a record; from now on it is at `to`, and `from` is dead. False: it was released or replaced
    /// meanwhile, and both are dead.
    fn moved(&self, key: Key, version: u64, from: Place, to: Place) -> bool;

    /// Reclaim found a record that does not hold what was written; it is dead now.
    fn damaged(&self, key: Key, version: u64, place: Place);

    /// Names all columns and all chunks whose bytes lie in this log. Called on a thread that may block; changes go on
    /// meanwhile. What was there when this was called and is not named is dead, as if it were released.
    ///
    /// # Errors
    /// `PutOff` if something that is not named must stay for now: then there is no checkpoint, and nothing is dead.
    fn live(&self, entries: &mut dyn Entries) -> Result<()>;
}

/// Takes what lives, for a checkpoint.
pub trait Entries {
    /// A column.
    fn column(&mut self, entry: &ColumnEntry);
    /// A chunk in the log.
    fn chunk(&mut self, key: Key, version: u64, runs: &[Run], place: Place);
}
