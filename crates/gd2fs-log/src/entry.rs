//! What the log keeps: snapshots of chunks, the states of columns, and notes about both.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use gd2fs_device::BLOCK;
use gd2fs_transport::Memory;
use gd2fs_wire::sums::Run;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::position::Place;

/// A chunk: stripe unit `chunk` of column `column` of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The file's id.
    pub file: u128,
    /// The column of the file.
    pub column: u32,
    /// Index of the stripe unit in the file.
    pub chunk: u64,
}

/// What a column is, apart from its bytes. The log only keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColumnState {
    /// Highest epoch seen.
    pub epoch: u32,
    /// The node's incarnation when the column was placed on it.
    pub born: u32,
    /// Highest write grant seen.
    pub grant: u64,
    /// File offset below which nothing changes any more.
    pub sealed: u64,
    /// Bytes of a chunk.
    pub stripe_unit: u32,
    /// Columns of the file.
    pub width: u32,
    /// Up to where the column has reached, as a file offset: also with bytes that the log does not have.
    pub end: u64,
    /// Whether it has reached no further.
    pub exact: bool,
    /// Whether nothing of it has been lost so far.
    pub whole: bool,
}

/// A chunk's bytes as they shall be kept.
#[derive(Clone)]
pub struct Snapshot {
    /// The chunk.
    pub key: Key,
    /// Rises with every change of the chunk, and with every note about it or its column, in the whole node.
    pub version: u64,
    /// Its column's state at this version.
    pub state: ColumnState,
    /// The valid ranges and their CRC-32C: sorted, disjoint, not empty.
    pub runs: Vec<Run>,
    /// The bytes of [`cover`] of the runs; what lies between runs is not looked at. Slices are whole blocks.
    pub memory: Memory,
    /// Keeps the memory alive and the runs' bytes unchanged.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// A change without bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// The column's state from this version on.
    Column {
        /// The file's id.
        file: u128,
        /// The column of the file.
        column: u32,
        /// The change's version.
        version: u64,
        /// The state.
        state: ColumnState,
    },
    /// The chunk's records up to and including this version are void.
    Forget {
        /// The chunk.
        key: Key,
        /// The last version that is void.
        version: u64,
    },
    /// The column's records and states up to and including this version are void.
    Delete {
        /// The file's id.
        file: u128,
        /// The column of the file.
        column: u32,
        /// The last version that is void.
        version: u64,
    },
}

impl Note {
    /// The version that the note carries.
    pub fn version(&self) -> u64 {
        match *self {
            Note::Column { version, .. } | Note::Forget { version, .. } | Note::Delete { version, .. } => {
                version
            }
        }
    }

    /// Whether the note makes this version of the chunk void.
    pub(crate) fn voids(&self, key: &Key, version: u64) -> bool {
        match *self {
            Note::Column { .. } => false,
            Note::Forget { key: gone, version: last } => gone == *key && version <= last,
            Note::Delete { file, column, version: last } => {
                (file, column) == (key.file, key.column) && version <= last
            }
        }
    }
}

/// A column that is known, in a checkpoint and after recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnEntry {
    /// The file's id.
    pub file: u128,
    /// The column of the file.
    pub column: u32,
    /// The version at which the state became this.
    pub version: u64,
    /// The state.
    pub state: ColumnState,
}

/// A chunk whose bytes lie in the log, in a checkpoint and after recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkEntry {
    /// The chunk.
    pub key: Key,
    /// The version of these bytes.
    pub version: u64,
    /// The valid ranges and their CRC-32C.
    pub runs: Vec<Run>,
    /// Where they lie.
    pub place: Place,
}

/// The whole blocks of a chunk that hold all of `runs`: bytes counted from the chunk's first. Empty without runs.
pub fn cover(runs: &[Run]) -> Range<u32> {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return 0..0 };
    first.start / BLOCK as u32 * BLOCK as u32..last.end.next_multiple_of(BLOCK as u32)
}

