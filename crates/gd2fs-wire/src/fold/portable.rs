//! The pass where the processor has no instructions that we know: crc-fast's best, block by block.

use crc_fast::{CrcAlgorithm::Crc32Iscsi, Digest};

/// Small enough that the copy finds in the first cache what the sum has just read, large against the cost of a call.
const BLOCK_BYTES: usize = 4 << 10;

pub fn sum(register: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(Crc32Iscsi, u64::from(register));
    digest.update(bytes);
    digest.get_state() as u32
}

/// # Safety
/// As [`super::copy`].
pub unsafe fn copy_summed(mut register: u32, from: *const u8, to: *mut u8, length: usize) -> u32 {
    let mut done = 0;
    while done < length {
        let block = BLOCK_BYTES.min(length - done);
        // SAFETY: both ranges by the caller's promise. The sum is taken of what was stored, since the source may be memory of
        // a peer that does not keep its promise not to write it.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), block);
            register = sum(register, std::slice::from_raw_parts(to.add(done), block));
        }
        done += block;
    }
    register
}
