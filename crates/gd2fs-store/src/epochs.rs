//! The little that must outlive the node's memory: the highest epoch of each column, and which columns were deleted lately.
//!
//! An append-only journal of fixed records with a sum each. It is written anew, small, at every start, and whenever what it
//! repeats outgrows what it says.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use gd2fs_wire::sums::crc32c;
use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;

use crate::columns::Name;
use crate::data_dir::{DataDirError, write_durably};
use crate::store::TOMBSTONE_LIFE;

const MAGIC: &[u8; 8] = b"GD2FSEP1";
/// file u128, column u32, epoch u32, deleted at u64 (unix seconds of the cluster's time, 0 = not), CRC-32C u32; little-endian.
const RECORD_BYTES: usize = 36;
/// Journals below this are not worth rewriting.
const COMPACTION_BYTES_MIN: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    epoch: u32,
    deleted_at: u64,
}

type Entries = HashMap<Name, Entry>;

pub struct Epochs {
    path: PathBuf,
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    bytes: u64,
    entries: Entries,
    /// An append failed: the end of the file is unknown, so nothing more is appended before it was written anew.
    broken: bool,
}

impl Epochs {
    pub fn open(path: &Path) -> Result<Epochs, DataDirError> {
        let content = match std::fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => MAGIC.to_vec(),
            other => other.map_err(DataDirError::io(path))?,
        };
        // Nothing is forgotten here: what time it is, only control can say.
        let entries =
            replay(&content).map_err(|offset| DataDirError::Journal { path: path.into(), offset })?;
        let (file, bytes) = rewrite(path, &entries).map_err(DataDirError::io(path))?;
        Ok(Epochs { path: path.into(), inner: Mutex::new(Inner { file, bytes, entries, broken: false }) })
    }

    /// The highest epoch that was ever used for a column, 0 if none above 1 was.
    pub fn highest(&self, file: u128, column: u32) -> u32 {
        self.inner.lock().entries.get(&(file, column)).map_or(0, |entry| entry.epoch)
    }

    /// Remembers `epoch` for good before it is used. Epoch 1 needs no memory: nothing is lower.
    pub fn raise(&self, file: u128, column: u32, epoch: u32) -> Result<(), Failure> {
        if epoch <= 1 {
            return Ok(());
        }
        let mut inner = self.inner.lock();
        let entry = inner.entries.get(&(file, column)).copied().unwrap_or_default();
        if epoch <= entry.epoch {
            return Ok(());
        }
        self.append(&mut inner, &[((file, column), Entry { epoch, ..entry })])
    }

    /// Remembers deletions at `now`, for as long as something could bring the columns back, and forgets those for which that is
    /// over at `certain`: both in unix seconds of the cluster's time. Returns what it forgot.
    pub fn bury(&self, names: &[Name], now: u64, certain: u64) -> Result<Vec<Name>, Failure> {
        let over = |entry: &Entry| {
            entry.deleted_at > 0 && entry.deleted_at.saturating_add(TOMBSTONE_LIFE.as_secs()) <= certain
        };
        let mut inner = self.inner.lock();
        let known = |name| inner.entries.get(name).copied().unwrap_or_default();
        let fresh: Vec<_> = names
            .iter()
            .map(|name| (*name, known(name)))
            .filter(|(_, entry)| entry.deleted_at == 0 || over(entry))
            .map(|(name, entry)| (name, Entry { deleted_at: now.max(1), ..entry }))
            .collect();
        if !fresh.is_empty() {
            self.append(&mut inner, &fresh)?;
        }
        Ok(inner.entries.extract_if(|_, entry| over(entry)).map(|(name, _)| name).collect())
    }

    /// Deleted columns.
    pub fn tombstones(&self) -> Vec<Name> {
        let inner = self.inner.lock();
        inner.entries.iter().filter(|(_, entry)| entry.deleted_at > 0).map(|(name, _)| *name).collect()
    }

    fn append(&self, inner: &mut Inner, records: &[(Name, Entry)]) -> Result<(), Failure> {
        let live = (inner.entries.len() * RECORD_BYTES) as u64;
        if inner.broken || inner.bytes > COMPACTION_BYTES_MIN.max(4 * live) {
            (inner.file, inner.bytes) = rewrite(&self.path, &inner.entries).map_err(|e| self.refuse(e))?;
            inner.broken = false;
        }
        let bytes: Vec<u8> = records.iter().flat_map(|(name, entry)| encode(*name, *entry)).collect();
        if let Err(error) = inner.file.write_all(&bytes).and_then(|()| inner.file.sync_data()) {
            inner.broken = true;
            return Err(self.refuse(error));
        }
        inner.bytes += bytes.len() as u64;
        inner.entries.extend(records.iter().copied());
        Ok(())
    }

    fn refuse(&self, error: io::Error) -> Failure {
        let message = format!("{} cannot be written ({error}); free its disk", self.path.display());
        Failure::new(Code::Internal, message)
    }
}

fn encode((file, column): Name, entry: Entry) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..16].copy_from_slice(&file.to_le_bytes());
    record[16..20].copy_from_slice(&column.to_le_bytes());
    record[20..24].copy_from_slice(&entry.epoch.to_le_bytes());
    record[24..32].copy_from_slice(&entry.deleted_at.to_le_bytes());
    let sum = crc32c(&record[..32]);
    record[32..].copy_from_slice(&sum.to_le_bytes());
    record
}

