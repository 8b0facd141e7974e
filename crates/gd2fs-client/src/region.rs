//! Memory that this library has allocated: nodes of this host map it, and move bytes straight to and from it.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use gd2fs_transport::one_sided::SEGMENTS_MAX;
use gd2fs_transport::shm::{self, page_bytes};
use gd2fs_transport::{Memory, Segment};
use gd2fs_wire::code::{Code, Failure};
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::request::Direction;
use crate::severed::{Cuts, Severed};

/// Library memory. It stays mapped as long as somebody holds it: its owner, or a transfer.
pub struct Region {
    pub(crate) number: u32,
    memory: shm::Region,
    /// Ranges whose pages are this process's alone since a node did not say whether it still writes there.
    severed: Mutex<Severed>,
    released: UnboundedSender<u32>,
}

/// All regions of a client, by address.
pub(crate) struct Regions {
    by_address: RwLock<BTreeMap<usize, Weak<Region>>>,
    last: AtomicU32,
    /// Numbers of regions that are gone: nodes are told.
    released: UnboundedSender<u32>,
}

/// Memory that a node can reach by itself.
pub(crate) struct Direct {
    pub segments: Vec<Segment>,
    pub ranges: Ranges,
}

/// Where a node may be until it has answered.
pub(crate) struct Ranges {
    list: Vec<(Arc<Region>, Range<usize>)>,
    /// Of a read: all of them can be severed.
    _cuts: Cuts,
}

impl Region {
    pub fn address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// In bytes, whole pages.
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.memory.descriptor()
    }

    /// Takes `range`, whole pages, out of what nodes can reach. What it held is lost.
    fn sever(&self, range: Range<usize>) -> io::Result<()> {
        self.memory.sever(range.start, range.len())?;
        self.severed.lock().insert(range);
        Ok(())
    }

    /// Whether this is a child of the process that made it, which can't reach it.
    pub fn is_forked(&self) -> bool {
        self.memory.is_forked()
    }

    fn contains(&self, address: usize, length: usize) -> bool {
        let start = self.address() as usize;
        address >= start
            && address - start <= self.capacity()
            && length <= self.capacity() - (address - start)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // In a forked child nobody may be told: the runtime's locks are as the fork found them.
        if !self.is_forked() {
            // Nobody listens any more when the client is closed, and its connections, which held the node's mappings, are too.
            let _ = self.released.send(self.number);
        }
    }
}

impl Ranges {
    pub fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.list.iter().map(|(region, _)| region)
    }

    /// Takes them away from a node that does not say whether it still writes there.
    pub fn sever(&self) -> io::Result<()> {
        self.list.iter().try_for_each(|(region, range)| region.sever(range.clone()))
    }
}

impl Regions {
    pub fn new() -> (Regions, UnboundedReceiver<u32>) {
        let (released, gone) = mpsc::unbounded_channel();
        (Regions { by_address: RwLock::default(), last: AtomicU32::new(0), released }, gone)
    }

    pub fn allocate(&self, length: usize) -> Result<Arc<Region>, Failure> {
        if length == 0 {
            return Err(Failure::new(Code::Invalid, "length: 0 bytes can't be allocated"));
        }
        let memory = shm::Region::create(length).map_err(|error| {
            Failure::new(Code::NoSpace, format!("length: the system gives no {length} bytes: {error}"))
        })?;
        let region = Region {
            number: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            memory,
            severed: Mutex::default(),
            released: self.released.clone(),
        };
        let region = Arc::new(region);
        let mut by_address = self.by_address.write();
        by_address.retain(|_, region| region.strong_count() > 0);
        by_address.insert(region.address() as usize, Arc::downgrade(&region));
        Ok(region)
    }

