//! The receiving half of a connection.

use std::io;
use std::sync::Arc;

use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::sums::{self, PieceSums};

use crate::frame::{Frame, FrameError};
use crate::memory::{Memory, Slice};
use crate::stream::{SLICES_MAX, Stream};

/// Holds many small frames, so that pipelined 4 KiB requests cost few system calls; payloads beyond it go past it.
const BUFFER_BYTES: usize = 128 << 10;
/// Received at once at most: what is summed right behind it must still lie in the core's own cache.
const RECEIVE_BYTES_MAX: usize = 128 << 10;

/// Room for the header and the sums of a payload of 4 MiB, and little of what follows: that need not be copied again.
const HEAD_BYTES: usize = 1 << 10;
/// Behind a payload of this size another one is likely.
const LARGE_BYTES: usize = 64 << 10;

pub struct Receiver {
    stream: Arc<Stream>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// What `has_next` asks for the next time.
    ahead_bytes: usize,
}

impl Receiver {
    pub fn new(stream: Arc<Stream>) -> Receiver {
        let buffer = vec![0; BUFFER_BYTES].into();
        Receiver { stream, buffer, start: 0, end: 0, ahead_bytes: BUFFER_BYTES }
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for the first byte of the next frame; false if the peer closed in between frames.
    pub async fn has_next(&mut self) -> io::Result<bool> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.end = receive(&self.stream, &mut self.buffer[..self.ahead_bytes]).await?;
            self.ahead_bytes = BUFFER_BYTES;
        }
        Ok(self.end > 0)
    }

    /// Whether all that was received has been taken.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether the next frame is here already, with its payload.
    pub fn holds_frame(&self) -> bool {
        let held = &self.buffer[self.start..self.end];
        let Some(Ok(header)) = held.first_chunk().map(Header::decode) else { return false };
        held.len() >= frame_bytes(&header)
    }

    /// The headers that come next, as far as they are here already; they are taken later. Waits for nothing. What is wrong with them,
    /// or with the connection, shows when they are taken.
    pub fn look_ahead(&mut self, count: usize) -> Vec<Header> {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        let until = self.buffer.len().min(self.end + HEAD_BYTES);
        if self.end < until {
            let into = &mut self.buffer[self.end..until];
            // SAFETY: the range is borrowed for the whole of the call.
            let slice = unsafe { Slice::new(into.as_mut_ptr(), into.len()) };
            // SAFETY: as above.
            self.end += unsafe { self.stream.try_receive(&[slice]) }.unwrap_or(0);
        }
        let mut held = &self.buffer[self.start..self.end];
        let mut headers = Vec::new();
        while headers.len() < count
            && let Some(Ok(header)) = held.first_chunk().map(Header::decode)
        {
            headers.push(header);
            held = held.get(frame_bytes(&header)..).unwrap_or_default();
        }
        headers
    }

    /// The next header with its ext and sums. The payload still waits in the connection; if it is JSON, the sum over the
    /// frame is checked by `json`, else here.
    pub async fn frame(&mut self) -> Result<Frame, FrameError> {
        let header = self.header().await?;
        self.rest(header).await
    }

    /// The next header alone, checked in itself.
    pub async fn header(&mut self) -> Result<Header, FrameError> {
        let mut bytes = [0; HEADER_BYTES];
        self.exact(&mut bytes).await?;
        Header::decode(&bytes).map_err(|failure| match Header::identify(&bytes) {
            Some(header) => FrameError::Refused { header, failure },
            None => FrameError::Malformed(failure),
        })
    }

    /// Ext and sums of a header that was just received.
    pub async fn rest(&mut self, header: Header) -> Result<Frame, FrameError> {
        let mut ext = vec![0; usize::from(header.ext_bytes)];
        self.exact(&mut ext).await?;
        // `Header::decode` refuses what is not a multiple of four.
        let mut sums = vec![0; header.sums_bytes as usize / size_of::<u32>()];
        self.exact(sums::bytes_of_sums(&mut sums)).await?;
        let frame = Frame { header, ext, sums };
        if header.carries_file_data() || header.payload_bytes() == 0 {
            frame.check(&[])?;
        }
        Ok(frame)
    }

    /// The JSON payload of `frame`, checked.
    pub async fn json(&mut self, frame: &Frame) -> Result<Vec<u8>, FrameError> {
        let mut payload = vec![0; frame.header.payload_bytes() as usize];
        self.exact(&mut payload).await?;
        frame.check(&payload)?;
        Ok(payload)
    }

    /// Receives file data straight into `memory`, and sums what came while it is still in the cache.
    ///
    /// # Safety
    /// The memory is valid and nobody else uses it until this returns or the future is dropped.
    pub async unsafe fn scatter(
        &mut self,
        memory: &Memory,
        mut sums: Option<&mut PieceSums>,
    ) -> io::Result<()> {
        if memory.len() >= LARGE_BYTES {
            self.ahead_bytes = HEAD_BYTES;
        }
        let mut rest = Cursor::new(memory.slices());
        while self.start < self.end
            && let Some(slice) = rest.next(self.end - self.start)
        {
            let bytes = &self.buffer[self.start..self.start + slice.len()];
            // SAFETY: the caller's promise.
            unsafe { slice.fill_from(bytes) };
            if let Some(sums) = &mut sums {
                sums.update(bytes);
            }
            self.start += slice.len();
        }
        let mut vector = Vec::new();
        while rest.gather(RECEIVE_BYTES_MAX, &mut vector) {
            self.stream.readable().await?;
            // SAFETY: the caller's promise.
            let received = match unsafe { self.stream.try_receive(&vector) } {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                other => other?,
            };
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut left = received;
            while left > 0 {
                let slice = rest.next(left).expect("no more is received than was asked for");
                if let Some(sums) = &mut sums {
                    // SAFETY: received, and still nobody else's.
                    sums.update(unsafe { slice.bytes() });
                }
                left -= slice.len();
            }
        }
        Ok(())
    }

    /// Reads and drops `length` bytes: the payload of a request that was refused.
    pub async fn discard(&mut self, mut length: u64) -> io::Result<()> {
        while length > 0 {
            if !self.has_next().await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let take = length.min((self.end - self.start) as u64);
            self.start += take as usize;
            length -= take;
        }
        Ok(())
    }

    /// Drops what comes until the peer has closed its end.
    pub async fn drain(&mut self) {
        loop {
            match self.has_next().await {
                Ok(true) => self.start = self.end,
                Ok(false) => return,
                Err(error) if is_end(error.kind()) => return,
                // The system is short of something; the peer may be at our memory still.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        }
    }

    async fn exact(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            if !self.has_next().await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let take = into.len().min(self.end - self.start);
            let (now, later) = into.split_at_mut(take);
            now.copy_from_slice(&self.buffer[self.start..self.start + take]);
            self.start += take;
            into = later;
        }
        Ok(())
    }
}

