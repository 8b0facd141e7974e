//! One pass over memory: CRC-32C by folding, and storing the same bytes on the way where the caller wants them moved.
//!
//! All functions work on the *register* of the CRC: `!0` before the first byte, and its complement after the last is the sum.
//! A register can be carried from one range to the next, so that a sum over scattered fragments needs no combining.

pub mod portable;
#[cfg(target_arch = "x86_64")]
pub mod x86;

/// The register before the first byte.
pub const START: u32 = !0;

/// How a copy stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Through the cache, for bytes that somebody reads soon and that fit there.
    Cached,
    /// Around the cache, which spares reading the destination's lines from memory before they are overwritten. The
    /// stores are ordered only by [`fence`].
    Streaming,
}

/// The register after `bytes`.
pub fn sum(register: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the instructions are there, and the reference covers the range that is read.
        return unsafe { x86::sum(register, bytes.as_ptr(), bytes.len()) };
    }
    portable::sum(register, bytes)
}

/// Copies and returns the register after the copied bytes. What is summed is what is stored: each byte is loaded once where the
/// instructions for it exist.
///
/// # Safety
/// As `copy`.
pub unsafe fn copy_summed(register: u32, from: *const u8, to: *mut u8, length: usize, store: Store) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the instructions are there; the ranges by the caller's promise.
        return unsafe { x86::copy_summed(register, from, to, length, store) };
    }
    let _ = store; // Elsewhere there is one way.
    // SAFETY: the caller's promise.
    unsafe { portable::copy_summed(register, from, to, length) }
}

/// Copies `length` bytes.
///
/// # Safety
/// `[from, from + length)` can be read and is not written during the call, `[to, to + length)` can be written and is used by
/// nobody else, and the two do not overlap. After streaming stores nobody else is told of the bytes before [`fence`].
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize, store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streaming && x86::available() {
        // SAFETY: the instructions are there; the ranges by the caller's promise.
        return unsafe { x86::copy_streaming(from, to, length) };
    }
    let _ = store; // As above.
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

/// Orders streaming stores before everything that this thread stores later, as ordinary stores already are.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_way_gives_the_bytes_and_the_sum(
            data in proptest::collection::vec(any::<u8>(), 0..3000), skip in 0usize..70, shift in 0usize..70,
            start in any::<u32>(), streaming in any::<bool>()
        ) {
            let store = if streaming { Store::Streaming } else { Store::Cached };
            let data = &data[skip.min(data.len())..];
            let expected = portable::sum(start, data);
            prop_assert_eq!(sum(start, data), expected);

            let mut room = vec![0xa5u8; shift + data.len() + 64];
            // SAFETY: the room is large enough behind `shift`, and nobody else has it.
            let register = unsafe {
                copy_summed(start, data.as_ptr(), room.as_mut_ptr().add(shift), data.len(), store)
            };
            fence();
            prop_assert_eq!(register, expected);
            prop_assert_eq!(&room[shift..shift + data.len()], data);
            prop_assert!(room[..shift].iter().chain(&room[shift + data.len()..]).all(|byte| *byte == 0xa5));

            room.fill(0xa5);
            // SAFETY: as above.
            unsafe { copy(data.as_ptr(), room.as_mut_ptr().add(shift), data.len(), store) };
            fence();
            prop_assert_eq!(&room[shift..shift + data.len()], data);
            prop_assert!(room[..shift].iter().chain(&room[shift + data.len()..]).all(|byte| *byte == 0xa5));

            room.fill(0xa5);
            // SAFETY: as above.
            let register = unsafe {
                portable::copy_summed(start, data.as_ptr(), room.as_mut_ptr().add(shift), data.len())
            };
            prop_assert_eq!(register, expected);
            prop_assert_eq!(&room[shift..shift + data.len()], data);
        }
    }

    #[test]
    fn a_register_is_carried_over_cuts() {
        let data: Vec<u8> = (0..10_000u32).map(|i| (i ^ (i >> 5)) as u8).collect();
        for cut in [0, 1, 31, 32, 255, 256, 257, 5000, 9999, 10_000] {
            assert_eq!(sum(sum(START, &data[..cut]), &data[cut..]), portable::sum(START, &data));
        }
    }
}
