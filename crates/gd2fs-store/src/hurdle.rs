//! What stands in the way of an operation that found something missing under its column's lock. The lock is given up, the
//! hurdle is taken, and the operation begins again from what is true then.

use gd2fs_wire::{Code, Failure};

pub(crate) enum Hurdle {
    /// This chunk must be lifted into memory first.
    Cold(u64),
    /// Changes must be durable first.
    Owed,
    /// A frame of so many bytes is wanted; the failure says so if none can be had.
    Room(usize, Failure),
    /// There is no way.
    No(Failure),
}

impl From<Failure> for Hurdle {
    fn from(failure: Failure) -> Hurdle {
        Hurdle::No(failure)
    }
}

impl Hurdle {
    /// An arena's answer about a frame of `bytes`.
    pub fn room(bytes: usize, failure: Failure) -> Hurdle {
        if failure.code == Code::NoSpace { Hurdle::Room(bytes, failure) } else { Hurdle::No(failure) }
    }

    /// The same with a message made more precise.
    pub fn explained(self, explain: impl FnOnce(Failure) -> Failure) -> Hurdle {
        match self {
            Hurdle::No(failure) => Hurdle::No(explain(failure)),
            other => other,
        }
    }
}
