//! What goes wrong with a log.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use crate::position::Place;
use crate::superblock::SuperblockError;

/// What an operation of this crate returns.
pub type Result<T, E = LogError> = std::result::Result<T, E>;

/// Why a log could not be opened or an operation was not carried out.
#[derive(Clone, Debug, Error)]
pub enum LogError {
    /// The device is not this node's log.
    #[error("{}: {error}", path.display())]
    Superblock {
        /// The device.
        path: PathBuf,
        /// What is wrong with it.
        error: SuperblockError,
    },
    /// The device or an option cannot be used; nothing was changed.
    #[error("{field}: {reason}")]
    Refused {
        /// The option or field.
        field: &'static str,
        /// What it must be.
        reason: String,
    },
    /// Nothing was written: what lives fills the log. Release something, then try again.
    #[error(
        "the log is full: {bytes} bytes are wanted, {live_bytes} of {total_bytes} are live; delete what is not \
         needed any more, or give the node more or larger logs (node.logs, node.log_bytes)"
    )]
    NoSpace {
        /// Bytes that the record takes.
        bytes: u64,
        /// Bytes of live records.
        live_bytes: u64,
        /// Bytes of all segments.
        total_bytes: u64,
    },
    /// Nothing was written: too many notes wait. Try again.
    #[error("too many notes wait; try again when some are durable")]
    Overloaded,
    /// Nothing was written: a note that was begun later makes this snapshot void.
    #[error("a later note makes this snapshot void")]
    Superseded,
    /// The place was released and its segment reused.
    #[error("{0:?} holds nothing any more")]
    Gone(Place),
    /// The range does not lie in the place.
    #[error("bytes [{start}, {end}) of the chunk are not whole blocks inside {place:?}")]
    Outside {
        /// The place that was read.
        place: Place,
        /// First byte wanted, counted from the chunk's first.
        start: u32,
        /// Byte behind the last.
        end: u32,
    },
    /// The device failed; what was to be written may be there or not.
    #[error("{0}")]
    Device(Arc<gd2fs_device::Error>),
    /// The device could not be read when the log was opened. Nothing was changed.
    #[error(
        "it cannot be read at offset {offset} ({reason}), and what is there may be the last word about anything: take it out of \
         node.logs, which keeps what the other logs hold, then replace or wipe it; what it holds is lost"
    )]
    Unreadable {
        /// Where the device failed, in bytes from its start.
        offset: u64,
        /// The system's answer.
        reason: String,
    },
    /// The device failed a write twice, in two segments.
    #[error("written twice, failed twice: {0}")]
    Write(String),
    /// A sync failed earlier: what the device holds of the last writes is unknown, so that nothing more is written.
    #[error("the log takes no more writes since a sync failed: {0}; replace the device")]
    Failed(String),
    /// The checkpoint could not be written. Without one no segment is used again, so that whoever waits for room learns it too.
    #[error("checkpoint {}: {error}; make room on its file system, or repair it", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        error: Arc<io::Error>,
    },
    /// The owner wants no checkpoint now. As with one that fails, no segment is used again meanwhile.
    #[error("no checkpoint is made: {0}")]
    PutOff(String),
    /// The log was closed.
    #[error("the log was closed")]
    Closed,
}

impl LogError {
    /// Whether the same call may succeed a little later, once the caller has made room.
    pub fn is_retryable(&self) -> bool {
        matches!(self, LogError::NoSpace { .. } | LogError::Overloaded)
    }

    /// A failure of the device while a log is opened, as an operator can act on it.
    pub(crate) fn at_open(self) -> LogError {
        match &self {
            LogError::Device(error) => match &**error {
                gd2fs_device::Error::Failed { kind: gd2fs_device::Kind::Read, offset, source, .. } => {
                    LogError::Unreadable { offset: *offset, reason: source.to_string() }
                }
                _ => self,
            },
            _ => self,
        }
    }

    /// Whether the call certainly left the log as it was.
    pub fn has_no_side_effects(&self) -> bool {
        !matches!(self, LogError::Device(_) | LogError::Write(_) | LogError::Failed(_))
    }
}

impl From<gd2fs_device::Error> for LogError {
    fn from(error: gd2fs_device::Error) -> LogError {
        LogError::Device(Arc::new(error))
    }
}
