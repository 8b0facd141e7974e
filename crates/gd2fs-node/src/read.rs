//! READ: from the arena to the socket, with no copy in between; what lies in the log is read into the arena first.

use std::sync::atomic::Ordering::Relaxed;

use gd2fs_store::ReadView;
use gd2fs_transport::{Frame, Memory, Slice};
use gd2fs_wire::capability::Right;
use gd2fs_wire::{Failure, Header};

use crate::connection::{Connection, Reply};

impl Connection<'_> {
    pub(crate) async fn read(&self, header: &Header) -> Result<Reply, Failure> {
        let handle = self.authorised(header, Right::Read)?;
        let mut view =
            handle.column.read(header.epoch, header.offset, header.length, !header.is_raw()).await?;
        self.shared.stats.bytes_read.fetch_add(view.bytes().len() as u64, Relaxed);
        let sums = std::mem::take(&mut view.sums);
        Ok(Reply::Data(Frame { header: self.reply(header), ext: Vec::new(), sums }, view))
    }
}

/// The bytes of a view, alive and unchanged as long as it is.
pub(crate) fn memory_of(view: &ReadView) -> Memory {
    let bytes = view.bytes();
    // SAFETY: whoever uses it keeps the view for as long. The cast loses only `const`: it is read.
    Memory::from(unsafe { Slice::new(bytes.as_ptr().cast_mut(), bytes.len()) })
}
