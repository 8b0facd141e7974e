//! One end of a connection, whatever carries it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

#[cfg(feature = "fake")]
use crate::fake;
use crate::memory::{Slice, iovecs};

/// IOV_MAX of Linux.
pub(crate) const SLICES_MAX: usize = 1024;
/// A peer names one region in a frame; what it sends beyond this, unasked, is closed at once.
const DESCRIPTORS_MAX: usize = 4;

pub enum Stream {
    Tcp(TcpStream),
    /// Between processes of one host; carries descriptors of shared memory beside its bytes.
    Local(Local),
    #[cfg(feature = "fake")]
    Fake(fake::End),
}

pub struct Local {
    stream: UnixStream,
    received: Mutex<VecDeque<OwnedFd>>,
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Stream {
        Stream::Tcp(stream)
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Stream {
        Stream::Local(Local { stream, received: Mutex::default() })
    }
}

impl Stream {
    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.readable().await,
            Stream::Local(local) => local.stream.readable().await,
            #[cfg(feature = "fake")]
            Stream::Fake(end) => end.readable().await,
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.writable().await,
            Stream::Local(local) => local.stream.writable().await,
            #[cfg(feature = "fake")]
            Stream::Fake(end) => end.writable().await,
        }
    }

    /// Receives into `slices`, at most `SLICES_MAX` of them; 0 is the peer's end of the stream.
    ///
    /// # Safety
    /// The slices are valid and nobody else uses them during the call.
    pub(crate) unsafe fn try_receive(&self, slices: &[Slice]) -> io::Result<usize> {
        // SAFETY: the caller's promise; a Slice and an iovec name the same memory.
        let receive = |fd: i32| unsafe {
            let vector = iovecs(slices);
            match libc::readv(fd, vector.as_ptr(), vector.len() as i32) {
                -1 => Err(io::Error::last_os_error()),
                bytes => Ok(bytes as usize),
            }
        };
        match self {
            Stream::Tcp(stream) => stream.try_io(Interest::READABLE, || receive(stream.as_raw_fd())),
            Stream::Local(local) => local.stream.try_io(Interest::READABLE, || {
                // SAFETY: the caller's promise.
                unsafe { local.receive(slices) }
            }),
            #[cfg(feature = "fake")]
            // SAFETY: the caller's promise.
            Stream::Fake(end) => unsafe { end.try_receive(slices) },
        }
    }

    pub(crate) fn try_send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        match self {
            Stream::Tcp(stream) => stream.try_write_vectored(slices),
            Stream::Local(local) => local.stream.try_write_vectored(slices),
            #[cfg(feature = "fake")]
            Stream::Fake(end) => end.try_send(slices),
        }
    }

    /// Sends at least one byte of `bytes`, and with it a descriptor, which the peer takes by `take_descriptor`.
    pub(crate) fn try_send_descriptor(&self, bytes: &[u8], descriptor: &OwnedFd) -> io::Result<usize> {
        let Stream::Local(local) = self else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "only a local stream carries descriptors",
            ));
        };
        local.stream.try_io(Interest::WRITABLE, || {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [descriptor.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
            Ok(sendmsg(&local.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
        })
    }

    /// The oldest descriptor that came with the bytes received so far.
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        match self {
            Stream::Local(local) => local.received.lock().pop_front(),
            _ => None,
        }
    }

    /// Closes the descriptors that nobody has taken: they came beside frames that are not MAP, or too many with one.
    pub fn drop_descriptors(&self) {
        if let Stream::Local(local) = self {
            local.received.lock().clear();
        }
    }

    /// Whether the peer is a process of this host.
    pub fn is_local(&self) -> bool {
        matches!(self, Stream::Local(_))
    }

    /// Ends the connection from this side: whoever waits on it, here or at the peer, wakes. A local peer that moves bytes of our
    /// memory may still say when it is done: only sending ends then.
    pub fn end(&self) {
        self.shutdown(if self.is_local() { libc::SHUT_WR } else { libc::SHUT_RDWR });
    }

    /// Drops the connection with all that is under way in it, whoever still holds this object: a peer that waits for room to send
    /// more, which a mere shutdown would leave waiting, wakes too.
    pub fn shut(&self) {
        let Stream::Tcp(stream) = self else { return self.shutdown(libc::SHUT_RDWR) };
        let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
        // SAFETY: the descriptor is open, and the address lives and is as long as is said. That it fails for a connection that has
        // ended already is fine.
        unsafe { libc::connect(stream.as_raw_fd(), &raw const nobody, size_of_val(&nobody) as u32) };
    }

    /// Whether the peer of a local stream has ended it, or is gone: whatever it asked for, it does not wait for it any more.
    pub fn is_ended_by_peer(&self) -> bool {
        let Stream::Local(local) = self else { return false };
        let events = libc::POLLRDHUP;
        let mut poll = libc::pollfd { fd: local.stream.as_raw_fd(), events, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&raw mut poll, 1, 0) != 0 }
    }

    fn shutdown(&self, how: i32) {
        let fd = match self {
            Stream::Tcp(stream) => stream.as_raw_fd(),
            Stream::Local(local) => local.stream.as_raw_fd(),
            #[cfg(feature = "fake")]
            Stream::Fake(end) => return end.shut(),
        };
        // SAFETY: the descriptor is open; a socket that is not connected any more is what we want.
        unsafe { libc::shutdown(fd, how) };
    }
}

impl Local {
    /// # Safety
    /// As for `Stream::try_receive`.
    unsafe fn receive(&self, slices: &[Slice]) -> io::Result<usize> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let writable = |slice: &Slice| {
            // SAFETY: the caller's promise; the kernel only writes there.
            io::IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(slice.address(), slice.len()) })
        };
        let mut vector: Vec<io::IoSliceMut<'_>> = slices.iter().map(writable).collect();
        let received = recvmsg(&self.stream, &mut vector, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                let mut queue = self.received.lock();
                for descriptor in descriptors {
                    if queue.len() < DESCRIPTORS_MAX {
                        queue.push_back(descriptor);
                    }
                }
            }
        }
        Ok(received.bytes)
    }
}