    /// `memory` as segments, if it is library memory throughout, and may be taken from the node again: what a node fills must be
    /// whole pages, since only pages can be severed.
    pub fn direct(&self, memory: &Memory, direction: Direction) -> Option<Direct> {
        let pages = if direction == Direction::Read { page_bytes() } else { 1 };
        let by_address = self.by_address.read();
        let mut ranges: Vec<(Arc<Region>, Range<usize>)> = Vec::new();
        for slice in memory.slices().iter().filter(|slice| !slice.is_empty()) {
            let (address, length) = (slice.address() as usize, slice.len());
            let region = match ranges.last() {
                Some((region, _)) if region.contains(address, length) => region.clone(),
                _ => {
                    let (_, region) = by_address.range(..=address).next_back()?;
                    region.upgrade().filter(|region| region.contains(address, length))?
                }
            };
            let start = address - region.address() as usize;
            let range = start..start + length;
            if !start.is_multiple_of(pages)
                || !length.is_multiple_of(pages)
                || region.severed.lock().overlaps(&range)
            {
                return None;
            }
            match ranges.last_mut() {
                Some((last, before)) if Arc::ptr_eq(last, &region) && before.end == start => {
                    before.end = range.end;
                }
                _ => ranges.push((region, range)),
            }
        }
        let segment = |(region, range): &(Arc<Region>, Range<usize>)| {
            Segment::new(region.number, range.start as u64, range.len() as u32)
        };
        if ranges.len() > SEGMENTS_MAX {
            return None;
        }
        let cuts = Cuts::claim(if direction == Direction::Read { ranges.len() } else { 0 })?;
        let segments = ranges.iter().map(segment).collect();
        Some(Direct { segments, ranges: Ranges { list: ranges, _cuts: cuts } })
    }
}

#[cfg(test)]
mod tests {
    use gd2fs_transport::Slice;

    use super::*;
    use crate::severed::CUTS_MAX;

    fn part(region: &Region, start: usize, length: usize) -> Slice {
        // SAFETY: inside the region, which outlives the test's use.
        unsafe { Slice::new(region.address().add(start), length) }
    }

    #[test]
    fn only_whole_pages_of_library_memory_are_filled_by_a_node() {
        let (regions, mut gone) = Regions::new();
        let page = page_bytes();
        let region = regions.allocate(4 * page).unwrap();
        let direct = |memory: &Memory| regions.direct(memory, Direction::Read);
        let two = Memory::new(vec![part(&region, 0, page), part(&region, page, page)]);
        assert_eq!(direct(&two).unwrap().segments.len(), 1, "what lies together is one segment");
        let apart = Memory::new(vec![part(&region, 2 * page, page), part(&region, 0, page)]);
        assert_eq!(direct(&apart).unwrap().segments.len(), 2);
        assert!(direct(&Memory::from(part(&region, 1, page))).is_none());
        assert!(regions.direct(&Memory::from(part(&region, 1, 5)), Direction::Write).is_some());
        let mut foreign = vec![0u8; page];
        // SAFETY: never used.
        let foreign = unsafe { Slice::new(foreign.as_mut_ptr(), page) };
        assert!(direct(&Memory::new(vec![part(&region, 0, page), foreign])).is_none());
        region.sever(page..2 * page).unwrap();
        assert!(direct(&two).is_none() && direct(&apart).is_some());
        let number = region.number;
        drop((region, two, apart));
        assert_eq!(gone.try_recv().unwrap(), number);
    }
    /// The system would give no mappings for all of them: what is not severed must have gone another way.
    #[test]
    fn of_very_many_fragments_only_those_that_can_be_severed_are_filled_by_a_node() {
        let (regions, _gone) = Regions::new();
        let page = page_bytes();
        for count in [20_000, 70_000] {
            let region = regions.allocate(2 * count * page).unwrap();
            let odd = |index: usize| part(&region, (2 * index + 1) * page, page);
            // SAFETY: inside the region, which nobody else uses.
            (0..count).for_each(|index| unsafe { odd(index).address().sub(page).write(7) });
            let doubtful: Vec<Ranges> = (0..count)
                .step_by(1000)
                .map(|first| Memory::new((first..first + 1000).map(odd).collect()))
                .filter_map(|memory| Some(regions.direct(&memory, Direction::Read)?.ranges))
                .collect();
            // Other tests have some too.
            assert!((10_000..=CUTS_MAX).contains(&(1000 * doubtful.len())));
            doubtful.iter().for_each(|ranges| ranges.sever().unwrap());
            let severed = 1000 * doubtful.len();
            drop(doubtful);
            // SAFETY: as above.
            assert!((0..count).all(|index| unsafe { odd(index).address().sub(page).read() } == 7));
            let all = Memory::new((0..count).map(odd).collect());
            let one = |index: usize| regions.direct(&Memory::from(odd(index)), Direction::Read);
            assert!(regions.direct(&all, Direction::Read).is_none() && one(0).is_none());
            assert!(severed + 2000 > CUTS_MAX || one(severed + 1).is_some());
        }
    }
}
