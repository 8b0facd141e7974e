//! The pass with AVX2 and VPCLMULQDQ: eight accumulators of 32 bytes are folded over strides of 256 bytes.
//!
//! An accumulator holds two lanes of 16 bytes. Folding a lane over a distance of D bits multiplies its first eight bytes by
//! x^(D+32) and its last eight by x^(D-32), both modulo the polynomial, and leaves 16 bytes that have the same remainder D
//! bits further on. At the end all accumulators are folded into the last 16 bytes, which the crc32 instruction reduces.
//! Source of the method: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.
//!
//! Pointers advance by `wrapping_add`: with debug assertions on, as in this project's release profile, `add` would check each
//! step of the innermost loop.

use std::arch::x86_64::*;
use std::sync::atomic::{AtomicU8, Ordering};

use super::Store;

const VECTOR: usize = 32;
const LINE: usize = 64;
const STRIDE: usize = 8 * VECTOR;

/// How far in front of the loads the source is prefetched, in bytes.
const AHEAD: usize = 1024;

/// CRC-32C's polynomial, lowest degree in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The multipliers that fold a lane over 16, 32, .. 256 bytes; `[n]` is for 16 n bytes.
const FOLDS: [(u64, u64); STRIDE / 16 + 1] = {
    let mut folds = [(0, 0); STRIDE / 16 + 1];
    let mut n = 1;
    while n < folds.len() {
        folds[n] = (multiplier(128 * n + 32), multiplier(128 * n - 32));
        n += 1;
    }
    folds
};

/// x^n modulo the polynomial, reflected. The product of two reflected numbers comes out one bit low: hence the shift.
const fn multiplier(n: usize) -> u64 {
    let mut value = 1u32 << 31;
    let mut i = 0;
    while i < n {
        value = if value & 1 == 1 { (value >> 1) ^ POLYNOMIAL } else { value >> 1 };
        i += 1;
    }
    (value as u64) << 1
}

/// Where the bytes go.
const NOWHERE: u8 = 0;
const CACHED: u8 = 1;
const STREAMING: u8 = 2;

/// Whether this processor has all instructions that are used here.
pub fn available() -> bool {
    // 0: not yet asked, 1: no, 2: yes. One load here in place of the five that asking costs each time.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let all = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("vpclmulqdq")
                && is_x86_feature_detected!("pclmulqdq")
                && is_x86_feature_detected!("sse4.2");
            KNOWN.store(1 + u8::from(all), Ordering::Relaxed);
            all
        }
        known => known == 2,
    }
}

/// # Safety
/// `available()`, and `[from, from + length)` can be read.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub unsafe fn sum(register: u32, from: *const u8, length: usize) -> u32 {
    // SAFETY: the caller's promise; nothing is stored.
    unsafe { pass::<true, NOWHERE>(register, from, std::ptr::null_mut(), length) }
}

/// # Safety
/// `available()`, and as [`super::copy`].
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub unsafe fn copy_summed(register: u32, from: *const u8, to: *mut u8, length: usize, store: Store) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        match store {
            Store::Cached => pass::<true, CACHED>(register, from, to, length),
            Store::Streaming => pass_aligned::<true>(register, from, to, length),
        }
    }
}

/// # Safety
/// As [`copy_summed`].
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub unsafe fn copy_streaming(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { pass_aligned::<false>(0, from, to, length) };
}

/// Stores ordinarily up to the first line boundary of the destination: streaming stores need whole aligned vectors, and only
/// whole lines reach memory without being read first.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn pass_aligned<const SUM: bool>(register: u32, from: *const u8, to: *mut u8, length: usize) -> u32 {
    let head = to.align_offset(LINE).min(length);
    // SAFETY: both parts lie in the caller's ranges, and the second is aligned for its stores.
    unsafe {
        let register = pass::<SUM, CACHED>(register, from, to, head);
        pass::<SUM, STREAMING>(register, from.wrapping_add(head), to.wrapping_add(head), length - head)
    }
}

#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn pass<const SUM: bool, const STORE: u8>(
    register: u32,
    mut from: *const u8,
    mut to: *mut u8,
    mut left: usize,
) -> u32 {
    if left < VECTOR {
        // SAFETY: the caller's promise.
        return unsafe { pass_short::<SUM, STORE>(register, from, to, left) };
    }
    let step = |from: &mut *const u8, to: &mut *mut u8, left: &mut usize, bytes: usize| {
        *from = from.wrapping_add(bytes);
        *to = to.wrapping_add(bytes);
        *left -= bytes;
    };
    // The register counts as if it were part of the first four bytes: in the sum only, not in what is stored.
    let start = _mm256_set_epi64x(0, 0, 0, i64::from(register));
    // SAFETY: every vector lies in the ranges, since `left` holds as many bytes as are taken. `to` is null only where nothing
    // is stored.
    unsafe {
        let mut last;
        if left >= STRIDE {
            let mut sums = load_stride::<STORE>(from, to);
            step(&mut from, &mut to, &mut left, STRIDE);
            sums[0] = _mm256_xor_si256(sums[0], start);
            let by_stride = folding(STRIDE);
            while left >= STRIDE {
                prefetch(from);
                let next = load_stride::<STORE>(from, to);
                if SUM {
                    for i in 0..sums.len() {
                        sums[i] = fold(sums[i], by_stride, next[i]);
                    }
                }
                step(&mut from, &mut to, &mut left, STRIDE);
            }
            last = if SUM { join(sums) } else { start };
        } else {
            last = _mm256_xor_si256(load::<STORE>(from, to), start);
            step(&mut from, &mut to, &mut left, VECTOR);
        }
        let by_vector = folding(VECTOR);
        while left >= VECTOR {
            let next = load::<STORE>(from, to);
            if SUM {
                last = fold(last, by_vector, next);
            }
            step(&mut from, &mut to, &mut left, VECTOR);
        }
        pass_short::<SUM, STORE>(if SUM { reduce(last) } else { 0 }, from, to, left)
    }
}

