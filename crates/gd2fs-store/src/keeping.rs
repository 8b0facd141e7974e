//! How a column's changes reach the log.
//!
//! Bytes follow behind: a changed chunk waits in a queue, is written as a snapshot of all of it, and counts as clean when the
//! newest snapshot is in the log. What a crash must not undo (a seal, a grant, bytes that replace or end others which the log
//! has) is *owed*: [`Column::settle`] returns once it is durable, and whatever depends on it is answered only then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_log::{LogError, Note, Place as LogPlace, Snapshot, cover};
use gd2fs_transport::Slice;
use gd2fs_wire::{Code, Failure};

use crate::chunk::{Appending, Chunk};
use crate::column::{Column, State};
use crate::dirty::Dirty;
use crate::ends::Loss;
use crate::frame::Frame;
use crate::tier::{Record, Tier, failure_of};

const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Notes of one column that wait at once, so that many columns fit into what a log lets wait.
const FORGETS_AT_ONCE: usize = 64;

/// Changes that must be durable before they are answered.
#[derive(Default)]
pub(crate) struct Owed {
    /// The column's state.
    state: Option<Note>,
    /// Chunks that are gone, each with the version up to which the logs must forget it.
    gone: BTreeMap<u64, u64>,
    /// Chunks, each with the change that a snapshot must hold.
    kept: BTreeMap<u64, u64>,
    /// Chunks whose record has moved to another log, each with the version up to which the logs must forget it: else the former
    /// record would be the last word once the newer one's log is gone.
    former: BTreeMap<u64, u64>,
}

impl Owed {
    pub fn is_empty(&self) -> bool {
        self.state.is_none() && self.gone.is_empty() && self.kept.is_empty() && self.former.is_empty()
    }

    /// Another log has a newer record of the chunk than this version.
    pub fn forget_former(&mut self, index: u64, version: u64) {
        let known = self.former.entry(index).or_insert(version);
        *known = version.max(*known);
    }

    pub fn has_former(&self) -> bool {
        !self.former.is_empty()
    }

    /// Whether the column's state is another than the log has it.
    pub fn names_state(&self) -> bool {
        self.state.is_some()
    }

    /// Whether the log may bring former bytes of a chunk back.
    pub fn forgets(&self, index: u64) -> bool {
        self.gone.contains_key(&index)
    }
}

impl Column {
    /// The bytes of a chunk have changed. `through`: the log has bytes that contradict them, so that the change counts only
    /// once it is durable.
    pub(crate) fn changed(self: &Arc<Self>, state: &mut State, index: u64, through: bool) {
        let Some(tier) = self.shared.tier_of(&self.key(index)) else { return };
        let version = self.shared.next_version();
        let chunk = state.chunks.get_mut(&index).expect("it has just changed");
        chunk.changed = version;
        let bytes = chunk.frame().expect("it has just changed").capacity();
        let waits = match &mut chunk.dirty {
            Some(dirty) => {
                dirty.change(bytes, chunk.appending.is_some());
                true
            }
            None => {
                chunk.dirty = Some(Dirty::new(&tier.behind, bytes));
                false
            }
        };
        if through {
            state.owed.kept.insert(index, version);
        }
        if !waits {
            tier.queue.push((Arc::downgrade(self), index));
        }
        if self.shared.hurries() {
            // It may sleep until the first of them has had its time.
            tier.queue.wake.notify_one();
        }
    }

    /// The column is another than its last snapshot says.
    pub(crate) fn owe_state(&self, state: &mut State) {
        state.version = self.shared.next_version();
        if state.logged {
            let (file, column) = self.name();
            let note = Note::Column { file, column, version: state.version, state: self.log_state(state) };
            state.owed.state = Some(note);
        }
    }

    /// A chunk that the log has is gone.
    pub(crate) fn owe_forget(&self, state: &mut State, index: u64) {
        state.owed.kept.remove(&index);
        state.owed.former.remove(&index);
        state.owed.gone.insert(index, self.shared.next_version());
    }

