//! Sums of 4 KiB parts of runs, remembered when a reader of a part needed them.
//!
//! A run has one sum, so a part of it can be trusted only after all of it was verified: eight times the bytes of a 4 KiB read.
//! What that verification learns about the other parts is kept, and the next small read of the run verifies what it sends.

use gd2fs_wire::sums::{PIECE_BYTES, combine};
use gd2fs_wire::{Failure, sums};

use crate::chunk::verify;
use crate::read::Extent;
use crate::runs::Run;

/// The smallest block of a KV cache that anybody moves alone, and a page.
const GRAIN: u32 = 4096;

/// The sums of a run's bytes between 4 KiB offsets of its chunk, each at the place of its grain in the piece.
pub(crate) type RunGrains = [u32; GRAINS];
const GRAINS: usize = (PIECE_BYTES / GRAIN as u64) as usize;

/// Of one run of each piece, by the piece: 48 bytes for 32 KiB of data.
#[derive(Default)]
pub(crate) struct Grains(Vec<Option<(Run, RunGrains)>>);

impl Grains {
    pub fn of(&self, run: &Run) -> Option<RunGrains> {
        self.0
            .get(piece_of(run))
            .copied()
            .flatten()
            .filter(|(known, _)| known == run)
            .map(|(_, grains)| grains)
    }

    pub fn remember(&mut self, run: Run, grains: RunGrains) {
        let piece = piece_of(&run);
        if self.0.len() <= piece {
            self.0.resize(piece + 1, None);
        }
        self.0[piece] = Some((run, grains));
    }

    /// Forgets every run that a change of `[start, end)` may have changed or joined to another.
    pub fn forget(&mut self, start: u32, end: u32) {
        let from = (u64::from(start) / PIECE_BYTES) as usize;
        let to = (u64::from(end).div_ceil(PIECE_BYTES) as usize).min(self.0.len());
        if from < to {
            self.0[from..to].fill(None);
        }
    }
}

fn piece_of(run: &Run) -> usize {
    (u64::from(run.start) / PIECE_BYTES) as usize
}

/// The sum of `[from, to)`, a part of `run`, after it was verified; and the run's grains if they were not known.
pub(crate) fn part_sum(
    extent: &Extent,
    run: &Run,
    known: Option<&RunGrains>,
    (from, to): (u32, u32),
) -> Result<(u32, Option<RunGrains>), Failure> {
    let mut part = Sum::default();
    let mut whole = Sum::default();
    let mut learned = [0; GRAINS];
    let mut at = run.start;
    while at < run.end {
        let index = (at / GRAIN) as usize % GRAINS;
        let end = ((at / GRAIN + 1) * GRAIN).min(run.end);
        let inside = (from.clamp(at, end), to.clamp(at, end));
        match known {
            // All of it is wanted, or nothing: its bytes need not be looked at, and the reader verifies the sum.
            Some(known) if inside == (at, end) => part.append(known[index], end - at),
            Some(_) if inside.0 >= inside.1 => {}
            _ => {
                let cut = |start: u32, end: u32| {
                    // SAFETY: valid bytes, which nobody writes.
                    Sum { crc: sums::crc32c(unsafe { extent.bytes(start, end) }), length: end - start }
                };
                let wanted = cut(inside.0, inside.1);
                let mut grain = cut(at, inside.0);
                grain.append(wanted.crc, wanted.length);
                let behind = cut(inside.1, end);
                grain.append(behind.crc, behind.length);
                if let Some(known) = known {
                    verify(&Run { start: at, end, crc: known[index] }, grain.crc)?;
                }
                whole.append(grain.crc, end - at);
                learned[index] = grain.crc;
                part.append(wanted.crc, wanted.length);
            }
        }
        at = end;
    }
    if known.is_some() {
        return Ok((part.crc, None));
    }
    verify(run, whole.crc)?;
    Ok((part.crc, Some(learned)))
}

/// A sum that grows; of no bytes at first.
#[derive(Default)]
struct Sum {
    crc: u32,
    length: u32,
}

impl Sum {
    fn append(&mut self, crc: u32, length: u32) {
        if length > 0 {
            self.crc = if self.length == 0 { crc } else { combine(self.crc, crc, u64::from(length)) };
            self.length += length;
        }
    }
}
