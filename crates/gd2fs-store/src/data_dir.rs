//! A node's data directory: who owns it, which incarnation it saw last, and the epochs.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use gd2fs_wire::sums::crc32c;
use thiserror::Error;

use crate::epochs::Epochs;
use crate::log_list;
use crate::log_set::LogId;
use crate::own_files::{CHECKPOINT, EPOCHS, INCARNATION, LOCK, LOGS, NEW, STOPPED, SUPERBLOCK};
use crate::superblock::{Superblock, SuperblockError};

const INCARNATION_MAGIC: &[u8; 8] = b"GD2FSINC";

/// What is left where the directory cannot be restored.
const ANEW: &str = "give an empty directory and remove the files of node.logs too (of block devices zero the first MiB): they belong to \
                    this directory, and another one refuses them, so that what they hold is lost";

/// What helps against an error of the system, where that can be told.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "; the node writes there: make it writable, or set node.data_dir to a directory that is"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; make room on that disk, or stop the node and move the directory of node.data_dir to a larger one"
        }
        _ => "",
    }
}

/// Why a data directory cannot be used.
#[derive(Debug, Error)]
pub enum DataDirError {
    #[error("{path}: {error}{}", remedy(error))]
    Io { path: PathBuf, error: io::Error },
    #[error("{0}: another process uses this data directory")]
    InUse(PathBuf),
    #[error("{path}: {error}")]
    Superblock { path: PathBuf, error: SuperblockError },
    #[error("{0}: it holds an epochs journal but no superblock; restore it, or {ANEW}")]
    NoSuperblock(PathBuf),
    #[error("{0}: it is damaged; restore it, or {ANEW}")]
    Incarnation(PathBuf),
    #[error("incarnation {asked} is not above {last}, which this data directory saw already; register again")]
    NotHigher { asked: u32, last: u32 },
    #[error(
        "{0}: it is damaged, so that nobody knows which logs are the last word; restore it, or remove it and the files of \
         node.logs (of block devices zero the first MiB), with what they hold"
    )]
    Logs(PathBuf),
    #[error("{path}: the record at byte {offset} is damaged; restore it, or {ANEW}")]
    Journal { path: PathBuf, offset: usize },
}

impl DataDirError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> DataDirError {
        move |error| DataDirError::Io { path: path.into(), error }
    }
}

/// An opened data directory; while it lives, no other process can open it.
pub struct DataDir {
    pub(crate) epochs: Epochs,
    pub(crate) incarnation: u32,
    /// Of the last life.
    logs: Vec<LogId>,
    stopped: bool,
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Opens the directory, or makes it, for one incarnation of one node.
    pub fn open(path: &Path, cluster: &str, node: &str, incarnation: u32) -> Result<DataDir, DataDirError> {
        std::fs::create_dir_all(path).map_err(DataDirError::io(path))?;
        let lock = lock(path)?;
        let (superblock_path, epochs_path) = (path.join(SUPERBLOCK), path.join(EPOCHS));
        let refuse = |error| DataDirError::Superblock { path: superblock_path.clone(), error };
        let superblock = Superblock::new(cluster, node).map_err(refuse)?;
        match read_if_there(&superblock_path)? {
            Some(bytes) => superblock.check(&bytes).map_err(refuse)?,
            None if epochs_path.exists() => return Err(DataDirError::NoSuperblock(path.into())),
            None => write_durably(&superblock_path, &superblock.encode())
                .map_err(DataDirError::io(&superblock_path))?,
        }
        let logs = log_list::read(&path.join(LOGS))?;
        raise_incarnation(&path.join(INCARNATION), incarnation)?;
        let (epochs, stopped) = (Epochs::open(&epochs_path)?, path.join(STOPPED).exists());
        Ok(DataDir { epochs, incarnation, logs, stopped, path: path.into(), _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The logs of the last life that served.
    pub(crate) fn logs(&self) -> &[LogId] {
        &self.logs
    }

    /// Whether the last life that served had everything in its logs when it ended.
    pub(crate) fn stopped_in_order(&self) -> bool {
        self.stopped
    }

    /// This life ends, and has. Durable when this returns.
    pub(crate) fn note_stop(&self) -> Result<(), DataDirError> {
        let path = self.path.join(STOPPED);
        write_durably(&path, &[]).map_err(DataDirError::io(&path))
    }

    /// Where the checkpoint of a log lies.
    pub(crate) fn checkpoint(&self, log: &LogId) -> PathBuf {
        self.path.join(format!("{CHECKPOINT}{log}"))
    }

    /// This life's logs, before it serves or changes anything: every other one has missed a life from here on. Durable when this
    /// returns. Checkpoints of others are of no use any more. That the last life stopped in order counts no longer, also if this one
    /// ends before it has written anything.
    pub(crate) fn keep_logs(&self, logs: &[LogId]) -> Result<(), DataDirError> {
        let stopped = self.path.join(STOPPED);
        if self.stopped {
            std::fs::remove_file(&stopped).map_err(DataDirError::io(&stopped))?;
        }
        // Makes the removal durable too: it is the same directory.
        log_list::write(&self.path.join(LOGS), logs)?;
        for entry in std::fs::read_dir(&self.path).map_err(DataDirError::io(&self.path))? {
            let path = entry.map_err(DataDirError::io(&self.path))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let Some(rest) = name.strip_prefix(CHECKPOINT) else { continue };
            if !logs.iter().any(|log| rest.starts_with(&log.to_string())) {
                std::fs::remove_file(&path).map_err(DataDirError::io(&path))?;
            }
        }
        Ok(())
    }
}

fn lock(path: &Path) -> Result<File, DataDirError> {
    let name = path.join(LOCK);
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&name)
        .map_err(DataDirError::io(&name))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DataDirError::InUse(path.into())),
        Err(TryLockError::Error(error)) => Err(DataDirError::Io { path: name, error }),
    }
}

