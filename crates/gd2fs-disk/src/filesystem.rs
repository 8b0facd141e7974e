//! The file system: a root directory with the one file `disk`.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use gd2fs_device::{BLOCK, Error};

use crate::disk::Disk;

/// The file's name in the mounted directory.
pub const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
/// Size and owner never change.
const UNCHANGED: Duration = Duration::from_secs(3600);
/// As many as a node keeps under way, so that the kernel never holds requests of a slow disk back.
const BACKGROUND_MAX: u16 = 256;

/// Forwards the kernel's requests to a disk; none is waited for here, so slow ones don't hold up others.
pub struct OneFile(pub Arc<Disk>);

impl OneFile {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            FILE => (FileType::RegularFile, 0o600, self.0.bytes),
            _ => return None,
        };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Some(FileAttr {
            ino: inode,
            size,
            // Preallocated: a node takes the file as it is.
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        })
    }
}

/// The disk's own error number where it has one.
fn number(error: &Error) -> Errno {
    Errno::from_i32(error.os_code().unwrap_or(libc::EIO))
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it the kernel does one direct transfer of a file after the other. Old kernels lack it.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE) {
            Some(attributes) if parent == INodeNo::ROOT && name == NAME => {
                reply.entry(&UNCHANGED, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&UNCHANGED, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE, FileType::RegularFile, NAME),
        ];
        for (index, (inode, kind, name)) in entries.into_iter().enumerate().skip(offset as usize) {
            if reply.add(inode, index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page cache above the disk's own, and writes beside one another as on a disk.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.bytes.saturating_sub(offset).min(size.into()) {
            0 => reply.data(&[]),
            length => self.0.read(offset, length as usize, move |read| match read {
                Ok(bytes) => reply.data(bytes),
                Err(error) => reply.error(number(&error)),
            }),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (length, block) = (bytes.len(), BLOCK as u64);
        if length == 0 || !length.is_multiple_of(BLOCK) || !offset.is_multiple_of(block) {
            return reply.error(Errno::EINVAL);
        }
        if offset.checked_add(length as u64).is_none_or(|end| end > self.0.bytes) {
            return reply.error(Errno::ENOSPC);
        }
        // The kernel shows RWF_DSYNC here like O_DSYNC of the file; O_SYNC contains it.
        let durable = flags.0 & libc::O_DSYNC != 0;
        let done = Box::new(move |written: Result<(), Error>| match written {
            Ok(()) => reply.written(length as u32),
            Err(error) => reply.error(number(&error)),
        });
        self.0.write(offset, bytes, durable, done);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.sync(Box::new(move |synced| match synced {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(number(&error)),
        }));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Closing a file makes nothing durable.
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}
