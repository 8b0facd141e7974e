//! The directory `data`: files for what a node keeps beside its logs, no more durable than POSIX promises.
//!
//! A sync of a file makes its bytes durable but not its name, a sync of the directory names but no bytes; a rename happens
//! or not. A power cut takes any of the rest back. Why not ext4 on the disk's file: there every sync commits all that was
//! done to any name before, so that a forgotten sync of a directory is never missed, on that file system.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use fuser::Errno;
use gd2fs_device::fault::{Dice, SECTOR};
use parking_lot::Mutex;

/// Of all files together. A node's epochs and checkpoints are far below it; what grows without end is found.
const BYTES_MAX: u64 = 256 << 20;

/// The files, in memory: they end with the process.
pub struct Files(Mutex<State>);

struct State {
    dice: Dice,
    off: bool,
    /// By a number that is never given twice.
    files: BTreeMap<u64, File>,
    next: u64,
    names: Names,
    /// What a cut leaves at least.
    synced: Names,
    /// What happened to `names` since `synced`, oldest first.
    changes: VecDeque<Change>,
    /// Changes that are in `synced`.
    settled: u64,
}

type Names = BTreeMap<OsString, u64>;
/// Names that changed at once, each with its file from now on.
type Change = Vec<(OsString, Option<u64>)>;

#[derive(Default)]
struct File {
    bytes: Arc<Vec<u8>>,
    /// How often `bytes` changed.
    version: u64,
    synced: Arc<Vec<u8>>,
    synced_version: u64,
    handles: u32,
}

/// What a sync that begins now makes durable when it is done.
pub enum Sync {
    File { file: u64, bytes: Arc<Vec<u8>>, version: u64 },
    Directory { changes: u64 },
}

/// What a cut took back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Creations, renames and removals.
    pub changes: usize,
    /// Files of which not all bytes are the latest.
    pub files: usize,
}

impl Files {
    /// None yet; `seed` decides what a cut takes.
    pub fn new(seed: u64) -> Files {
        Files(Mutex::new(State {
            dice: Dice::new(seed),
            off: false,
            files: BTreeMap::new(),
            next: 0,
            names: Names::new(),
            synced: Names::new(),
            changes: VecDeque::new(),
            settled: 0,
        }))
    }

    /// Cuts the power: every call fails until [`Files::restore`].
    pub fn cut(&self) -> Lost {
        self.0.lock().cut()
    }

    /// The power is back.
    pub fn restore(&self) {
        self.0.lock().off = false;
    }

    /// Runs `call` unless the power is cut.
    fn powered<T>(&self, call: impl FnOnce(&mut State) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut state = self.0.lock();
        if state.off { Err(Errno::EIO) } else { call(&mut state) }
    }

    /// The file of this name.
    pub fn lookup(&self, name: &OsStr) -> Result<u64, Errno> {
        self.powered(|state| state.names.get(name).copied().ok_or(Errno::ENOENT))
    }

    /// A file's length.
    pub fn bytes(&self, file: u64) -> Result<u64, Errno> {
        self.powered(|state| Ok(state.file(file)?.bytes.len() as u64))
    }

    pub fn names(&self) -> Result<Vec<(OsString, u64)>, Errno> {
        self.powered(|state| Ok(state.names.iter().map(|(name, file)| (name.clone(), *file)).collect()))
    }

    /// Makes an empty file and a handle for it.
    pub fn create(&self, name: &OsStr) -> Result<u64, Errno> {
        self.powered(|state| {
            if state.names.contains_key(name) {
                return Err(Errno::EEXIST);
            }
            let file = state.next;
            state.next += 1;
            state.files.insert(file, File { handles: 1, ..File::default() });
            state.change(vec![(name.into(), Some(file))]);
            Ok(file)
        })
    }

    pub fn open(&self, file: u64) -> Result<(), Errno> {
        self.powered(|state| {
            state.file(file)?.handles += 1;
            Ok(())
        })
    }

    /// Gives a handle back; also without power.
    pub fn release(&self, file: u64) {
        let mut state = self.0.lock();
        if let Ok(file) = state.file(file) {
            file.handles = file.handles.saturating_sub(1);
        }
        state.collect();
    }

    pub fn read(&self, file: u64, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        self.powered(|state| {
            let bytes = &state.file(file)?.bytes;
            let start = bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
            Ok(bytes[start..bytes.len().min(start.saturating_add(length))].to_vec())
        })
    }