    /// Returns when everything that is owed is durable. Whoever fails leaves it owed, but for what has become durable: the next
    /// one goes on.
    pub(crate) async fn settle(self: &Arc<Self>) -> Result<(), Failure> {
        let kept = {
            let state = self.state.lock();
            if state.owed.is_empty() {
                return Ok(());
            }
            state.owed.kept.clone()
        };
        for index in kept.keys() {
            self.hurry(*index);
        }
        // Before the state: a grant that is durable is not opened again, and what it has dropped must not come back under it.
        self.forget(|owed| &mut owed.gone).await?;
        self.settle_state().await?;
        let since = Instant::now();
        for (index, change) in &kept {
            self.kept(*index, *change, since).await?;
        }
        {
            let owed = &mut self.state.lock().owed;
            owed.kept.retain(|index, change| kept.get(index).is_none_or(|kept| kept < change));
        }
        self.settle_former().await
    }

    async fn settle_state(&self) -> Result<(), Failure> {
        let Some(note) = self.state.lock().owed.state else { return Ok(()) };
        self.noted([note]).await?;
        let owed = &mut self.state.lock().owed;
        owed.state = owed.state.filter(|newer| *newer != note);
        Ok(())
    }

    /// Has the logs forget former records of chunks that have moved from one log to another.
    async fn settle_former(&self) -> Result<(), Failure> {
        if !self.state.lock().owed.has_former() {
            return Ok(());
        }
        // The newer records first: until they are durable the former ones are what a flush has promised.
        self.shared.sync_logs().await?;
        self.forget(|owed| &mut owed.former).await
    }

    /// Has the logs forget what one of the lists names by now, some at a time. Each group is owed no more once it is durable: a
    /// column has more chunks than notes can wait. No snapshot that a note forbids begins before it: its chunk is gone, or has a
    /// higher version.
    async fn forget(&self, list: impl Fn(&mut Owed) -> &mut BTreeMap<u64, u64>) -> Result<(), Failure> {
        let all: Vec<(u64, u64)> = {
            let mut state = self.state.lock();
            list(&mut state.owed).iter().map(|(index, version)| (*index, *version)).collect()
        };
        for group in all.chunks(FORGETS_AT_ONCE) {
            let mut group = group.to_vec();
            {
                // Others may have settled some meanwhile.
                let mut state = self.state.lock();
                let owed = list(&mut state.owed);
                group.retain(|(index, version)| owed.get(index) == Some(version));
            }
            self.noted(
                group
                    .iter()
                    .map(|(index, version)| Note::Forget { key: self.key(*index), version: *version }),
            )
            .await?;
            let mut state = self.state.lock();
            let owed = list(&mut state.owed);
            for (index, version) in group {
                if owed.get(&index) == Some(&version) {
                    owed.remove(&index);
                }
            }
        }
        Ok(())
    }

    /// Returns when every log has these notes.
    async fn noted(&self, notes: impl IntoIterator<Item = Note>) -> Result<(), Failure> {
        let begun: Vec<_> = notes.into_iter().flat_map(|note| self.shared.note(note)).collect();
        for note in begun {
            note.await.map_err(|error| failure_of(&error))?;
        }
        Ok(())
    }

    /// Returns when everything that was acknowledged before is durable.
    ///
    /// # Errors
    /// UNSUPPORTED without a log; NO_SPACE, INTERNAL if the log takes nothing; LOST if something went meanwhile.
    pub async fn flush(self: &Arc<Self>) -> Result<(), Failure> {
        drop(self.lock_alive()?);
        if self.shared.tiers.is_empty() {
            let message = "this node keeps nothing beyond its memory; give it node.logs";
            return Err(Failure::new(Code::Unsupported, message));
        }
        let changes: Vec<(u64, u64)> = {
            let mut state = self.lock_alive()?;
            self.touch();
            if self.keep_end(&mut state) {
                // Where there are bytes and no log knows them, their snapshots will say it.
                state.logged |= state.chunks.is_empty();
                self.owe_state(&mut state);
            }
            let behind = state.chunks.iter().filter(|(_, chunk)| chunk.dirty.is_some());
            behind.map(|(index, chunk)| (*index, chunk.changed)).collect()
        };
        for (index, _) in &changes {
            self.hurry(*index);
        }
        let since = Instant::now();
        self.settle().await?;
        for (index, change) in changes {
            if self.written(index, change, since).await?.is_none() {
                self.check_lost(index)?;
            }
        }
        self.shared.sync_logs().await?;
        self.settle_former().await
    }

