//! Power cuts at random moments, several on one device, against a model of what may and what must be there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, PowerCut, Rule};
use gd2fs_log::{ColumnState, Key, Log, LogError, Note, Recovered};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::shelf::{Content, Dice, Shelf};
use crate::{Disk, run};

const FILES: u64 = 2;
const COLUMNS: u64 = 2;
const CHUNKS: u64 = 8;
const EIO: i32 = 5;

/// What the test has done, by chunk and by column, and what of it was acknowledged.
#[derive(Default)]
struct Model {
    /// What was ever submitted and may be there. What a recovery did not find is taken out: it may never come back.
    possible: BTreeMap<Key, HashMap<u64, Content>>,
    /// Appends that have returned.
    completed: HashSet<(Key, u64)>,
    /// Highest acknowledged version of each chunk.
    acked: HashMap<Key, u64>,
    /// What was evicted, or forgotten by a note that was not acknowledged, and then not found. Only a checkpoint says that it
    /// is gone: without one it may be found again, if nothing newer was durable.
    lapsed: BTreeMap<Key, HashMap<u64, Content>>,
    /// Highest versions that were evicted: they may be there or not.
    evicted: HashMap<Key, u64>,
    /// Highest versions that notes have made void, by key and by column: tried, and acknowledged.
    tried: HashMap<Key, u64>,
    void: HashMap<Key, u64>,
    columns: HashMap<(u128, u32), HashMap<u64, ColumnState>>,
    /// As for chunks: columns whose deletion was not acknowledged, and that were not found then.
    columns_lapsed: HashMap<(u128, u32), HashMap<u64, ColumnState>>,
    columns_acked: HashMap<(u128, u32), u64>,
    columns_tried: HashMap<(u128, u32), u64>,
    columns_void: HashMap<(u128, u32), u64>,
    busy: HashSet<Key>,
    version: u64,
}

fn raise<K: std::hash::Hash + Eq>(map: &mut HashMap<K, u64>, key: K, version: u64) {
    let entry = map.entry(key).or_insert(version);
    *entry = version.max(*entry);
}

fn get<K: std::hash::Hash + Eq>(map: &HashMap<K, u64>, key: &K) -> u64 {
    map.get(key).copied().unwrap_or(0)
}

fn keys() -> impl Iterator<Item = Key> {
    (0..FILES).flat_map(|file| {
        (0..COLUMNS).flat_map(move |column| {
            (0..CHUNKS).map(move |chunk| Key { file: u128::from(file), column: column as u32, chunk })
        })
    })
}

impl Model {
    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn acknowledge(&mut self, completed: &HashSet<(Key, u64)>) {
        for (key, version) in completed {
            raise(&mut self.acked, *key, *version);
            raise(&mut self.columns_acked, (key.file, key.column), *version);
        }
    }

    /// Compares what was recovered, then takes it for the truth from here on.
    fn check(&mut self, recovered: &Recovered, seed: u64) {
        let excused = recovered.given_up;
        let found: HashMap<Key, _> = recovered.chunks.iter().map(|entry| (entry.key, entry)).collect();
        assert_eq!(found.len(), recovered.chunks.len(), "seed {seed}: a chunk was found twice");
        for key in keys() {
            let (acked, void, tried) =
                (get(&self.acked, &key), get(&self.void, &key), get(&self.tried, &key));
            let possible = self.possible.entry(key).or_default();
            let lapsed = self.lapsed.entry(key).or_default();
            let &Recovered { from_checkpoint, scanned_records, dropped_records, given_up, .. } = recovered;
            let report = (from_checkpoint, scanned_records, dropped_records, given_up);
            let context =
                format!("seed {seed}: {key:?}, acknowledged {acked}, void {void}, tried {tried}, {report:?}");
            match found.get(&key) {
                Some(entry) => {
                    let version = entry.version;
                    let again = if from_checkpoint { None } else { lapsed.remove(&version) };
                    let again = again.filter(|content| content.runs() == entry.runs);
                    let content = possible.get(&version).or(again.as_ref()).cloned();
                    let content =
                        content.unwrap_or_else(|| panic!("{context}: a phantom of version {version}"));
                    assert_eq!(entry.runs, content.runs(), "{context}: other runs");
                    assert!(version > void, "{context}: version {version} came back");
                    assert!(version >= acked, "{context}: went back to {version}");
                    *possible = HashMap::from([(version, content)]);
                    self.acked.insert(key, version);
                }
                None => {
                    let needed = acked > tried && acked > get(&self.evicted, &key);
                    assert!(!needed || excused, "{context}: lost");
                    let last = get(&self.evicted, &key).max(tried);
                    lapsed.extend(possible.drain().filter(|(version, _)| *version <= last));
                    self.acked.remove(&key);
                }
            }
        }
        self.check_columns(recovered, excused, seed);
        self.evicted.clear();
        self.completed.clear();
        self.busy.clear();
        self.version = recovered.version_max;
        let chunks = recovered.chunks.iter().map(|entry| entry.version);
        let found = chunks.chain(recovered.columns.iter().map(|entry| entry.version)).max().unwrap_or(0);
        assert!(self.version >= found, "seed {seed}: version {found} was found and may be given again");
        let highest = |map: &HashMap<Key, u64>| map.values().copied().max().unwrap_or(0);
        assert!(
            excused || self.version >= highest(&self.acked).max(highest(&self.void)),
            "seed {seed}: version_max"
        );
        if excused {
            // Versions go on from what was found; older notes are gone with the records that they spoke of.
            self.void.clear();
            self.columns_void.clear();
        }
        // Notes that may or may not be durable have had their chance.
        self.tried = self.void.clone();
        self.columns_tried = self.columns_void.clone();
    }

