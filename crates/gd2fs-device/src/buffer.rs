//! Memory as direct I/O wants it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use gd2fs_transport::Slice;

use crate::BLOCK;

/// Zeroed bytes of its own, begun and ended at multiples of [`BLOCK`].
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a Buffer owns its bytes as a Box<[u8]> does.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` bytes, a multiple of [`BLOCK`] and not 0.
    ///
    /// # Panics
    /// If `bytes` is 0 or no multiple of [`BLOCK`].
    pub fn new(bytes: usize) -> Buffer {
        assert!(
            bytes > 0 && bytes.is_multiple_of(BLOCK),
            "a buffer holds whole blocks of {BLOCK} bytes, not {bytes}"
        );
        let layout = Layout::from_size_align(bytes, BLOCK).expect("a size that memory can have");
        // SAFETY: the layout's size is not 0.
        let start =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Buffer { start, layout }
    }

    /// All of it, for an operation.
    ///
    /// # Safety
    /// As for [`Slice::new`]: until the operation has completed the buffer lives (give it, or a reference-counted pointer to
    /// it, to the operation's `keep`), nobody writes it, and nobody reads it if the operation fills it.
    pub unsafe fn slice(&self) -> Slice {
        // SAFETY: the caller's promise.
        unsafe { Slice::new(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is ours and initialised; a transfer that fills it excludes readers (`slice`).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
