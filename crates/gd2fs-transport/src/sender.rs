//! The sending half of a connection.

use std::io::{self, IoSlice};
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::frame::Frame;
use crate::memory::Memory;

/// IOV_MAX of Linux.
const SLICES_MAX: usize = 1024;

pub struct Sender {
    stream: Arc<TcpStream>,
}

impl Sender {
    pub fn new(stream: Arc<TcpStream>) -> Sender {
        Sender { stream }
    }

    /// Sends a frame whose payload, if any, is JSON.
    pub async fn json(&self, mut frame: Frame, payload: &[u8]) -> io::Result<()> {
        frame.header.length = payload.len() as u32;
        let head = frame.encode(payload);
        self.all(&mut [IoSlice::new(&head), IoSlice::new(payload)]).await
    }

    /// Sends a frame without payload; `header.length` stays as it is.
    pub async fn bare(&self, mut frame: Frame) -> io::Result<()> {
        let head = frame.encode(&[]);
        self.all(&mut [IoSlice::new(&head)]).await
    }

    /// Sends a frame with file data straight from `memory`.
    ///
    /// # Safety
    /// The memory is valid and nobody writes it until this returns or the future is dropped.
    pub async unsafe fn data(&self, mut frame: Frame, memory: &Memory) -> io::Result<()> {
        frame.header.length = memory.len() as u32;
        let head = frame.encode(&[]);
        let mut slices = Vec::with_capacity(1 + memory.slices().len());
        slices.push(IoSlice::new(&head));
        // SAFETY: the caller's promise.
        slices.extend(memory.slices().iter().map(|slice| IoSlice::new(unsafe { slice.bytes() })));
        self.all(&mut slices).await
    }

    async fn all(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        // Drops leading empty slices, so that a write of nothing is never taken for a closed connection.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write_vectored(&slices[..slices.len().min(SLICES_MAX)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => IoSlice::advance_slices(&mut slices, sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
