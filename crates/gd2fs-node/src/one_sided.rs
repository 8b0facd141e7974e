//! READ and WRITE whose bytes the node moves itself, between the arena and memory that the client has registered.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use gd2fs_transport::one_sided;
use gd2fs_transport::shm::Regions;
use gd2fs_transport::{Frame, Remote, Segment, Stream};
use gd2fs_wire::capability::Right;
use gd2fs_wire::messages::{Map, Unmap};
use gd2fs_wire::{Code, Failure, Header};

use crate::connection::{Connection, Reply};
use crate::read::memory_of;
use crate::server::Shared;
use crate::write::memory_for;

#[cfg(test)]
mod tests;

/// The way to the memory of whoever is at the other end of `stream`, if this kind of stream has one.
pub(crate) fn remote_of(stream: &Stream, shared: &Shared) -> Option<Box<dyn Remote>> {
    let apart = shared.config.memory_threads > 0;
    stream.is_local().then(|| Box::new(Regions::new(shared.mappings.clone(), apart)) as Box<dyn Remote>)
}

impl Connection<'_> {
    pub(crate) fn map(&self, frame: &Frame, descriptor: Option<OwnedFd>) -> Result<Reply, Failure> {
        let remote = self.remote()?;
        let map: Map = frame.message()?;
        // Thousands of page-table entries: not on a thread that others wait for.
        tokio::task::block_in_place(|| remote.register(&map, descriptor))?;
        Ok(Reply::Bare(Frame::new(self.reply(&frame.header))))
    }

    pub(crate) fn unmap(&self, frame: &Frame) -> Result<Reply, Failure> {
        let Unmap { region } = frame.message()?;
        self.remote()?.unregister(region)?;
        Ok(Reply::Bare(Frame::new(self.reply(&frame.header))))
    }

    /// READ: the bytes are in the client's memory before the answer is.
    pub(crate) async fn put(&mut self, frame: &Frame) -> Result<Reply, Failure> {
        let header = &frame.header;
        let segments = one_sided::decode(&frame.ext, u64::from(header.length))?;
        let summed = !header.is_raw();
        let mut view = self.view(header).await?;
        let moved = view.bytes().len();
        let segments = first(segments, moved as u64);
        let from = memory_of(&view);
        // SAFETY: the view outlives the move, and keeps its bytes alive and unchanged: a deadline that drops this future drops
        // the move, which ends it, before the view.
        let sums = unsafe { self.remote()?.put(header.offset, &from, &segments, summed) }.await?;
        if let Some(piece) = sums.iter().zip(&view.sums).position(|(moved, stored)| moved != stored) {
            let message = format!(
                "piece {piece} of [{}, +{moved}) sums to {:#010x}, stored was {:#010x}",
                header.offset, sums[piece], view.sums[piece]
            );
            return Err(Failure::new(Code::Corrupt, message));
        }
        self.shared.stats.bytes_read.fetch_add(moved as u64, Relaxed);
        let sums = std::mem::take(&mut view.sums);
        let header = Header { length: moved as u32, ..self.reply(header) };
        Ok(Reply::Bare(Frame { header, ext: Vec::new(), sums }))
    }

    /// WRITE: the bytes are taken from the client's memory, once.
    pub(crate) async fn get(&self, frame: &Frame) -> Result<Reply, Failure> {
        let header = &frame.header;
        let handle = self.authorised(header, Right::Write)?;
        self.check_not_fenced()?;
        let segments = one_sided::decode(&frame.ext, u64::from(header.length))?;
        let ticket = self.begin_write(&handle, header).await?;
        let into = memory_for(&ticket);
        // SAFETY: the ticket outlives the move, also where this future is dropped, and nobody else uses its range.
        let sums = unsafe { self.remote()?.get(header.offset, &segments, &into) }.await?;
        let expected = (!frame.sums.is_empty()).then_some(frame.sums.as_slice());
        // A client that has given up may use its memory for other things: what was taken from it before the end of its stream
        // is what it meant, anything later may not be.
        let given_up = || self.membership.is_fenced() || self.stream.is_ended_by_peer();
        // SAFETY: the move is over, and summed what it moved.
        unsafe { ticket.publish(&sums, expected, given_up) }.await?;
        self.shared.stats.bytes_written.fetch_add(u64::from(header.length), Relaxed);
        Ok(Reply::Bare(Frame::new(Header { length: header.length, ..self.reply(header) })))
    }

    fn remote(&self) -> Result<&dyn Remote, Failure> {
        self.remote.as_deref().ok_or_else(|| {
            let message =
                "this connection reaches no memory of its client; only one over a local socket does";
            Failure::new(Code::BadRequest, message)
        })
    }
}

/// The first `length` bytes of `segments`.
fn first(segments: Vec<Segment>, mut length: u64) -> Vec<Segment> {
    let mut part = Vec::with_capacity(segments.len());
    for segment in segments {
        let take = length.min(u64::from(segment.length()));
        if take > 0 {
            part.push(Segment::new(segment.region(), segment.offset(), take as u32));
        }
        length -= take;
    }
    part
}
