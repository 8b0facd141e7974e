//! The node's DRAM: slabs that are made when they are needed, and kept.
//!
//! A slab that has become empty stays mapped, so that the next session finds its pages there: the first write to a page takes
//! several times as long as a later one (docs/adr/0007-arena-memory.md). The bound is the capacity, which is the node's own by
//! its configuration.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;

use crate::buddy::{Buddy, LEAF_BYTES, ORDER_MAX, order_of};
use crate::frame::Frame;
use crate::ledger::Held;
use crate::mapping::Mapping;

/// As large as the largest stripe unit, so that every chunk fits into one slab.
pub const SLAB_BYTES: usize = 64 << 20;

pub struct Arena {
    capacity: usize,
    used: AtomicUsize,
    slabs: Mutex<Slabs>,
}

struct Slabs {
    list: Vec<Option<Slab>>,
    /// Slabs that have a free block, by the order of their largest one.
    by_largest: [BTreeSet<usize>; ORDER_MAX + 1],
    /// Slabs that could still be made.
    absent: BTreeSet<usize>,
}

struct Slab {
    mapping: Mapping,
    buddy: Buddy,
}

impl Arena {
    /// An arena of at most `capacity` bytes, rounded down to 32 KiB. No memory is taken yet.
    pub fn new(capacity: usize) -> Arena {
        let capacity = capacity / LEAF_BYTES * LEAF_BYTES;
        let count = capacity.div_ceil(SLAB_BYTES);
        let slabs = Slabs {
            list: (0..count).map(|_| None).collect(),
            by_largest: Default::default(),
            absent: (0..count).collect(),
        };
        Arena { capacity, used: AtomicUsize::new(0), slabs: Mutex::new(slabs) }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes in frames, in whole size classes.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes mapped from the operating system: what was ever needed at once, in whole slabs.
    pub fn mapped(&self) -> usize {
        self.slabs.lock().list.iter().flatten().map(|slab| slab.mapping.bytes()).sum()
    }

    /// The size of a frame for `bytes`, which are a chunk at most.
    pub(crate) fn frame_bytes(bytes: usize) -> Result<usize, Failure> {
        let too_large = || format!("a frame of {bytes} bytes is over the limit of {SLAB_BYTES}");
        let order = order_of(bytes).ok_or_else(|| Failure::new(Code::TooLarge, too_large()))?;
        Ok(LEAF_BYTES << order)
    }

    /// A frame of at least `bytes`, which is a chunk's size at most. Its content is whatever was there before.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Frame, Failure> {
        self.allocate_for(bytes, None)
    }

    /// The same on somebody's account.
    pub(crate) fn allocate_for(self: &Arc<Self>, bytes: usize, held: Option<Held>) -> Result<Frame, Failure> {
        let order = (Arena::frame_bytes(bytes)? / LEAF_BYTES).ilog2() as usize;
        let mut slabs = self.slabs.lock();
        let index = match (order..=ORDER_MAX).find_map(|o| slabs.by_largest[o].first().copied()) {
            Some(index) => index,
            None => self.add_slab(&mut slabs, order)?,
        };
        let slab = slabs.list[index].as_mut().expect("ranked slabs exist");
        let before = slab.buddy.largest_free();
        let leaf = slab.buddy.allocate(order).expect("the slab's largest free block is large enough");
        let after = slab.buddy.largest_free();
        // SAFETY: the block lies inside the slab's mapping.
        let address = unsafe { slab.mapping.address().add(leaf as usize * LEAF_BYTES) };
        slabs.rank(index, before, after);
        drop(slabs);
        self.used.fetch_add(LEAF_BYTES << order, Ordering::Relaxed);
        Ok(Frame::new(self.clone(), address, index, leaf, order, held))
    }

