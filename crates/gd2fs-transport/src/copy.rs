//! Copies between memory and memory that give the sums of what they moved: the data path of one-sided transports on one host.

use gd2fs_wire::fold::{self, Store};
use gd2fs_wire::sums::PieceSums;

use crate::memory::{Memory, Slice};

/// Copies of at least this many bytes store around the cache; what is smaller, its reader finds in the cache.
///
/// Measured with a reader that sums what was copied, into memory that is in no cache: ordinary stores win up to 32 KiB (7.9
/// against 5.2 GB/s, copy and sum together), from 64 KiB to 4 MiB the two are equal, though the copy itself takes a third less
/// with streaming ones, and beyond they win (7.4 against 4.4). A destination that is still in the cache favours ordinary ones.
const STREAMING_BYTES_MIN: usize = 256 << 10;

fn store_for(length: usize) -> Store {
    if length >= STREAMING_BYTES_MIN { Store::Streaming } else { Store::Cached }
}

/// Work on memory that takes longer than a system call.
const LONG_BYTES: usize = 256 << 10;

/// Runs `work` over so many bytes. With `apart` the thread's other tasks go on elsewhere meanwhile, if it is long: the runtime's
/// spare threads, which the knob `memory_threads` counts, serve them. It is never dropped in the middle.
pub fn at_memory<T>(apart: bool, bytes: usize, work: impl FnOnce() -> T) -> T {
    if apart && bytes >= LONG_BYTES { tokio::task::block_in_place(work) } else { work() }
}

/// Copies `length` bytes.
///
/// # Safety
/// `[from, from + length)` can be read, `[to, to + length)` can be written and is used by nobody else during the call, and the
/// two do not overlap.
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { fold::copy(from, to, length, store_for(length)) };
    fold::fence();
}

/// Copies `length` bytes and returns their CRC-32C, of the very bytes that were stored.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_summed(from: *const u8, to: *mut u8, length: usize) -> u32 {
    // SAFETY: the caller's promise.
    let register = unsafe { fold::copy_summed(fold::START, from, to, length, store_for(length)) };
    fold::fence();
    !register
}

/// Copies one scatter list to another of the same length and returns the sums of the pieces into which 32 KiB file offsets
/// split the range, if they are wanted, else nothing. `file_offset` is where the first byte lies in its file. Pieces continue over
/// the cuts of both lists.
///
/// # Panics
/// If the lists differ in length.
///
/// # Safety
/// What [`Slice::new`] asks for, for both lists, until the call returns; and they do not overlap.
pub unsafe fn copy_pieces(file_offset: u64, from: &Memory, to: &Memory, summed: bool) -> Vec<u32> {
    assert_eq!(from.len(), to.len(), "both sides of a copy are equally long");
    let store = store_for(to.len());
    let mut sums = PieceSums::with_capacity(file_offset, if summed { to.len() as u64 } else { 0 });
    for (source, target) in shared_runs(from.slices(), to.slices()) {
        let (mut source, mut target, mut left) = (source.address(), target.address(), target.len());
        while left > 0 {
            let length = if summed { left.min(sums.left_in_piece()) } else { left };
            // SAFETY: a run lies inside one slice of each list; the rest is the caller's promise.
            unsafe {
                if summed {
                    let register = fold::copy_summed(sums.register(), source, target, length, store);
                    sums.advance(length, register);
                } else {
                    fold::copy(source, target, length, store);
                }
                (source, target) = (source.add(length), target.add(length));
            }
            left -= length;
        }
    }
    fold::fence();
    sums.finish()
}

/// Two lists of the same length, cut where either of them is.
fn shared_runs(from: &[Slice], to: &[Slice]) -> impl Iterator<Item = (Slice, Slice)> {
    fn next(rest: Option<Slice>, more: &mut impl Iterator<Item = Slice>) -> Option<Slice> {
        rest.filter(|slice| !slice.is_empty()).or_else(|| more.find(|slice| !slice.is_empty()))
    }
    let (mut sources, mut targets) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut target) = (None, None);
    std::iter::from_fn(move || {
        let (from, to) = (next(source, &mut sources)?, next(target, &mut targets)?);
        let length = from.len().min(to.len());
        source = Some(from.part(length, from.len() - length));
        target = Some(to.part(length, to.len() - length));
        Some((from.part(0, length), to.part(0, length)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gd2fs_wire::sums::{crc32c, piece_sums};
    use proptest::prelude::*;

    /// A scatter list over `room` with a gap of one byte behind each part.
    fn scattered(room: &mut [u8], lengths: &[usize]) -> Memory {
        let mut at = 0;
        let slices = lengths.iter().map(|length| {
            let part = &mut room[at..at + length];
            at += length + 1;
            // SAFETY: the tests keep the room until the copy is over and use it for nothing else meanwhile.
            unsafe { Slice::new(part.as_mut_ptr(), part.len()) }
        });
        Memory::new(slices.collect())
    }

    fn gather(memory: &Memory) -> Vec<u8> {
        // SAFETY: as above; nobody writes any more.
        memory.slices().iter().flat_map(|slice| unsafe { slice.bytes() }.to_vec()).collect()
    }

    fn cut(total: usize, cuts: &[usize]) -> Vec<usize> {
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (total + 1)).chain([0, total]).collect();
        ends.sort_unstable();
        ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn scattered_copies_give_bytes_and_sums(
            offset in 0u64..100_000, total in prop_oneof![0usize..70_000, 250_000usize..600_000],
            cuts_from in proptest::collection::vec(any::<usize>(), 0..12),
            cuts_to in proptest::collection::vec(any::<usize>(), 0..12)
        ) {
            let (cuts_from, cuts_to) = (cut(total, &cuts_from), cut(total, &cuts_to));
            let mut source: Vec<u8> = (0..total + cuts_from.len()).map(|i| (i ^ (i >> 8) ^ (i >> 13)) as u8).collect();
            let mut target = vec![0xa5; total + cuts_to.len()];
            let from = scattered(&mut source, &cuts_from);
            let to = scattered(&mut target, &cuts_to);
            let whole = gather(&from);
            // SAFETY: both lists point into buffers that live and that nobody else uses.
            let sums = unsafe { copy_pieces(offset, &from, &to, true) };
            prop_assert_eq!(sums, piece_sums(offset, &whole));
            prop_assert!(gather(&to) == whole);
            let mut at = 0;
            for length in &cuts_to {
                at += length;
                prop_assert_eq!(target[at], 0xa5, "a gap at {} was written", at);
                at += 1;
            }

            target.fill(0);
            let to = scattered(&mut target, &cuts_to);
            // SAFETY: as above.
            let sums = unsafe { copy_pieces(offset, &from, &to, false) };
            prop_assert_eq!(sums, Vec::<u32>::new());
            prop_assert!(gather(&to) == whole);
        }
    }

    #[test]
    fn small_and_large_copies() {
        for length in [0, 1, 4096, STREAMING_BYTES_MIN - 1, STREAMING_BYTES_MIN, (1 << 20) + 3] {
            let source: Vec<u8> = (0..length).map(|i| (i ^ (i >> 9)) as u8).collect();
            let mut target = vec![0; length];
            // SAFETY: two buffers of `length` bytes.
            assert_eq!(unsafe { copy_summed(source.as_ptr(), target.as_mut_ptr(), length) }, crc32c(&source));
            assert!(source == target);
            target.fill(0);
            // SAFETY: as above.
            unsafe { copy(source.as_ptr(), target.as_mut_ptr(), length) };
            assert!(source == target);
        }
    }
}
