//! The receiving half of a connection.

use std::io;
use std::sync::Arc;

use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::sums;
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::frame::{Frame, FrameError};
use crate::memory::{Memory, Slice};

/// Holds many small frames, so that pipelined 4 KiB requests cost few system calls; payloads beyond it go past it.
const BUFFER_BYTES: usize = 64 << 10;
/// IOV_MAX of Linux.
const SLICES_MAX: usize = 1024;

pub struct Receiver {
    stream: Arc<TcpStream>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Receiver {
    pub fn new(stream: Arc<TcpStream>) -> Receiver {
        Receiver { stream, buffer: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 }
    }

    /// Waits for the first byte of the next frame; false if the peer closed in between frames.
    pub async fn has_next(&mut self) -> io::Result<bool> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.end = receive(&self.stream, &mut self.buffer).await?;
        }
        Ok(self.end > 0)
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
        let mut sum_bytes = vec![0; header.sums_bytes as usize];
        self.exact(&mut sum_bytes).await?;
        let frame = Frame { header, ext, sums: sums::sums_from_bytes(&sum_bytes) };
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

    /// Receives file data straight into `memory`.
    ///
    /// # Safety
    /// The memory is valid and nobody else uses it until this returns or the future is dropped.
    pub async unsafe fn scatter(&mut self, memory: &Memory) -> io::Result<()> {
        let mut index = 0;
        let mut slices = memory.slices().to_vec();
        while index < slices.len() && self.start < self.end {
            let take = slices[index].len().min(self.end - self.start);
            // SAFETY: the caller's promise.
            unsafe { slices[index].part(0, take).fill_from(&self.buffer[self.start..self.start + take]) };
            self.start += take;
            advance(&mut slices, &mut index, take);
        }
        while index < slices.len() {
            if slices[index].is_empty() {
                index += 1;
                continue;
            }
            let upto = slices.len().min(index + SLICES_MAX);
            // SAFETY: the caller's promise.
            let received = unsafe { receive_vectored(&self.stream, &slices[index..upto]) }.await?;
            advance(&mut slices, &mut index, received);
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

fn advance(slices: &mut [Slice], index: &mut usize, mut bytes: usize) {
    while bytes > 0 {
        let slice = &mut slices[*index];
        let take = bytes.min(slice.len());
        *slice = slice.part(take, slice.len() - take);
        bytes -= take;
        if slice.is_empty() {
            *index += 1;
        }
    }
}

async fn receive(stream: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// # Safety
/// The slices are valid and nobody else uses them until this returns or the future is dropped.
async unsafe fn receive_vectored(stream: &TcpStream, slices: &[Slice]) -> io::Result<usize> {
    use std::os::fd::AsRawFd;
    loop {
        stream.readable().await?;
        let result = stream.try_io(Interest::READABLE, || {
            let vector: Vec<libc::iovec> = slices
                .iter()
                .map(|slice| libc::iovec { iov_base: slice.address().cast(), iov_len: slice.len() })
                .collect();
            // SAFETY: the vector names memory that the caller promised; its length is at most IOV_MAX.
            let received = unsafe { libc::readv(stream.as_raw_fd(), vector.as_ptr(), vector.len() as i32) };
            if received < 0 { Err(io::Error::last_os_error()) } else { Ok(received as usize) }
        });
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            other => return other,
        }
    }
}
