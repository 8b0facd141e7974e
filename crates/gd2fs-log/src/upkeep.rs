//! Upkeep in the background: checkpoints, and moving what lives out of segments that are mostly dead.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_device::{BLOCK, Buffer, Op};
use tokio::task::JoinSet;

use crate::append::Payload;
use crate::checkpoint::{Foot, Named, Writer, discard, publish};
use crate::entry::cover;
use crate::error::{LogError, Result};
use crate::inner::Inner;
use crate::position::Mark;
use crate::record::Body;
use crate::scan::runs_hold;
use crate::segment::Live;
use crate::state::{Class, RESERVED};

/// Records that reclaim moves at once: enough to keep a disk busy, few enough to leave most of its queue to others.
const MOVES_MAX: usize = 8;
/// With more than this in flight, and free segments left, reclaim lets appends go first.
const BUSY_IN_FLIGHT: usize = 16;
/// A record waits so long for appends, once; also with a device that is always busy reclaim goes on.
const GIVE_WAY: Duration = Duration::from_millis(1);
/// A segment that lives to more than this share is not worth copying: it would gain less than a tenth.
const LIVE_MAX_TENTHS: u32 = 9;
/// Steps in a row that freed nothing and moved nothing, before the log counts as full. Entries that were released while a
/// checkpoint was made are free after the next.
const STALLS_MAX: u32 = 3;
/// Steps in a row by which not a tenth of a segment was gained, before the log counts as full. Each segment that is moved
/// should gain so much, and a checkpoint follows it; large records can leave so much unused at the ends of segments that
/// nothing is gained. What a device can gain is finite, and so is what is moved for it.
const STEPS_MAX: u32 = 32;
/// A segment in which something cannot be read, by a device that can be read elsewhere, is left alone for so long: a read of a broken
/// spot costs a disk seconds. It stays what it is, and costs the log its room; what can be read of it is served.
const PUT_OFF: Duration = Duration::from_secs(60);
/// After a failure, so that a full or broken disk is not asked without a pause. Whoever needs room meanwhile learns the reason.
pub(crate) const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// What has failed is tried again also where nobody asks for anything.
const RETRY: Duration = Duration::from_secs(60);

impl Inner {
    /// Runs until the log is closed.
    pub async fn keep_up(self: Arc<Self>) {
        let _end = Ending(&self);
        loop {
            let work = self.work.notified();
            tokio::pin!(work);
            work.as_mut().enable();
            if self.state.lock().closed || self.owner().is_none() {
                return;
            }
            if let Err(error) = self.round().await {
                tracing::warn!("{}: {error}", self.device.path().display());
                self.state.lock().trouble = Some(error);
                self.room.notify_waiters();
                // Over at once if the log is closed meanwhile.
                let _ = tokio::time::timeout(PAUSE_AFTER_FAILURE, self.closing.notified()).await;
                self.state.lock().trouble = None;
                let _ = tokio::time::timeout(RETRY, work).await;
                continue;
            }
            work.await;
        }
    }

    /// A checkpoint if one is due, and room if it is short.
    async fn round(self: &Arc<Self>) -> Result<()> {
        let due = {
            let state = self.state.lock();
            state.failed.is_none()
                && (state.bytes_since_checkpoint >= self.checkpoint_bytes
                    || state.records_since_checkpoint >= self.checkpoint_records)
        };
        if due {
            self.checkpoint().await?;
        }
        let (mut best, mut steps, mut stalls) = (None, 0, 0);
        loop {
            let (free, gain, division, stop) = {
                let state = self.state.lock();
                let stop = state.failed.is_some() || state.closed || state.exhausted;
                (state.segments.free_count(), state.gain, state.segments.division, stop)
            };
            let watermark = watermark(division.segments);
            if free > watermark || stop {
                return Ok(());
            }
            let worth_while =
                best.is_none_or(|best| gain >= best + i64::from(division.blocks().div_ceil(10)));
            (best, steps) = if worth_while { (Some(gain), 0) } else { (best, steps + 1) };
            stalls = if self.make_room(free, watermark).await? { 0 } else { stalls + 1 };
            if stalls == STALLS_MAX || steps == STEPS_MAX {
                self.give_up();
                return Ok(());
            }
        }
    }

    /// Nothing more can be gained until something is released: whoever waits for room is told.
    fn give_up(&self) {
        self.state.lock().exhausted = true;
        self.room.notify_waiters();
    }

