//! Copies between scatter lists that sum what they move.

use gd2fs_wire::sums::PieceSums;

use crate::memory::Memory;

/// # Safety
/// Both lists are valid and equally long; nobody writes `from`, nobody else uses `to`, during the call.
pub unsafe fn copy_pieces(file_offset: u64, from: &Memory, to: &Memory, summed: bool) -> Vec<u32> {
    let mut sums = PieceSums::new(file_offset);
    let parts = from.split(to.slices().iter().map(|slice| slice.len()));
    for (part, slice) in parts.iter().zip(to.slices()) {
        let mut at = 0;
        for source in part.slices() {
            // SAFETY: the caller's promise.
            unsafe {
                let bytes = source.bytes();
                slice.part(at, bytes.len()).fill_from(bytes);
                if summed {
                    sums.update(bytes);
                }
            }
            at += source.len();
        }
    }
    sums.finish()
}
