//! CRC-32C of 32 KiB pieces, split at 32 KiB file offsets, and how sums combine into sums of ranges.

mod combine;

pub use combine::combine;

use zerocopy::IntoBytes;

use crate::fold;

/// Pieces are split at multiples of this many bytes of the *file*, whatever the request's own offset is.
pub const PIECE_BYTES: u64 = 32 << 10;

/// Valid bytes `[start, end)` of a chunk, inside one 32 KiB piece, with their CRC-32C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u32,
    pub end: u32,
    pub crc: u32,
}

pub fn crc32c(data: &[u8]) -> u32 {
    !fold::sum(fold::START, data)
}

/// The sum of several slices one after the other, without joining them.
pub fn crc32c_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    !parts.into_iter().fold(fold::START, fold::sum)
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
pub fn piece_sums(offset: u64, data: &[u8]) -> Vec<u32> {
    let mut sums = PieceSums::with_capacity(offset, data.len() as u64);
    sums.update(data);
    sums.finish()
}

/// The sums of the pieces of a range whose bytes come one part after the other, in any cuts.
///
/// Whoever receives 64 to 256 KiB at a time and passes each on at once finds them in the cache.
#[derive(Debug)]
pub struct PieceSums {
    done: Vec<u32>,
    /// The CRC's register over the bytes of the piece that has begun.
    register: u32,
    /// Bytes up to the next boundary. As many as a whole piece only if none has begun, except before a first whole piece.
    left: usize,
    /// Whether the current piece has any bytes.
    begun: bool,
}

impl PieceSums {
    /// Sums of bytes that lie at `file_offset` and behind it.
    pub fn new(file_offset: u64) -> PieceSums {
        PieceSums::with_capacity(file_offset, 0)
    }

    /// As `new`, with room for the sums of `length` bytes.
    pub fn with_capacity(file_offset: u64, length: u64) -> PieceSums {
        PieceSums {
            done: Vec::with_capacity(piece_count(file_offset, length)),
            register: fold::START,
            left: (PIECE_BYTES - file_offset % PIECE_BYTES) as usize,
            begun: false,
        }
    }

    pub fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (part, rest) = data.split_at(self.left.min(data.len()));
            let register = fold::sum(self.register, part);
            self.advance(part.len(), register);
            data = rest;
        }
    }

    /// Bytes up to where the current piece ends: what `advance` takes at most.
    pub fn left_in_piece(&self) -> usize {
        self.left
    }

    /// The register with which whoever sums on its own (a copy that sums on the way) continues the current piece.
    pub fn register(&self) -> u32 {
        self.register
    }

    /// Accounts for `bytes` that somebody else summed, up to the register that it came to.
    pub fn advance(&mut self, bytes: usize, register: u32) {
        assert!(bytes <= self.left, "{bytes} bytes cross the end of a piece {} bytes away", self.left);
        self.left -= bytes;
        self.register = register;
        self.begun |= bytes > 0;
        if self.left == 0 {
            self.done.push(!register);
            self.register = fold::START;
            self.left = PIECE_BYTES as usize;
            self.begun = false;
        }
    }

    /// The sums of all pieces; the last one may be a part of its piece.
    pub fn finish(mut self) -> Vec<u32> {
        if self.begun {
            self.done.push(!self.register);
        }
        self.done
    }
}

/// Sums as they travel, little-endian.
pub fn sums_to_bytes(sums: &[u32]) -> &[u8] {
    sums.as_bytes()
}

/// Where `count` sums are to be received, as bytes.
pub fn bytes_of_sums(sums: &mut [u32]) -> &mut [u8] {
    sums.as_mut_bytes()
}

// What lies in memory is what travels.
const _: () = assert!(cfg!(target_endian = "little"), "GD2FS runs on little-endian machines");

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
        assert_eq!(piece_sums(7, &[]), Vec::<u32>::new());
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

        #[test]
        fn running_sums_do_not_depend_on_the_cuts(
            offset in 0u64..200_000, parts in proptest::collection::vec(0usize..40_000, 0..8)
        ) {
            let data: Vec<u8> = (0..parts.iter().sum::<usize>()).map(|i| (i ^ (i >> 7)) as u8).collect();
            let (mut running, mut rest) = (PieceSums::new(offset), &data[..]);
            for part in parts {
                let (now, later) = rest.split_at(part);
                running.update(now);
                rest = later;
            }
            let mut at = 0;
            let expected: Vec<u32> = piece_lengths(offset, data.len() as u64)
                .map(|length| { at += length; crc32c(&data[at - length..at]) })
                .collect();
            prop_assert_eq!(running.finish(), expected);
        }
    }
}
