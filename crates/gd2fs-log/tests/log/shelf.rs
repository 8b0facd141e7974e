//! An owner as simple as can be: it remembers where everything is.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use gd2fs_device::Buffer;
use gd2fs_log::{
    ChunkEntry, ColumnEntry, ColumnState, Entries, Key, Log, LogError, Note, Owner, Place, Recovered,
    Snapshot, cover,
};
use gd2fs_wire::sums::{PIECE_BYTES, Run, crc32c};
use parking_lot::Mutex;

pub struct Shelf {
    log: Weak<Log>,
    pub state: Mutex<State>,
}

#[derive(Default)]
pub struct State {
    pub chunks: BTreeMap<Key, ChunkEntry>,
    pub columns: BTreeMap<(u128, u32), ColumnEntry>,
    /// Runs and column's state of snapshots that are on their way.
    pub coming: HashMap<(Key, u64), (Vec<Run>, ColumnState)>,
    forgotten: HashMap<Key, u64>,
    deleted: HashMap<(u128, u32), u64>,
    pub damaged: Vec<Key>,
    pub moved: u64,
}

impl Shelf {
    pub fn new(log: &Arc<Log>, recovered: &Recovered) -> Arc<Shelf> {
        let mut state = State::default();
        state.chunks.extend(recovered.chunks.iter().map(|entry| (entry.key, entry.clone())));
        state.columns.extend(recovered.columns.iter().map(|entry| ((entry.file, entry.column), *entry)));
        Arc::new(Shelf { log: Arc::downgrade(log), state: Mutex::new(state) })
    }

    pub async fn put(&self, log: &Log, content: &Content) -> gd2fs_log::Result<()> {
        let snapshot = content.snapshot();
        let coming = (snapshot.runs.clone(), snapshot.state);
        let append = {
            let mut state = self.state.lock();
            if content.version <= state.void(&content.key) {
                return Err(LogError::Superseded);
            }
            state.coming.insert((content.key, content.version), coming);
            log.append(snapshot)
        };
        append.await
    }

    /// The version that was there.
    pub fn evict(&self, key: &Key) -> Option<u64> {
        let gone = self.state.lock().chunks.remove(key)?;
        if let Some(log) = self.log.upgrade() {
            log.release(gone.place);
        }
        Some(gone.version)
    }

    /// Makes the change that a note stands for, then notes it; for a deletion both under the lock. That is all that the log
    /// asks for: it must bear that a checkpoint comes between the other changes, their notes, and the releases.
    pub fn note(&self, log: &Log, note: Note) -> impl Future<Output = gd2fs_log::Result<()>> + Send + use<> {
        let mut state = self.state.lock();
        let gone = state.apply(&note);
        let locked = matches!(note, Note::Delete { .. }).then_some(state);
        let noted = log.note(note);
        drop(locked);
        gone.iter().for_each(|entry| log.release(entry.place));
        noted
    }

    pub async fn read(&self, log: &Log, entry: &ChunkEntry) -> gd2fs_log::Result<Vec<u8>> {
        let buffer = Arc::new(Buffer::new(entry.place.bytes as usize));
        // SAFETY: the operation keeps the buffer, which is read only after it.
        let memory = unsafe { buffer.slice() };
        let Place { first, bytes, .. } = entry.place;
        log.read(entry.place, first, first + bytes, memory.into(), Arc::clone(&buffer)).await?;
        Ok(buffer.to_vec())
    }
}

impl State {
    /// Gives what is gone by it, to be released.
    pub fn apply(&mut self, note: &Note) -> Vec<ChunkEntry> {
        match *note {
            Note::Column { file, column, version, state } => {
                self.learn(ColumnEntry { file, column, version, state });
                Vec::new()
            }
            Note::Forget { key, version } => {
                self.forgotten.insert(key, version);
                self.chunks.remove(&key).into_iter().collect()
            }
            Note::Delete { file, column, version } => {
                self.deleted.insert((file, column), version);
                self.columns.remove(&(file, column));
                let whole = std::mem::take(&mut self.chunks).into_iter();
                let (dead, alive) = whole.partition(|(key, _)| (key.file, key.column) == (file, column));
                self.chunks = alive;
                BTreeMap::into_values(dead).collect()
            }
        }
    }

    fn learn(&mut self, entry: ColumnEntry) {
        if self.deleted.get(&(entry.file, entry.column)).is_none_or(|deleted| entry.version > *deleted) {
            let known = self.columns.entry((entry.file, entry.column)).or_insert(entry);
            if known.version <= entry.version {
                *known = entry;
            }
        }
    }

    fn void(&self, key: &Key) -> u64 {
        let deleted = self.deleted.get(&(key.file, key.column)).copied().unwrap_or(0);
        self.forgotten.get(key).copied().unwrap_or(0).max(deleted)
    }
}

impl Owner for Shelf {
    fn appended(&self, key: Key, version: u64, place: Place) -> bool {
        let mut state = self.state.lock();
        let (runs, column_state) = state.coming.remove(&(key, version)).expect("it was put");
        state.learn(ColumnEntry { file: key.file, column: key.column, version, state: column_state });
        if version <= state.void(&key) {
            return false;
        }
        let old = state.chunks.insert(key, ChunkEntry { key, version, runs, place });
        drop(state);
        if let (Some(old), Some(log)) = (old, self.log.upgrade()) {
            assert!(old.version < version, "versions never go back");
            log.release(old.place);
        }
        true
    }

