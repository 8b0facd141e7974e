//! Where in the log's order something lies, and where on the device.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A point in the log's order: so many records of the segment with this generation, and all of the segments before it.
/// As a record's own position it is the number of records before it in its segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Number of the segment's opening; 0 before the first.
    pub generation: u64,
    /// Records in that segment before this point.
    pub sequence: u32,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "record {} of generation {}", self.sequence, self.generation)
    }
}

/// A position with the device offset at which the next record begins: what a scan can start from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    pub at: Position,
    pub offset: u64,
}

/// Where the payload of a record lies. It stays valid until it is released or its owner was told of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Generation of the segment: a place whose segment was reused is recognised.
    pub generation: u64,
    /// Device offset of the payload's first block.
    pub offset: u64,
    /// Byte of the chunk that lies at `offset`, a multiple of 4,096.
    pub first: u32,
    /// Bytes of the payload, a multiple of 4,096.
    pub bytes: u32,
}

#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawPosition {
    generation: U64,
    sequence: U32,
}

impl From<Position> for RawPosition {
    fn from(at: Position) -> RawPosition {
        RawPosition { generation: at.generation.into(), sequence: at.sequence.into() }
    }
}

impl From<RawPosition> for Position {
    fn from(raw: RawPosition) -> Position {
        Position { generation: raw.generation.get(), sequence: raw.sequence.get() }
    }
}
