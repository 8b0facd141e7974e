//! The face of the log.

use std::any::Any;
use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock, Weak};

use gd2fs_device::{BLOCK, Device, Op};
use gd2fs_transport::Memory;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::append::Payload;
use crate::entry::{Note, Snapshot, cover, fault_of};
use crate::error::{LogError, Result};
use crate::format::superblock_of;
use crate::inner::Inner;
use crate::owner::Owner;
use crate::position::{Mark, Place, Position};
use crate::record::{Body, RUNS_MAX, SEGMENT_HEADER_BLOCKS, snapshot_header_blocks};
use crate::recover::{Layout, Recovered, recover};
use crate::segment::Division;
use crate::state::{Class, State};
use crate::upkeep::watermark;

/// Large enough that a segment's header and its unused end cost nothing, small enough that reclaim frees some at a time.
const SEGMENT_BYTES_MAX: u64 = 256 << 20;
/// Two are reserved, one is open, one is reclaimed: with fewer nothing can be kept.
const SEGMENTS_MIN: u32 = 5;

/// What [`segment_bytes`] puts into a segment at least, of the largest records, on a device with room for 32 of them.
const SEGMENT_RECORDS_MIN: u32 = 2;
const PAYLOAD_BYTES_MAX: u32 = 64 << 20;

/// How a log is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cluster's name, 1 to 255 bytes.
    pub cluster: String,
    /// The node's name, 1 to 255 bytes.
    pub node: String,
    /// The checkpoint's file; its neighbours with `.new` and `.copy` behind the name belong to it.
    pub checkpoint: PathBuf,
    /// Bytes of the largest chunk, a multiple of 4,096 up to 64 MiB. A log that was made for larger ones still takes them.
    pub payload_bytes_max: u32,
    /// Bytes of a segment, a multiple of 4,096, if the device is new. None: what keeps most, at most 256 MiB.
    pub segment_bytes: Option<u64>,
    /// A checkpoint is made after so many bytes of records. A scan reads as many at most, in about a second.
    pub checkpoint_bytes: u64,
    /// A checkpoint is made after so many records.
    pub checkpoint_records: u64,
}

impl Options {
    /// Options with the usual limits.
    pub fn new(cluster: &str, node: &str, checkpoint: impl Into<PathBuf>) -> Options {
        Options {
            cluster: cluster.into(),
            node: node.into(),
            checkpoint: checkpoint.into(),
            payload_bytes_max: 4 << 20,
            segment_bytes: None,
            checkpoint_bytes: 1 << 30,
            checkpoint_records: 16_384,
        }
    }
}

/// Numbers of a log, all since it was opened, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of all segments.
    pub total_bytes: u64,
    /// Bytes of live records, with their headers, that fit beside the segments that are kept free and the unused ends of the
    /// others, if all are as large as those that live now. With more than this no segment can be emptied any more.
    pub usable_bytes: u64,
    /// Bytes of live records, with their headers.
    pub live_bytes: u64,
    /// Bytes of dead records, of notes, and of segments' unused ends.
    pub dead_bytes: u64,
    /// Bytes that may be written before reclaim must free more.
    pub free_bytes: u64,
    /// Live records.
    pub live_records: u64,
    /// Bytes written, with headers and with what reclaim has copied.
    pub appended_bytes: u64,
    /// Payload bytes that reclaim has copied.
    pub reclaimed_bytes: u64,
    /// Checkpoints made.
    pub checkpoints: u64,
    /// Syncs made; each may answer many callers.
    pub syncs: u64,
    /// Time spent in syncs.
    pub sync_us: u64,
    /// The longest sync.
    pub sync_us_max: u64,
    /// Reads that the device has failed.
    pub read_errors: u64,
}

