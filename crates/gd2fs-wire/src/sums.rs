//! CRC-32C of 32 KiB pieces, split at 32 KiB file offsets, and how sums combine into sums of ranges.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// Pieces are split at multiples of this many bytes of the *file*, whatever the request's own offset is.
pub const PIECE_BYTES: u64 = 32 << 10;

pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, data) as u32
}

/// The sum of `a ‖ b` from the sums of both and the length of `b` in bytes.
pub fn combine(a: u32, b: u32, length_b: u64) -> u32 {
    crc_fast::checksum_combine(Crc32Iscsi, u64::from(a), u64::from(b), length_b) as u32
}

/// The sum of several slices one after the other, without joining them.
pub fn crc32c_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut digest = crc_fast::Digest::new(Crc32Iscsi);
    parts.into_iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// How many pieces the file range `[offset, offset + length)` touches.
pub fn piece_count(offset: u64, length: u64) -> usize {
    if length == 0 {
        return 0;
    }
    ((offset + length).div_ceil(PIECE_BYTES) - offset / PIECE_BYTES) as usize
}

/// The lengths of the parts into which 32 KiB file offsets split `[offset, offset + length)`.
pub fn piece_lengths(offset: u64, length: u64) -> impl Iterator<Item = usize> {
    let (mut at, end) = (offset, offset + length);
    std::iter::from_fn(move || {
        let next = ((at / PIECE_BYTES + 1) * PIECE_BYTES).min(end);
        (at < end).then(|| {
            let piece = (next - at) as usize;
            at = next;
            piece
        })
    })
}

/// The sums of `data`, which lies at `offset` in its file.
pub fn piece_sums(offset: u64, mut data: &[u8]) -> Vec<u32> {
    piece_lengths(offset, data.len() as u64)
        .map(|length| {
            let (piece, rest) = data.split_at(length);
            data = rest;
            crc32c(piece)
        })
        .collect()
}

/// Sums the pieces of a range that comes in any cuts.
pub struct PieceSums {
    digest: crc_fast::Digest,
    /// Bytes until the next 32 KiB offset of the file.
    left: u64,
    sums: Vec<u32>,
}

impl PieceSums {
    /// `offset` is where the range begins in its file.
    pub fn new(offset: u64) -> PieceSums {
        let left = PIECE_BYTES - offset % PIECE_BYTES;
        PieceSums { digest: crc_fast::Digest::new(Crc32Iscsi), left, sums: Vec::new() }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while bytes.len() as u64 >= self.left {
            let (now, later) = bytes.split_at(self.left as usize);
            self.digest.update(now);
            self.sums.push(self.digest.finalize_reset() as u32);
            (self.left, bytes) = (PIECE_BYTES, later);
        }
        if !bytes.is_empty() {
            self.digest.update(bytes);
            self.left -= bytes.len() as u64;
        }
    }

    /// One sum for each piece that the range touches.
    pub fn finish(mut self) -> Vec<u32> {
        if self.digest.get_amount() > 0 {
            self.sums.push(self.digest.finalize() as u32);
        }
        self.sums
    }
}

pub fn sums_to_bytes(sums: &[u32]) -> Vec<u8> {
    sums.iter().flat_map(|sum| sum.to_le_bytes()).collect()
}

/// # Panics
/// Never for a length that `Header::decode` accepted (a multiple of four).
pub fn sums_from_bytes(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_value() {
        // RFC 3720, appendix B.4: 32 bytes of zeros.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn pieces_split_at_file_offsets() {
        assert_eq!(piece_lengths(PIECE_BYTES - 1, 2).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(piece_count(0, PIECE_BYTES), 1);
        assert_eq!(piece_count(5, 0), 0);
    }

    proptest! {
        #[test]
        fn sums_of_pieces_combine_into_the_sum_of_the_range(
            offset in 0u64..200_000, data in proptest::collection::vec(any::<u8>(), 0..150_000)
        ) {
            let sums = piece_sums(offset, &data);
            prop_assert_eq!(sums.len(), piece_count(offset, data.len() as u64));
            let whole = sums.iter().zip(piece_lengths(offset, data.len() as u64))
                .fold(crc32c(&[]), |sum, (piece, length)| combine(sum, *piece, length as u64));
            prop_assert_eq!(whole, crc32c(&data));
        }
    }
}
