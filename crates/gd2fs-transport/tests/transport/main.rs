//! One contract over every stream, and one over every way of a node to a client's memory.

mod one_sided;
mod streams;

use gd2fs_transport::{Memory, Slice};

pub fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(37).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// `bytes` as a list of slices of the lengths that `cuts` repeats; the caller keeps them alive and to itself.
pub fn list(bytes: &mut [u8], cuts: &[usize]) -> Memory {
    let (mut rest, mut slices, mut cuts) = (bytes, Vec::new(), cuts.iter().copied().cycle());
    while !rest.is_empty() {
        let (now, later) = rest.split_at_mut(cuts.next().unwrap().clamp(1, rest.len()));
        // SAFETY: the caller's promise.
        slices.push(unsafe { Slice::new(now.as_mut_ptr(), now.len()) });
        rest = later;
    }
    Memory::new(slices)
}