    /// `offset`: None appends.
    pub fn write(&self, file: u64, offset: Option<u64>, bytes: &[u8]) -> Result<(), Errno> {
        self.powered(|state| {
            let held = state.held();
            let file = state.file(file)?;
            let length = file.bytes.len() as u64;
            let start = offset.unwrap_or(length);
            let end = start.checked_add(bytes.len() as u64).ok_or(Errno::EFBIG)?;
            if end > length && held + (end - length) > BYTES_MAX {
                return Err(Errno::ENOSPC);
            }
            let all = file.changed();
            all.resize(length.max(end) as usize, 0);
            all[start as usize..end as usize].copy_from_slice(bytes);
            Ok(())
        })
    }

    pub fn truncate(&self, file: u64, length: u64) -> Result<(), Errno> {
        self.powered(|state| {
            let held = state.held();
            let file = state.file(file)?;
            if length > file.bytes.len() as u64 && held + length > BYTES_MAX {
                return Err(Errno::ENOSPC);
            }
            file.changed().resize(length as usize, 0);
            Ok(())
        })
    }

    pub fn rename(&self, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
        self.powered(|state| {
            let file = *state.names.get(from).ok_or(Errno::ENOENT)?;
            if from != to {
                state.change(vec![(from.into(), None), (to.into(), Some(file))]);
            }
            Ok(())
        })
    }

    pub fn remove(&self, name: &OsStr) -> Result<(), Errno> {
        self.powered(|state| {
            state.names.get(name).ok_or(Errno::ENOENT)?;
            state.change(vec![(name.into(), None)]);
            state.collect();
            Ok(())
        })
    }

    /// Begins a sync of a file's bytes, or of the names.
    pub fn begin_sync(&self, file: Option<u64>) -> Result<Sync, Errno> {
        self.powered(|state| match file {
            Some(file) => {
                let File { bytes, version, .. } = state.file(file)?;
                Ok(Sync::File { file, bytes: Arc::clone(bytes), version: *version })
            }
            None => Ok(Sync::Directory { changes: state.settled + state.changes.len() as u64 }),
        })
    }

    /// The sync is done: it fails if the power was cut meanwhile and is off.
    pub fn end_sync(&self, sync: Sync) -> Result<(), Errno> {
        self.powered(|state| {
            match sync {
                Sync::File { file, bytes, version } => {
                    let file = state.file(file)?;
                    if file.synced_version < version {
                        (file.synced, file.synced_version) = (bytes, version);
                    }
                }
                Sync::Directory { changes } => {
                    while state.settled < changes
                        && let Some(change) = state.changes.pop_front()
                    {
                        apply(&mut state.synced, &change);
                        state.settled += 1;
                    }
                    state.collect();
                }
            }
            Ok(())
        })
    }
}

impl State {
    fn file(&mut self, file: u64) -> Result<&mut File, Errno> {
        // One that a cut took back, of a process that did not end with its power.
        self.files.get_mut(&file).ok_or(Errno::EIO)
    }

    fn held(&self) -> u64 {
        self.files.values().map(|file| file.bytes.len() as u64).sum()
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.names, &change);
        self.changes.push_back(change);
    }

    fn cut(&mut self) -> Lost {
        self.off = true;
        let mut lost = Lost::default();
        // A journal keeps their order, but not everything has one.
        let surviving = self.dice.tear(self.changes.len());
        for (change, survives) in self.changes.drain(..).zip(surviving) {
            self.settled += 1;
            lost.changes += usize::from(!survives);
            if survives {
                apply(&mut self.synced, &change);
            }
        }
        self.names = self.synced.clone();
        for file in self.files.values_mut() {
            if file.version > file.synced_version {
                file.synced = Arc::new(file.surviving(&mut self.dice));
                lost.files += usize::from(file.synced != file.bytes);
                file.bytes = Arc::clone(&file.synced);
                file.synced_version = file.version;
            }
        }
        self.collect();
        lost
    }

    /// Forgets files that nothing leads to any more, whatever a cut takes back.
    fn collect(&mut self) {
        let State { files, names, synced, changes, .. } = self;
        let pending = changes.iter().flatten().filter_map(|(_, file)| *file);
        let named: BTreeSet<u64> = names.values().chain(synced.values()).copied().chain(pending).collect();
        files.retain(|number, file| file.handles > 0 || named.contains(number));
    }
}

impl File {
    fn changed(&mut self) -> &mut Vec<u8> {
        self.version += 1;
        Arc::make_mut(&mut self.bytes)
    }