fn decode(record: &[u8]) -> Option<(Name, Entry)> {
    let record: &[u8; RECORD_BYTES] = record.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("4 bytes"));
    if word(32) != crc32c(&record[..32]) {
        return None;
    }
    let file = u128::from_le_bytes(record[..16].try_into().expect("16 bytes"));
    let deleted_at = u64::from_le_bytes(record[24..32].try_into().expect("8 bytes"));
    Some(((file, word(16)), Entry { epoch: word(20), deleted_at }))
}

/// Err: the offset of a damaged record. A record that is torn at the very end was never answered for and is dropped.
fn replay(content: &[u8]) -> Result<Entries, usize> {
    let records = content.strip_prefix(MAGIC).ok_or(0usize)?;
    let mut entries = Entries::new();
    let mut torn = None;
    for (index, record) in records.chunks(RECORD_BYTES).enumerate() {
        match (decode(record), torn) {
            (Some((name, entry)), None) => {
                entries.insert(name, entry);
            }
            (Some(_), Some(offset)) => return Err(offset),
            (None, _) => torn = torn.or(Some(MAGIC.len() + index * RECORD_BYTES)),
        }
    }
    Ok(entries)
}

fn rewrite(path: &Path, entries: &Entries) -> io::Result<(File, u64)> {
    let mut bytes = MAGIC.to_vec();
    entries.iter().for_each(|(name, entry)| bytes.extend_from_slice(&encode(*name, *entry)));
    write_durably(path, &bytes)?;
    Ok((OpenOptions::new().append(true).open(path)?, bytes.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;
    const LIFE: u64 = TOMBSTONE_LIFE.as_secs();

    #[test]
    fn epochs_and_tombstones_survive() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("epochs");
        let epochs = Epochs::open(&path).unwrap();
        epochs.raise(7, 0, 1).unwrap();
        epochs.raise(7, 1, 5).unwrap();
        epochs.raise(7, 1, 4).unwrap();
        epochs.raise(8, 0, 2).unwrap();
        assert!(epochs.bury(&[(8, 0), (9, 3)], NOW, NOW).unwrap().is_empty());
        drop(epochs);
        let epochs = Epochs::open(&path).unwrap();
        assert_eq!((epochs.highest(7, 0), epochs.highest(7, 1), epochs.highest(8, 0)), (0, 5, 2));
        assert_eq!(epochs.tombstones().len(), 2);
        let mut forgotten = epochs.bury(&[(1, 1)], NOW + LIFE, NOW + LIFE).unwrap();
        forgotten.sort();
        assert_eq!((forgotten, epochs.tombstones()), (vec![(8, 0), (9, 3)], vec![(1, 1)]), "old ones go");
        assert_eq!(epochs.highest(8, 0), 0);
    }

    /// A node that was away for long, or that only believes so.
    #[test]
    fn what_only_seems_to_be_over_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("epochs");
        let epochs = Epochs::open(&path).unwrap();
        epochs.raise(7, 0, 5).unwrap();
        epochs.bury(&[(7, 0)], NOW, NOW).unwrap();
        // The node's time went on without control's.
        assert!(epochs.bury(&[(1, 0)], NOW + 10 * LIFE, NOW + LIFE - 1).unwrap().is_empty());
        // Years went by, and nobody has said so yet.
        drop(epochs);
        let epochs = Epochs::open(&path).unwrap();
        assert_eq!((epochs.tombstones().len(), epochs.highest(7, 0)), (2, 5));
        // Deleted again: the second deletion is remembered as long as any.
        assert!(epochs.bury(&[(7, 0)], NOW + LIFE, NOW + LIFE).unwrap().is_empty());
        assert_eq!(epochs.bury(&[], NOW + 2 * LIFE, NOW + 2 * LIFE).unwrap(), [(7, 0)]);
    }

    #[test]
    fn a_torn_end_is_dropped_and_damage_before_it_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("epochs");
        let epochs = Epochs::open(&path).unwrap();
        (1..=3).for_each(|file| epochs.raise(file, 0, 10).unwrap());
        drop(epochs);
        let good = std::fs::read(&path).unwrap();
        for cut in 1..RECORD_BYTES {
            std::fs::write(&path, &good[..good.len() - cut]).unwrap();
            let epochs = Epochs::open(&path).unwrap();
            assert_eq!([1, 2, 3].map(|file| epochs.highest(file, 0)), [10, 10, 0]);
        }
        let mut bad = good.clone();
        bad[MAGIC.len() + RECORD_BYTES + 3] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let offset = MAGIC.len() + RECORD_BYTES;
        assert!(matches!(Epochs::open(&path), Err(DataDirError::Journal { offset: o, .. }) if o == offset));
    }

    #[test]
    fn the_journal_stays_small() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("epochs");
        let epochs = Epochs::open(&path).unwrap();
        epochs.inner.lock().bytes = COMPACTION_BYTES_MIN + 1;
        epochs.raise(1, 0, 2).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), (MAGIC.len() + RECORD_BYTES) as u64);
        assert_eq!(Epochs::open(&path).unwrap().highest(1, 0), 2);
    }
}
