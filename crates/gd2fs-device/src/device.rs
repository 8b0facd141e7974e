//! A file or block device that a node's log lies on.

use std::fmt;
use std::fs::File;
use std::future::Future;
use std::path::Path;
use std::sync::{Arc, mpsc};

use gd2fs_transport::Slice;
use tokio::sync::oneshot;

use crate::file::{self, Opened};
use crate::queue::Queue;
use crate::workers::on_engine_thread;
use crate::{Done, Error, Op, Options, Result, engine};

/// One preallocated file or one block device, locked for this process alone.
///
/// Operations run in parallel and complete in any order; none waits for another but for a place. Dropping the device
/// refuses what waits, waits for what is under way, and then unlocks; dropped in a callback it does the waiting on a thread
/// of its own.
pub struct Device {
    queue: Arc<Queue>,
    file: Arc<File>,
    block: bool,
    direct: bool,
}

/// How busy a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// System calls in the engine's hands, at most [`Options::depth`].
    pub under_way: usize,
    /// Operations of which not all has begun, at most [`Options::waiting_max`].
    pub waiting: usize,
}

impl Device {
    /// Makes a file of `bytes` allocated bytes (a multiple of [`crate::BLOCK`]), also of one that holds no data. A file with data is opened as it is, at its own size: what it is, and whether it may be changed, is for the
    /// caller to find out. A block device must have at least so many bytes.
    ///
    /// # Errors
    /// `NoRoom` before anything is allocated if the file system has less; `Locked`; `Unusable`; `Invalid`.
    pub fn create(path: &Path, bytes: u64, options: &Options) -> Result<Device> {
        check(path, options)?;
        Device::over(path, file::create(path, bytes, options.direct)?, options)
    }

    /// Opens what exists, at its full size rounded down to [`crate::BLOCK`].
    ///
    /// # Errors
    /// `Locked`; `Unusable` (not there, no rights, neither file nor block device, too small); `Invalid`.
    pub fn open(path: &Path, options: &Options) -> Result<Device> {
        check(path, options)?;
        Device::over(path, file::open(path, options.direct)?, options)
    }

    /// Whether [`Device::create`] would make something here: nothing is there, or a file without data.
    ///
    /// # Errors
    /// `Unusable`.
    pub fn is_vacant(path: &Path) -> Result<bool> {
        file::is_vacant(path)
    }

    fn over(path: &Path, opened: Opened, options: &Options) -> Result<Device> {
        let file = Arc::new(opened.file);
        let engine = engine::build(&file, path, options)?;
        let queue = Queue::new(path, opened.bytes, engine, options);
        Ok(Device { queue, file, block: opened.block, direct: opened.direct })
    }

    /// Allocates what a file has in holes, as one that was copied may; a block device has none. Without it a write could find
    /// no room.
    ///
    /// # Errors
    /// `NoRoom` before anything is allocated; `Unusable`.
    pub fn allocate(&self) -> Result<()> {
        if self.block { Ok(()) } else { file::allocate(self.path(), &self.file, self.bytes()) }
    }

    /// Whether it is a block device, whose size nobody chooses.
    pub fn is_block(&self) -> bool {
        self.block
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.queue.path
    }

    /// Its size in bytes, a multiple of [`crate::BLOCK`].
    pub fn bytes(&self) -> u64 {
        self.queue.bytes
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Who makes its system calls: `uring` or `pool`.
    pub fn engine(&self) -> &'static str {
        self.queue.engine.name()
    }

    /// How busy it is now.
    pub fn load(&self) -> Load {
        let (under_way, waiting) = self.queue.load();
        Load { under_way, waiting }
    }

    /// Carries out `op` and tells `done`, see [`Done`]. Never blocks. `op.keep` is dropped after `done` has returned.
    ///
    /// # Errors
    /// To `done`: `Invalid` and `Overloaded`, at once; `Failed`; `Closed` if the device is dropped first.
    pub fn submit(&self, op: Op, done: Done) {
        self.queue.submit(op, done);
    }

    /// Carries out `op`; begun at once, whether or not the future is polled, and not ended if it is dropped. When the future
    /// is ready, `op.keep` has been dropped.
    ///
    /// # Errors
    /// As for [`Device::submit`].
    pub fn perform(&self, op: Op) -> impl Future<Output = Result<()>> + Send + use<> {
        let (tell, told) = oneshot::channel();
        let Op { kind, offset, memory, keep } = op;
        let done = Box::new(move |result| {
            drop(keep);
            // Nobody listens if the future was dropped.
            let _ = tell.send(result);
        });
        self.submit(Op { kind, offset, memory, keep: Box::new(()) }, done);
        let path = Arc::clone(&self.queue.path);
        async move { told.await.unwrap_or_else(|_| Err(Error::Closed { path: path.to_path_buf() })) }
    }

    /// Carries out `op` and blocks until it is over; for recovery, which has nothing else to do.
    ///
    /// # Errors
    /// As for [`Device::submit`]; `Invalid` in a callback, where the wait would never end.
    pub fn perform_blocking(&self, op: Op) -> Result<()> {
        if on_engine_thread() {
            let reason = "a callback may not block; use submit or perform there".into();
            return Err(Error::Invalid { path: self.path().to_path_buf(), reason });
        }
        let (tell, told) = mpsc::sync_channel(1);
        self.submit(op, Box::new(move |result| drop(tell.send(result))));
        told.recv().unwrap_or_else(|_| Err(Error::Closed { path: self.path().to_path_buf() }))
    }

    /// Fills `bytes` (see [`crate::Buffer`]) from `offset` and blocks until it is over.
    ///
    /// # Errors
    /// As for [`Device::perform_blocking`].
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: borrowed alone until the operation is over.
        let slice = unsafe { Slice::new(bytes.as_mut_ptr(), bytes.len()) };
        self.perform_blocking(Op::read(offset, slice, ()))
    }

    /// Writes `bytes` (see [`crate::Buffer`]) at `offset` and blocks until it is over. Not durable before a sync.
    ///
    /// # Errors
    /// As for [`Device::perform_blocking`].
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: borrowed until the operation is over, which only reads.
        let slice = unsafe { Slice::new(bytes.as_ptr().cast_mut(), bytes.len()) };
        self.perform_blocking(Op::write(offset, slice, ()))
    }

    /// Makes all completed writes durable and blocks until they are.
    ///
    /// # Errors
    /// As for [`Device::perform_blocking`].
    pub fn sync(&self) -> Result<()> {
        self.perform_blocking(Op::sync())
    }
}

fn check(path: &Path, options: &Options) -> Result<()> {
    options.check().map_err(|reason| Error::Invalid { path: path.to_path_buf(), reason })
}

impl Drop for Device {
    fn drop(&mut self) {
        self.queue.close();
        if on_engine_thread() {
            let queue = Arc::clone(&self.queue);
            std::thread::spawn(move || queue.drain());
        } else {
            self.queue.drain();
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Load { under_way, waiting } = self.load();
        let mut shown = f.debug_struct("Device");
        shown.field("path", &self.path()).field("bytes", &self.bytes()).field("engine", &self.engine());
        shown.field("under_way", &under_way).field("waiting", &waiting).finish_non_exhaustive()
    }
}
