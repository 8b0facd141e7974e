//! The names in a data directory that are its node's own, and refusing a log that would lie under one of them: the node replaces,
//! cuts and removes what is there.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::tier::{TierError, Tiers};

/// Whose directory it is.
pub(crate) const SUPERBLOCK: &str = "superblock";
/// The journal of epochs and deletions.
pub(crate) const EPOCHS: &str = "epochs";
/// The last incarnation; the agent reads it too.
pub(crate) const INCARNATION: &str = "incarnation";
/// Held while the directory is open.
pub(crate) const LOCK: &str = "lock";
/// The ids of the last life's logs.
pub(crate) const LOGS: &str = "logs";
/// There while the last life is one that stopped in order.
pub(crate) const STOPPED: &str = "stopped";
/// Before a log's id, the name of its checkpoint; the log makes neighbours of that.
pub(crate) const CHECKPOINT: &str = "checkpoint-";
/// Behind a name: what is to replace the file, see `write_durably`.
pub(crate) const NEW: &str = "new";
/// The agent's lock, `alone_in` in python/gd2fs/config/serving.py.
const RUNNING_LOCK: &str = "running.lock";

/// As many as the kernel follows.
const LINKS_MAX: usize = 40;

/// Whether a file of this name in a data directory is its node's own.
fn is_own(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let plain = name.strip_suffix(NEW.as_bytes()).and_then(|rest| rest.strip_suffix(b".")).unwrap_or(name);
    name.starts_with(CHECKPOINT.as_bytes())
        || [SUPERBLOCK, EPOCHS, INCARNATION, LOCK, LOGS, STOPPED, RUNNING_LOCK]
            .iter()
            .any(|own| plain == own.as_bytes())
}

impl Tiers {
    /// Refuses a log that is one of the node's own files in its data directory, or would be made under such a name, by whatever
    /// path. Changes nothing; to be called before [`crate::DataDir::open`], which writes such files.
    ///
    /// # Errors
    /// `OwnFile`.
    pub fn check_places(&self, data_dir: &Path) -> Result<(), TierError> {
        for log in &self.logs {
            if let Some(own) = own_file(data_dir, &log.path) {
                return Err(TierError::OwnFile { path: log.path.clone(), own });
            }
        }
        Ok(())
    }
}

/// The node's own file that a path leads to. What cannot be looked up cannot be opened either, and is refused then.
fn own_file(data_dir: &Path, path: &Path) -> Option<PathBuf> {
    if let Some((directory, name)) = end_of(path)
        && is_own(&name)
        && is_same(&directory, data_dir)
    {
        return Some(data_dir.join(name));
    }
    // Under another name, by a hard link or a mount; or the own name is itself a link.
    let entries = fs::read_dir(data_dir).ok()?.flatten();
    let mut own = entries.filter(|entry| is_own(&entry.file_name())).map(|entry| entry.path());
    own.find(|own| is_same(own, path))
}

/// The directory and the name at which a path ends behind all links, also if nothing is there yet.
fn end_of(path: &Path) -> Option<(PathBuf, OsString)> {
    let mut path = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        let directory = path.parent()?.to_path_buf();
        match fs::read_link(&path) {
            Ok(target) => path = directory.join(target),
            Err(_) => return Some((Path::new(".").join(directory), path.file_name()?.to_os_string())),
        }
    }
    None
}

fn is_same(a: &Path, b: &Path) -> bool {
    let of = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((of(a), of(b)), (Ok(a), Ok(b)) if a == b)
}
