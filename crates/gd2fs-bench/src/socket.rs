//! Blocking sockets with as few system calls as the kernel allows.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use gd2fs_transport::Slice;

/// A peer on this machine that says nothing for so long is stuck; a measurement must end.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// What every measured connection gets: no delay of small messages, an end to all waiting, and `buffer_bytes` of kernel
/// buffer each way (None: the kernel's own choice, which grows with use).
pub fn prepare(stream: &TcpStream, buffer_bytes: Option<u32>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    let Some(bytes) = buffer_bytes else { return Ok(()) };
    let bytes = i32::try_from(bytes).map_err(|_| io::Error::other("a socket buffer is below 2 GiB"))?;
    for name in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // SAFETY: the descriptor is open, and the option is an int that is read here.
        let result = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                (&raw const bytes).cast(),
                size_of_val(&bytes) as libc::socklen_t,
            )
        };
        checked(result as isize)?;
    }
    Ok(())
}

/// Fills `memory`; Ok(false) if the peer has ended before the first byte.
///
/// # Safety
/// Nobody else uses `memory` during the call.
pub unsafe fn receive(stream: &TcpStream, memory: Slice) -> io::Result<bool> {
    let mut done = 0;
    while done < memory.len() {
        let rest = memory.part(done, memory.len() - done);
        // SAFETY: the range is mapped by the promise of its slice, and ours by the caller's.
        let got =
            unsafe { libc::recv(stream.as_raw_fd(), rest.address().cast(), rest.len(), libc::MSG_WAITALL) };
        match checked(got) {
            Ok(0) if done == 0 => return Ok(false),
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer ended in the middle")),
            Ok(got) => done += got,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(timeout_named(error)),
        }
    }
    Ok(true)
}

/// Sends the slices, one behind the other.
///
/// # Safety
/// Nobody writes them during the call.
pub unsafe fn send<const N: usize>(stream: &TcpStream, mut slices: [Slice; N]) -> io::Result<()> {
    let mut first = 0;
    while first < N {
        if slices[first].is_empty() {
            first += 1;
            continue;
        }
        let mut vectors =
            slices.map(|slice| libc::iovec { iov_base: slice.address().cast(), iov_len: slice.len() });
        // SAFETY: all zeros is a message without addresses; the vectors outlive the call, their ranges by the caller's promise.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = vectors[first..].as_mut_ptr();
            message.msg_iovlen = N - first;
            libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        let mut sent = match checked(sent) {
            Ok(sent) => sent,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(timeout_named(error)),
        };
        for slice in &mut slices[first..] {
            let take = sent.min(slice.len());
            *slice = slice.part(take, slice.len() - take);
            sent -= take;
        }
    }
    Ok(())
}

/// The result of a system call as a number of bytes.
pub fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A socket's timeout comes as "would block", which would puzzle whoever reads it.
pub fn timeout_named(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock {
        let text = format!("the peer moved nothing for {} s", SILENCE_MAX.as_secs());
        return io::Error::new(ErrorKind::TimedOut, text);
    }
    error
}

/// The bytes of a local buffer as a slice.
///
/// # Safety
/// The buffer outlives every use of the result, and is not used otherwise meanwhile.
pub unsafe fn local(bytes: &mut [u8]) -> Slice {
    // SAFETY: the caller's promise.
    unsafe { Slice::new(bytes.as_mut_ptr(), bytes.len()) }
}
