//! The file system: a root directory with the file `disk` and the directory `data`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use gd2fs_device::{BLOCK, Error};

use crate::disk::{Disk, number};

/// The file's name in the mounted directory.
pub const NAME: &str = "disk";
/// That of the directory.
pub const DATA_NAME: &str = "data";
const FILE: INodeNo = INodeNo(2);
const DATA: INodeNo = INodeNo(3);
/// Those of the files in `data` follow.
const FILES: u64 = 16;
/// Size and owner of the disk never change.
const UNCHANGED: Duration = Duration::from_secs(3600);
/// A power cut changes what is in `data` behind the kernel's back.
const CHANGING: Duration = Duration::ZERO;
/// As many as a node keeps under way, so that the kernel never holds requests of a slow disk back.
const BACKGROUND_MAX: u16 = 256;

/// Forwards the kernel's requests to a disk; none is waited for here, so slow ones don't hold up others.
pub struct Volume(pub Arc<Disk>);

/// The number of a file in `data`.
fn file_of(inode: INodeNo) -> Option<u64> {
    inode.0.checked_sub(FILES)
}

/// Names are only given, changed and taken in `data`.
fn in_data(parent: INodeNo) -> Result<(), Errno> {
    if parent == DATA { Ok(()) } else { Err(Errno::EPERM) }
}

fn answer(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn attributes(inode: INodeNo, kind: FileType, size: u64) -> FileAttr {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    FileAttr {
        ino: inode,
        size,
        // Preallocated: a node takes the file as it is.
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: if kind == FileType::Directory { 0o755 } else { 0o600 },
        nlink: 1,
        uid,
        gid,
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    }
}

impl Volume {
    fn attributes(&self, inode: INodeNo) -> Result<(Duration, FileAttr), Errno> {
        Ok(match (inode, file_of(inode)) {
            (INodeNo::ROOT | DATA, _) => (UNCHANGED, attributes(inode, FileType::Directory, 0)),
            (FILE, _) => (UNCHANGED, attributes(inode, FileType::RegularFile, self.0.bytes)),
            (_, Some(file)) => {
                (CHANGING, attributes(inode, FileType::RegularFile, self.0.files.bytes(file)?))
            }
            _ => return Err(Errno::ENOENT),
        })
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<INodeNo, Errno> {
        match parent {
            INodeNo::ROOT if name == NAME => Ok(FILE),
            INodeNo::ROOT if name == DATA_NAME => Ok(DATA),
            DATA => Ok(INodeNo(FILES + self.0.files.lookup(name)?)),
            _ => Err(Errno::ENOENT),
        }
    }

    fn entries(&self, directory: INodeNo) -> Result<Vec<(INodeNo, FileType, OsString)>, Errno> {
        let mut entries = vec![
            (directory, FileType::Directory, ".".into()),
            (INodeNo::ROOT, FileType::Directory, "..".into()),
        ];
        if directory == DATA {
            let files = self.0.files.names()?.into_iter();
            entries.extend(files.map(|(name, file)| (INodeNo(FILES + file), FileType::RegularFile, name)));
        } else {
            entries.push((FILE, FileType::RegularFile, NAME.into()));
            entries.push((DATA, FileType::Directory, DATA_NAME.into()));
        }
        Ok(entries)
    }

    /// Writes to a file in `data`.
    fn write_file(&self, file: u64, offset: u64, bytes: &[u8], flags: OpenFlags, reply: ReplyWrite) {
        let offset = (flags.0 & libc::O_APPEND == 0).then_some(offset);
        let length = bytes.len() as u32;
        let done = move |written| match written {
            Ok(()) => reply.written(length),
            Err(error) => reply.error(error),
        };
        match self.0.files.write(file, offset, bytes) {
            Ok(()) if flags.0 & libc::O_DSYNC != 0 => self.0.sync_files(Some(file), done),
            written => done(written),
        }
    }
}

impl Filesystem for Volume {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it the kernel does one direct transfer of a file after the other. Old kernels lack it.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.find(parent, name).and_then(|inode| self.attributes(inode)) {
            Ok((life, attributes)) => reply.entry(&life, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Ok((life, attributes)) => reply.attr(&life, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // Times, owners and modes are what they are; nobody who runs a node depends on them.
        let cut = match (file_of(inode), size) {
            (Some(file), Some(size)) => self.0.files.truncate(file, size),
            (None, Some(_)) => Err(Errno::EPERM),
            (_, None) => Ok(()),
        };
        match cut.and_then(|()| self.attributes(inode)) {
            Ok((life, attributes)) => reply.attr(&life, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = match self.entries(inode) {
            Ok(entries) => entries,
            Err(error) => return reply.error(error),
        };
        for (index, (inode, kind, name)) in entries.into_iter().enumerate().skip(offset as usize) {
            if reply.add(inode, index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        match in_data(parent).and_then(|()| self.0.files.create(name)) {
            Ok(file) => {
                let attributes = attributes(INodeNo(FILES + file), FileType::RegularFile, 0);
                let flags = FopenFlags::FOPEN_DIRECT_IO;
                reply.created(&CHANGING, &attributes, Generation(0), FileHandle(0), flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let allowed = in_data(parent).and_then(|()| in_data(new_parent));
        answer(reply, allowed.and_then(|()| self.0.files.rename(name, new_name)));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, in_data(parent).and_then(|()| self.0.files.remove(name)));
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page cache above the disk's own.
        let direct = FopenFlags::FOPEN_DIRECT_IO;
        match file_of(inode).map(|file| self.0.files.open(file)) {
            // And writes beside one another as on a disk.
            None => reply.opened(FileHandle(0), direct | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES),
            Some(Ok(())) => reply.opened(FileHandle(0), direct),
            Some(Err(error)) => reply.error(error),
        }
    }

    fn release(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(file) = file_of(inode) {
            self.0.files.release(file);
        }
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if let Some(file) = file_of(inode) {
            return match self.0.files.read(file, offset, size as usize) {
                Ok(bytes) => reply.data(&bytes),
                Err(error) => reply.error(error),
            };
        }
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
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if let Some(file) = file_of(inode) {
            return self.write_file(file, offset, bytes, flags, reply);
        }
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

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match file_of(inode) {
            Some(file) => self.0.sync_files(Some(file), |synced| answer(reply, synced)),
            None => {
                self.0.sync(Box::new(move |synced| answer(reply, synced.map_err(|error| number(&error)))));
            }
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Closing a file makes nothing durable.
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if inode == DATA {
            self.0.sync_files(None, |synced| answer(reply, synced));
        } else {
            reply.ok();
        }
    }
}
