//! The ceiling of the TCP transport: a bare socket pair that moves the same parts, without frames, sums or a store.
//!
//! One blocking thread per stream at each end; the bytes go straight from one big buffer into another. The asker keeps a few
//! parts asked ahead on every stream, so that neither end ever waits for the other's turn.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use gd2fs_transport::Slice;

use crate::socket::{local, prepare, receive, send};
use crate::together::together;

/// Connections that a server takes at a time: each is a thread, and a measurement uses a few.
const CONNECTIONS_MAX: usize = 128;
const STREAMS_MAX: usize = 64;
/// offset u64, length u32, operation u32; little-endian.
const REQUEST_BYTES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// Serves ranges of `memory` to whoever connects, until the listener fails. Each connection is a thread.
///
/// # Safety
/// `memory` stays mapped as long as the process lives, and nobody else uses it.
pub unsafe fn serve(listener: &TcpListener, memory: Slice) -> io::Result<()> {
    static SERVED: AtomicUsize = AtomicUsize::new(0);
    loop {
        let (stream, _) = listener.accept()?;
        if SERVED.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
            SERVED.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        thread::Builder::new().name("raw-tcp".into()).spawn(move || {
            // A peer that goes away in the middle ends its own connection and concerns nobody else.
            // SAFETY: the promise of `serve`.
            let _ = unsafe { serve_one(&stream, memory) };
            SERVED.fetch_sub(1, Ordering::Relaxed);
        })?;
    }
}

/// # Safety
/// As of `serve`.
unsafe fn serve_one(stream: &TcpStream, memory: Slice) -> io::Result<()> {
    let mut hello = [0; 4];
    // SAFETY: a local buffer, used by nobody else.
    if !unsafe { receive(stream, local(&mut hello)) }? {
        return Ok(());
    }
    let buffer_bytes = u32::from_le_bytes(hello);
    prepare(stream, (buffer_bytes > 0).then_some(buffer_bytes))?;
    // Between two runs nobody asks for anything.
    stream.set_read_timeout(None)?;
    let mut request = [0; REQUEST_BYTES];
    // SAFETY: as above.
    while unsafe { receive(stream, local(&mut request)) }? {
        let (operation, offset, length) = decode(&request)?;
        if offset.checked_add(length).is_none_or(|end| end > memory.len()) {
            return Err(io::Error::other("a request beyond the end of the memory"));
        }
        let part = memory.part(offset, length);
        match operation {
            // SAFETY: the promise of `serve`.
            Operation::Read => unsafe { send(stream, [part]) }?,
            // SAFETY: as above; askers of one measurement never ask for overlapping writes.
            Operation::Write => unsafe {
                receive(stream, part)?;
                send(stream, [local(&mut request)])?;
            },
        }
    }
    Ok(())
}

