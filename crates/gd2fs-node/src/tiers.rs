//! FLUSH, WARM and WHERE: a client asks where the bytes of a column are, and has them where it needs them.

use std::sync::Arc;

use gd2fs_transport::Frame;
use gd2fs_wire::capability::Right;
use gd2fs_wire::messages::Span;
use gd2fs_wire::{Code, Failure, Header};

use crate::connection::{Connection, Reply};
use crate::node::Node;
use crate::open::Handle;

impl Connection<'_> {
    /// Whoever may open a column may wait until it is durable: that changes nothing that anybody reads.
    pub(crate) async fn flush_column(&self, header: &Header) -> Result<Reply, Failure> {
        self.handle(header)?.column.flush().await?;
        Ok(Reply::Bare(Frame::new(self.reply(header))))
    }

    pub(crate) fn warm(&self, frame: &Frame) -> Result<Reply, Failure> {
        let (handle, span) = self.readable(frame)?;
        // Counts what is there of a range of any size.
        let warmth = tokio::task::block_in_place(|| handle.column.warm(span.start, span.end))?;
        Ok(Reply::Bare(Frame::with_message(self.reply(&frame.header), &warmth)?))
    }

    pub(crate) fn whereabouts(&self, frame: &Frame) -> Result<Reply, Failure> {
        let (handle, span) = self.readable(frame)?;
        let found = handle.column.whereabouts(span.start, span.end)?;
        Ok(Reply::Bare(Frame::with_message(self.reply(&frame.header), &found)?))
    }

    /// The range that a request names, if its capability allows to read it.
    fn readable(&self, frame: &Frame) -> Result<(Arc<Handle>, Span), Failure> {
        let handle = self.handle(&frame.header)?;
        let span: Span = frame.message()?;
        let length = span.end.checked_sub(span.start).filter(|length| *length > 0).ok_or_else(|| {
            let Span { start, end } = span;
            Failure::new(Code::BadRequest, format!("start {start} is not below end {end}"))
        })?;
        handle.capability.allows(Right::Read, span.start, length)?;
        Ok((handle, span))
    }
}

impl Node {
    /// At most `limit` columns whose valid prefix has changed, as the JSON of a `Report`.
    pub fn report(&self, limit: usize) -> String {
        serde_json::to_string(&self.store().report(limit)).expect("plain data serialises")
    }

    /// Control has taken everything up to this report.
    pub fn reported(&self, sequence: u64) {
        self.store().reported(sequence);
    }
}