    fn moved(&self, key: Key, version: u64, from: Place, to: Place) -> bool {
        let mut state = self.state.lock();
        state.moved += 1;
        match state.chunks.get_mut(&key) {
            Some(entry) if entry.version == version && entry.place == from => {
                entry.place = to;
                true
            }
            _ => false,
        }
    }

    fn damaged(&self, key: Key, version: u64, place: Place) {
        let mut state = self.state.lock();
        if state.chunks.get(&key).is_some_and(|entry| entry.version == version && entry.place == place) {
            state.chunks.remove(&key);
        }
        state.damaged.push(key);
    }

    fn live(&self, entries: &mut dyn Entries) -> gd2fs_log::Result<()> {
        let state = self.state.lock();
        state.columns.values().for_each(|entry| entries.column(entry));
        state
            .chunks
            .values()
            .for_each(|entry| entries.chunk(entry.key, entry.version, &entry.runs, entry.place));
        Ok(())
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// What a chunk holds at a version; the bytes come from `seed`.
#[derive(Clone, Debug, PartialEq)]
pub struct Content {
    pub key: Key,
    pub version: u64,
    pub seed: u64,
    pub ranges: Vec<(u32, u32)>,
}

impl Content {
    /// Unaligned ranges inside pieces of a chunk of 4 KiB to `bytes_max`.
    pub fn random(dice: &mut Dice, key: Key, version: u64, bytes_max: u32) -> Content {
        let doublings = u64::from((bytes_max / 4096).ilog2() + 1);
        let bytes = 4096u32 << dice.below(doublings);
        let mut ranges = Vec::new();
        let first = if dice.below(4) == 0 { dice.below(u64::from(bytes)) as u32 } else { 0 };
        for piece in (0..bytes).step_by(PIECE_BYTES as usize) {
            let end = bytes.min(piece + PIECE_BYTES as u32);
            let (mut from, mut upto) = (piece.max(first), end);
            if dice.below(4) == 0 && from < upto {
                from += dice.below(u64::from(upto - from)) as u32;
                upto -= dice.below(u64::from(upto - from)) as u32;
            }
            if from < upto && (dice.below(8) > 0 || ranges.is_empty()) {
                ranges.push((from, upto));
            }
        }
        if ranges.is_empty() {
            ranges.push((0, bytes));
            ranges.truncate(1);
            ranges[0].1 = bytes.min(PIECE_BYTES as u32);
        }
        Content { key, version, seed: dice.next(), ranges }
    }

    pub fn whole(key: Key, version: u64, bytes: u32) -> Content {
        let piece = PIECE_BYTES as u32;
        let ranges = (0..bytes).step_by(piece as usize).map(|at| (at, bytes.min(at + piece))).collect();
        Content { key, version, seed: version ^ key.chunk << 32, ranges }
    }

    /// The payload's blocks, junk in the gaps included.
    pub fn bytes(&self) -> Buffer {
        let mut buffer = Buffer::new(self.cover().len());
        let mut dice = Dice(self.seed);
        for word in buffer.chunks_exact_mut(8) {
            word.copy_from_slice(&dice.next().to_le_bytes());
        }
        buffer
    }

    pub fn runs(&self) -> Vec<Run> {
        let (bytes, first) = (self.bytes(), self.cover().start);
        let sum = |(start, end): (u32, u32)| crc32c(&bytes[(start - first) as usize..(end - first) as usize]);
        self.ranges
            .iter()
            .map(|(start, end)| Run { start: *start, end: *end, crc: sum((*start, *end)) })
            .collect()
    }

    fn cover(&self) -> std::ops::Range<u32> {
        cover(
            &self
                .ranges
                .iter()
                .map(|(start, end)| Run { start: *start, end: *end, crc: 0 })
                .collect::<Vec<_>>(),
        )
    }

    pub fn state(&self) -> ColumnState {
        ColumnState {
            epoch: 1,
            born: 2,
            grant: self.version,
            sealed: self.seed,
            stripe_unit: 4 << 20,
            width: 1,
            end: self.version * 7,
            exact: self.version.is_multiple_of(2),
            whole: self.version.is_multiple_of(3),
        }
    }

    pub fn snapshot(&self) -> Snapshot {
        let buffer = Arc::new(self.bytes());
        // SAFETY: `keep` holds the buffer, and nobody writes it any more.
        let memory = unsafe { buffer.slice() }.into();
        let (key, version, state, runs) = (self.key, self.version, self.state(), self.runs());
        Snapshot { key, version, state, runs, memory, keep: buffer }
    }

    /// Whether these are the bytes of the valid ranges.
    pub fn matches(&self, entry: &ChunkEntry, payload: &[u8]) -> bool {
        let (bytes, first) = (self.bytes(), self.cover().start as usize);
        entry.runs == self.runs()
            && entry.place.first as usize == first
            && payload.len() == bytes.len()
            && self.ranges.iter().all(|(start, end)| {
                let range = *start as usize - first..*end as usize - first;
                payload[range.clone()] == bytes[range]
            })
    }
}