fn encode(operation: Operation, offset: usize, length: usize) -> [u8; REQUEST_BYTES] {
    let mut request = [0; REQUEST_BYTES];
    request[..8].copy_from_slice(&(offset as u64).to_le_bytes());
    request[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    request[12..].copy_from_slice(&u32::from(operation == Operation::Write).to_le_bytes());
    request
}

fn decode(request: &[u8; REQUEST_BYTES]) -> io::Result<(Operation, usize, usize)> {
    let number = |range: std::ops::Range<usize>| {
        let mut bytes = [0; 8];
        bytes[..range.len()].copy_from_slice(&request[range]);
        u64::from_le_bytes(bytes)
    };
    let operation = match number(12..16) {
        0 => Operation::Read,
        1 => Operation::Write,
        other => return Err(io::Error::other(format!("unknown operation {other}"))),
    };
    Ok((operation, number(0..8) as usize, number(8..12) as usize))
}

/// Connections to one server, ready for any number of runs.
pub struct RawTcp {
    streams: Vec<TcpStream>,
}

impl RawTcp {
    /// `buffer_bytes`: of the kernel's socket buffers at both ends; None leaves them to the kernel.
    pub fn connect(address: SocketAddr, streams: usize, buffer_bytes: Option<u32>) -> io::Result<RawTcp> {
        if !(1..=STREAMS_MAX).contains(&streams) {
            return Err(io::Error::other(format!("streams: {streams} is not in 1..{STREAMS_MAX}")));
        }
        let connect = || {
            let stream = TcpStream::connect(address)?;
            prepare(&stream, buffer_bytes)?;
            // SAFETY: a local buffer, used by nobody else.
            unsafe { send(&stream, [local(&mut buffer_bytes.unwrap_or(0).to_le_bytes())]) }?;
            Ok(stream)
        };
        Ok(RawTcp { streams: (0..streams).map(|_| connect()).collect::<io::Result<_>>()? })
    }

    /// Moves `memory` from or to `offset` of the server's, in parts of `part_bytes` with `ahead` of them asked ahead
    /// on every stream. The streams take parts as they become free. Returns the time that took.
    ///
    /// # Safety
    /// Nobody else uses `memory` during the call.
    pub unsafe fn run(
        &self,
        operation: Operation,
        offset: usize,
        memory: Slice,
        part_bytes: usize,
        ahead: usize,
    ) -> io::Result<Duration> {
        if part_bytes == 0 || u32::try_from(part_bytes).is_err() || ahead == 0 {
            return Err(io::Error::other("part_bytes and ahead are above 0, part_bytes below 4 GiB"));
        }
        let parts = Parts { offset, memory, part_bytes, next: AtomicUsize::new(0) };
        let works = self
            .streams
            .iter()
            .map(|stream| {
                let parts = &parts;
                move || match operation {
                    // SAFETY: the caller's promise; every part is taken once.
                    Operation::Read => unsafe { read(stream, parts, ahead) },
                    // SAFETY: as above.
                    Operation::Write => unsafe { write(stream, parts, ahead) },
                }
            })
            .collect();
        let (time, results) = together(works);
        results.into_iter().collect::<io::Result<()>>()?;
        Ok(time)
    }
}

/// What is left to move, shared by the streams.
struct Parts {
    offset: usize,
    memory: Slice,
    part_bytes: usize,
    next: AtomicUsize,
}

impl Parts {
    fn take(&self) -> Option<(usize, Slice)> {
        let start = self.next.fetch_add(1, Ordering::Relaxed) * self.part_bytes;
        let rest = self.memory.len().checked_sub(start).filter(|rest| *rest > 0)?;
        Some((self.offset + start, self.memory.part(start, rest.min(self.part_bytes))))
    }
}

/// # Safety
/// Nobody else uses the memory of `parts`, but for other streams that take other parts.
unsafe fn read(stream: &TcpStream, parts: &Parts, ahead: usize) -> io::Result<()> {
    let mut asked = VecDeque::with_capacity(ahead);
    loop {
        while asked.len() < ahead
            && let Some((offset, part)) = parts.take()
        {
            let mut request = encode(Operation::Read, offset, part.len());
            // SAFETY: a local buffer.
            unsafe { send(stream, [local(&mut request)]) }?;
            asked.push_back(part);
        }
        let Some(part) = asked.pop_front() else { return Ok(()) };
        // SAFETY: the caller's promise.
        if !unsafe { receive(stream, part) }? {
            return Err(io::Error::other("the server has ended"));
        }
    }
}

/// # Safety
/// As of `read`.
unsafe fn write(stream: &TcpStream, parts: &Parts, ahead: usize) -> io::Result<()> {
    let (mut unanswered, mut reply) = (0, [0; REQUEST_BYTES]);
    loop {
        let part = parts.take();
        if let Some((offset, part)) = part {
            let mut request = encode(Operation::Write, offset, part.len());
            // SAFETY: a local buffer, and the caller's promise.
            unsafe { send(stream, [local(&mut request), part]) }?;
            unanswered += 1;
        }
        if unanswered == 0 {
            return Ok(());
        }
        if unanswered == ahead || part.is_none() {
            // SAFETY: a local buffer.
            if !unsafe { receive(stream, local(&mut reply)) }? {
                return Err(io::Error::other("the server has ended"));
            }
            unanswered -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server in a thread that ends with the process, over memory that is never freed.
    fn server(memory: &'static mut [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // SAFETY: the memory lives as long as the process; the tests look at it only between runs.
        let slice = unsafe { local(memory) };
        // SAFETY: as above.
        thread::spawn(move || unsafe { serve(&listener, slice) });
        address
    }

    #[test]
    fn bytes_arrive_where_they_belong_in_both_directions() {
        const LENGTH: usize = 1_000_003;
        let pattern: Vec<u8> = (0..LENGTH).map(|i| (i * 13 + i / 253) as u8).collect();
        let served: &'static mut [u8] = vec![0; LENGTH].leak();
        let (start, length) = (served.as_ptr() as usize, served.len());
        let address = server(served);
        for (streams, buffer_bytes) in [(1, None), (3, Some(256 << 10))] {
            let raw = RawTcp::connect(address, streams, buffer_bytes).unwrap();
            let mut source = pattern.clone();
            source.rotate_left(streams);
            // SAFETY: local buffers that nobody else uses.
            unsafe { raw.run(Operation::Write, 0, local(&mut source), 65_536, 2) }.unwrap();
            // SAFETY: every write was answered, so the server does not touch its memory now.
            let there = unsafe { std::slice::from_raw_parts(start as *const u8, length) };
            assert!(there == source);
            let mut target = vec![0; LENGTH];
            // SAFETY: as above.
            let time = unsafe { raw.run(Operation::Read, 3, local(&mut target[3..]), 10_000, 4) }.unwrap();
            assert!(target[3..] == source[3..] && time > Duration::ZERO);
        }
    }

    #[test]
    fn a_range_beyond_the_memory_is_an_error_and_not_a_crash() {
        let address = server(vec![0; 4096].leak());
        let raw = RawTcp::connect(address, 1, None).unwrap();
        let mut target = vec![0; 8192];
        // SAFETY: a local buffer.
        let error = unsafe { raw.run(Operation::Read, 0, local(&mut target), 8192, 1) }.unwrap_err();
        assert!(
            error.to_string().contains("server has ended") || error.kind() == io::ErrorKind::ConnectionReset
        );
        assert!(RawTcp::connect(address, 0, None).is_err());
    }
}
