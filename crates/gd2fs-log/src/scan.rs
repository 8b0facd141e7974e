//! Reading segments from their begin, at the device's speed.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use gd2fs_device::{BLOCK, Buffer, Device, Op, PART_BYTES_MAX};
use gd2fs_wire::sums::{Run, crc32c, crc32c_of};

use crate::entry::{Key, Note, cover};
use crate::error::Result;
use crate::position::{Place, Position};
use crate::record::{Body, SegmentId, Stamp};
use crate::segment::Division;

/// Parts of 1 MiB that are read ahead: 16 MiB in flight keep any disk busy, and bound recovery's memory.
const PARTS_AHEAD: usize = 16;

type Reading = Pin<Box<dyn Future<Output = gd2fs_device::Result<()>> + Send>>;

struct Part {
    offset: u64,
    buffer: Arc<Buffer>,
    reading: Option<Reading>,
}

/// A range of the device that is read from its begin to its end, some parts ahead of who asks.
struct Ahead<'a> {
    device: &'a Device,
    next: u64,
    end: u64,
    parts: VecDeque<Part>,
}

impl Ahead<'_> {
    /// The bytes `[offset, offset + length)`, in one slice or more. Offsets never go back.
    async fn bytes(&mut self, offset: u64, length: usize) -> Result<Vec<&[u8]>> {
        let end = offset + length as u64;
        while self.parts.front().is_some_and(|part| part.offset + part.buffer.len() as u64 <= offset) {
            self.parts.pop_front();
        }
        if self.parts.is_empty() {
            self.next = self.next.max(offset / BLOCK as u64 * BLOCK as u64);
        }
        while self.next < self.end && (self.parts.len() < PARTS_AHEAD || self.next < end) {
            self.read_on();
        }
        for part in &mut self.parts {
            if part.offset < end
                && let Some(reading) = part.reading.take()
            {
                reading.await?;
            }
        }
        let parts = self.parts.iter().take_while(|part| part.offset < end);
        Ok(parts
            .map(|part| {
                let from = offset.saturating_sub(part.offset) as usize;
                let upto = ((end - part.offset) as usize).min(part.buffer.len());
                &part.buffer[from..upto]
            })
            .collect())
    }

    fn read_on(&mut self) {
        let length = (self.end - self.next).min(PART_BYTES_MAX as u64) as usize;
        let buffer = Arc::new(Buffer::new(length));
        // SAFETY: the operation keeps the buffer; it is read only once the operation is over.
        let memory = unsafe { buffer.slice() };
        let reading = self.device.perform(Op::read(self.next, memory, Arc::clone(&buffer)));
        self.parts.push_back(Part { offset: self.next, buffer, reading: Some(Box::pin(reading)) });
        self.next += length as u64;
    }
}

/// A record that a scan has met.
#[derive(Debug)]
pub(crate) struct Met {
    pub at: Position,
    /// Device offset of its header.
    pub offset: u64,
    pub stamp: Stamp,
    pub what: What,
}

impl Met {
    /// The position behind it.
    pub fn end(&self) -> Position {
        Position { sequence: self.at.sequence + 1, ..self.at }
    }
}

#[derive(Debug)]
pub(crate) enum What {
    /// `whole`: the payload holds what the runs' sums say.
    Snapshot {
        key: Key,
        version: u64,
        state: crate::ColumnState,
        runs: Vec<Run>,
        place: Place,
        whole: bool,
    },
    Notes(Vec<Note>),
}

/// Which records of a segment are to be read.
pub(crate) struct Stretch {
    pub segment: u32,
    pub id: SegmentId,
    /// The first record, and the block at which it begins.
    pub first: Position,
    pub block: u32,
    /// So many records the segment had when the next was opened.
    pub sequence_end: u32,
    /// Blocks of the largest record.
    pub record_blocks_max: u32,
}

/// What a segment has.
pub(crate) struct Walked {
    /// Its records.
    pub sequence: u32,
    /// Where a header lies behind them that is torn or damaged.
    pub torn: Option<u64>,
}