/// A log on one device. All methods may be called from any thread; futures may be dropped: what they had begun goes on.
pub struct Log {
    inner: Arc<Inner>,
    /// What goes on in the background.
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Log {
    /// Opens the log of a device, formats a device that is blank, and says what it holds. Runs its background
    /// work on the tokio runtime of the caller. Nothing can be appended before [`Log::start`].
    ///
    /// # Errors
    /// `Superblock` if the device is not this node's; `Refused` for an option, or a device that is too small;
    /// `Unreadable`; `Device`; `Checkpoint` if a checkpoint is there and cannot be read at all.
    pub async fn open(device: Arc<Device>, options: Options) -> Result<(Log, Recovered)> {
        check(&options)?;
        let superblock = superblock_of(&device, &options).await.map_err(LogError::at_open)?;
        let division = Division::new(device.bytes(), superblock.segment_bytes);
        let payload_bytes_max = payload_bytes_max(device.bytes(), division, &options);
        let record_blocks_max = snapshot_header_blocks(RUNS_MAX) + payload_bytes_max / BLOCK as u32;
        let layout = Layout { device: &device, device_id: &superblock.device, division, record_blocks_max };
        let found = recover(&layout, &options.checkpoint).await.map_err(LogError::at_open)?;
        let mut state = State::new(found.segments);
        state.tail = found.end;
        state.completed = Mark { at: found.end, offset: 0 };
        state.durable = found.end;
        state.witness = found.witness;
        state.floor = found.floor;
        state.generation_next = found.generation_next;
        state.version_max = found.recovered.version_max;
        if found.witness.said > Position::default() {
            // A checkpoint is due: what was scanned once is not scanned again, and an older copy of the device is known from now on.
            state.records_since_checkpoint = options.checkpoint_records;
        }
        let inner = Inner {
            device,
            device_id: superblock.device,
            checkpoint_path: options.checkpoint,
            payload_bytes_max,
            checkpoint_bytes: options.checkpoint_bytes,
            checkpoint_records: options.checkpoint_records,
            runtime: Handle::current(),
            owner: OnceLock::new(),
            state: Mutex::new(state),
            room: Notify::new(),
            work: Notify::new(),
            closing: Notify::new(),
            told: Notify::new(),
            synced: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
            sync_turn: tokio::sync::Mutex::new(()),
            upkeep: tokio::sync::Mutex::new(()),
            notes: Mutex::default(),
            counters: Default::default(),
            read_error_told: Default::default(),
        };
        Ok((Log { inner: Arc::new(inner), tasks: Mutex::default() }, found.recovered))
    }

    /// Begins upkeep, once the owner knows what was recovered. The log does not keep the owner alive; without it nothing
    /// is wanted any more. A second call changes nothing.
    pub fn start(&self, owner: Weak<dyn Owner>) {
        if self.inner.owner.set(owner).is_ok() {
            self.inner.state.lock().kept = true;
            let runtime = &self.inner.runtime;
            let upkeep = runtime.spawn(Arc::clone(&self.inner).keep_up());
            *self.tasks.lock() = vec![upkeep, runtime.spawn(Arc::clone(&self.inner).bear_witness())];
        }
    }

    /// Writes a snapshot. It has begun when this returns: a note that begins later and makes it void is obeyed. When the
    /// future completes the bytes, and all that was appended before, are written but not durable, and the owner has learnt
    /// the place ([`Owner::appended`]). Waits while reclaim makes room. A write that the device fails is repeated once, in
    /// another segment.
    ///
    /// # Errors
    /// `NoSpace`, before anything is written; `Superseded` if a note that was begun after this makes it void; `Refused` for
    /// a snapshot that cannot be; `Write`; `Failed`; `Closed`.
    pub fn append(&self, snapshot: Snapshot) -> impl Future<Output = Result<()>> + Send + use<> {
        let (inner, begun) = (Arc::clone(&self.inner), self.inner.begin());
        async move {
            check_snapshot(&snapshot, inner.payload_bytes_max)?;
            let Snapshot { key, version, state, runs, memory, keep } = snapshot;
            let (body, payload) = (Body::Snapshot { key, version, state, runs }, Payload { memory, keep });
            inner.append(begun, Class::Snapshot, &body, Some(&payload), None).await.map(|_| ())
        }
    }

    /// Writes a note; it has begun when this returns. The future completes when the note, and everything that was complete
    /// before, is durable. Notes that wait at the same time share a write and a sync.
    ///
    /// # Errors
    /// `NoSpace`; `Overloaded`; `Write`; `Failed`; `Closed`. The owner, which has made the change already, repeats the note:
    /// until it is durable a recovery may find the change made, not made, or made in part.
    pub fn note(&self, note: Note) -> impl Future<Output = Result<()>> + Send + use<> {
        let told = self.inner.note(Some(note));
        async move { told.await.unwrap_or(Err(LogError::Closed)) }
    }

    /// Makes everything durable whose append had completed, or of which [`Owner::appended`] was told, before this was called.
    ///
    /// # Errors
    /// `Failed`: from then on nothing is written any more, since the device may have lost any of its last writes.
    pub async fn sync(&self) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        // On its own: the failure of a sync that nobody waits for any more is the end of writing all the same.
        let made = self.inner.runtime.spawn(async move { inner.sync().await });
        made.await.unwrap_or(Err(LogError::Closed))
    }