    /// Frees what is empty, or empties one more segment. False if nothing came of it.
    async fn make_room(self: &Arc<Self>, free: u32, watermark: u32) -> Result<bool> {
        let (empty, victim) = {
            let state = self.state.lock();
            let blocks_max = state.segments.division.blocks() / 10 * LIVE_MAX_TENTHS;
            (state.segments.empty_count(), state.segments.victim(blocks_max))
        };
        match victim {
            // One checkpoint for several segments, unless appends wait for the first.
            Some(records) if empty == 0 || (free > RESERVED && free + empty <= watermark) => {
                let _upkeep = self.upkeep.lock().await;
                self.move_all(records).await
            }
            _ if empty > 0 => Ok(self.checkpoint().await? > 0),
            _ => Ok(false),
        }
    }

    /// Moves the live records of a segment. False if none could be moved. All that was begun has ended when this returns, also
    /// with an error: a copy that is still on its way could come behind the next checkpoint's position.
    async fn move_all(self: &Arc<Self>, records: Vec<Live>) -> Result<bool> {
        let mut moves = JoinSet::new();
        let mut moved = Ok(false);
        for record in records {
            let busy = {
                let mut state = self.state.lock();
                if state.segments.is_put_off(&record.place) {
                    // It does not come free: what is moved out of it gains nothing.
                    break;
                }
                state.in_flight.len() > BUSY_IN_FLIGHT && state.segments.free_count() > RESERVED
            };
            if busy {
                tokio::time::sleep(GIVE_WAY).await;
            }
            if moves.len() == MOVES_MAX {
                moved = both(moved, ended(moves.join_next().await));
            }
            if moved.is_err() {
                break;
            }
            moves.spawn_on(Arc::clone(self).move_one(record), &self.runtime);
        }
        while let Some(end) = moves.join_next().await {
            moved = both(moved, ended(Some(end)));
        }
        moved
    }

