//! What a log holds when it is opened: the checkpoint, and what the segments say that were written after it.
//!
//! A power cut keeps any part of what was not synced, so the scan must tell two things apart. *The end*: the first record
//! that is missing and that no header behind it calls durable; it and everything behind it was never acknowledged, and is
//! dropped for good. *Damage*: a record that is missing although a later header calls it durable. A damaged payload costs its
//! own chunk, in all versions. A damaged header could have been anything, the deletion of any chunk or the seal of any column
//! included: all is given up, since a miss is allowed and a wrong byte is not.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use gd2fs_device::{BLOCK, Buffer, Device, Op};

use crate::checkpoint::{Checkpoint, Foot, Writer, load, publish};
use crate::entry::{ChunkEntry, ColumnEntry, Key, Note};
use crate::error::{LogError, Result};
use crate::format::{HEADERS_AT_ONCE, headers};
use crate::position::{Mark, Position};
use crate::record::{SEGMENT_HEADER_BLOCKS, SegmentHeader, snapshot_header_blocks};
use crate::scan::{Met, Stretch, What, walk};
use crate::segment::{Division, Live, Segments};
use crate::witness::Witness;

/// What was in the log when it was opened.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Columns and their states.
    pub columns: Vec<ColumnEntry>,
    /// Chunks and where their bytes lie. Those that came from the checkpoint were not read.
    pub chunks: Vec<ChunkEntry>,
    /// The highest version that was ever durable here; the owner goes on above it.
    pub version_max: u64,
    /// Whether a checkpoint was used; otherwise everything was scanned.
    pub from_checkpoint: bool,
    /// Records that were scanned and accepted.
    pub scanned_records: u64,
    /// Records at the end that were never durable, and are gone.
    pub dropped_records: u64,
    /// Durable records that do not hold any more what was written.
    pub damaged_records: u64,
    /// Nothing was kept, since what is there cannot be known to be the last word: a durable header is damaged, or no
    /// checkpoint can be read although one was relied on.
    pub given_up: bool,
}

/// What the log goes on with.
pub(crate) struct Found {
    pub recovered: Recovered,
    pub segments: Segments,
    pub end: Position,
    pub witness: Witness,
    pub generation_next: u64,
    pub floor: Position,
}

/// Why a record that should be there is not.
#[derive(Clone, Copy, Debug)]
enum Missing {
    /// Its header says what it was.
    Payload,
    Unknown,
}

struct Scan {
    met: Vec<Met>,
    missing: Vec<(Position, Missing)>,
    /// The highest position that any header calls durable.
    durable: Position,
    floor: Position,
    /// Behind the last record that was met.
    reached: Position,
    /// Where a header lies there that is no whole one, and that nothing calls durable.
    torn: Option<u64>,
}

/// What is scanned.
pub(crate) struct Layout<'a> {
    pub device: &'a Arc<Device>,
    pub device_id: &'a [u8; 16],
    pub division: Division,
    /// Blocks of the largest record.
    pub record_blocks_max: u32,
}

type Headers = BTreeMap<u64, (u32, SegmentHeader)>;

/// Finds out what lives, and makes sure that what was dropped never comes back.
pub(crate) async fn recover(layout: &Layout<'_>, checkpoint_path: &Path) -> Result<Found> {
    let headers = segment_headers(layout).await?;
    let failed = |error| LogError::Checkpoint { path: checkpoint_path.into(), error: Arc::new(error) };
    let loaded = load(checkpoint_path, layout.device_id).map_err(failed)?;
    let mut floor = headers.values().map(|(_, header)| header.known.floor).max().unwrap_or_default();
    if let Some(checkpoint) = loaded.filter(|found| found.foot.position.at >= floor) {
        let foot = checkpoint.foot;
        let scan = scan(layout, &headers, foot.position, foot.durable).await?;
        // A record can know of a newer checkpoint than the segments' headers do.
        if scan.floor <= foot.position.at {
            return finish(layout, &headers, &scan, Some(checkpoint), checkpoint_path).await;
        }
        floor = scan.floor;
    }
    if !headers.is_empty() {
        let (device, checkpoint) = (layout.device.path().display(), checkpoint_path.display());
        tracing::warn!(
            "{device}: no usable checkpoint in {checkpoint}; everything from {floor} on is scanned"
        );
    }
    let mut scan = scan(layout, &headers, Mark { at: floor, offset: 0 }, floor).await?;
    if scan.floor > floor {
        scan = self::scan(layout, &headers, Mark { at: scan.floor, offset: 0 }, scan.floor).await?;
    }
    finish(layout, &headers, &scan, None, checkpoint_path).await
}