    fn check_columns(&mut self, recovered: &Recovered, excused: bool, seed: u64) {
        let found: HashMap<_, _> =
            recovered.columns.iter().map(|entry| ((entry.file, entry.column), entry)).collect();
        for (column, possible) in &mut self.columns {
            let (acked, tried) = (get(&self.columns_acked, column), get(&self.columns_tried, column));
            let lapsed = self.columns_lapsed.entry(*column).or_default();
            let report = (recovered.from_checkpoint, recovered.scanned_records, recovered.dropped_records);
            let context =
                format!("seed {seed}: column {column:?}, acknowledged {acked}, tried {tried}, {report:?}");
            match found.get(column) {
                Some(entry) => {
                    let version = entry.version;
                    let again = if recovered.from_checkpoint { None } else { lapsed.remove(&version) };
                    let state = possible.get(&version).copied().or(again);
                    assert_eq!(state, Some(entry.state), "{context}: {version}");
                    possible.insert(version, entry.state);
                    assert!(entry.version > get(&self.columns_void, column), "{context}: came back");
                    assert!(entry.version >= acked, "{context}: went back to {}", entry.version);
                    possible.retain(|known, _| *known == entry.version);
                    self.columns_acked.insert(*column, entry.version);
                }
                None => {
                    assert!(acked <= tried || excused, "{context}: lost");
                    lapsed.extend(possible.drain().filter(|(version, _)| *version <= tried));
                    self.columns_acked.remove(column);
                }
            }
        }
    }
}

struct Life {
    log: Arc<Log>,
    shelf: Arc<Shelf>,
    model: Arc<Mutex<Model>>,
    tasks: JoinSet<()>,
}

/// Appends that fail have met the cut, or a log that is full, or a later note.
fn expected(result: &gd2fs_log::Result<()>) {
    if let Err(error) = result {
        let fine = matches!(
            error,
            LogError::NoSpace { .. }
                | LogError::Overloaded
                | LogError::Superseded
                | LogError::Write(_)
                | LogError::Device(_)
                | LogError::Failed(_)
                | LogError::Closed
        );
        assert!(fine, "{error}");
    }
}

impl Life {
    fn step(&mut self, dice: &mut Dice, bytes_max: u32) {
        let all: Vec<Key> = keys().collect();
        let key = all[dice.below(all.len() as u64) as usize];
        match dice.below(20) {
            0..=9 => self.put(dice, key, bytes_max),
            10 | 11 => self.sync(),
            12 | 13 => {
                let version = self.model.lock().next_version();
                self.note(Note::Forget { key, version });
            }
            14 => {
                let version = self.model.lock().next_version();
                let state = ColumnState { grant: dice.next(), ..ColumnState::default() };
                self.note(Note::Column { file: key.file, column: key.column, version, state });
            }
            15 if dice.below(2) == 0 => {
                let version = self.model.lock().next_version();
                self.note(Note::Delete { file: key.file, column: key.column, version });
            }
            16 if dice.below(3) == 0 => {
                let log = Arc::clone(&self.log);
                self.tasks.spawn(async move { drop(log.checkpoint().await) });
            }
            17 | 18 => {
                let mut model = self.model.lock();
                self.shelf
                    .evict(&key)
                    .into_iter()
                    .for_each(|version| raise(&mut model.evicted, key, version));
            }
            _ => {}
        }
    }

