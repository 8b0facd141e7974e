//! What a reader holds while it sends.

use gd2fs_wire::Failure;
use gd2fs_wire::guard::{Guard, stands};
use gd2fs_wire::sums::crc32c;

use crate::frame::Frame;
use crate::grains::{RunGrains, part_sum};
use crate::precedence::Reading;
use crate::runs::Run;

/// Bytes of a chunk in a frame that begins with the chunk's byte `first`: 0 for the chunk's own frame, the first block for one
/// that holds only what a small read of a cold chunk needs.
#[derive(Clone)]
pub(crate) struct Extent {
    pub frame: Frame,
    pub first: u32,
}

impl Extent {
    /// Bytes `[start, end)` of the chunk.
    ///
    /// # Safety
    /// As for [`Frame::bytes`].
    pub unsafe fn bytes(&self, start: u32, end: u32) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { self.frame.bytes(start - self.first, end - self.first) }
    }
}

/// A range of valid bytes. They neither change nor go away while this lives, whatever happens to the file meanwhile.
pub struct ReadView {
    extent: Option<Extent>,
    start: u32,
    end: u32,
    /// CRC-32C of each piece of the range; empty if they were not asked for.
    pub sums: Vec<u32>,
    /// Writes may wait for it, see [`crate::precedence`].
    _reading: Option<Reading>,
}

/// Grains that a read has found out.
pub(crate) type Learned = Vec<(Run, RunGrains)>;

impl ReadView {
    /// Nothing: the range lies at or beyond the column's end.
    pub(crate) fn empty() -> ReadView {
        ReadView { extent: None, start: 0, end: 0, sums: Vec::new(), _reading: None }
    }

    /// A view of `[start, end)`, held by `runs`, each with its grains where they are known. The sum of a whole run goes out as it
    /// was stored, so that the reader verifies end to end what the writer summed; a part of a run gets a new sum, after the run
    /// was verified.
    pub(crate) fn new(
        extent: Extent,
        start: u32,
        end: u32,
        runs: &[(Run, Option<RunGrains>)],
    ) -> Result<(ReadView, Learned), Failure> {
        let mut sums = Vec::with_capacity(runs.len());
        let mut learned = Vec::new();
        for (run, known) in runs {
            let part = (run.start.max(start), run.end.min(end));
            if part == (run.start, run.end) {
                // SAFETY: valid bytes, which nobody writes.
                let now = || crc32c(unsafe { extent.bytes(run.start, run.end) });
                sums.push(if stands(Guard::Checksum) { run.crc } else { now() });
                continue;
            }
            let (sum, found) = part_sum(&extent, run, known.as_ref(), part)?;
            sums.push(sum);
            learned.extend(found.map(|grains| (*run, grains)));
        }
        Ok((ReadView { extent: Some(extent), start, end, sums, _reading: None }, learned))
    }

    pub(crate) fn while_it_lives(self, reading: Reading) -> ReadView {
        ReadView { _reading: Some(reading), ..self }
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.extent {
            // SAFETY: the range was valid when the view was made under the column's lock, and valid bytes of a frame are
            // written by nobody while somebody holds it.
            Some(extent) => unsafe { extent.bytes(self.start, self.end) },
            None => &[],
        }
    }
}
