//! A write between its reservation and its publication.

use std::sync::Arc;

use gd2fs_wire::{Code, Failure};

use crate::column::Column;
use crate::frame::Frame;
use crate::geometry::Place;

/// Memory for one write, and the right to publish it once. Dropping it gives everything back.
pub struct WriteTicket {
    pub(crate) column: Arc<Column>,
    pub(crate) frame: Frame,
    pub(crate) place: Place,
    pub(crate) offset: u64,
    pub(crate) epoch: u32,
    pub(crate) grant: u64,
    pub(crate) published: bool,
}

impl WriteTicket {
    /// Where the bytes belong in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Where the bytes belong: an address and a length. They stay this ticket's own, to be received into without any lock,
    /// until it is published or dropped; whoever receives keeps the ticket for as long.
    pub fn target(&self) -> (*mut u8, usize) {
        let Place { start, end, .. } = self.place;
        (self.frame.address(start, end), (end - start) as usize)
    }

    /// Verifies the received bytes, whose sums are `actual`, against the writer's (None: not summed by the writer) and publishes
    /// them in one step. `fenced` is asked under the column's lock: a writer that is fenced before this point changes nothing.
    ///
    /// # Safety
    /// The bytes have been received: nobody writes them any more, and `actual` was made of them where they are now.
    pub async unsafe fn publish(
        mut self,
        actual: &[u32],
        expected: Option<&[u32]>,
        fenced: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        if let Some(expected) = expected
            && let Some(piece) = actual.iter().zip(expected).position(|(a, b)| a != b)
        {
            let Place { start, end, .. } = self.place;
            let (offset, length) = (self.offset, end - start);
            return Err(Failure::new(
                Code::Checksum,
                format!(
                    "piece {piece} of the write of {length} bytes at {offset} arrived damaged; nothing was changed"
                ),
            ));
        }
        let column = self.column.clone();
        column.publish(&mut self, actual, fenced).await
    }
}

impl Drop for WriteTicket {
    fn drop(&mut self) {
        if !self.published {
            let column = self.column.clone();
            column.abandon(self);
        }
    }
}
