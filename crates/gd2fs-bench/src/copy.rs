//! Copies inside this machine's memory: the ceiling of every transfer that is one copy.

use std::time::Duration;

use gd2fs_transport::Slice;

use crate::together::together;

/// Shares are cut at cache lines, so that no two threads write into one.
const LINE_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The C library's memcpy, which decides by itself how to store.
    Memcpy,
    /// Stores that go around the caches, so that the target's lines are not read before they are overwritten.
    Streaming,
}

/// A range of bytes and the place of the same length that it is copied to.
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    from: Slice,
    to: Slice,
}

impl Fragment {
    /// Panics if the lengths differ.
    pub fn new(from: Slice, to: Slice) -> Fragment {
        assert_eq!(from.len(), to.len(), "a fragment is copied whole");
        Fragment { from, to }
    }

    fn len(&self) -> usize {
        self.from.len()
    }

    fn part(&self, start: usize, length: usize) -> Fragment {
        Fragment { from: self.from.part(start, length), to: self.to.part(start, length) }
    }
}

/// Copies all fragments with `threads` threads, each its contiguous share of the bytes; the time that took.
///
/// # Safety
/// The ranges are mapped; no source is written, and no target used at all, by anyone else during the call. No target overlaps
/// another range.
pub unsafe fn copy(kind: Kind, fragments: &[Fragment], threads: usize) -> Duration {
    let works = shares(fragments, threads.max(1))
        .into_iter()
        .map(|share| {
            move || {
                for fragment in &share {
                    // SAFETY: the caller's promise; shares are disjoint.
                    unsafe { copy_one(kind, fragment) }
                }
            }
        })
        .collect();
    together(works).0
}

/// Cuts the fragments, which count as one range of bytes, into `count` shares of about the same size.
fn shares(fragments: &[Fragment], count: usize) -> Vec<Vec<Fragment>> {
    let total: usize = fragments.iter().map(Fragment::len).sum();
    let share_bytes = total.div_ceil(count).next_multiple_of(LINE_BYTES);
    let mut shares = vec![Vec::new()];
    let mut room = share_bytes;
    for fragment in fragments {
        let mut start = 0;
        while start < fragment.len() {
            if room == 0 {
                shares.push(Vec::new());
                room = share_bytes;
            }
            let take = room.min(fragment.len() - start);
            shares.last_mut().expect("never empty").push(fragment.part(start, take));
            start += take;
            room -= take;
        }
    }
    shares
}

/// # Safety
/// As of `copy`.
unsafe fn copy_one(kind: Kind, fragment: &Fragment) {
    let (from, to, length) = (fragment.from.address(), fragment.to.address(), fragment.len());
    match kind {
        // SAFETY: both ranges hold `length` bytes and do not overlap.
        Kind::Memcpy => unsafe { std::ptr::copy_nonoverlapping(from, to, length) },
        // SAFETY: as above.
        Kind::Streaming => unsafe { stream(from, to, length) },
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, length: usize) {
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's promise, and the processor has the instructions.
        unsafe { x86::stream_avx2(from, to, length) }
    } else {
        // SAFETY: the caller's promise; every x86-64 processor has SSE2.
        unsafe { x86::stream_sse2(from, to, length) }
    }
}

/// Elsewhere the C library knows best.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256,
    };

    /// A loop of four loads and four streaming stores, with ordinary stores before the first aligned vector and after the last.
    macro_rules! stream_loop {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// Both ranges hold `length` bytes and do not overlap; the processor has the feature.
            #[target_feature(enable = $feature)]
            pub unsafe fn $name(from: *const u8, to: *mut u8, length: usize) {
                const BYTES: usize = size_of::<$vector>();
                let head = to.align_offset(BYTES).min(length);
                let blocks = (length - head) / (4 * BYTES);
                let tail = head + blocks * 4 * BYTES;
                // SAFETY: head <= length; the loop stays below tail <= length, its stores are aligned; loads may be unaligned.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, to, head);
                    let mut source = from.add(head).cast::<$vector>();
                    let mut target = to.add(head).cast::<$vector>();
                    for _ in 0..blocks {
                        let vectors =
                            [$load(source), $load(source.add(1)), $load(source.add(2)), $load(source.add(3))];
                        for (i, vector) in vectors.into_iter().enumerate() {
                            $store(target.add(i), vector);
                        }
                        source = source.add(4);
                        target = target.add(4);
                    }
                    std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), length - tail);
                }
                // Streaming stores are ordered by nothing else.
                _mm_sfence();
            }
        };
    }

    stream_loop!(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    stream_loop!(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    fn slice(bytes: &mut [u8]) -> Slice {
        // SAFETY: the buffers of these tests outlive the copies and are not used meanwhile.
        unsafe { Slice::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    #[test]
    fn every_byte_arrives_whatever_the_alignment_and_nothing_beyond() {
        for (start, length) in [(0, 1), (1, 31), (3, 4096), (31, 100_001), (32, 1 << 20), (5, 0)] {
            for kind in [Kind::Memcpy, Kind::Streaming] {
                for threads in [1, 2, 5] {
                    let mut source = pattern(length);
                    let mut target = vec![0xEE; start + length + 40];
                    let fragment =
                        Fragment::new(slice(&mut source), slice(&mut target[start..start + length]));
                    // SAFETY: both buffers live and are not used during the call.
                    unsafe { copy(kind, &[fragment], threads) };
                    assert_eq!(target[start..start + length], source, "{kind:?} {threads}");
                    assert!(
                        target[..start].iter().chain(&target[start + length..]).all(|byte| *byte == 0xEE)
                    );
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn both_streaming_loops_copy_the_same() {
        let source = pattern(10_007);
        for loop_ in [x86::stream_sse2, x86::stream_avx2] {
            if !std::arch::is_x86_feature_detected!("avx2") {
                eprintln!("not run: this processor has no AVX2");
                return;
            }
            let mut target = vec![0; source.len()];
            // SAFETY: both hold the length; the features are there.
            unsafe { loop_(source.as_ptr(), target.as_mut_ptr(), source.len()) };
            assert_eq!(target, source);
        }
    }

    #[test]
    fn scattered_fragments_are_shared_by_bytes_and_not_by_number() {
        let (mut source, mut target) = (pattern(10_000), vec![0; 10_000]);
        let cuts = [0, 1, 9_000, 9_001, 10_000];
        let fragments: Vec<Fragment> = cuts
            .windows(2)
            .map(|cut| Fragment::new(slice(&mut source[cut[0]..cut[1]]), slice(&mut target[cut[0]..cut[1]])))
            .collect();
        let sizes: Vec<usize> =
            shares(&fragments, 3).iter().map(|share| share.iter().map(Fragment::len).sum()).collect();
        assert_eq!(sizes, [3_392, 3_392, 3_216]);
        // SAFETY: as above.
        unsafe { copy(Kind::Streaming, &fragments, 3) };
        assert_eq!(target, source);
    }
}