    fn add_slab(&self, slabs: &mut Slabs, order: usize) -> Result<usize, Failure> {
        let slab_bytes = |index: usize| SLAB_BYTES.min(self.capacity - index * SLAB_BYTES);
        let no_space = |why: String| {
            let (used, capacity) = (self.used(), self.capacity);
            let wanted = LEAF_BYTES << order;
            Failure::new(
                Code::NoSpace,
                format!(
                    "no frame of {wanted} bytes: {used} of {capacity} bytes are used{why}; delete files or raise memory_bytes"
                ),
            )
        };
        // Only the last slab can be smaller than the others, so this looks at two at most.
        let index = slabs.absent.iter().copied().find(|index| {
            Buddy::new((slab_bytes(*index) / LEAF_BYTES) as u32).largest_free().is_some_and(|o| o >= order)
        });
        let index = index.ok_or_else(|| no_space(String::new()))?;
        let mapping = Mapping::new(slab_bytes(index))
            .map_err(|error| no_space(format!(", and the system gives no more memory ({error})")))?;
        let buddy = Buddy::new((mapping.bytes() / LEAF_BYTES) as u32);
        slabs.rank(index, None, buddy.largest_free());
        slabs.absent.remove(&index);
        slabs.list[index] = Some(Slab { mapping, buddy });
        Ok(index)
    }

    pub(crate) fn release(&self, index: usize, leaf: u32, order: usize) {
        let mut slabs = self.slabs.lock();
        let slab = slabs.list[index].as_mut().expect("a slab with a frame in it exists");
        let before = slab.buddy.largest_free();
        slab.buddy.release(leaf, order);
        let after = slab.buddy.largest_free();
        slabs.rank(index, before, after);
        drop(slabs);
        self.used.fetch_sub(LEAF_BYTES << order, Ordering::Relaxed);
    }
}

impl Slabs {
    fn rank(&mut self, index: usize, before: Option<usize>, after: Option<usize>) {
        if before != after {
            before.map(|order| self.by_largest[order].remove(&index));
            after.map(|order| self.by_largest[order].insert(index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_made_lazily_and_kept() {
        let arena = Arc::new(Arena::new(SLAB_BYTES + (1 << 20)));
        assert_eq!(arena.mapped(), 0);
        let large = arena.allocate(SLAB_BYTES).unwrap();
        assert_eq!(arena.mapped(), SLAB_BYTES);
        let small = arena.allocate(1 << 20).unwrap();
        assert_eq!(arena.mapped(), arena.capacity());
        assert_eq!(arena.allocate(1).err().unwrap().code, Code::NoSpace);
        let address = large.address(0, 0);
        drop((large, small));
        assert_eq!((arena.mapped(), arena.used()), (arena.capacity(), 0));
        let again = arena.allocate(SLAB_BYTES).unwrap();
        assert_eq!(again.address(0, 0), address, "the slab whose pages are there already");
        assert_eq!(arena.mapped(), arena.capacity());
    }

    #[test]
    fn a_kept_slab_is_used_before_another_is_made() {
        let arena = Arc::new(Arena::new(4 * SLAB_BYTES));
        let many: Vec<Frame> = (0..5).map(|_| arena.allocate(SLAB_BYTES / 4).unwrap()).collect();
        assert_eq!(arena.mapped(), 2 * SLAB_BYTES);
        drop(many);
        let large = [arena.allocate(SLAB_BYTES).unwrap(), arena.allocate(SLAB_BYTES).unwrap()];
        assert_eq!((arena.mapped(), arena.used()), (2 * SLAB_BYTES, 2 * SLAB_BYTES));
        let third = arena.allocate(1).unwrap();
        assert_eq!(arena.mapped(), 3 * SLAB_BYTES);
        drop((large, third));
    }

    #[test]
    fn the_capacity_is_exact() {
        let arena = Arc::new(Arena::new(3 * LEAF_BYTES + 5));
        let frames: Vec<Frame> = (0..3).map(|_| arena.allocate(1).unwrap()).collect();
        assert_eq!(arena.allocate(1).err().unwrap().code, Code::NoSpace);
        assert_eq!(arena.used(), 3 * LEAF_BYTES);
        drop(frames);
        assert_eq!(arena.allocate(SLAB_BYTES + 1).err().unwrap().code, Code::TooLarge);
    }
}