/// Decides what lives, and prepares the device and the segments for going on.
async fn finish(
    layout: &Layout<'_>,
    headers: &Headers,
    scan: &Scan,
    checkpoint: Option<Checkpoint>,
    checkpoint_path: &Path,
) -> Result<Found> {
    let from_checkpoint = checkpoint.is_some();
    let mut checkpoint = checkpoint.unwrap_or_default();
    let there = checkpoint.chunks.len();
    checkpoint.chunks.retain(|entry| {
        let segment = layout.division.locate(entry.place.offset).map(|(segment, _)| segment);
        segment.is_some() && headers.get(&entry.place.generation).map(|(segment, _)| *segment) == segment
    });
    // A checkpoint that was used is one without which older records are not the last word any more.
    let floor = scan.floor.max(checkpoint.foot.position.at);
    let unreadable = (there - checkpoint.chunks.len()) as u64;
    let end = scan.missing.iter().map(|(at, _)| *at).find(|at| *at >= scan.durable);
    let mut recovered = resolve(checkpoint, scan, end);
    recovered.from_checkpoint = from_checkpoint;
    recovered.damaged_records += unreadable;
    recovered.given_up |= !from_checkpoint && scan.floor > Position::default();
    if !recovered.given_up {
        return settle(layout, headers, scan, recovered, end, floor).await;
    }
    (recovered.columns, recovered.chunks) = (Vec::new(), Vec::new());
    tracing::error!(
        "{}: what it holds may not be the last word; all is given up",
        layout.device.path().display()
    );
    let at = end.unwrap_or(scan.reached);
    let mut found = settle(layout, headers, scan, recovered, end, at).await?;
    found.witness = Witness::default();
    // From here on the log is as good as new, and stays so: an empty checkpoint says where it begins.
    let foot =
        Foot { position: Mark { at, offset: 0 }, durable: at, version_max: found.recovered.version_max };
    let written = Writer::create(checkpoint_path, layout.device_id).and_then(|writer| writer.finish(&foot));
    let written = written.and_then(|()| publish(checkpoint_path));
    written.map_err(|error| LogError::Checkpoint { path: checkpoint_path.into(), error: Arc::new(error) })?;
    Ok(found)
}

/// Reads the headers of all segments.
async fn segment_headers(layout: &Layout<'_>) -> Result<Headers> {
    let mut found = Headers::new();
    let all: Vec<u32> = (0..layout.division.segments).collect();
    for group in all.chunks(HEADERS_AT_ONCE) {
        let read = headers(layout.device, layout.device_id, layout.division, group).await?;
        for (segment, header) in group.iter().zip(read) {
            if let Some(header) = header {
                found.insert(header.generation, (*segment, header));
            }
        }
    }
    Ok(found)
}

/// Generations that the log had given up when a later segment was opened.
fn void(headers: &Headers) -> HashSet<u64> {
    let skipped = |(_, header): &(u32, SegmentHeader)| {
        headers
            .range(header.previous.generation + 1..header.generation.max(header.previous.generation + 1))
            .map(|(generation, _)| *generation)
            .collect::<Vec<_>>()
    };
    headers.values().flat_map(skipped).collect()
}

