//! READ: from the arena to the socket, with no copy in between.

use std::sync::atomic::Ordering::Relaxed;

use gd2fs_transport::Frame;
use gd2fs_wire::capability::Right;
use gd2fs_wire::{Failure, Header};

use crate::connection::{Connection, Reply};

impl Connection<'_> {
    pub(crate) fn read(&self, header: &Header) -> Result<Reply, Failure> {
        let handle = self.authorised(header, Right::Read)?;
        let mut view = handle.column.read(header.epoch, header.offset, header.length, !header.is_raw())?;
        self.shared.stats.bytes_read.fetch_add(view.bytes().len() as u64, Relaxed);
        let sums = std::mem::take(&mut view.sums);
        Ok(Reply::Data(Frame { header: self.reply(header), ext: Vec::new(), sums }, view))
    }
}
