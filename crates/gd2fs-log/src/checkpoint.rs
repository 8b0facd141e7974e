//! Checkpoints: what lives, in a file beside the log, so that recovery scans only what came after.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use gd2fs_wire::fold;
use gd2fs_wire::sums::{Run, crc32c};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::{ChunkEntry, ColumnEntry, ColumnState, Key, RawEntry, RawRun, cover, fault_of};
use crate::owner::Entries;
use crate::position::{Mark, Place, Position, RawPosition};
use crate::record::RUNS_MAX;

const MAGIC: &[u8; 8] = b"GD2FSCKP";
const MAJOR: u16 = 1;
const COLUMN: u8 = 1;
const CHUNK: u8 = 2;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHead {
    magic: [u8; 8],
    major: U16,
    minor: U16,
    reserved: U32,
    device: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawItem {
    kind: u8,
    zero: u8,
    runs: U16,
    entry: RawEntry,
    generation: U64,
    offset: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawFoot {
    items: U64,
    position: RawPosition,
    offset: U64,
    durable: RawPosition,
    version_max: U64,
    crc: U32,
}

/// What a checkpoint says of the log as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Foot {
    /// The scan goes on here: whatever was complete before is in the entries, or was gone.
    pub position: Mark,
    /// Everything before this was durable when the checkpoint was.
    pub durable: Position,
    pub version_max: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    pub foot: Foot,
    pub columns: Vec<ColumnEntry>,
    pub chunks: Vec<ChunkEntry>,
}

/// A checkpoint on its way to `<path>.new`.
pub(crate) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    /// The CRC's register over what was put.
    sum: u32,
    items: u64,
    /// The first error; entries that follow it are not written.
    result: io::Result<()>,
    pub named: Named,
}

/// The places that the entries name: generations of segments, and offsets in them.
pub(crate) type Named = HashMap<u64, HashSet<u64>>;

impl Writer {
    pub fn create(path: &Path, device: &[u8; 16]) -> io::Result<Writer> {
        let file = BufWriter::with_capacity(1 << 20, File::create(new(path))?);
        let named = Named::new();
        let mut writer =
            Writer { path: path.into(), file, sum: fold::START, items: 0, result: Ok(()), named };
        let head = RawHead {
            magic: *MAGIC,
            major: MAJOR.into(),
            minor: 0.into(),
            reserved: 0.into(),
            device: *device,
        };
        writer.put(head.as_bytes());
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) {
        if self.result.is_ok() {
            self.sum = fold::sum(self.sum, bytes);
            self.result = self.file.write_all(bytes);
        }
    }

    /// Makes the file whole and durable under its temporary name.
    pub fn finish(mut self, foot: &Foot) -> io::Result<()> {
        let mut raw = RawFoot {
            items: self.items.into(),
            position: foot.position.at.into(),
            offset: foot.position.offset.into(),
            durable: foot.durable.into(),
            version_max: foot.version_max.into(),
            crc: 0.into(),
        };
        let bytes = raw.as_bytes();
        let bytes = &bytes[..bytes.len() - 4];
        raw.crc = (!fold::sum(self.sum, bytes)).into();
        self.result?;
        self.file.write_all(raw.as_bytes())?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        tracing::debug!("{}: {} entries", self.path.display(), self.items);
        Ok(())
    }
}

impl Entries for Writer {
    fn column(&mut self, entry: &ColumnEntry) {
        let key = Key { file: entry.file, column: entry.column, chunk: 0 };
        let entry = RawEntry::new(key, entry.version, entry.state);
        let item =
            RawItem { kind: COLUMN, zero: 0, runs: 0.into(), entry, generation: 0.into(), offset: 0.into() };
        self.items += 1;
        self.put(item.as_bytes());
    }