    /// The synced bytes, the latest, or of each sector either; the length and the bytes are not written together.
    fn surviving(&self, dice: &mut Dice) -> Vec<u8> {
        match dice.below(3) {
            0 => return self.synced.to_vec(),
            1 => return self.bytes.to_vec(),
            _ => {}
        }
        let mut bytes = self.synced.to_vec();
        bytes.resize(if dice.falls(0.5) { self.bytes.len() } else { self.synced.len() }, 0);
        let reaching = dice.tear(self.bytes.len().div_ceil(SECTOR));
        let sectors = bytes.chunks_mut(SECTOR).zip(self.bytes.chunks(SECTOR)).zip(reaching);
        for ((old, new), _) in sectors.filter(|(_, reaches)| *reaches) {
            let both = old.len().min(new.len());
            old[..both].copy_from_slice(&new[..both]);
        }
        bytes
    }
}

fn apply(names: &mut Names, change: &Change) {
    for (name, file) in change {
        match file {
            Some(file) => names.insert(name.clone(), *file),
            None => names.remove(name),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: u64 = 200;

    fn name(text: &str) -> &OsStr {
        OsStr::new(text)
    }

    fn content(files: &Files, of: &str) -> Option<Vec<u8>> {
        files.lookup(name(of)).ok().map(|file| files.read(file, 0, usize::MAX).unwrap())
    }

    fn synced(files: &Files, file: Option<u64>) {
        files.end_sync(files.begin_sync(file).unwrap()).unwrap();
    }

    /// Replaces `a` as one should, without the syncs that are not wanted.
    fn replace(files: &Files, bytes: &[u8], sync_file: bool, sync_directory: bool) {
        let file = files.create(name("a.new")).unwrap();
        files.write(file, None, bytes).unwrap();
        if sync_file {
            synced(files, Some(file));
        }
        files.release(file);
        files.rename(name("a.new"), name("a")).unwrap();
        if sync_directory {
            synced(files, None);
        }
    }

    /// What `a` is after a cut with each seed.
    fn outcomes(sync_file: bool, sync_directory: bool) -> BTreeSet<Option<Vec<u8>>> {
        let outcome = |seed| {
            let files = Files::new(seed);
            replace(&files, &[1; 600], true, true);
            replace(&files, &[2; 700], sync_file, sync_directory);
            files.cut();
            assert_eq!(files.lookup(name("a")).unwrap_err(), Errno::EIO, "without power");
            files.restore();
            content(&files, "a")
        };
        (0..SEEDS).map(outcome).collect()
    }

    #[test]
    fn each_sync_that_is_left_out_is_missed() {
        let (old, new) = (Some(vec![1; 600]), Some(vec![2; 700]));
        assert_eq!(outcomes(true, true), BTreeSet::from([new.clone()]));
        assert_eq!(outcomes(true, false), BTreeSet::from([old, new.clone()]));
        let without_bytes = outcomes(false, true);
        assert!(without_bytes.contains(&new) && without_bytes.contains(&Some(Vec::new())));
        let zeroes = |bytes: &Vec<u8>| bytes.len() == 700 && bytes.contains(&0) && bytes.contains(&2);
        assert!(without_bytes.iter().flatten().any(zeroes), "torn, and longer than what was written");
    }

    #[test]
    fn a_sync_holds_what_was_written_before_it_began() {
        let mut shorter = 0;
        for seed in 0..SEEDS {
            let files = Files::new(seed);
            let file = files.create(name("journal")).unwrap();
            files.write(file, None, b"first").unwrap();
            let (bytes, names) = (files.begin_sync(Some(file)).unwrap(), files.begin_sync(None).unwrap());
            files.write(file, None, b" second").unwrap();
            files.rename(name("journal"), name("other")).unwrap();
            files.end_sync(bytes).unwrap();
            files.end_sync(names).unwrap();
            files.cut();
            files.restore();
            let found = content(&files, "journal").or_else(|| content(&files, "other")).unwrap();
            assert!(found.starts_with(b"first"), "{found:?}");
            shorter += usize::from(found == b"first");
        }
        assert!((1..SEEDS as usize).contains(&shorter));
    }

    #[test]
    fn what_nothing_leads_to_takes_no_space() {
        let files = Files::new(0);
        for _ in 0..3 {
            replace(&files, &vec![1; (BYTES_MAX / 3) as usize], true, true);
        }
        let open = files.lookup(name("a")).unwrap();
        files.open(open).unwrap();
        files.remove(name("a")).unwrap();
        synced(&files, None);
        assert_eq!(files.read(open, 0, 1).unwrap(), [1], "a handle keeps it");
        assert_eq!(files.write(open, Some(BYTES_MAX), &[1]).unwrap_err(), Errno::ENOSPC);
        files.release(open);
        assert_eq!(files.bytes(open).unwrap_err(), Errno::EIO);
    }
}
