//! Reference-counted blocks of the arena.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::arena::Arena;
use crate::buddy::LEAF_BYTES;
use crate::ledger::Held;

/// A block of memory that goes back to the arena with its last holder: a reader that sends from it, a writer that receives
/// into it, or the chunk whose bytes it holds.
#[derive(Clone)]
pub struct Frame(Arc<Block>);

struct Block {
    arena: Arc<Arena>,
    address: NonNull<u8>,
    slab: usize,
    leaf: u32,
    order: usize,
    /// For whoever has asked for it.
    _held: Option<Held>,
}

// SAFETY: a Block is an owned address range; the rules of `Frame`'s methods say who may touch which bytes.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.release(self.slab, self.leaf, self.order);
    }
}

impl Frame {
    pub(crate) fn new(
        arena: Arc<Arena>,
        address: NonNull<u8>,
        slab: usize,
        leaf: u32,
        order: usize,
        held: Option<Held>,
    ) -> Frame {
        Frame(Arc::new(Block { arena, address, slab, leaf, order, _held: held }))
    }

    pub fn capacity(&self) -> usize {
        LEAF_BYTES << self.0.order
    }

    pub fn is(&self, other: &Frame) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether this is the only holder. Nobody can become another one while the caller keeps `self` to itself.
    pub(crate) fn is_exclusive(&self) -> bool {
        let exclusive = Arc::strong_count(&self.0) == 1;
        // Pairs with the release of the last other holder, so that its reads are over before we write.
        fence(Ordering::Acquire);
        exclusive
    }

    /// The address of `[start, end)`; using it is subject to the rules of `bytes` and `copy_from`.
    pub fn address(&self, start: u32, end: u32) -> *mut u8 {
        assert!(start <= end && end as usize <= self.capacity(), "[{start}, {end}) lies outside the frame");
        // SAFETY: inside the block, as just checked.
        unsafe { self.0.address.as_ptr().add(start as usize) }
    }

    /// # Safety
    /// Nobody writes `[start, end)` while the reference lives.
    pub(crate) unsafe fn bytes(&self, start: u32, end: u32) -> &[u8] {
        // SAFETY: mapped as long as the frame lives, which the reference cannot outlive; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address(start, end), (end - start) as usize) }
    }

    /// Copies `[start, end)` of another frame to the same place in this one.
    ///
    /// # Safety
    /// Nobody writes the range in `source`, and nobody else reads or writes it here, during the call.
    pub(crate) unsafe fn copy_from(&self, source: &Frame, start: u32, end: u32) {
        debug_assert!(!self.is(source));
        let (from, to) = (source.address(start, end), self.address(start, end));
        // SAFETY: two different blocks, both large enough.
        unsafe { std::ptr::copy_nonoverlapping(from, to, (end - start) as usize) };
    }
}