    /// Reads bytes `[start, end)` of a chunk, whole blocks of `place`, into `memory`. What was written is not verified: the
    /// caller has the sums. A place that is released while this goes on is read all the same.
    ///
    /// # Errors
    /// `Gone`; `Outside`; `Device`.
    pub async fn read(
        &self,
        place: Place,
        start: u32,
        end: u32,
        memory: Memory,
        keep: impl Any + Send,
    ) -> Result<()> {
        let block = BLOCK as u32;
        let whole = start.is_multiple_of(block) && end.is_multiple_of(block) && start < end;
        let inside =
            start >= place.first && u64::from(end) <= u64::from(place.first) + u64::from(place.bytes);
        if !whole || !inside || memory.len() != (end - start) as usize {
            return Err(LogError::Outside { place, start, end });
        }
        let Some(reader) = self.inner.enter(&place) else { return Err(LogError::Gone(place)) };
        let offset = place.offset + u64::from(start - place.first);
        let read = self.inner.device.perform(Op::read(offset, memory, (keep, reader))).await;
        Ok(read.inspect_err(|error| self.inner.read_failed(error))?)
    }

    /// The record at this place is dead: its space comes back. Not durable: until a checkpoint is made, a recovery may find it
    /// again, unless a note forbids that. Releasing twice changes nothing.
    pub fn release(&self, place: Place) {
        self.inner.release(&place);
    }

    /// Makes a checkpoint now, so that the next recovery is short.
    ///
    /// # Errors
    /// `Checkpoint`; `PutOff`; `Failed`; `NoSpace`; `Closed` before [`Log::start`] or without owner.
    pub async fn checkpoint(&self) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let made = self.inner.runtime.spawn(async move { inner.checkpoint().await.map(|_| ()) });
        // A checkpoint that panicked was reported by the panic's hook.
        made.await.unwrap_or(Err(LogError::Closed))
    }

    /// Why the log takes no more writes, if it does not: a sync failed.
    pub fn failed(&self) -> Option<String> {
        self.inner.state.lock().failed.clone()
    }

    /// The largest bytes of a snapshot's blocks.
    pub fn payload_bytes_max(&self) -> u32 {
        self.inner.payload_bytes_max
    }

    /// Numbers.
    pub fn stats(&self) -> Stats {
        let state = self.inner.state.lock();
        let division = state.segments.division;
        let bytes = |blocks: u64| blocks * BLOCK as u64;
        let live: u64 = state.segments.iter().map(|segment| u64::from(segment.live_blocks)).sum();
        let free = bytes(state.free_blocks());
        let total = u64::from(division.segments) * division.segment_bytes;
        let records: u64 = state.segments.iter().map(|segment| segment.live.len() as u64).sum();
        let counters = &self.inner.counters;
        Stats {
            total_bytes: total,
            usable_bytes: usable_bytes(division, live.checked_div(records).unwrap_or(1)),
            live_bytes: bytes(live),
            dead_bytes: total - free - bytes(live),
            free_bytes: free,
            live_records: records,
            appended_bytes: counters.appended_bytes.load(Relaxed),
            reclaimed_bytes: counters.reclaimed_bytes.load(Relaxed),
            checkpoints: counters.checkpoints.load(Relaxed),
            syncs: counters.syncs.load(Relaxed),
            sync_us: counters.sync_us.load(Relaxed),
            sync_us_max: counters.sync_us_max.load(Relaxed),
            read_errors: counters.read_errors.load(Relaxed),
        }
    }

    /// Ends upkeep, and refuses what is appended from now on and what waits for room. What was appended and not synced is as
    /// durable as it was.
    pub async fn close(&self) {
        self.inner.shut();
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            // It ends by itself; a panic in it was reported by the panic's hook.
            let _ = task.await;
        }
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner.state.lock();
        let mut shown = f.debug_struct("Log");
        shown
            .field("device", &self.inner.device)
            .field("tail", &state.tail)
            .field("completed", &state.completed.at);
        shown.field("durable", &state.durable).field("in_flight", &state.in_flight.len());
        shown.field("free_segments", &state.segments.free_count()).field("breaking", &state.breaking);
        shown.field("exhausted", &state.exhausted).field("failed", &state.failed).finish_non_exhaustive()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.inner.shut();
    }
}

impl Inner {
    fn shut(&self) {
        self.state.lock().closed = true;
        self.room.notify_waiters();
        self.work.notify_one();
        self.closing.notify_one();
        self.synced.notify_one();
    }
}