    /// Copies one record to the append point. What does not hold what was written is never copied: it would end the log at
    /// the next recovery. False if it still lives where it was.
    async fn move_one(self: Arc<Self>, live: Live) -> Result<bool> {
        let begun = self.begin();
        let Some(reader) = self.enter(&live.place) else { return Ok(true) };
        let header_bytes = live.header_blocks as usize * BLOCK;
        let buffer = Arc::new(Buffer::new(live.blocks() as usize * BLOCK));
        // SAFETY: the operation keeps the buffer, which is read only after it.
        let memory = unsafe { buffer.slice() };
        let keep = (Arc::clone(&buffer), reader);
        let read = self.device.perform(Op::read(live.place.offset - header_bytes as u64, memory, keep)).await;
        if let Err(error) = read.inspect_err(|error| self.read_failed(error)) {
            return self.unreadable(&live, error.into()).await;
        }
        let (header, payload) = buffer.split_at(header_bytes);
        let body = Body::decode(header).map(|(_, body)| body).filter(|body| match body {
            Body::Snapshot { key, version, runs, .. } => {
                (*key, *version) == (live.key, live.version) && runs_hold(runs, cover(runs).start, payload)
            }
            Body::Notes(_) => false,
        });
        let Some(body) = body else {
            tracing::error!(
                "{}: {:?} does not hold what was written",
                self.device.path().display(),
                live.place
            );
            self.release(&live.place);
            if let Some(owner) = self.owner() {
                owner.damaged(live.key, live.version, live.place);
            }
            return Ok(true);
        };
        let memory = memory.part(header_bytes, payload.len()).into();
        let payload = Payload { memory, keep: buffer.clone() };
        match self.append(begun, Class::Reclaim, &body, Some(&payload), Some(live.place)).await {
            Ok(_) => {
                self.counters.reclaimed_bytes.fetch_add(u64::from(live.place.bytes), Relaxed);
                Ok(true)
            }
            Err(LogError::Superseded) => Ok(true),
            Err(LogError::NoSpace { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A record could not be read. That is no damage, however often it happens: only what was read can be that. If nothing
    /// can be read the disk is away, and upkeep has failed until it is back. Otherwise the segment is put off, and another is next.
    async fn unreadable(&self, live: &Live, error: LogError) -> Result<bool> {
        let block = Arc::new(Buffer::new(BLOCK));
        // SAFETY: the operation keeps the buffer, and nobody looks at it.
        let memory = unsafe { block.slice() };
        if self.device.perform(Op::read(0, memory, block)).await.is_err() {
            return Err(error);
        }
        let put_off = self.state.lock().segments.put_off(&live.place, Instant::now() + PUT_OFF);
        if let Some(segment) = put_off {
            tracing::warn!(
                "{}: segment {segment} cannot be emptied, since something in it cannot be read: {error}",
                self.device.path().display()
            );
        }
        Ok(true)
    }

    /// Writes a checkpoint and frees the segments that nothing needs once it is durable. Gives their number.
    pub async fn checkpoint(self: &Arc<Self>) -> Result<u32> {
        let _upkeep = self.upkeep.lock().await;
        let Some(owner) = self.owner() else { return Err(LogError::Closed) };
        // An owner that knows that all is written, and ends therefore, is not to find the last record behind the position.
        self.caught_up().await;
        // The position first, the entries after it: what is missing in them was gone, or comes behind the position.
        let (position, bytes, records) = {
            let state = self.state.lock();
            (state.completed, state.bytes_since_checkpoint, state.records_since_checkpoint)
        };
        let inner = Arc::clone(self);
        let written = self.runtime.spawn_blocking(move || {
            let mut writer = match Writer::create(&inner.checkpoint_path, &inner.device_id) {
                Ok(writer) => writer,
                Err(error) => return Ok(Err(error)),
            };
            owner.live(&mut writer)?;
            inner.drop_unnamed(&position, &writer.named);
            Ok(Ok(writer))
        });
        let mut writer = match written.await {
            Ok(Err(put_off)) => {
                discard(&self.checkpoint_path);
                return Err(put_off);
            }
            Ok(Ok(written)) => self.written(Ok(written))?,
            Err(panicked) => self.written(Err(panicked))?,
        };
        // What the entries do not name because of a note is not to come back in part if that note is never durable.
        self.state.lock().checkpointing = true;
        self.room.notify_waiters();
        let _ = self.note(None).await;
        self.state.lock().checkpointing = false;
        // The entries may name records that are newer than the position, and not durable yet.
        let (durable, version_max) = {
            let state = self.state.lock();
            (state.completed.at, state.version_max)
        };
        self.sync_anyhow().await?;
        let named = std::mem::take(&mut writer.named);
        let foot = Foot { position, durable, version_max };
        let path = self.checkpoint_path.clone();
        let published =
            self.runtime.spawn_blocking(move || writer.finish(&foot).and_then(|()| publish(&path)));
        self.written(published.await)?;
        self.state.lock().floor = position.at;
        // Every header says the floor, this one first: before anything is reused, the device itself knows that it was, should
        // both copies of the checkpoint be lost. Where there is no room for that, the first segment that is reused says it.
        match self.append_durably(Class::Reclaim, &Body::Notes(Vec::new())).await {
            Ok(()) | Err(LogError::NoSpace { .. }) => {}
            Err(error) => return Err(error),
        }
        let mut state = self.state.lock();
        state.bytes_since_checkpoint = state.bytes_since_checkpoint.saturating_sub(bytes);
        state.records_since_checkpoint = state.records_since_checkpoint.saturating_sub(records);
        let freed = state.segments.free_behind(position.at.generation, &named);
        state.gain += i64::from(freed) * i64::from(state.segments.division.blocks());
        drop(state);
        self.counters.checkpoints.fetch_add(1, Relaxed);
        self.room.notify_waiters();
        Ok(freed)
    }

    /// What lies before a checkpoint's position and is not named by its entries was forgotten, whether or not the owner has come
    /// to release it. Moved, it would come behind the position, and a recovery would take it for new.
    fn drop_unnamed(&self, position: &Mark, named: &Named) {
        let segments = self.state.lock().segments.division.segments;
        // A lock for each segment: there may be a million records, and appends go on.
        (0..segments).for_each(|segment| self.state.lock().segments.drop_unnamed(segment, position, named));
    }

    /// What became of a part of a checkpoint's file. One that failed leaves nothing behind: on a full disk others wait for that space.
    fn written<T>(&self, joined: Result<std::io::Result<T>, tokio::task::JoinError>) -> Result<T> {
        let result = joined.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        result.map_err(|error| {
            discard(&self.checkpoint_path);
            LogError::Checkpoint { path: self.checkpoint_path.clone(), error: Arc::new(error) }
        })
    }
}

/// Below so many free segments reclaim works: a twentieth, and always more than what it needs itself.
pub(crate) fn watermark(segments: u32) -> u32 {
    (segments / 20).max(RESERVED + 1)
}

/// Upkeep ends: nobody is to wait for room that it would make. Also if it panics.
struct Ending<'a>(&'a Inner);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state.lock().kept = false;
        self.0.room.notify_waiters();
    }
}

/// Whether anything was moved; the first error.
fn both(before: Result<bool>, now: Result<bool>) -> Result<bool> {
    Ok(before? | now?)
}

fn ended(joined: Option<Result<Result<bool>, tokio::task::JoinError>>) -> Result<bool> {
    match joined {
        None => Ok(false),
        Some(Ok(result)) => result,
        // A move that panicked was reported by the panic's hook; its record lives where it was.
        Some(Err(_)) => Ok(false),
    }
}
