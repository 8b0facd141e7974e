//! The blocks that begin a segment and a record.

use gd2fs_device::{BLOCK, Buffer};
use gd2fs_wire::sums::{Run, crc32c_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::{ColumnState, Key, Note, RawEntry, RawNote, RawRun, cover, fault_of};
use crate::position::{Position, RawPosition};

const SEGMENT_MAGIC: &[u8; 8] = b"GD2FSSEG";
const RECORD_MAGIC: &[u8; 4] = b"2DLR";
/// A segment's header is there twice: without it, nothing in the segment can be read.
pub(crate) const SEGMENT_HEADER_BLOCKS: u32 = 2;
const SNAPSHOT: u8 = 1;
const NOTES: u8 = 2;
/// Notes that fit into one block behind the fixed part.
pub(crate) const NOTES_MAX: usize = (BLOCK - size_of::<RawRecord>()) / size_of::<RawNote>();
/// Runs of one snapshot: a 64 MiB chunk has 2,048 pieces of one run each.
pub const RUNS_MAX: usize = 2048;

/// Drawn at random for each opening of a segment and repeated in its records: what an earlier opening, or an earlier format of
/// the device, has left behind never passes for a record of this one, whatever generation it carries.
pub(crate) type SegmentId = [u8; 16];

/// What the writer knew when it wrote. Every header says it, so that a reader can tell the end of the log from damage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// Everything before this position was durable.
    pub durable: Position,
    /// Segments that lay wholly before this position may have been reused: without a checkpoint at or behind it, nothing
    /// before it can be trusted to be the last word.
    pub floor: Position,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawSegment {
    magic: [u8; 8],
    device: [u8; 16],
    id: SegmentId,
    generation: U64,
    previous: RawPosition,
    durable: RawPosition,
    floor: RawPosition,
    crc: U32,
}

/// The first two blocks of a segment, each of them whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub id: SegmentId,
    pub generation: u64,
    /// Where the log ended when the segment was opened. Generations between this one's and the segment's own are void.
    pub previous: Position,
    pub known: Known,
}

impl SegmentHeader {
    pub fn encode(&self, device: &[u8; 16]) -> Buffer {
        let mut raw = RawSegment {
            magic: *SEGMENT_MAGIC,
            device: *device,
            id: self.id,
            generation: self.generation.into(),
            previous: self.previous.into(),
            durable: self.known.durable.into(),
            floor: self.known.floor.into(),
            crc: 0.into(),
        };
        raw.crc = crc32c_of([raw.as_bytes()]).into();
        let mut blocks = Buffer::new(SEGMENT_HEADER_BLOCKS as usize * BLOCK);
        for block in blocks.chunks_exact_mut(BLOCK) {
            block[..size_of::<RawSegment>()].copy_from_slice(raw.as_bytes());
        }
        blocks
    }

    /// None for anything but a header of this device, of which one copy is whole.
    pub fn decode(blocks: &[u8], device: &[u8; 16]) -> Option<SegmentHeader> {
        blocks.chunks_exact(BLOCK).find_map(|block| SegmentHeader::decode_one(block, device))
    }

    fn decode_one(block: &[u8], device: &[u8; 16]) -> Option<SegmentHeader> {
        let (mut raw, _) = RawSegment::read_from_prefix(block).ok()?;
        let stored = raw.crc.get();
        raw.crc = 0.into();
        let valid =
            &raw.magic == SEGMENT_MAGIC && &raw.device == device && crc32c_of([raw.as_bytes()]) == stored;
        valid.then(|| SegmentHeader {
            id: raw.id,
            generation: raw.generation.get(),
            previous: raw.previous.into(),
            known: Known { durable: raw.durable.into(), floor: raw.floor.into() },
        })
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRecord {
    magic: [u8; 4],
    kind: u8,
    zero: u8,
    /// Runs of a snapshot, or notes.
    count: U16,
    segment: SegmentId,
    at: RawPosition,
    durable: RawPosition,
    floor: RawPosition,
    payload_first: U32,
    payload_bytes: U32,
    entry: RawEntry,
    crc: U32,
}

/// Where a record stands and what was known when it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub segment: SegmentId,
    pub at: Position,
    pub known: Known,
}

/// What a record says; a snapshot's bytes follow its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Snapshot { key: Key, version: u64, state: ColumnState, runs: Vec<Run> },
    Notes(Vec<Note>),
}

impl Body {
    /// Blocks of the header.
    pub fn header_blocks(&self) -> u32 {
        match self {
            Body::Snapshot { runs, .. } => snapshot_header_blocks(runs.len()),
            Body::Notes(_) => 1,
        }
    }