/// Persists `incarnation` if it is above the last one: what an older incarnation acknowledged is gone with its memory.
fn raise_incarnation(path: &Path, incarnation: u32) -> Result<(), DataDirError> {
    let last = match read_if_there(path)? {
        Some(bytes) => decode_incarnation(&bytes).ok_or_else(|| DataDirError::Incarnation(path.into()))?,
        None => 0,
    };
    if incarnation <= last {
        return Err(DataDirError::NotHigher { asked: incarnation, last });
    }
    let mut bytes = INCARNATION_MAGIC.to_vec();
    bytes.extend_from_slice(&incarnation.to_le_bytes());
    bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
    write_durably(path, &bytes).map_err(DataDirError::io(path))
}

fn decode_incarnation(bytes: &[u8]) -> Option<u32> {
    let bytes: &[u8; 16] = bytes.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    (&bytes[..8] == INCARNATION_MAGIC && word(12) == crc32c(&bytes[..12])).then(|| word(8))
}

pub(crate) fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, DataDirError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataDirError::Io { path: path.into(), error }),
    }
}

/// Replaces a file so that after a crash it has either its former content or the new one.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension(NEW);
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_and_rising_incarnations() {
        let directory = tempfile::tempdir().unwrap();
        let open = |incarnation| DataDir::open(directory.path(), "c", "n", incarnation);
        let first = open(3).unwrap();
        assert!(matches!(open(4), Err(DataDirError::InUse(_))));
        drop(first);
        assert!(matches!(open(3), Err(DataDirError::NotHigher { asked: 3, last: 3 })));
        drop(open(4).unwrap());
        let path = directory.path().join(INCARNATION);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[9] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(open(5), Err(DataDirError::Incarnation(_))));
    }

    #[test]
    fn what_cannot_be_used_says_what_helps() {
        let path = || PathBuf::from("x");
        let damaged = [
            DataDirError::Incarnation(path()),
            DataDirError::NoSuperblock(path()),
            DataDirError::Journal { path: path(), offset: 8 },
        ];
        for error in damaged.map(|error| error.to_string()) {
            assert!(error.contains("restore it") && error.contains("node.logs"), "{error}");
        }
        for (number, part) in [(libc::EROFS, "writable"), (libc::EACCES, "writable"), (libc::ENOSPC, "room")]
        {
            let error = DataDirError::Io { path: path(), error: io::Error::from_raw_os_error(number) };
            assert!(
                error.to_string().contains(part) && error.to_string().contains("node.data_dir"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_directory_without_its_superblock_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(DataDir::open(directory.path(), "c", "n", 1).unwrap());
        std::fs::remove_file(directory.path().join(SUPERBLOCK)).unwrap();
        let again = DataDir::open(directory.path(), "c", "n", 2);
        assert!(matches!(again, Err(DataDirError::NoSuperblock(_))));
    }
}