/// Bytes of a frame with all that its header announces.
fn frame_bytes(header: &Header) -> usize {
    let around = usize::from(header.ext_bytes) + header.sums_bytes as usize;
    HEADER_BYTES + around + header.payload_bytes() as usize
}

/// What of a list of slices is still to be filled.
struct Cursor<'a> {
    slices: &'a [Slice],
    /// Bytes of the first slice that are done.
    inside: usize,
}

impl Cursor<'_> {
    fn new(slices: &[Slice]) -> Cursor<'_> {
        Cursor { slices, inside: 0 }
    }

    /// Takes the next piece that lies in one slice, of at most `bytes`; None at the end.
    fn next(&mut self, bytes: usize) -> Option<Slice> {
        loop {
            let first = self.slices.first()?;
            let left = first.len() - self.inside;
            if left == 0 {
                (self.slices, self.inside) = (&self.slices[1..], 0);
                continue;
            }
            let piece = first.part(self.inside, left.min(bytes));
            self.inside += piece.len();
            return Some(piece);
        }
    }

    /// Lists what comes next, at most `bytes` of it, without taking it; false at the end.
    fn gather(&self, bytes: usize, into: &mut Vec<Slice>) -> bool {
        into.clear();
        let mut ahead = Cursor { slices: self.slices, inside: self.inside };
        let mut left = bytes;
        while left > 0
            && into.len() < SLICES_MAX
            && let Some(slice) = ahead.next(left)
        {
            left -= slice.len();
            into.push(slice);
        }
        !into.is_empty()
    }
}

fn is_end(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected)
}

async fn receive(stream: &Stream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        // SAFETY: the range is borrowed for the whole of the call.
        let slice = unsafe { Slice::new(into.as_mut_ptr(), into.len()) };
        // SAFETY: as above.
        match unsafe { stream.try_receive(&[slice]) } {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}
