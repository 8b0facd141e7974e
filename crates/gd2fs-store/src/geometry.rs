//! Where a byte of a file lives: chunk i lies in column i mod width.

use std::cmp::Ordering;

use gd2fs_wire::sums::PIECE_BYTES;
use gd2fs_wire::{Code, Failure};

use crate::arena::SLAB_BYTES;

/// Largest bytes of a chunk: every chunk fits into one slab of the arena.
pub const STRIPE_UNIT_MAX: u32 = SLAB_BYTES as u32;
/// Bounds what one capability has to list.
const WIDTH_MAX: u32 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub column: u32,
    pub width: u32,
    /// Bytes of a chunk; a multiple of 32 KiB, so that no piece crosses from one chunk to the next.
    pub stripe_unit: u32,
}

/// A range inside one chunk; `start` and `end` count from the chunk's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub chunk: u64,
    pub start: u32,
    pub end: u32,
}

impl Geometry {
    pub fn new(column: u32, width: u32, stripe_unit: u32) -> Result<Geometry, Failure> {
        let refuse = |message: String| Err(Failure::new(Code::BadRequest, message));
        let whole_pieces = u64::from(stripe_unit).is_multiple_of(PIECE_BYTES);
        if stripe_unit == 0 || !whole_pieces || stripe_unit > STRIPE_UNIT_MAX {
            return refuse(format!("stripe_unit {stripe_unit} is not a multiple of 32 KiB up to 64 MiB"));
        }
        if width == 0 || width > WIDTH_MAX {
            return refuse(format!("width {width} is not in 1..{WIDTH_MAX}"));
        }
        if column >= width {
            return refuse(format!("column {column} of a file with {width} columns"));
        }
        Ok(Geometry { column, width, stripe_unit })
    }

    /// The place of the file range `[offset, offset + length)`, which must lie in one chunk of this column.
    pub(crate) fn place(&self, offset: u64, length: u32) -> Result<Place, Failure> {
        let refuse = |why: String| {
            let message = format!("[{offset}, {}) {why}", offset.saturating_add(u64::from(length)));
            Err(Failure::new(Code::BadRequest, message))
        };
        let unit = u64::from(self.stripe_unit);
        let (chunk, start) = (offset / unit, (offset % unit) as u32);
        if length == 0 {
            return refuse("is empty".into());
        }
        if u64::from(start) + u64::from(length) > unit || offset.checked_add(u64::from(length)).is_none() {
            return refuse(format!("crosses a stripe unit of {unit} bytes"));
        }
        if chunk % u64::from(self.width) != u64::from(self.column) {
            return refuse(format!("lies in column {}, not {}", chunk % u64::from(self.width), self.column));
        }
        Ok(Place { chunk, start, end: start + length })
    }

    /// File offset of byte `inside` of chunk `chunk`.
    pub(crate) fn offset(&self, chunk: u64, inside: u32) -> u64 {
        chunk * u64::from(self.stripe_unit) + u64::from(inside)
    }

    /// How many bytes of the file range `[start, end)` lie in this column.
    pub(crate) fn bytes_between(&self, start: u64, end: u64) -> u64 {
        let (unit, width, column) =
            (u64::from(self.stripe_unit), u64::from(self.width), u64::from(self.column));
        let below = |offset: u64| {
            let (chunk, inside) = (offset / unit, offset % unit);
            let in_this_turn = match (chunk % width).cmp(&column) {
                Ordering::Less => 0,
                Ordering::Equal => inside,
                Ordering::Greater => unit,
            };
            chunk / width * unit + in_this_turn
        };
        below(end) - below(start)
    }

    /// This column's chunks below the file offset `end`, with the end inside each.
    pub(crate) fn chunks_between(&self, start: u64, end: u64) -> impl Iterator<Item = Place> {
        let (unit, width, column) =
            (u64::from(self.stripe_unit), u64::from(self.width), u64::from(self.column));
        let first = start / unit;
        let first = first + (column + width - first % width) % width;
        (first..end.div_ceil(unit)).step_by(self.width as usize).map(move |chunk| Place {
            chunk,
            start: start.saturating_sub(chunk * unit) as u32,
            end: (end - chunk * unit).min(unit) as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let geometry = Geometry::new(1, 3, 65536).unwrap();
        assert_eq!(geometry.place(65536 + 10, 20).unwrap(), Place { chunk: 1, start: 10, end: 30 });
        assert_eq!(geometry.place(0, 1).unwrap_err().code, Code::BadRequest);
        assert_eq!(geometry.place(2 * 65536 - 1, 2).unwrap_err().code, Code::BadRequest);
        assert_eq!(geometry.place(65536, 0).unwrap_err().code, Code::BadRequest);
    }

    #[test]
    fn chunks_of_a_column_below_a_length() {
        let chunks = |column, start, end| {
            let geometry = Geometry::new(column, 2, 65536).unwrap();
            geometry.chunks_between(start, end).map(|p| (p.chunk, p.start, p.end)).collect::<Vec<_>>()
        };
        assert_eq!(chunks(0, 0, 3 * 65536 + 5), [(0, 0, 65536), (2, 0, 65536)]);
        assert_eq!(chunks(1, 65536 + 7, 3 * 65536 + 5), [(1, 7, 65536), (3, 0, 5)]);
        assert_eq!(chunks(0, 65536 + 7, 65536 + 9), []);
        assert_eq!(chunks(0, 100, 100), [(0, 100, 100)]);
        assert_eq!(chunks(0, 0, 0), []);
    }

    #[test]
    fn bytes_of_a_column_are_those_of_its_chunks() {
        for (width, column) in [(1, 0), (3, 0), (3, 1), (3, 2)] {
            let geometry = Geometry::new(column, width, 32768).unwrap();
            for (start, end) in
                [(0, 0), (0, 10 * 32768 + 5), (32767, 32769), (70_000, 400_001), (98_304, 131_072)]
            {
                let chunks: u64 =
                    geometry.chunks_between(start, end).map(|p| u64::from(p.end - p.start)).sum();
                assert_eq!(geometry.bytes_between(start, end), chunks, "[{start}, {end}) of {geometry:?}");
            }
        }
        let all: u64 =
            (0..3).map(|column| Geometry::new(column, 3, 32768).unwrap().bytes_between(7, u64::MAX)).sum();
        assert_eq!(all, u64::MAX - 7);
    }

    #[test]
    fn bad_shapes_are_refused() {
        for (column, width, unit) in
            [(0, 1, 0), (0, 1, 1000), (0, 1, 128 << 20), (0, 0, 65536), (2, 2, 65536)]
        {
            assert_eq!(Geometry::new(column, width, unit).unwrap_err().code, Code::BadRequest);
        }
    }
}
