//! What a reader holds while it sends.

use gd2fs_wire::Failure;

use crate::frame::Frame;
use crate::grains::{RunGrains, part_sum};
use crate::runs::Run;

/// A range of valid bytes. They neither change nor go away while this lives, whatever happens to the file meanwhile.
pub struct ReadView {
    frame: Option<Frame>,
    start: u32,
    end: u32,
    /// CRC-32C of each piece of the range; empty if they were not asked for.
    pub sums: Vec<u32>,
}

/// Grains that a read has found out.
pub(crate) type Learned = Vec<(Run, RunGrains)>;

impl ReadView {
    /// Nothing: the range lies at or beyond the column's end.
    pub(crate) fn empty() -> ReadView {
        ReadView { frame: None, start: 0, end: 0, sums: Vec::new() }
    }

    /// A view of `[start, end)`, held by `runs`, each with its grains where they are known. The sum of a whole run goes out as it
    /// was stored, so that the reader verifies end to end what the writer summed; a part of a run gets a new sum, after the run
    /// was verified.
    pub(crate) fn new(
        frame: Frame,
        start: u32,
        end: u32,
        runs: &[(Run, Option<RunGrains>)],
    ) -> Result<(ReadView, Learned), Failure> {
        let mut sums = Vec::with_capacity(runs.len());
        let mut learned = Vec::new();
        for (run, known) in runs {
            let part = (run.start.max(start), run.end.min(end));
            if part == (run.start, run.end) {
                sums.push(run.crc);
                continue;
            }
            let (sum, found) = part_sum(&frame, run, known.as_ref(), part)?;
            sums.push(sum);
            learned.extend(found.map(|grains| (*run, grains)));
        }
        Ok((ReadView { frame: Some(frame), start, end, sums }, learned))
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.frame {
            // SAFETY: the range was valid when the view was made under the column's lock, and valid bytes of a frame are
            // written by nobody while somebody holds it.
            Some(frame) => unsafe { frame.bytes(self.start, self.end) },
            None => &[],
        }
    }
}
