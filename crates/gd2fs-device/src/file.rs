//! Opening and preallocating what a device lies on.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fstatvfs};

use crate::pool::call;
use crate::{BLOCK, Buffer, Error, Kind, Result};

/// The kernel takes an io_uring down, and with it the hold on its file, some milliseconds after a process was killed: a node
/// that is restarted at once waits so long before it says that another one runs.
const BUSY_WAIT: Duration = Duration::from_secs(1);

/// A locked file or block device.
pub(crate) struct Opened {
    pub file: File,
    pub bytes: u64,
    pub block: bool,
    pub direct: bool,
}

/// Opens what exists.
pub(crate) fn open(path: &Path, direct: bool) -> Result<Opened> {
    let block =
        look(path)?.ok_or_else(|| refused(path, "open", io::Error::from_raw_os_error(libc::ENOENT)))?;
    // Asked exclusively, the kernel refuses a block device that is mounted or part of an array.
    let exclusive = if block { libc::O_EXCL } else { 0 };
    let (file, direct) = open_file(path, OpenOptions::new().read(true).write(true), exclusive, direct)?;
    lock(path, &file)?;
    finish(path, file, block, direct)
}

/// Whether nothing is at the path, or a file without data.
pub(crate) fn is_vacant(path: &Path) -> Result<bool> {
    match look(path)? {
        None => Ok(true),
        Some(true) => Ok(false),
        Some(false) => {
            let file = File::open(path).map_err(|error| refused(path, "open", error))?;
            holds_data(path, &file).map(|data| !data)
        }
    }
}

/// Makes a file, or of one without data, so that `bytes` bytes are allocated; a block device must have them.
pub(crate) fn create(path: &Path, bytes: u64, direct: bool) -> Result<Opened> {
    if bytes == 0 || !bytes.is_multiple_of(BLOCK as u64) {
        let reason = format!("bytes: {bytes} is no positive multiple of {BLOCK}");
        return Err(Error::Invalid { path: path.to_path_buf(), reason });
    }
    match look(path)? {
        Some(true) => {
            let opened = open(path, direct)?;
            if opened.bytes < bytes {
                let reason = format!("the block device has {} bytes, not {bytes}", opened.bytes);
                return Err(unusable(path, reason, "ask for a smaller device or choose a larger disk"));
            }
            Ok(opened)
        }
        existing => {
            let (file, direct) =
                open_file(path, OpenOptions::new().read(true).write(true).create(true), 0, direct)?;
            lock(path, &file)?;
            // Asked under the lock. What holds something may be anybody's: it is not grown, filled or cut.
            let made = match holds_data(path, &file)? {
                true => Ok(()),
                false => cut(path, &file, bytes).and_then(|()| allocate(path, &file, bytes)),
            };
            let made = made.and_then(|()| finish(path, file, false, direct));
            if made.is_err() && existing.is_none() {
                // What was made and is of no use must not keep its space; the error that counts is the first.
                let _ = fs::remove_file(path);
            }
            made
        }
    }
}

/// Whether a block device (`true`), a regular file or nothing is there.
fn look(path: &Path) -> Result<Option<bool>> {
    match fs::metadata(path).map(|found| found.file_type()) {
        Ok(kind) if kind.is_block_device() => Ok(Some(true)),
        Ok(kind) if kind.is_file() => Ok(Some(false)),
        Ok(kind) => {
            let what = if kind.is_dir() { "a directory" } else { "neither file nor block device" };
            Err(unusable(path, format!("it is {what}"), "name a regular file or a block device"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(refused(path, "look up", error)),
    }
}

fn open_file(path: &Path, how: &mut OpenOptions, flags: i32, direct: bool) -> Result<(File, bool)> {
    let busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
    let mut open = |flags| patiently(|| how.custom_flags(flags).open(path), busy);
    if direct {
        match open(flags | libc::O_DIRECT) {
            Ok(file) => return Ok((file, true)),
            // Only this says that the file system has no direct I/O.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => tracing::warn!(
                "{}: its file system has no direct I/O; bytes pass through the page cache, which costs memory and speed",
                path.display()
            ),
            Err(error) => return Err(refused(path, "open", error)),
        }
    }
    open(flags).map(|file| (file, false)).map_err(|error| refused(path, "open", error))
}

fn lock(path: &Path, file: &File) -> Result<()> {
    let locked = patiently(|| file.try_lock(), |error| matches!(error, TryLockError::WouldBlock));
    locked.map_err(|error| match error {
        TryLockError::WouldBlock => Error::Locked { path: path.to_path_buf() },
        TryLockError::Error(error) => refused(path, "lock", error),
    })
}

/// Tries again for [`BUSY_WAIT`] while somebody else seems to hold the device.
fn patiently<T, E>(mut attempt: impl FnMut() -> Result<T, E>, busy: impl Fn(&E) -> bool) -> Result<T, E> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(error) if busy(&error) && begun.elapsed() < BUSY_WAIT => std::thread::sleep(BUSY_WAIT / 100),
            result => return result,
        }
    }
}

