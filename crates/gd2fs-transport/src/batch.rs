//! Frames on their way out.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::frame::Frame;
use crate::memory::Memory;
use crate::stream::Stream;

/// Frames that go out together: where they are small, the system calls are what costs.
#[derive(Default)]
pub struct Batch {
    /// Headers, ext, sums, JSON and small file data of all frames, one behind the other.
    heads: Vec<u8>,
    frames: Vec<Cut>,
    bytes: usize,
    /// Goes out with the first byte.
    descriptor: Option<Arc<OwnedFd>>,
}

struct Cut {
    request: u64,
    /// Where in `heads` this frame ends.
    head_end: usize,
    /// And where in all that goes out.
    end: usize,
    payload: Memory,
}

/// So many bytes fill a socket's buffer anyway.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Copying so little costs less than slices of its own, and its memory is of no more use: a peer that does not read keeps fewer
/// frames of a node's.
const COPIED_BYTES_MAX: usize = 16 << 10;
/// Each takes two slices of a system call's 1,024.
const BATCH_FRAMES_MAX: usize = 256;

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Another frame would only wait longer.
    pub fn is_full(&self) -> bool {
        self.bytes >= BATCH_BYTES_MAX || self.frames.len() >= BATCH_FRAMES_MAX
    }

    /// Counts bytes that a reply stands for: its receiver waits for it as for those.
    pub fn weigh(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    pub fn clear(&mut self) {
        self.heads.clear();
        self.frames.clear();
        self.bytes = 0;
        self.descriptor = None;
    }

    /// A frame without payload; `header.length` stays as it is.
    pub fn push(&mut self, frame: Frame) {
        self.add(frame, &[], Memory::default());
    }

    /// A frame whose payload is JSON.
    pub fn push_json(&mut self, mut frame: Frame, payload: &[u8]) {
        frame.header.length = payload.len() as u32;
        self.add(frame, payload, Memory::default());
    }

    /// A frame with file data. Returns whether it is sent straight from `memory`, which is needed until then; little is copied now.
    ///
    /// # Safety
    /// The memory is valid and nobody writes it during the call.
    pub unsafe fn push_data(&mut self, mut frame: Frame, memory: Memory) -> bool {
        frame.header.length = memory.len() as u32;
        if memory.len() > COPIED_BYTES_MAX {
            self.add(frame, &[], memory);
            return true;
        }
        let length = memory.len();
        self.add(frame, &[], Memory::default());
        // SAFETY: the caller's promise.
        memory.slices().iter().for_each(|slice| self.heads.extend_from_slice(unsafe { slice.bytes() }));
        let last = self.frames.last_mut().expect("just added");
        (last.head_end, last.end, self.bytes) = (self.heads.len(), last.end + length, self.bytes + length);
        false
    }

    /// A descriptor for the peer, which belongs to the first frame.
    pub fn attach(&mut self, descriptor: Arc<OwnedFd>) {
        self.descriptor = Some(descriptor);
    }

    fn add(&mut self, mut frame: Frame, json: &[u8], payload: Memory) {
        let begin = self.heads.len();
        frame.encode_into(json, &mut self.heads);
        self.heads.extend_from_slice(json);
        let (head_end, length) = (self.heads.len(), self.heads.len() - begin + payload.len());
        self.bytes += length;
        let end = self.frames.last().map_or(0, |last| last.end) + length;
        self.frames.push(Cut { request: frame.header.request, head_end, end, payload });
    }

    /// Sends all of it. If the future is dropped before that, the stream is of no use any more.
    ///
    /// # Safety
    /// The memory of every payload is valid and nobody writes it until this returns or the future is dropped.
    pub async unsafe fn send(&self, stream: &Stream) -> io::Result<()> {
        let handed_over = AtomicU64::new(0);
        // SAFETY: the caller's promise.
        unsafe { self.send_counted(stream, &handed_over) }.await
    }

    /// As `send`; `handed_over` is told the number of each request whose frame the system has taken: nothing here touches its
    /// memory from then on.
    ///
    /// # Safety
    /// As for `send`, for each payload until it is handed over.
    pub async unsafe fn send_counted(&self, stream: &Stream, handed_over: &AtomicU64) -> io::Result<()> {
        let (mut gone, mut waiting) = (0, self.frames.as_slice());
        let mut hand_over = |bytes: usize| {
            gone += bytes;
            while let [first, rest @ ..] = waiting
                && first.end <= gone
            {
                handed_over.store(first.request, Ordering::Release);
                waiting = rest;
            }
        };
        let mut slices = Vec::with_capacity(2 * self.frames.len());
        let (mut begin, mut since) = (0, 0);
        for Cut { head_end, payload, .. } in &self.frames {
            since = *head_end;
            if payload.is_empty() {
                // Heads without payload between them are one slice.
                continue;
            }
            slices.push(IoSlice::new(&self.heads[begin..*head_end]));
            begin = *head_end;
            // SAFETY: the caller's promise.
            slices.extend(payload.slices().iter().map(|slice| IoSlice::new(unsafe { slice.bytes() })));
        }
        if begin < since {
            slices.push(IoSlice::new(&self.heads[begin..since]));
        }
        let mut rest = slices.as_mut_slice();
        if let (Some(descriptor), Some(first)) = (&self.descriptor, rest.first()) {
            let sent = loop {
                stream.writable().await?;
                match stream.try_send_descriptor(first, descriptor) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => break other?,
                }
            };
            hand_over(sent);
            IoSlice::advance_slices(&mut rest, sent);
        }
        // Drops leading empty slices, so that a write of nothing is never taken for a closed connection.
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            stream.writable().await?;
            match stream.try_send(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    hand_over(sent);
                    IoSlice::advance_slices(&mut rest, sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
