//! What a reader holds while it sends.

use gd2fs_wire::{Failure, sums};

use crate::chunk::verify;
use crate::frame::Frame;
use crate::runs::Run;

/// A range of valid bytes. They neither change nor go away while this lives, whatever happens to the file meanwhile.
pub struct ReadView {
    frame: Option<Frame>,
    start: u32,
    end: u32,
    /// CRC-32C of each piece of the range; empty if they were not asked for.
    pub sums: Vec<u32>,
}

impl ReadView {
    /// Nothing: the range lies at or beyond the column's end.
    pub(crate) fn empty() -> ReadView {
        ReadView { frame: None, start: 0, end: 0, sums: Vec::new() }
    }

    /// A view of `[start, end)`, held by `runs`. The sum of a whole run goes out as it was stored, so that the reader verifies
    /// end to end what the writer summed; a part of a run gets a new sum, after the run was verified.
    pub(crate) fn new(frame: Frame, start: u32, end: u32, runs: Option<&[Run]>) -> Result<ReadView, Failure> {
        let mut view = ReadView { frame: Some(frame), start, end, sums: Vec::new() };
        for run in runs.into_iter().flatten() {
            let (from, to) = (run.start.max(start), run.end.min(end));
            if (from, to) == (run.start, run.end) {
                view.sums.push(run.crc);
                continue;
            }
            let [before, part, after] =
                [(run.start, from), (from, to), (to, run.end)].map(|(a, b)| sums::crc32c(view.range(a, b)));
            let whole = sums::combine(before, part, u64::from(to - from));
            verify(run, sums::combine(whole, after, u64::from(run.end - to)))?;
            view.sums.push(part);
        }
        Ok(view)
    }

    pub fn bytes(&self) -> &[u8] {
        self.range(self.start, self.end)
    }

    fn range(&self, start: u32, end: u32) -> &[u8] {
        match &self.frame {
            // SAFETY: the range was valid when the view was made under the column's lock, and valid bytes of a frame are
            // written by nobody while somebody holds it.
            Some(frame) => unsafe { frame.bytes(start, end) },
            None => &[],
        }
    }
}