/// Asks for the source that the stride after a few more needs: the hardware's own guesses end at a page of 4 KiB.
#[target_feature(enable = "avx2")]
fn prefetch(from: *const u8) {
    for line in 0..STRIDE / LINE {
        // SAFETY: a prefetch of any address, mapped or not, is only a hint.
        #[allow(unused_unsafe, reason = "newer toolchains know that it is safe")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD + line * LINE).cast())
        };
    }
}

/// # Safety
/// 32 bytes can be read at `from` and, unless they go nowhere, written at `to`, which streaming wants aligned.
#[target_feature(enable = "avx2")]
unsafe fn load<const STORE: u8>(from: *const u8, to: *mut u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let vector = _mm256_loadu_si256(from.cast());
        match STORE {
            STREAMING => _mm256_stream_si256(to.cast(), vector),
            CACHED => _mm256_storeu_si256(to.cast(), vector),
            _ => {}
        }
        vector
    }
}

/// # Safety
/// As `load`, for 256 bytes.
#[target_feature(enable = "avx2")]
unsafe fn load_stride<const STORE: u8>(from: *const u8, to: *mut u8) -> [__m256i; 8] {
    let mut stride = [_mm256_setzero_si256(); 8];
    for (i, vector) in stride.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *vector = unsafe { load::<STORE>(from.wrapping_add(i * VECTOR), to.wrapping_add(i * VECTOR)) };
    }
    stride
}

#[target_feature(enable = "avx2")]
fn folding(bytes: usize) -> __m256i {
    let (first, second) = FOLDS[bytes / 16];
    let (first, second) = (first as i64, second as i64);
    _mm256_set_epi64x(second, first, second, first)
}

/// Both lanes of `sum`, folded over the distance that `by` was made for, onto `next`.
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold(sum: __m256i, by: __m256i, next: __m256i) -> __m256i {
    let first = _mm256_clmulepi64_epi128::<0x00>(sum, by);
    let second = _mm256_clmulepi64_epi128::<0x11>(sum, by);
    _mm256_xor_si256(_mm256_xor_si256(first, second), next)
}

/// Folds eight consecutive vectors into the last of them.
#[target_feature(enable = "avx2,vpclmulqdq")]
fn join(sums: [__m256i; 8]) -> __m256i {
    let mut last = sums[7];
    for (i, sum) in sums[..7].iter().enumerate() {
        last = fold(*sum, folding((7 - i) * VECTOR), last);
    }
    last
}

/// The register that a vector amounts to.
#[target_feature(enable = "avx2,pclmulqdq,sse4.2")]
fn reduce(vector: __m256i) -> u32 {
    let by = _mm256_castsi256_si128(folding(16));
    let (low, high) = (_mm256_castsi256_si128(vector), _mm256_extracti128_si256::<1>(vector));
    let first = _mm_clmulepi64_si128::<0x00>(low, by);
    let second = _mm_clmulepi64_si128::<0x11>(low, by);
    let lane = _mm_xor_si128(_mm_xor_si128(first, second), high);
    let register = _mm_crc32_u64(0, _mm_extract_epi64::<0>(lane) as u64);
    _mm_crc32_u64(register, _mm_extract_epi64::<1>(lane) as u64) as u32
}

/// Less than a vector, or the head of a line: words, then bytes. Always stored through the cache.
///
/// # Safety
/// As `pass`.
#[target_feature(enable = "sse4.2")]
unsafe fn pass_short<const SUM: bool, const STORE: u8>(
    register: u32,
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> u32 {
    const WORD: usize = 8;
    let (mut register, mut done) = (register, 0);
    // SAFETY: the caller's promise, within `length`.
    unsafe {
        while length - done >= WORD {
            let word = from.wrapping_add(done).cast::<u64>().read_unaligned();
            if STORE != NOWHERE {
                to.wrapping_add(done).cast::<u64>().write_unaligned(word);
            }
            if SUM {
                register = _mm_crc32_u64(u64::from(register), word) as u32;
            }
            done += WORD;
        }
        while done < length {
            let byte = from.wrapping_add(done).read();
            if STORE != NOWHERE {
                to.wrapping_add(done).write(byte);
            }
            if SUM {
                register = _mm_crc32_u8(register, byte);
            }
            done += 1;
        }
    }
    register
}