/// What is wrong with a list of runs, if anything.
pub(crate) fn fault_of(runs: &[Run]) -> Option<String> {
    let mut at = 0;
    for run in runs {
        if run.start < at || run.end <= run.start || run.end > 1 << 30 {
            return Some(format!(
                "runs: [{}, {}) is empty, overlaps its predecessor or is too far",
                run.start, run.end
            ));
        }
        at = run.end;
    }
    runs.is_empty().then(|| "runs: there is none, so there is nothing to keep".into())
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawRun {
    start: U32,
    end: U32,
    crc: U32,
}

impl From<Run> for RawRun {
    fn from(run: Run) -> RawRun {
        RawRun { start: run.start.into(), end: run.end.into(), crc: run.crc.into() }
    }
}

impl From<RawRun> for Run {
    fn from(raw: RawRun) -> Run {
        Run { start: raw.start.get(), end: raw.end.get(), crc: raw.crc.get() }
    }
}

/// A version of a chunk or column with a state.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawEntry {
    file: [u8; 16],
    column: U32,
    chunk: U64,
    version: U64,
    epoch: U32,
    born: U32,
    grant: U64,
    sealed: U64,
    stripe_unit: U32,
    width: U32,
    end: U64,
    exact: u8,
    whole: u8,
    zeros: [u8; 2],
}

impl RawEntry {
    pub fn new(key: Key, version: u64, state: ColumnState) -> RawEntry {
        RawEntry {
            file: key.file.to_le_bytes(),
            column: key.column.into(),
            chunk: key.chunk.into(),
            version: version.into(),
            epoch: state.epoch.into(),
            born: state.born.into(),
            grant: state.grant.into(),
            sealed: state.sealed.into(),
            stripe_unit: state.stripe_unit.into(),
            width: state.width.into(),
            end: state.end.into(),
            exact: state.exact.into(),
            whole: state.whole.into(),
            zeros: [0; 2],
        }
    }

    pub fn key(&self) -> Key {
        Key { file: u128::from_le_bytes(self.file), column: self.column.get(), chunk: self.chunk.get() }
    }

    pub fn version(&self) -> u64 {
        self.version.get()
    }

    pub fn state(&self) -> ColumnState {
        ColumnState {
            epoch: self.epoch.get(),
            born: self.born.get(),
            grant: self.grant.get(),
            sealed: self.sealed.get(),
            stripe_unit: self.stripe_unit.get(),
            width: self.width.get(),
            end: self.end.get(),
            exact: self.exact != 0,
            whole: self.whole != 0,
        }
    }
}

const COLUMN: u8 = 1;
const FORGET: u8 = 2;
const DELETE: u8 = 3;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawNote {
    kind: u8,
    zeros: [u8; 3],
    entry: RawEntry,
}

impl From<Note> for RawNote {
    fn from(note: Note) -> RawNote {
        let key = |file, column| Key { file, column, chunk: 0 };
        let (kind, entry) = match note {
            Note::Column { file, column, version, state } => {
                (COLUMN, RawEntry::new(key(file, column), version, state))
            }
            Note::Forget { key, version } => (FORGET, RawEntry::new(key, version, ColumnState::default())),
            Note::Delete { file, column, version } => {
                (DELETE, RawEntry::new(key(file, column), version, ColumnState::default()))
            }
        };
        RawNote { kind, zeros: [0; 3], entry }
    }
}

impl RawNote {
    /// None for a kind that this format does not have.
    pub fn decode(&self) -> Option<Note> {
        let (key, version) = (self.entry.key(), self.entry.version());
        let Key { file, column, .. } = key;
        match self.kind {
            COLUMN => Some(Note::Column { file, column, version, state: self.entry.state() }),
            FORGET => Some(Note::Forget { key, version }),
            DELETE => Some(Note::Delete { file, column, version }),
            _ => None,
        }
    }
}
