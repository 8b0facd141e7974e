//! The segments of a device: which are free, what lives in them, and who still reads.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use gd2fs_device::BLOCK;

use crate::checkpoint::Named;
use crate::entry::Key;
use crate::position::{Mark, Place};
use crate::record::SEGMENT_HEADER_BLOCKS;

/// How a device is divided: one block of superblock, the segments, what is left over, one block with its copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    pub segment_bytes: u64,
    pub segments: u32,
}

impl Division {
    pub fn new(device_bytes: u64, segment_bytes: u64) -> Division {
        let segments = device_bytes.saturating_sub(2 * BLOCK as u64) / segment_bytes;
        Division { segment_bytes, segments: segments.min(u64::from(u32::MAX)) as u32 }
    }

    pub fn start(&self, segment: u32) -> u64 {
        BLOCK as u64 + u64::from(segment) * self.segment_bytes
    }

    pub fn offset(&self, segment: u32, block: u32) -> u64 {
        self.start(segment) + u64::from(block) * BLOCK as u64
    }

    /// Blocks of a segment.
    pub fn blocks(&self) -> u32 {
        (self.segment_bytes / BLOCK as u64) as u32
    }

    /// The segment and the block in it at a device offset; None outside of all segments.
    pub fn locate(&self, offset: u64) -> Option<(u32, u32)> {
        let inside = offset.checked_sub(BLOCK as u64)?;
        let segment =
            u32::try_from(inside / self.segment_bytes).ok().filter(|segment| *segment < self.segments)?;
        Some((segment, (inside % self.segment_bytes / BLOCK as u64) as u32))
    }
}

/// A record that its owner still wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub key: Key,
    pub version: u64,
    pub place: Place,
    pub header_blocks: u32,
}

impl Live {
    pub fn blocks(&self) -> u32 {
        self.header_blocks + self.place.bytes / BLOCK as u32
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Holds nothing; may be opened.
    Free,
    /// The append point is in it.
    Open,
    /// Takes no more records.
    Full,
    /// Nothing lives in it and a checkpoint lies behind it: free as soon as its last reader is gone.
    Leaving,
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub phase: Phase,
    pub generation: u64,
    pub live: BTreeMap<u64, Live>,
    pub live_blocks: u32,
    pub used_blocks: u32,
    pub readers: u32,
    /// Reclaim could not read something in it, and leaves it alone until then.
    put_off: Option<Instant>,
}

impl Segment {
    fn is_put_off(&self, now: Instant) -> bool {
        self.put_off.is_some_and(|until| now < until)
    }
}

#[derive(Debug)]
pub(crate) struct Segments {
    pub division: Division,
    all: Vec<Segment>,
    free: VecDeque<u32>,
}

impl Segments {
    pub fn new(division: Division) -> Segments {
        let empty = |_| Segment {
            phase: Phase::Free,
            generation: 0,
            live: BTreeMap::new(),
            live_blocks: 0,
            used_blocks: 0,
            readers: 0,
            put_off: None,
        };
        let all = (0..division.segments).map(empty).collect();
        Segments { division, all, free: (0..division.segments).collect() }
    }

    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.all.iter()
    }

    /// Takes the segment that has been free longest, so that wear spreads.
    pub fn open(&mut self, generation: u64) -> Option<u32> {
        let segment = self.free.pop_front()?;
        let opened = &mut self.all[segment as usize];
        opened.phase = Phase::Open;
        opened.generation = generation;
        opened.used_blocks = SEGMENT_HEADER_BLOCKS;
        opened.put_off = None;
        Some(segment)
    }

    pub fn close(&mut self, segment: u32) {
        self.all[segment as usize].phase = Phase::Full;
    }

    pub fn use_blocks(&mut self, segment: u32, blocks: u32) {
        self.all[segment as usize].used_blocks += blocks;
    }

    /// What recovery found: a segment that holds records of `generation`.
    pub fn adopt(&mut self, segment: u32, generation: u64) {
        self.free.retain(|free| *free != segment);
        let found = &mut self.all[segment as usize];
        found.phase = Phase::Full;
        found.generation = generation;
        found.used_blocks = self.division.blocks();
    }

    /// The segment that a place lies in, unless it was reused since.
    fn of(&mut self, place: &Place) -> Option<(u32, &mut Segment)> {
        let (segment, _) = self.division.locate(place.offset)?;
        let found = &mut self.all[segment as usize];
        (found.phase != Phase::Free && found.generation == place.generation).then_some((segment, found))
    }

