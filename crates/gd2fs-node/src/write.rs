//! WRITE: from the socket straight to where the bytes will stay.

use std::sync::atomic::Ordering::Relaxed;

use gd2fs_store::WriteTicket;
use gd2fs_transport::{Frame, Memory, Slice};
use gd2fs_wire::capability::Right;
use gd2fs_wire::sums::PieceSums;
use gd2fs_wire::{Code, Failure, Header};

use crate::connection::{Connection, Reply, Stop};
use crate::open::Handle;

impl Connection<'_> {
    pub(crate) async fn write(&mut self, frame: &Frame) -> Result<Reply, Stop> {
        let header = &frame.header;
        let handle = self.authorised(header, Right::Write)?;
        self.check_not_fenced()?;
        let ticket = self.begin_write(&handle, header).await?;
        let memory = memory_for(&ticket);
        let mut sums = PieceSums::new(header.offset);
        // SAFETY: the ticket outlives the receive, and nobody else uses its range. Both live in this one future: a deadline
        // or a shutdown that drops it stops the receive (the only call that writes there is made by polling it) before the
        // ticket gives its memory back.
        unsafe { self.receiver.scatter(&memory, Some(&mut sums)) }.await?;
        self.unread = 0;
        let expected = (!header.is_raw()).then_some(frame.sums.as_slice());
        let sums = sums.finish();
        // SAFETY: the receive is over, and summed what it received.
        unsafe { ticket.publish(&sums, expected, || self.membership.is_fenced()) }.await?;
        self.shared.stats.bytes_written.fetch_add(u64::from(header.length), Relaxed);
        Ok(Reply::Bare(Frame::new(Header { length: header.length, ..self.reply(header) })))
    }

    /// A refusal here comes before any payload is taken in, and is counted as such.
    pub(crate) async fn begin_write(&self, handle: &Handle, header: &Header) -> Result<WriteTicket, Failure> {
        let grant = handle.capability.grant;
        let begun = handle.column.begin_write(header.epoch, grant, header.offset, header.length).await;
        if begun.is_err() {
            self.shared.stats.refused_unread.fetch_add(1, Relaxed);
        }
        begun
    }

    pub(crate) fn check_not_fenced(&self) -> Result<(), Failure> {
        if self.membership.is_fenced() {
            let message = "a newer connection of this client has taken over";
            return Err(Failure::new(Code::StaleWriter, message));
        }
        Ok(())
    }
}

/// Where the bytes of a write belong: its own until the ticket is published or dropped.
pub(crate) fn memory_for(ticket: &WriteTicket) -> Memory {
    let (address, length) = ticket.target();
    // SAFETY: whoever moves bytes there keeps the ticket for as long.
    Memory::from(unsafe { Slice::new(address, length) })
}