/// Scans what lies behind `start`; everything before `durable` is known to have been durable.
async fn scan(layout: &Layout<'_>, headers: &Headers, start: Mark, durable: Position) -> Result<Scan> {
    let durable =
        headers.values().map(|(_, header)| header.known.durable).max().unwrap_or_default().max(durable);
    let floor = headers.values().map(|(_, header)| header.known.floor).max().unwrap_or_default();
    let mut scan =
        Scan { met: Vec::new(), missing: Vec::new(), durable, floor, reached: start.at, torn: None };
    let void = void(headers);
    let from = start.at.generation;
    let chain: Vec<_> = headers.range(from..).filter(|(generation, _)| !void.contains(generation)).collect();
    let mut gaps = Vec::new();
    for (index, (generation, (segment, header))) in chain.iter().enumerate() {
        if header.previous > scan.reached {
            gaps.push(scan.reached);
        }
        let next = chain.get(index + 1).map(|(_, (_, next))| next.previous);
        let sequence_end =
            next.filter(|previous| previous.generation == **generation).map_or(u32::MAX, |p| p.sequence);
        let inside = start
            .offset
            .checked_sub(layout.division.start(*segment))
            .filter(|bytes| **generation == from && (1..=layout.division.segment_bytes).contains(bytes));
        let (first, block) = match inside {
            Some(bytes) => (start.at, (bytes / BLOCK as u64) as u32),
            None => (Position { generation: **generation, sequence: 0 }, SEGMENT_HEADER_BLOCKS),
        };
        let record_blocks_max = layout.record_blocks_max;
        let stretch =
            Stretch { segment: *segment, id: header.id, first, block, sequence_end, record_blocks_max };
        let walked = walk(layout.device, layout.division, &stretch, &mut scan.met, &mut gaps).await?;
        scan.reached = scan.reached.max(Position { generation: **generation, sequence: walked.sequence });
        // Only the last segment says nowhere how many records it has.
        scan.torn = walked.torn;
    }
    scan.met.retain(|met| met.at >= start.at);
    for met in &scan.met {
        scan.durable = scan.durable.max(met.stamp.known.durable);
        scan.floor = scan.floor.max(met.stamp.known.floor);
        if let What::Snapshot { whole: false, .. } = &met.what {
            scan.missing.push((met.at, Missing::Payload));
        }
    }
    if scan.durable > scan.reached {
        gaps.push(scan.reached);
        scan.torn = None;
    }
    scan.missing.extend(gaps.into_iter().filter(|at| *at >= start.at).map(|at| (at, Missing::Unknown)));
    scan.missing.sort_by_key(|(at, _)| *at);
    Ok(scan)
}

/// One chunk on its way through the log.
enum Last {
    Whole(ChunkEntry),
    /// This version was durable and is damaged: an older one is not the chunk any more.
    Damaged(u64),
}

impl Last {
    fn version(&self) -> u64 {
        match self {
            Last::Whole(entry) => entry.version,
            Last::Damaged(version) => *version,
        }
    }
}

/// Applies, in order, what the checkpoint and the scan say, up to the log's end.
fn resolve(checkpoint: Checkpoint, scan: &Scan, end: Option<Position>) -> Recovered {
    let damage = scan.missing.iter().filter(|(at, _)| end.is_none_or(|end| *at < end));
    let tail = scan.missing.iter().filter(|(at, _)| end.is_some_and(|end| *at >= end));
    let unread = tail.filter(|(_, what)| matches!(what, Missing::Unknown)).count();
    let given_up = damage.clone().any(|(_, what)| matches!(what, Missing::Unknown));
    let mut columns: HashMap<(u128, u32), ColumnEntry> = HashMap::new();
    let mut chunks: HashMap<Key, Last> = HashMap::new();
    let mut deleted: HashMap<(u128, u32), u64> = HashMap::new();
    let mut forgotten: HashMap<Key, u64> = HashMap::new();
    let mut recovered = Recovered {
        version_max: checkpoint.foot.version_max,
        dropped_records: unread as u64 + u64::from(scan.torn.is_some()),
        damaged_records: damage.count() as u64,
        given_up,
        ..Recovered::default()
    };
    // The owner names its own state: it may hold a version of which the log had not heard, and which is not to be given again.
    let versions = checkpoint.columns.iter().map(|entry| entry.version);
    let versions = versions.chain(checkpoint.chunks.iter().map(|entry| entry.version));
    recovered.version_max = versions.fold(recovered.version_max, u64::max);
    columns.extend(checkpoint.columns.into_iter().map(|entry| ((entry.file, entry.column), entry)));
    chunks.extend(checkpoint.chunks.into_iter().map(|entry| (entry.key, Last::Whole(entry))));
    let mut learn = |entry: ColumnEntry| {
        let known = columns.entry((entry.file, entry.column)).or_insert(entry);
        if known.version <= entry.version {
            *known = entry;
        }
    };
    for met in &scan.met {
        if end.is_some_and(|end| met.at >= end) {
            recovered.dropped_records += 1;
            continue;
        }
        recovered.scanned_records += 1;
        match &met.what {
            What::Snapshot { key, version, state, runs, place, whole } => {
                recovered.version_max = recovered.version_max.max(*version);
                let Key { file, column, .. } = *key;
                let newer = chunks.get(key).is_none_or(|last| last.version() <= *version);
                learn(ColumnEntry { file, column, version: *version, state: *state });
                if newer {
                    let entry =
                        ChunkEntry { key: *key, version: *version, runs: runs.clone(), place: *place };
                    chunks.insert(*key, if *whole { Last::Whole(entry) } else { Last::Damaged(*version) });
                }
            }
            What::Notes(notes) => {
                for note in notes {
                    recovered.version_max = recovered.version_max.max(note.version());
                    match *note {
                        Note::Column { file, column, version, state } => {
                            learn(ColumnEntry { file, column, version, state });
                        }
                        Note::Forget { key, version } => raise(&mut forgotten, key, version),
                        Note::Delete { file, column, version } => {
                            raise(&mut deleted, (file, column), version)
                        }
                    }
                }
            }
        }
    }
    let gone = |file, column| deleted.get(&(file, column)).copied().unwrap_or(0);
    recovered.columns =
        columns.into_values().filter(|entry| entry.version > gone(entry.file, entry.column)).collect();
    let whole = chunks.into_values().filter_map(|last| match last {
        Last::Whole(entry) => Some(entry),
        Last::Damaged(_) => None,
    });
    let lives = |entry: &ChunkEntry| {
        let void =
            forgotten.get(&entry.key).copied().unwrap_or(0).max(gone(entry.key.file, entry.key.column));
        entry.version > void
    };
    recovered.chunks = whole.filter(lives).collect();
    recovered
}