/// Whether any byte of a file was ever written, as far as its file system can tell.
fn holds_data(path: &Path, file: &File) -> Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::NXIO) => Ok(false),
        // A file system that cannot tell: only an empty file surely has none.
        Err(rustix::io::Errno::INVAL) => {
            file.metadata().map(|found| found.len() > 0).map_err(|error| refused(path, "look up", error))
        }
        Err(error) => Err(refused(path, "look for data in", error.into())),
    }
}

/// Makes a file without data no longer than `bytes`.
fn cut(path: &Path, file: &File, bytes: u64) -> Result<()> {
    let found = file.metadata().map_err(|error| refused(path, "look up", error))?;
    match found.len() > bytes {
        true => file.set_len(bytes).map_err(|error| refused(path, "cut", error)),
        false => Ok(()),
    }
}

/// Makes the file at least `bytes` long and free of holes so far.
pub(crate) fn allocate(path: &Path, file: &File, bytes: u64) -> Result<()> {
    let found = file.metadata().map_err(|error| refused(path, "look up", error))?;
    let allocated = found.blocks() * 512;
    if found.len() >= bytes && allocated >= bytes {
        return Ok(());
    }
    let system = fstatvfs(file).map_err(|error| refused(path, "ask its file system", error.into()))?;
    let no_room = || Error::NoRoom {
        path: path.to_path_buf(),
        bytes_wanted: bytes.saturating_sub(allocated),
        bytes_free: system.f_bavail * system.f_frsize,
    };
    // Asked before, since a preallocation that fails has filled the disk first.
    if bytes.saturating_sub(allocated) > system.f_bavail * system.f_frsize {
        return Err(no_room());
    }
    let done = rustix::io::retry_on_intr(|| fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes));
    match done.map_err(io::Error::from) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Err(no_room()),
        Err(error) => return Err(refused(path, "preallocate", error)),
    }
    // The size, and the name of a new file, outlive a power cut from here on.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = file.sync_all().and_then(|()| File::open(parent)?.sync_all());
    synced.map_err(|error| refused(path, "sync", error))
}

/// Learns the size and tries the unit of transfer.
fn finish(path: &Path, mut file: File, block: bool, direct: bool) -> Result<Opened> {
    let end = file.seek(SeekFrom::End(0)).map_err(|error| refused(path, "ask for its size", error))?;
    let bytes = end - end % BLOCK as u64;
    if bytes == 0 {
        let reason = format!("it has {end} bytes and a device has at least {BLOCK}");
        return Err(unusable(path, reason, "create the device with its size first"));
    }
    let trial = Buffer::new(BLOCK);
    // SAFETY: `trial` outlives the call and nobody else knows it.
    let slice = unsafe { trial.slice() };
    match call(&file, Kind::Read, 0, &slice.into()) {
        Ok(_) => Ok(Opened { file, bytes, block, direct }),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Error::Unusable {
            path: path.to_path_buf(),
            reason: format!("its disk moves no blocks of {BLOCK} bytes"),
            remedy: "choose a disk with a logical block size of at most 4096",
            source: Some(error),
        }),
        Err(error) => Err(refused(path, "read", error)),
    }
}

fn unusable(path: &Path, reason: String, remedy: &'static str) -> Error {
    Error::Unusable { path: path.to_path_buf(), reason, remedy, source: None }
}

/// The system does not let us; the remedy follows from its answer.
fn refused(path: &Path, what: &str, error: io::Error) -> Error {
    let remedy = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "give the node's user the right to read and write it",
        Some(libc::ENOENT) => "correct the path, or create the device (and its directory) first",
        Some(libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG) => "correct the path",
        Some(libc::EROFS) => "choose a file system that is not mounted read-only",
        Some(libc::EBUSY) => "unmount the block device or take it out of its array",
        Some(libc::EOPNOTSUPP) => "choose a file system that preallocates (ext4, XFS) or a block device",
        Some(libc::EFBIG) => {
            "ask for a smaller device, within the file system's and the user's limit on files"
        }
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files",
        _ => "check the disk and the kernel's log",
    };
    let reason = format!("cannot {what} it: {error}");
    Error::Unusable { path: path.to_path_buf(), reason, remedy, source: Some(error) }
}