    /// Blocks of header and payload.
    pub fn blocks(&self) -> u32 {
        let payload = match self {
            Body::Snapshot { runs, .. } => cover(runs).len() as u32 / BLOCK as u32,
            Body::Notes(_) => 0,
        };
        self.header_blocks() + payload
    }

    pub fn encode(&self, stamp: &Stamp) -> Buffer {
        let mut raw = RawRecord::new_zeroed();
        raw.magic = *RECORD_MAGIC;
        raw.segment = stamp.segment;
        raw.at = stamp.at.into();
        raw.durable = stamp.known.durable.into();
        raw.floor = stamp.known.floor.into();
        let mut block = Buffer::new(self.header_blocks() as usize * BLOCK);
        let (fixed, list) = block.split_at_mut(size_of::<RawRecord>());
        match self {
            Body::Snapshot { key, version, state, runs } => {
                let cover = cover(runs);
                raw.kind = SNAPSHOT;
                raw.count = (runs.len() as u16).into();
                raw.payload_first = cover.start.into();
                raw.payload_bytes = (cover.end - cover.start).into();
                raw.entry = RawEntry::new(*key, *version, *state);
                put(list, runs.iter().map(|run| RawRun::from(*run)));
            }
            Body::Notes(notes) => {
                raw.kind = NOTES;
                raw.count = (notes.len() as u16).into();
                put(list, notes.iter().map(|note| RawNote::from(*note)));
            }
        }
        raw.crc = crc32c_of([raw.as_bytes(), list]).into();
        fixed.copy_from_slice(raw.as_bytes());
        block
    }

    /// How many blocks the header has that begins with `block`; None if no record begins with it.
    pub fn header_blocks_of(block: &[u8]) -> Option<u32> {
        let (raw, _) = RawRecord::read_from_prefix(block).ok()?;
        let count = usize::from(raw.count.get());
        match (&raw.magic == RECORD_MAGIC, raw.kind) {
            (true, SNAPSHOT) if (1..=RUNS_MAX).contains(&count) => Some(snapshot_header_blocks(count)),
            (true, NOTES) if count <= NOTES_MAX => Some(1),
            _ => None,
        }
    }

    /// Whether this block, which begins no whole header, was to be that of the record `at`: it is torn or damaged.
    pub fn was_to_be(block: &[u8], segment: &SegmentId, at: Position) -> bool {
        RawRecord::read_from_prefix(block).is_ok_and(|(raw, _)| {
            &raw.segment == segment || (&raw.magic == RECORD_MAGIC && Position::from(raw.at) == at)
        })
    }

    /// Reads a whole header; None unless it is undamaged and well-formed.
    pub fn decode(header: &[u8]) -> Option<(Stamp, Body)> {
        let (mut raw, list) = RawRecord::read_from_prefix(header).ok()?;
        let stored = raw.crc.get();
        raw.crc = 0.into();
        if crc32c_of([raw.as_bytes(), list]) != stored {
            return None;
        }
        let count = usize::from(raw.count.get());
        let body = match raw.kind {
            SNAPSHOT => {
                let runs: Vec<Run> = take::<RawRun>(list, count)?.into_iter().map(Run::from).collect();
                let cover = if fault_of(&runs).is_none() { cover(&runs) } else { return None };
                if cover.start != raw.payload_first.get() || cover.len() as u32 != raw.payload_bytes.get() {
                    return None;
                }
                let entry = raw.entry;
                Body::Snapshot { key: entry.key(), version: entry.version(), state: entry.state(), runs }
            }
            NOTES => {
                Body::Notes(take::<RawNote>(list, count)?.iter().map(RawNote::decode).collect::<Option<_>>()?)
            }
            _ => return None,
        };
        let known = Known { durable: raw.durable.into(), floor: raw.floor.into() };
        Some((Stamp { segment: raw.segment, at: raw.at.into(), known }, body))
    }
}

/// Blocks of the header of a snapshot with so many runs.
pub(crate) fn snapshot_header_blocks(runs: usize) -> u32 {
    (size_of::<RawRecord>() + runs * size_of::<RawRun>()).div_ceil(BLOCK) as u32
}

fn put<T: IntoBytes + Immutable>(bytes: &mut [u8], items: impl Iterator<Item = T>) {
    for (place, item) in bytes.chunks_exact_mut(size_of::<T>()).zip(items) {
        place.copy_from_slice(item.as_bytes());
    }
}

fn take<T: FromBytes + Immutable + KnownLayout + Unaligned + Copy>(
    bytes: &[u8],
    count: usize,
) -> Option<Vec<T>> {
    let (items, _) = <[T]>::ref_from_prefix_with_elems(bytes, count).ok()?;
    Some(items.to_vec())
}