fn raise<K: std::hash::Hash + Eq>(map: &mut HashMap<K, u64>, key: K, version: u64) {
    let known = map.entry(key).or_insert(version);
    *known = version.max(*known);
}

/// Wipes the headers of what was dropped, makes that and everything that was found durable, and sets up the segments.
async fn settle(
    layout: &Layout<'_>,
    headers: &Headers,
    scan: &Scan,
    recovered: Recovered,
    end: Option<Position>,
    floor: Position,
) -> Result<Found> {
    let void = void(headers);
    let dropped =
        |generation: u64| void.contains(&generation) || end.is_some_and(|end| generation > end.generation);
    let gone = headers.iter().filter(|(generation, _)| dropped(**generation));
    let mut wiped: Vec<u64> = gone
        .flat_map(|(_, (segment, _))| {
            (0..SEGMENT_HEADER_BLOCKS).map(|block| layout.division.offset(*segment, block))
        })
        .collect();
    // Whole records may follow the end in its segment; they must not be met again.
    let behind = |met: &&Met| end.is_some_and(|end| met.at >= end && met.at.generation == end.generation);
    wiped.extend(scan.met.iter().filter(behind).map(|met| met.offset).chain(scan.torn));
    for offset in &wiped {
        let zeros = Arc::new(Buffer::new(BLOCK));
        // SAFETY: the operation keeps the buffer, which nobody writes.
        let memory = unsafe { zeros.slice() };
        layout.device.perform(Op::write(*offset, memory, zeros)).await?;
    }
    // What was found may still lie in the disk's cache: from here on it is called durable.
    layout.device.perform(Op::sync()).await?;
    let mut segments = Segments::new(layout.division);
    for (generation, (segment, _)) in headers.iter().filter(|(generation, _)| !dropped(**generation)) {
        segments.adopt(*segment, *generation);
    }
    for entry in &recovered.chunks {
        let (key, version, place) = (entry.key, entry.version, entry.place);
        segments.insert(Live {
            key,
            version,
            place,
            header_blocks: snapshot_header_blocks(entry.runs.len()),
        });
    }
    let at = end.unwrap_or(scan.reached);
    let newest = headers.keys().last().copied().unwrap_or(0);
    let generation_next = newest.max(at.generation).max(scan.durable.generation) + 1;
    let says = |met: &&Met| {
        end.is_none_or(|end| met.at < end) && !matches!(&met.what, What::Notes(notes) if notes.is_empty())
    };
    let said = scan.met.iter().filter(says).map(|met| met.end()).max().unwrap_or_default();
    let witness = Witness::found(said, scan.durable);
    Ok(Found { recovered, segments, end: at, witness, generation_next, floor })
}