    fn put(&mut self, dice: &mut Dice, key: Key, bytes_max: u32) {
        let content = {
            let mut model = self.model.lock();
            if !model.busy.insert(key) {
                return;
            }
            let version = model.next_version();
            let content = Content::random(dice, key, version, bytes_max);
            model.possible.entry(key).or_default().insert(version, content.clone());
            model.columns.entry((key.file, key.column)).or_default().insert(version, content.state());
            content
        };
        let (log, shelf, model) = (Arc::clone(&self.log), Arc::clone(&self.shelf), Arc::clone(&self.model));
        self.tasks.spawn(async move {
            let result = shelf.put(&log, &content).await;
            expected(&result);
            let mut model = model.lock();
            model.busy.remove(&key);
            match result {
                Ok(()) => drop(model.completed.insert((key, content.version))),
                Err(LogError::NoSpace { .. }) => {
                    // As the layer above does: something has to go.
                    let victims: Vec<Key> = shelf.state.lock().chunks.keys().copied().take(3).collect();
                    for key in victims {
                        shelf
                            .evict(&key)
                            .into_iter()
                            .for_each(|version| raise(&mut model.evicted, key, version));
                    }
                }
                Err(_) => {}
            }
        });
    }

    fn sync(&mut self) {
        let completed = self.model.lock().completed.clone();
        let (log, model) = (Arc::clone(&self.log), Arc::clone(&self.model));
        self.tasks.spawn(async move {
            if log.sync().await.is_ok() {
                model.lock().acknowledge(&completed);
            }
        });
    }

    fn note(&mut self, note: Note) {
        let completed = {
            let mut model = self.model.lock();
            match note {
                Note::Forget { key, version } => raise(&mut model.tried, key, version),
                Note::Delete { file, column, version } => {
                    raise(&mut model.columns_tried, (file, column), version);
                    for key in keys().filter(|key| (key.file, key.column) == (file, column)) {
                        raise(&mut model.tried, key, version);
                    }
                }
                Note::Column { file, column, version, state } => {
                    model.columns.entry((file, column)).or_default().insert(version, state);
                }
            }
            model.completed.clone()
        };
        let noted = self.shelf.note(&self.log, note);
        let model = Arc::clone(&self.model);
        self.tasks.spawn(async move {
            let result = noted.await;
            expected(&result);
            if result.is_err() {
                return;
            }
            let mut model = model.lock();
            model.acknowledge(&completed);
            match note {
                Note::Forget { key, version } => raise(&mut model.void, key, version),
                Note::Delete { file, column, version } => {
                    raise(&mut model.columns_void, (file, column), version);
                    for key in keys().filter(|key| (key.file, key.column) == (file, column)) {
                        raise(&mut model.void, key, version);
                    }
                }
                Note::Column { file, column, version, .. } => {
                    raise(&mut model.columns_acked, (file, column), version);
                }
            }
        });
    }
}

/// Reads everything that was recovered and compares the bytes.
async fn verify(log: &Log, shelf: &Shelf, model: &Mutex<Model>, seed: u64) {
    let entries: Vec<_> = shelf.state.lock().chunks.values().cloned().collect();
    for entry in entries {
        let payload = shelf.read(log, &entry).await.unwrap();
        let content = model.lock().possible[&entry.key][&entry.version].clone();
        assert!(content.matches(&entry, &payload), "seed {seed}: {:?} has other bytes", entry.key);
    }
}

#[derive(Default, Debug)]
struct Totals {
    cuts: usize,
    lost_sectors: usize,
    dropped: u64,
    moved: u64,
    checkpoints: u64,
    recovered: usize,
    failed_writes: u64,
}

/// A time in which writes fail, some of them or all, in part or before they have begun.
struct Outage {
    faults: Faults,
    steps: std::ops::Range<u64>,
    rule: Rule,
}

impl Outage {
    /// In half of the lives there is none.
    fn random(dice: &mut Dice) -> Outage {
        let effect = if dice.below(2) == 0 { Effect::Error(EIO) } else { Effect::Torn(Some(EIO)) };
        let chance = [0.1, 0.5, 1.0][dice.below(3) as usize];
        let rule = Rule::new(effect).on(&[Kind::Write]).chance(chance);
        let begin = if dice.below(2) == 0 { u64::MAX - 50 } else { dice.below(60) };
        Outage { faults: Faults::new(dice.next()), steps: begin..begin + 1 + dice.below(40), rule }
    }

