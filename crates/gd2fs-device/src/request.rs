//! An operation under way: its parts, what a system call's result means for one of them, and its end.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use gd2fs_transport::Memory;
use parking_lot::Mutex;

use crate::{BLOCK, Done, Error, Keep, Kind, Op, Result};

/// A longer operation is carried out as parallel parts of this many bytes: disks reach their bandwidth from about this
/// size on, and a short operation never waits behind one system call for gigabytes. With slices of at least [`BLOCK`] bytes
/// a part has at most 256, under the system's limit of 1,024.
pub const PART_BYTES_MAX: usize = 1 << 20;

/// So many calls in a row may move less than a block (interrupted, or "try again") before the part fails.
const FRUITLESS_MAX: u32 = 100;

/// Shared by an operation's parts.
pub(crate) struct Request {
    path: Arc<Path>,
    pub kind: Kind,
    open: Mutex<Open>,
}

struct Open {
    parts_left: usize,
    error: Option<Error>,
    end: Option<(Done, Keep)>,
}

/// A range of an operation that one system call moves, or what is left of it.
pub(crate) struct Part {
    pub request: Arc<Request>,
    pub offset: u64,
    pub memory: Memory,
    fruitless: u32,
}

/// How a part goes on after a system call.
pub(crate) enum Step {
    Again(Part),
    Finished(Arc<Request>, Result<()>),
}

impl Request {
    /// Cuts a checked operation.
    pub fn parts(path: Arc<Path>, op: Op, done: Done) -> Vec<Part> {
        let Op { kind, offset, memory, keep } = op;
        let count = memory.len().div_ceil(PART_BYTES_MAX).max(1);
        let open = Mutex::new(Open { parts_left: count, error: None, end: Some((done, keep)) });
        let request = Arc::new(Request { path, kind, open });
        let length = memory.len();
        let cut = |index: usize| PART_BYTES_MAX.min(length - index * PART_BYTES_MAX);
        let memories = if count == 1 { vec![memory] } else { memory.split((0..count).map(cut)) };
        let part = |(index, memory)| {
            let offset = offset + (index * PART_BYTES_MAX) as u64;
            Part { request: Arc::clone(&request), offset, memory, fruitless: 0 }
        };
        memories.into_iter().enumerate().map(part).collect()
    }

    /// `parts` of its parts are over; the last to end tells the caller, with the first error.
    pub fn finish(&self, parts: usize, result: Result<()>) {
        let (done, keep, result) = {
            let mut open = self.open.lock();
            open.parts_left -= parts;
            if let Err(error) = result {
                open.error.get_or_insert(error);
            }
            if open.parts_left > 0 {
                return;
            }
            let Some((done, keep)) = open.end.take() else { return };
            (done, keep, open.error.take().map_or(Ok(()), Err))
        };
        // A panic must not end the engine's thread, on which every other operation depends.
        let told = catch_unwind(AssertUnwindSafe(|| {
            done(result);
            drop(keep);
        }));
        if told.is_err() {
            tracing::error!("{}: the callback of a {} panicked", self.path.display(), self.kind);
        }
    }
}

impl Part {
    /// What `moved`, a system call's result in bytes, makes of it.
    pub fn advance(mut self, moved: io::Result<usize>) -> Step {
        let length = self.memory.len();
        let fruitless = match moved {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => error,
            Err(error) => return self.fail(error),
            Ok(moved) if moved >= length => return Step::Finished(self.request, Ok(())),
            Ok(moved) if moved >= BLOCK => {
                // Direct I/O goes on only at a block's start; bytes moved twice are the same bytes.
                let whole = moved - moved % BLOCK;
                self.memory = self.memory.split([whole, length - whole]).remove(1);
                self.offset += whole as u64;
                self.fruitless = 0;
                return Step::Again(self);
            }
            Ok(0) => return self.ended(),
            Ok(_) if self.request.kind == Kind::Read => {
                io::Error::new(io::ErrorKind::UnexpectedEof, "it ends inside a block")
            }
            Ok(_) => io::Error::new(io::ErrorKind::WriteZero, "it takes less than a block"),
        };
        self.fruitless += 1;
        if self.fruitless < FRUITLESS_MAX { Step::Again(self) } else { self.fail(fruitless) }
    }

    fn ended(self) -> Step {
        let error = match self.request.kind {
            Kind::Read => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it ends here, before the size it was opened with; was it truncated?",
            ),
            _ => io::Error::new(io::ErrorKind::WriteZero, "it takes no bytes"),
        };
        self.fail(error)
    }

    fn fail(self, source: io::Error) -> Step {
        let path = self.request.path.to_path_buf();
        let kind = self.request.kind;
        let error = Error::Failed { path, kind, offset: self.offset, length: self.memory.len(), source };
        Step::Finished(self.request, Err(error))
    }
}