fn check(options: &Options) -> Result<()> {
    let bytes = options.payload_bytes_max;
    if bytes == 0 || bytes > PAYLOAD_BYTES_MAX || !bytes.is_multiple_of(BLOCK as u32) {
        let reason = format!("{bytes} is not a multiple of {BLOCK} up to 64 MiB");
        return Err(LogError::Refused { field: "payload_bytes_max", reason });
    }
    if options.checkpoint_bytes == 0 || options.checkpoint_records == 0 {
        let reason = "both must be at least 1".into();
        return Err(LogError::Refused { field: "checkpoint_bytes, checkpoint_records", reason });
    }
    Ok(())
}

fn check_snapshot(snapshot: &Snapshot, bytes_max: u32) -> Result<()> {
    let Snapshot { runs, memory, .. } = snapshot;
    let refused = |reason| Err(LogError::Refused { field: "snapshot", reason });
    if let Some(reason) = fault_of(runs) {
        return refused(reason);
    }
    let bytes = cover(runs).len();
    if runs.len() > RUNS_MAX || bytes > bytes_max as usize {
        return refused(format!(
            "{} runs over {bytes} bytes, of at most {RUNS_MAX} over {bytes_max}",
            runs.len()
        ));
    }
    if memory.len() != bytes {
        return refused(format!("memory: {} bytes, and the runs' blocks have {bytes}", memory.len()));
    }
    Ok(())
}

/// Bytes of a segment that holds nothing but the largest record.
pub(crate) fn record_bytes_max(options: &Options) -> u64 {
    let blocks =
        SEGMENT_HEADER_BLOCKS + snapshot_header_blocks(RUNS_MAX) + options.payload_bytes_max / BLOCK as u32;
    u64::from(blocks) * BLOCK as u64
}

/// Bytes of the largest chunk of a log. One that was divided for other options takes what it may have been divided for, a
/// power of two: what was written then still counts, and no file becomes too large for it.
fn payload_bytes_max(device_bytes: u64, division: Division, options: &Options) -> u32 {
    if segment_bytes(device_bytes, options).is_ok_and(|bytes| bytes == division.segment_bytes) {
        return options.payload_bytes_max;
    }
    let record = (division.blocks() - SEGMENT_HEADER_BLOCKS) / SEGMENT_RECORDS_MIN;
    let blocks =
        record.saturating_sub(snapshot_header_blocks(RUNS_MAX)).clamp(1, PAYLOAD_BYTES_MAX / BLOCK as u32);
    options.payload_bytes_max.max((1 << blocks.ilog2()) * BLOCK as u32)
}

/// What fits into the segments that are neither kept free nor open, in whole records of `blocks`.
fn usable_bytes(division: Division, blocks: u64) -> u64 {
    let room = u64::from(division.blocks() - SEGMENT_HEADER_BLOCKS);
    kept_segments(division) * (room - room % blocks.clamp(1, room)) * BLOCK as u64
}

/// Segments that are neither kept free nor open.
fn kept_segments(division: Division) -> u64 {
    u64::from(division.segments.saturating_sub(watermark(division.segments) + 1))
}

/// How a new device is divided: a segment holds a whole number of the largest records, the number that keeps most where records
/// come in all sizes. Then up to one record of each segment can stay unused, which speaks for many; that some segments are kept
/// free speaks for few of them, on a small device. A device with room for 32 of its largest records gets two or three of them a segment.
pub(crate) fn segment_bytes(device_bytes: u64, options: &Options) -> Result<u64> {
    let header = u64::from(SEGMENT_HEADER_BLOCKS) * BLOCK as u64;
    let record = record_bytes_max(options) - header;
    let kept_surely = |records: u64| {
        let division = Division::new(device_bytes, header + records * record);
        kept_segments(division) * (records - 1) * record
    };
    let records_max = (SEGMENT_BYTES_MAX.saturating_sub(header) / record).max(1);
    let best =
        (1..=records_max).max_by_key(|records| (kept_surely(*records), Reverse(*records))).expect("one");
    let bytes = options.segment_bytes.unwrap_or(header + best * record);
    if !bytes.is_multiple_of(BLOCK as u64) || bytes < record_bytes_max(options) {
        let reason = format!("{bytes} is no multiple of {BLOCK} that holds a record of payload_bytes_max");
        return Err(LogError::Refused { field: "segment_bytes", reason });
    }
    let segments = Division::new(device_bytes, bytes).segments;
    if segments < SEGMENTS_MIN {
        let reason = format!(
            "{device_bytes} bytes give {segments} segments of {bytes}, fewer than {SEGMENTS_MIN}; choose a larger device or \
             smaller chunks"
        );
        return Err(LogError::Refused { field: "device", reason });
    }
    Ok(bytes)
}