    /// Whether a chunk that is gone was given up, and not dropped by whoever may do that.
    fn check_lost(&self, index: u64) -> Result<(), Failure> {
        let state = self.lock_alive()?;
        let start = self.geometry.offset(index, 0);
        let failure = self.missing(&state, start, start + 1);
        let gone = self.gap(&state, start, start + 1).is_some();
        if gone && failure.code == Code::Lost { Err(failure) } else { Ok(()) }
    }

    fn hurry(self: &Arc<Self>, index: u64) {
        if let Some(tier) = self.shared.tier_of(&self.key(index)) {
            tier.queue.hurry((Arc::downgrade(self), index));
        }
    }

    /// Returns when a snapshot of this change, or of a later one, is durable, or the chunk is gone.
    async fn kept(self: &Arc<Self>, index: u64, change: u64, since: Instant) -> Result<(), Failure> {
        match self.written(index, change, since).await? {
            Some(tier) => tier.log.sync().await.map_err(|error| failure_of(&error)),
            None => Ok(()),
        }
    }

    /// Returns when the log has a snapshot of this change or a later one; None: the chunk is gone. Of the troubles of the log those
    /// count that it had `since` the wait began.
    async fn written(
        self: &Arc<Self>,
        index: u64,
        change: u64,
        since: Instant,
    ) -> Result<Option<Arc<Tier>>, Failure> {
        let Some(tier) = self.shared.tier_of(&self.key(index)) else { return Ok(None) };
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            // Before the look, so that nothing is missed in between.
            progress.as_mut().enable();
            match self.state.lock().chunks.get(&index) {
                None => return Ok(None),
                Some(Chunk { record: Some(record), .. }) if record.changed >= change => {
                    return Ok(Some(Arc::clone(&record.tier)));
                }
                Some(chunk) => {
                    tier.check_since(since)?;
                    if chunk.appending.is_none() {
                        // An older snapshot was on its way when this was hurried before.
                        self.hurry(index);
                    }
                }
            }
            // A log that has failed tells nobody.
            let _ = tokio::time::timeout(LOOK_AGAIN, progress).await;
        }
    }

    /// Begins to write a dirty chunk to its log. None: there is nothing to write, or it is being written already.
    pub(crate) fn begin_append(
        self: &Arc<Self>,
        tier: &Arc<Tier>,
        index: u64,
    ) -> Option<(usize, u64, impl Future<Output = Result<(), LogError>> + Send + use<>)> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.deleted {
            return None;
        }
        let log_state = self.log_state(state);
        let chunk = state.chunks.get_mut(&index)?;
        if chunk.dirty.is_none() || chunk.appending.is_some() || chunk.runs().is_empty() {
            return None;
        }
        let version = self.shared.next_version();
        let frame = chunk.frame().expect("a dirty chunk is in memory").clone();
        let runs = chunk.runs().as_slice().to_vec();
        let blocks = cover(&runs);
        // SAFETY: the frame is kept, and what is valid in it is written by nobody while somebody holds it. What lies between
        // the runs may change meanwhile: the log does not look at it.
        let memory = unsafe { Slice::new(frame.address(blocks.start, blocks.end), blocks.len()) };
        chunk.appending = Some(Appending { version, changed: chunk.changed, runs: runs.as_slice().into() });
        if !std::mem::replace(&mut state.logged, true) {
            state.version = version;
        }
        let snapshot = Snapshot {
            key: self.key(index),
            version,
            state: log_state,
            runs,
            memory: memory.into(),
            keep: Arc::new(frame),
        };
        // Begun under the lock, see `Owner`.
        let append = tier.log.append(snapshot);
        drop(guard);
        Some((blocks.len(), version, append))
    }

    /// A snapshot lies in the log. False: nobody wants it any more.
    pub(crate) fn appended(
        self: &Arc<Self>,
        tier: &Arc<Tier>,
        index: u64,
        version: u64,
        place: LogPlace,
    ) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(chunk) = state.chunks.get_mut(&index) else { return false };
        let Some(appending) = chunk.appending.take_if(|appending| appending.version == version) else {
            return false;
        };
        let changed = appending.changed;
        let runs = (changed != chunk.changed).then_some(appending.runs);
        let held = self.tenant().log.hold(u64::from(place.bytes));
        let record = Record { tier: Arc::clone(tier), place, version, changed, runs, held };
        let former = chunk.record.replace(record);
        if let Some(former) = former.as_ref().filter(|former| !Arc::ptr_eq(&former.tier, tier)) {
            state.owed.forget_former(index, former.version);
        }
        if changed == chunk.changed {
            chunk.dirty = None;
            self.list_dram(state);
        } else {
            chunk.dirty.iter_mut().for_each(Dirty::appended);
            tier.queue.push((Arc::downgrade(self), index));
        }
        self.list_log(state);
        drop(guard);
        drop(former);
        self.shared.counters.flushed_bytes.fetch_add(u64::from(place.bytes), Relaxed);
        self.progress.notify_waiters();
        self.shared.space.notify_waiters();
        true
    }

    /// An append has failed: the chunk is as dirty as before, and is tried again first.
    pub(crate) fn not_appended(self: &Arc<Self>, tier: &Arc<Tier>, index: u64, version: u64) {
        let mut state = self.state.lock();
        if let Some(chunk) = state.chunks.get_mut(&index)
            && chunk.appending.take_if(|appending| appending.version == version).is_some()
        {
            chunk.dirty.iter_mut().for_each(Dirty::not_appended);
            tier.queue.hurry((Arc::downgrade(self), index));
        }
        drop(state);
        self.progress.notify_waiters();
    }

    /// Reclaim has moved a record.
    pub(crate) fn moved(&self, index: u64, version: u64, from: LogPlace, to: LogPlace) -> bool {
        let mut state = self.state.lock();
        let record = state.chunks.get_mut(&index).and_then(|chunk| chunk.record.as_mut());
        match record.filter(|record| record.version == version && record.place == from) {
            Some(record) => {
                record.place = to;
                true
            }
            None => false,
        }
    }

    /// A record does not hold what was written to it. A chunk in memory is written again; a cold one is lost.
    pub(crate) fn damaged(self: &Arc<Self>, index: u64, version: u64) {
        let mut state = self.state.lock();
        let Some(chunk) = state.chunks.get_mut(&index) else { return };
        if chunk.record.take_if(|record| record.version == version).is_none() {
            return;
        }
        self.shared.counters.corrupt.fetch_add(1, Relaxed);
        if chunk.frame().is_some() {
            self.changed(&mut state, index, false);
        } else {
            self.lose(&mut state, index, Loss::Damaged);
        }
        drop(state);
        self.progress.notify_waiters();
    }

    /// A frame does not hold what was written to it. True: the log has the same bytes, and the chunk is cold now, or it has
    /// another frame already.
    pub(crate) fn heal(&self, index: u64, frame: &Frame) -> bool {
        let mut state = self.state.lock();
        let Some(chunk) = state.chunks.get_mut(&index).filter(|chunk| chunk.is_in(frame)) else {
            return true;
        };
        self.shared.counters.corrupt.fetch_add(1, Relaxed);
        chunk.fall_back()
    }

    /// Takes a chunk out of both tiers for good; what the log has of it is owed to be forgotten.
    pub(crate) fn lose(&self, state: &mut State, index: u64, why: Loss) {
        let Some(chunk) = state.chunks.remove(&index) else { return };
        let end = self.geometry.offset(index, chunk.runs().end());
        state.reached = state.reached.max(end);
        let was_whole = state.lost_end == 0;
        state.lost_end = state.lost_end.max(end);
        if was_whole {
            // Before the log forgets it: what is missing then would be taken for what was never written.
            self.owe_state(state);
        }
        match why {
            Loss::Evicted => state.evicted_end = state.evicted_end.max(end),
            Loss::Damaged => drop(state.damaged.insert(index)),
        }
        if state.logged {
            self.owe_forget(state, index);
        }
        self.shared.changed.note(self.name());
    }
}
