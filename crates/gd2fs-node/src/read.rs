//! READ: from the arena to the socket, with no copy in between; what lies in the log is read into the arena first.

use std::sync::atomic::Ordering::Relaxed;

use gd2fs_store::ReadView;
use gd2fs_transport::{Frame, Memory, Slice};
use gd2fs_wire::capability::Right;
use gd2fs_wire::{Failure, Header, Opcode};

use crate::connection::{Connection, Reply};

/// Reads of this size are looked ahead for: what comes next is at the disk while this one is verified and sent.
const LARGE_BYTES: u32 = 1 << 20;
/// Of those that are here already.
const AHEAD_MAX: usize = 3;

impl Connection<'_> {
    pub(crate) async fn read(&mut self, header: &Header) -> Result<Reply, Failure> {
        let mut view = self.view(header).await?;
        self.shared.stats.bytes_read.fetch_add(view.bytes().len() as u64, Relaxed);
        let sums = std::mem::take(&mut view.sums);
        Ok(Reply::Data(Frame { header: self.reply(header), ext: Vec::new(), sums }, view))
    }

    /// What a READ wants.
    pub(crate) async fn view(&mut self, header: &Header) -> Result<ReadView, Failure> {
        let handle = self.authorised(header, Right::Read)?;
        if header.length >= LARGE_BYTES {
            self.look_ahead();
        }
        handle.column.read(header.epoch, header.offset, header.length, !header.is_raw()).await
    }

    /// What the next READs want begins to be lifted.
    fn look_ahead(&mut self) {
        for next in self.receiver.look_ahead(AHEAD_MAX) {
            // What is wrong with a request it is told when its turn comes.
            if next.opcode == Opcode::Read as u8
                && let Ok(handle) = self.authorised(&next, Right::Read)
                && let Some(ahead) = handle.column.read_ahead(next.offset, next.length)
            {
                if self.ahead.len() == AHEAD_MAX {
                    self.ahead.pop_front();
                }
                self.ahead.push_back(ahead);
            }
        }
    }
}

/// The bytes of a view, alive and unchanged as long as it is.
pub(crate) fn memory_of(view: &ReadView) -> Memory {
    let bytes = view.bytes();
    // SAFETY: whoever uses it keeps the view for as long. The cast loses only `const`: it is read.
    Memory::from(unsafe { Slice::new(bytes.as_ptr().cast_mut(), bytes.len()) })
}