    pub fn insert(&mut self, live: Live) {
        let Some((_, segment)) = self.of(&live.place) else { return };
        segment.live_blocks += live.blocks();
        if let Some(twice) = segment.live.insert(live.place.offset, live) {
            segment.live_blocks -= twice.blocks();
        }
    }

    /// Whether the place was live.
    pub fn remove(&mut self, place: &Place) -> bool {
        let Some((_, segment)) = self.of(place) else { return false };
        let Some(live) = segment.live.remove(&place.offset) else { return false };
        segment.live_blocks -= live.blocks();
        true
    }

    pub fn is_live(&mut self, place: &Place) -> bool {
        self.of(place).is_some_and(|(_, segment)| segment.live.contains_key(&place.offset))
    }

    /// Keeps the place's segment from being reused until `leave`.
    pub fn enter(&mut self, place: &Place) -> Option<u32> {
        let (index, segment) = self.of(place)?;
        segment.readers += 1;
        Some(index)
    }

    /// Whether a segment became free by it.
    pub fn leave(&mut self, segment: u32) -> bool {
        let left = &mut self.all[segment as usize];
        left.readers -= 1;
        let free = left.readers == 0 && left.phase == Phase::Leaving;
        if free {
            self.make_free(segment);
        }
        free
    }

    /// Frees the segments that were opened behind `generation`: nothing in them was ever complete. They are used again last, so
    /// that a broken spot of the device is not tried twice in a row.
    pub fn take_back(&mut self, generation: u64) {
        for index in 0..self.division.segments {
            let segment = &self.all[index as usize];
            if segment.phase != Phase::Free && segment.generation > generation {
                debug_assert!(segment.live.is_empty() && segment.readers == 0, "nobody was told of a place");
                self.make_free(index);
            }
        }
    }

    /// Something in the place's segment could not be read: it is no victim until then. The segment, unless it is put off already.
    pub fn put_off(&mut self, place: &Place, until: Instant) -> Option<u32> {
        let (index, segment) = self.of(place)?;
        let before = segment.put_off.replace(until);
        before.is_none_or(|before| before <= Instant::now()).then_some(index)
    }

    pub fn is_put_off(&mut self, place: &Place) -> bool {
        self.of(place).is_some_and(|(_, segment)| segment.is_put_off(Instant::now()))
    }

    fn make_free(&mut self, segment: u32) {
        self.all[segment as usize].phase = Phase::Free;
        self.free.push_back(segment);
    }

    /// How many segments a checkpoint could free.
    pub fn empty_count(&self) -> u32 {
        self.all.iter().filter(|segment| segment.phase == Phase::Full && segment.live.is_empty()).count()
            as u32
    }

    /// What lies before a checkpoint's position and is not named by its entries is dead.
    pub fn drop_unnamed(&mut self, segment: u32, position: &Mark, named: &Named) {
        let segment = &mut self.all[segment as usize];
        let (generation, Mark { at, offset: end }) = (segment.generation, *position);
        // Of the segment that the position lies in, the records before it; all, where a recovery ended.
        let before = |offset| generation < at.generation || end == 0 || offset < end;
        if generation > at.generation {
            return;
        }
        let named = named.get(&generation);
        let stays = |offset| !before(offset) || named.is_some_and(|named| named.contains(&offset));
        let mut dropped = 0;
        segment.live.retain(|offset, live| {
            let stays = stays(*offset);
            dropped += if stays { 0 } else { live.blocks() };
            stays
        });
        segment.live_blocks -= dropped;
    }

    /// Frees what is empty, lies wholly before the checkpoint at `generation`, and is not named by its entries. Gives their number.
    pub fn free_behind(&mut self, generation: u64, named: &Named) -> u32 {
        let mut count = 0;
        for index in 0..self.division.segments {
            let segment = &mut self.all[index as usize];
            let behind = segment.generation < generation && !named.contains_key(&segment.generation);
            if segment.phase == Phase::Full && segment.live.is_empty() && behind {
                segment.phase = Phase::Leaving;
                count += 1;
                if segment.readers == 0 {
                    self.make_free(index);
                }
            }
        }
        count
    }

    /// The full segment with the least that lives, if it has at most `blocks_max` of it, and at least something. Not one that
    /// is put off.
    pub fn victim(&self, blocks_max: u32) -> Option<Vec<Live>> {
        let now = Instant::now();
        let full = self.all.iter().filter(|segment| {
            segment.phase == Phase::Full && !segment.live.is_empty() && !segment.is_put_off(now)
        });
        let least = full.min_by_key(|segment| segment.live_blocks)?;
        (least.live_blocks <= blocks_max).then(|| least.live.values().copied().collect())
    }
}
