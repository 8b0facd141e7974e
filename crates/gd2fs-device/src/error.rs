//! What goes wrong with a device, with its path and a remedy.

use std::io;
use std::path::PathBuf;

use crate::Kind;

/// What an operation of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a device could not be opened or an operation was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path cannot be a device, or the system refuses it.
    #[error("{}: {reason}; {remedy}", path.display())]
    Unusable {
        /// The device's path.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
        /// The system's answer, if there is one.
        source: Option<io::Error>,
    },
    /// Its file system has no room for the preallocation.
    #[error(
        "{}: {bytes_wanted} bytes more are needed and its file system has {bytes_free} free; ask for a smaller device or \
         free space",
        path.display()
    )]
    NoRoom {
        /// The device's path.
        path: PathBuf,
        /// Bytes that are not allocated yet.
        bytes_wanted: u64,
        /// Bytes that the file system gives to this user.
        bytes_free: u64,
    },
    /// Another process, or another `Device` of this one, holds the lock, and did so for a second.
    #[error("{}: another node uses it; a device belongs to one node: stop that one or choose another path", path.display())]
    Locked {
        /// The device's path.
        path: PathBuf,
    },
    /// An option or an operation that no device accepts; nothing was done.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The device's path.
        path: PathBuf,
        /// The field that is wrong and what it must be.
        reason: String,
    },
    /// Too many operations wait; nothing was done.
    #[error("{}: {waiting_max} operations wait already; try again when some have completed", path.display())]
    Overloaded {
        /// The device's path.
        path: PathBuf,
        /// [`crate::Options::waiting_max`].
        waiting_max: usize,
    },
    /// The device was closed before all of the operation was begun; a write may have reached it in part.
    #[error("{}: closed before the operation was carried out", path.display())]
    Closed {
        /// The device's path.
        path: PathBuf,
    },
    /// The system failed a part of the operation; of a write, any part may have reached the device.
    #[error("{}: {kind} of {length} bytes at {offset}: {source}", path.display())]
    Failed {
        /// The device's path.
        path: PathBuf,
        /// What was asked for.
        kind: Kind,
        /// Where the part that failed begins, in bytes from the device's start.
        offset: u64,
        /// How many bytes of the part were still to move.
        length: usize,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// The system's error number (`libc::EIO`, `libc::ENOSPC`, ...), if the system answered with one.
    pub fn os_code(&self) -> Option<i32> {
        match self {
            Error::Failed { source, .. } | Error::Unusable { source: Some(source), .. } => {
                source.raw_os_error()
            }
            _ => None,
        }
    }

    /// Whether the same operation may succeed a little later although nobody repairs anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Overloaded { .. })
    }

    /// Whether the operation certainly left the device as it was.
    pub fn has_no_side_effects(&self) -> bool {
        match self {
            Error::Failed { kind, .. } => *kind == Kind::Read,
            Error::Closed { .. } => false,
            _ => true,
        }
    }
}

impl From<Error> for io::Error {
    /// Keeps kind and message; the message names the path.
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Unusable { source: Some(source), .. } | Error::Failed { source, .. } => source.kind(),
            Error::Unusable { source: None, .. } | Error::Invalid { .. } => io::ErrorKind::InvalidInput,
            Error::NoRoom { .. } => io::ErrorKind::StorageFull,
            Error::Locked { .. } => io::ErrorKind::ResourceBusy,
            Error::Overloaded { .. } => io::ErrorKind::WouldBlock,
            Error::Closed { .. } => io::ErrorKind::NotConnected,
        };
        io::Error::new(kind, error)
    }
}
