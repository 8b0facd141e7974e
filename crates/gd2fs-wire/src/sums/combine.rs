//! The sum of two ranges from their sums.
//!
//! Appending n bytes multiplies what came before by x^(8n) modulo the polynomial. Those powers come from a table of
//! x^(8 * 2^k), one multiplication for each bit that is set in n: one for a whole piece, a few for what appends leave.

/// CRC-32C's polynomial, lowest degree in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// x^0 in that notation.
const ONE: u32 = 1 << 31;

/// `[k]` is x^(8 * 2^k): the factor of 2^k bytes.
const FACTORS: [u32; 64] = {
    // x^8: the ninth bit from the top.
    let mut factors = [ONE >> 8; 64];
    let mut k = 1;
    while k < factors.len() {
        factors[k] = multiply(factors[k - 1], factors[k - 1]);
        k += 1;
    }
    factors
};

/// The sum of `a ‖ b` from the sums of both and the length of `b` in bytes.
pub fn combine(a: u32, b: u32, length_b: u64) -> u32 {
    let (mut shifted, mut rest) = (a, length_b);
    while rest != 0 {
        shifted = multiply(shifted, FACTORS[rest.trailing_zeros() as usize]);
        rest &= rest - 1;
    }
    shifted ^ b
}

/// The product modulo the polynomial.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 0;
    while bit < 32 {
        // All ones where the bit is set: which bits a sum has is random, and a branch on each would be guessed wrong half the time.
        product ^= b & 0u32.wrapping_sub((a >> (31 - bit)) & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
        bit += 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::crc32c;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_sum_of_two_ranges(data in proptest::collection::vec(any::<u8>(), 0..5000), cut in 0usize..5000) {
            let (a, b) = data.split_at(cut.min(data.len()));
            prop_assert_eq!(combine(crc32c(a), crc32c(b), b.len() as u64), crc32c(&data));
        }

        #[test]
        fn any_length_as_a_plain_implementation(a in any::<u32>(), b in any::<u32>(), length in any::<u64>()) {
            let plain = crc_fast::checksum_combine(
                crc_fast::CrcAlgorithm::Crc32Iscsi, u64::from(a), u64::from(b), length);
            prop_assert_eq!(u64::from(combine(a, b, length)), plain);
        }
    }
}