/// Reads the segment's records. A payload that is not what was written is noted, and the scan goes
/// on: its header says where the next record is. Where a header is missing, the next one is looked for as far as one record can
/// reach, and `gaps` gets the position: whether it is damage or the end of the log is for the caller to tell.
pub(crate) async fn walk(
    device: &Device,
    division: Division,
    stretch: &Stretch,
    met: &mut Vec<Met>,
    gaps: &mut Vec<Position>,
) -> Result<Walked> {
    let end = division.start(stretch.segment) + division.segment_bytes;
    let mut offset = division.offset(stretch.segment, stretch.block);
    let mut ahead = Ahead { device, next: offset, end, parts: VecDeque::new() };
    let mut at = stretch.first;
    let mut torn = None;
    while at.sequence < stretch.sequence_end && offset < end {
        let Some((stamp, body, found)) = next_header(&mut ahead, stretch, at, offset, end).await? else {
            let left = Body::was_to_be(&start_of(device, offset).await?, &stretch.id, at);
            torn = left.then_some(offset);
            break;
        };
        if stamp.at != at {
            gaps.push(at);
        }
        (at, offset) = (stamp.at, found);
        let next = offset + u64::from(body.blocks()) * BLOCK as u64;
        if next > end {
            break;
        }
        let payload = offset + u64::from(body.header_blocks()) * BLOCK as u64;
        let what = match body {
            Body::Notes(notes) => What::Notes(notes),
            Body::Snapshot { key, version, state, runs } => {
                let cover = cover(&runs);
                let whole = verified(&mut ahead, payload, cover.start, &runs).await?;
                let (first, bytes) = (cover.start, cover.end - cover.start);
                let place = Place { generation: at.generation, offset: payload, first, bytes };
                What::Snapshot { key, version, state, runs, place, whole }
            }
        };
        met.push(Met { at, offset, stamp, what });
        at.sequence += 1;
        offset = next;
    }
    Ok(Walked { sequence: at.sequence, torn })
}

/// The record `at`, or a later one of the segment that lies no further away than a record is long.
async fn next_header(
    ahead: &mut Ahead<'_>,
    stretch: &Stretch,
    at: Position,
    offset: u64,
    end: u64,
) -> Result<Option<(Stamp, Body, u64)>> {
    let far = end.min(offset + u64::from(stretch.record_blocks_max) * BLOCK as u64 + 1);
    for candidate in (offset..far).step_by(BLOCK) {
        if let Some((stamp, body)) = header(ahead, candidate, end).await? {
            let ours = stamp.segment == stretch.id && stamp.at.generation == at.generation;
            let expected = if candidate == offset { stamp.at == at } else { stamp.at > at };
            if ours && expected && stamp.at.sequence < stretch.sequence_end {
                return Ok(Some((stamp, body, candidate)));
            }
        }
    }
    Ok(None)
}

async fn header(ahead: &mut Ahead<'_>, offset: u64, end: u64) -> Result<Option<(Stamp, Body)>> {
    let first = ahead.bytes(offset, BLOCK).await?;
    let Some(blocks) = Body::header_blocks_of(first[0]) else { return Ok(None) };
    if blocks == 1 {
        return Ok(Body::decode(first[0]));
    }
    let bytes = blocks as usize * BLOCK;
    if offset + bytes as u64 > end {
        return Ok(None);
    }
    Ok(Body::decode(&ahead.bytes(offset, bytes).await?.concat()))
}

/// The first block of a record. What was read ahead is gone: the search for the next header went on behind it.
async fn start_of(device: &Device, offset: u64) -> Result<Arc<Buffer>> {
    let block = Arc::new(Buffer::new(BLOCK));
    // SAFETY: the operation keeps the buffer, which is read only after it.
    let memory = unsafe { block.slice() };
    device.perform(Op::read(offset, memory, Arc::clone(&block))).await?;
    Ok(block)
}

async fn verified(ahead: &mut Ahead<'_>, payload: u64, first: u32, runs: &[Run]) -> Result<bool> {
    for run in runs {
        let bytes =
            ahead.bytes(payload + u64::from(run.start - first), (run.end - run.start) as usize).await?;
        if crc32c_of(bytes) != run.crc {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a payload, whose first byte is byte `first` of the chunk, holds what the runs' sums say.
pub(crate) fn runs_hold(runs: &[Run], first: u32, payload: &[u8]) -> bool {
    runs.iter().all(|run| {
        let range = (run.start - first) as usize..(run.end - first) as usize;
        payload.get(range).is_some_and(|bytes| crc32c(bytes) == run.crc)
    })
}
