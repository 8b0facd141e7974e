//! The disk itself: a device over the backing file with power that can be cut and faults that can be ordered.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fuser::Errno;
use gd2fs_device::fault::{Faults, PowerCut};
use gd2fs_device::{BLOCK, Buffer, Device, Done, Error, Op, Options};
use parking_lot::RwLock;

use crate::files::Files;

/// One disk, shared by the file system and the command socket.
pub struct Disk {
    /// Taken out by `close`; afterwards every call fails.
    device: RwLock<Option<Device>>,
    pub bytes: u64,
    /// Files beside the device, under the same power.
    pub files: Files,
    pub power: PowerCut,
    pub faults: Faults,
    pub counts: Counts,
}

/// What was asked of the disk since it started.
#[derive(Default)]
pub struct Counts {
    pub reads: AtomicU64,
    pub bytes_read: AtomicU64,
    pub writes: AtomicU64,
    pub bytes_written: AtomicU64,
    /// Those of `writes` that had to be durable.
    pub durable_writes: AtomicU64,
    pub syncs: AtomicU64,
}

impl Disk {
    /// Opens the backing file; one that is not there is made with `bytes`. `seed` decides everything that is left to chance.
    ///
    /// # Errors
    /// Those of [`Device::create`].
    pub fn open(backing: &Path, bytes: u64, seed: u64) -> Result<Disk, Error> {
        let (power, faults) = (PowerCut::new(seed), Faults::new(seed));
        let options =
            Options { power_cut: Some(power.clone()), faults: Some(faults.clone()), ..Options::default() };
        let device = Device::create(backing, bytes, &options)?;
        let bytes = device.bytes();
        let (device, files) = (RwLock::new(Some(device)), Files::new(seed));
        Ok(Disk { device, bytes, files, power, faults, counts: Counts::default() })
    }

    /// Reads the blocks around `length` bytes at `offset`, which lie on the disk, and hands those bytes to `done`.
    pub fn read(&self, offset: u64, length: usize, done: impl FnOnce(Result<&[u8], Error>) + Send + 'static) {
        self.counts.reads.fetch_add(1, Relaxed);
        self.counts.bytes_read.fetch_add(length as u64, Relaxed);
        let skipped = (offset % BLOCK as u64) as usize;
        let buffer = Arc::new(Buffer::new((skipped + length).next_multiple_of(BLOCK)));
        // SAFETY: the operation keeps the buffer, and `done` reads it only when the operation is over.
        let slice = unsafe { buffer.slice() };
        let op = Op::read(offset - skipped as u64, slice, Arc::clone(&buffer));
        self.submit(op, Box::new(move |read| done(read.map(|()| &buffer[skipped..skipped + length]))));
    }

    /// Writes whole blocks.
    pub fn write(&self, offset: u64, bytes: &[u8], durable: bool, done: Done) {
        self.counts.writes.fetch_add(1, Relaxed);
        self.counts.bytes_written.fetch_add(bytes.len() as u64, Relaxed);
        self.counts.durable_writes.fetch_add(durable as u64, Relaxed);
        let mut buffer = Buffer::new(bytes.len());
        buffer.copy_from_slice(bytes);
        // SAFETY: the operation keeps the buffer, and nobody else has it.
        let slice = unsafe { buffer.slice() };
        let make = if durable { Op::write_sync } else { Op::write };
        self.submit(make(offset, slice, buffer), done);
    }

    /// Makes everything durable that was written.
    pub fn sync(&self, done: Done) {
        self.counts.syncs.fetch_add(1, Relaxed);
        self.submit(Op::sync(), done);
    }

    /// Makes a file's bytes durable, or the files' names. The device syncs first, so that what is ordered for its syncs
    /// befalls these, too.
    pub fn sync_files(
        self: &Arc<Self>,
        file: Option<u64>,
        done: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let sync = match self.files.begin_sync(file) {
            Ok(sync) => sync,
            Err(error) => return done(Err(error)),
        };
        let disk = Arc::clone(self);
        self.sync(Box::new(move |synced| {
            done(synced.map_err(|error| number(&error)).and_then(|()| disk.files.end_sync(sync)));
        }));
    }

    fn submit(&self, op: Op, done: Done) {
        match &*self.device.read() {
            Some(device) => device.submit(op, done),
            None => done(Err(Error::Closed { path: "disk".into() })),
        }
    }

    /// Waits for what is under way and, with the power on, leaves everything in the backing file.
    pub fn close(&self) {
        let device = self.device.write().take();
        drop(device);
    }
}

/// The disk's own error number where it has one.
pub fn number(error: &Error) -> Errno {
    Errno::from_i32(error.os_code().unwrap_or(libc::EIO))
}