    fn step(&self, step: u64, totals: &mut Totals) {
        if step == self.steps.start {
            self.faults.add(self.rule.clone());
        }
        if step == self.steps.end {
            self.end(totals);
        }
    }

    fn end(&self, totals: &mut Totals) {
        totals.failed_writes += u64::from(self.faults.all_hits().iter().sum::<u32>());
        self.faults.clear();
    }
}

/// One device, some lives, each ended by a cut.
async fn torture(seed: u64, totals: &mut Totals) {
    let mut dice = Dice(seed);
    let large = dice.below(8) == 0;
    let mut disk = if large {
        Disk::new(9, 2 << 20, 1 << 20)
    } else {
        Disk::new(6 + dice.below(3), 256 << 10, 128 << 10)
    };
    disk.checkpoint_records = 8 + dice.below(60);
    let model = Arc::new(Mutex::new(Model::default()));
    for life in 0..5 {
        let power = PowerCut::new(dice.next());
        let outage = Outage::random(&mut dice);
        let device = disk.device(Some(power.clone()), Some(outage.faults.clone()));
        let (log, recovered) = disk.open(device).await;
        let log = Arc::new(log);
        model.lock().check(&recovered, seed);
        assert_eq!(recovered.damaged_records, 0, "seed {seed}, life {life}: a cut is no damage");
        totals.recovered += recovered.chunks.len();
        totals.dropped += recovered.dropped_records;
        let shelf = Shelf::new(&log, &recovered);
        verify(&log, &shelf, &model, seed).await;
        log.start(Arc::downgrade(&shelf) as _);
        let mut here = Life { log, shelf, model: Arc::clone(&model), tasks: JoinSet::new() };
        for step in 0..dice.below(if large { 60 } else { 120 }) {
            outage.step(step, totals);
            here.step(&mut dice, disk.payload_bytes_max);
            match dice.below(4) {
                0 => tokio::task::yield_now().await,
                1 if here.tasks.len() > 8 => drop(here.tasks.join_next().await),
                _ => {}
            }
        }
        for _ in 0..dice.below(4) {
            drop(here.tasks.join_next().await);
        }
        let cut = power.cut().unwrap();
        outage.end(totals);
        here.log.close().await;
        while let Some(ended) = here.tasks.join_next().await {
            ended.unwrap();
        }
        totals.cuts += 1;
        totals.lost_sectors += cut.sectors_lost;
        totals.moved += here.shelf.state.lock().moved;
        totals.checkpoints += here.log.stats().checkpoints;
        drop(here);
        match dice.below(12) {
            0 => drop(std::fs::remove_file(disk.checkpoint())),
            1 => drop(std::fs::remove_file(disk.checkpoint().with_extension("copy"))),
            2 if dice.below(3) == 0 => {
                drop(std::fs::remove_file(disk.checkpoint()));
                drop(std::fs::remove_file(disk.checkpoint().with_extension("copy")));
            }
            _ => {}
        }
    }
}

#[test]
fn what_was_acknowledged_is_there_after_any_cut_and_nothing_comes_back() {
    let number =
        |name: &str, default| std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap());
    let (first, seeds) = (number("GD2FS_LOG_FIRST_SEED", 0), number("GD2FS_LOG_SEEDS", 200));
    let mut totals = Totals::default();
    for seed in first..first + seeds {
        run(torture(seed, &mut totals));
    }
    println!("{totals:?}");
    // A test that never reaches what it is for proves nothing.
    assert!(
        [totals.lost_sectors as u64, totals.dropped, totals.moved, totals.checkpoints, totals.failed_writes]
            .iter()
            .all(|total| *total > 0),
        "{totals:?}"
    );
}

#[test]
fn a_device_without_power_gets_no_checkpoint() {
    let disk = Disk::new(8, 1 << 20, 128 << 10);
    let key = Key { file: 7, column: 0, chunk: 1 };
    run(async {
        let power = PowerCut::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(Some(power.clone()), None)).await;
        shelf.put(&log, &Content::whole(key, 1, 16 << 10)).await.unwrap();
        log.sync().await.unwrap();
        power.cut().unwrap();
        // All records are durable; the note for which the checkpoint would leave one out never will be.
        let note = Note::Delete { file: key.file, column: key.column, version: 2 };
        assert!(shelf.note(&log, note).await.is_err());
        assert!(log.checkpoint().await.is_err());
        log.close().await;
    });
    let (_, _, recovered) = run(disk.look());
    assert_eq!((recovered.chunks.len(), recovered.from_checkpoint), (1, false), "{recovered:?}");
}