    fn chunk(&mut self, key: Key, version: u64, runs: &[Run], place: Place) {
        self.named.entry(place.generation).or_default().insert(place.offset);
        let entry = RawEntry::new(key, version, ColumnState::default());
        let (generation, offset) = (place.generation.into(), place.offset.into());
        let item =
            RawItem { kind: CHUNK, zero: 0, runs: (runs.len() as u16).into(), entry, generation, offset };
        let runs: Vec<RawRun> = runs.iter().map(|run| RawRun::from(*run)).collect();
        self.items += 1;
        self.put(item.as_bytes());
        self.put(runs.as_bytes());
    }
}

/// Gives a finished checkpoint its names. There are two copies: the entries of segments that were reused since exist
/// nowhere else.
pub(crate) fn publish(path: &Path) -> io::Result<()> {
    fs::rename(new(path), path)?;
    sync_directory(path)?;
    fs::copy(path, new(path))?;
    File::open(new(path))?.sync_all()?;
    fs::rename(new(path), copy(path))?;
    sync_directory(path)
}

/// Removes what is left of a checkpoint that could not be written.
pub(crate) fn discard(path: &Path) {
    // It may have had no file yet; what stays is overwritten by the next one.
    let _ = fs::remove_file(new(path));
}

/// The newest whole copy of this device's checkpoint, and why others are not used.
pub(crate) fn load(path: &Path, device: &[u8; 16]) -> io::Result<Option<Checkpoint>> {
    let mut newest: Option<Checkpoint> = None;
    for path in [path.to_path_buf(), copy(path)] {
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        match decode(&bytes, device) {
            Ok(found) => {
                if newest.as_ref().is_none_or(|other| other.foot.position.at < found.foot.position.at) {
                    newest = Some(found);
                }
            }
            Err(why) => tracing::warn!("{}: {why}; it is not used", path.display()),
        }
    }
    Ok(newest)
}

fn decode(bytes: &[u8], device: &[u8; 16]) -> Result<Checkpoint, &'static str> {
    let (head, rest) = RawHead::ref_from_prefix(bytes).map_err(|_| "it is cut short")?;
    let (mut rest, foot) = RawFoot::ref_from_suffix(rest).map_err(|_| "it is cut short")?;
    if &head.magic != MAGIC || foot.crc.get() != crc32c(&bytes[..bytes.len() - 4]) {
        return Err("it is damaged or no checkpoint");
    }
    if head.major.get() != MAJOR || &head.device != device {
        return Err("it belongs to another device or format");
    }
    let position = Mark { at: foot.position.into(), offset: foot.offset.get() };
    let (durable, version_max) = (foot.durable.into(), foot.version_max.get());
    let foot_items = foot.items.get();
    let mut found = Checkpoint { foot: Foot { position, durable, version_max }, ..Checkpoint::default() };
    for _ in 0..foot_items {
        let (item, after) =
            RawItem::ref_from_prefix(rest).map_err(|_| "it has fewer entries than it says")?;
        let count = usize::from(item.runs.get());
        let (runs, after) =
            <[RawRun]>::ref_from_prefix_with_elems(after, count).map_err(|_| "an entry is cut short")?;
        rest = after;
        let (key, version) = (item.entry.key(), item.entry.version());
        match item.kind {
            COLUMN => {
                let Key { file, column, .. } = key;
                found.columns.push(ColumnEntry { file, column, version, state: item.entry.state() });
            }
            CHUNK => {
                let runs: Vec<Run> = runs.iter().map(|run| Run::from(*run)).collect();
                if count > RUNS_MAX || fault_of(&runs).is_some() {
                    return Err("an entry has impossible runs");
                }
                let cover = cover(&runs);
                let (first, bytes) = (cover.start, cover.end - cover.start);
                let place =
                    Place { generation: item.generation.get(), offset: item.offset.get(), first, bytes };
                found.chunks.push(ChunkEntry { key, version, runs, place });
            }
            _ => return Err("an entry is of an unknown kind"),
        }
    }
    if rest.is_empty() { Ok(found) } else { Err("it has more entries than it says") }
}

fn new(path: &Path) -> PathBuf {
    beside(path, ".new")
}

fn copy(path: &Path) -> PathBuf {
    beside(path, ".copy")
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}
