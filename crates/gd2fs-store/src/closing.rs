//! The end of a store in order: everything goes to its log, and what does not is told.
//!
//! A log that fails for a while is waited for; one that takes nothing any more ends the wait for itself only.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_wire::{Code, Failure};
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use crate::column::Column;
use crate::shared::Shared;
use crate::store::Store;
use crate::tier::{Tier, failure_of};

const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// After an attempt that failed.
const PAUSE: Duration = Duration::from_millis(200);
/// The last such part of the patience: by then the logs that have everything make their checkpoints and wait no longer for others.
const CHECKPOINTS_PART: u32 = 4;
/// What runs in the background ends at once, unless a disk hangs: then it is left behind.
const ENDING_MAX: Duration = Duration::from_secs(1);

impl Store {
    /// Writes everything to the logs and makes their next start short. What is not written within `patience` is lost.
    ///
    /// # Errors
    /// What each log did not get, and why; the code is that of the first. All are closed in any case, within a second more.
    pub async fn close(&self, patience: Duration) -> Result<(), Failure> {
        let until = Instant::now() + patience;
        // From here on there is no new column.
        self.shared.closing.store(true, Relaxed);
        let tiers = &self.shared.tiers;
        let columns = if tiers.is_empty() { Vec::new() } else { self.columns.all() };
        columns.iter().for_each(|column| column.close());
        tiers.iter().for_each(|tier| tier.queue.wake.notify_one());
        let kept = if tiers.is_empty() { Ok(()) } else { self.keep_all(columns, until, patience).await };
        tiers.iter().for_each(|tier| tier.close());
        let flushers = std::mem::take(&mut *self.flushers.lock());
        let ending = async {
            for tier in tiers {
                tier.log.close().await;
            }
            for flusher in flushers {
                // A panic in it was reported by the panic's hook.
                let _ = flusher.await;
            }
        };
        if timeout(ENDING_MAX, ending).await.is_err() {
            tracing::warn!("a disk does not answer: what waits for it is left behind");
        }
        kept
    }

    async fn keep_all(
        &self,
        columns: Vec<Arc<Column>>,
        until: Instant,
        patience: Duration,
    ) -> Result<(), Failure> {
        let shared = &self.shared;
        let mut owed = None;
        let settled = async {
            while shared.tiers.iter().any(|tier| tier.is_behind()) {
                look_again(shared).await;
            }
            settle_all(shared, columns, &mut owed).await;
        };
        // What it leaves is looked at below.
        let _ = timeout_at((until - patience / CHECKPOINTS_PART).into(), settled).await;
        let mut ends = JoinSet::new();
        for (index, tier) in shared.tiers.iter().enumerate() {
            let (shared, tier) = (Arc::clone(shared), Arc::clone(tier));
            ends.spawn(async move { (index, checkpoint(&shared, &tier, until).await) });
        }
        let mut ended = ends.join_all().await;
        ended.sort_by_key(|(index, _)| *index);
        let troubles = shared.tiers.iter().zip(ended).filter_map(|(tier, (_, end))| tier.left(end));
        told(troubles.chain(owed))?;
        let noted = shared.data.note_stop();
        noted.map_err(|error| Failure::new(Code::Internal, error.to_string()))
    }
}

impl Tier {
    /// Whether it lacks something that it may still take.
    fn is_behind(&self) -> bool {
        self.behind.bytes() > 0 && self.log.failed().is_none()
    }

    /// What it did not get, after its last checkpoint came to `end`.
    fn left(&self, end: Result<(), Failure>) -> Option<Failure> {
        let (path, bytes) = (self.path.display(), self.behind.bytes());
        let late = || Failure::new(Code::Timeout, "it did not take them in time");
        if bytes > 0 {
            let Failure { code, message } = self.check().err().or(end.err()).unwrap_or_else(late);
            return Some(Failure::new(
                code,
                format!("{path}: {bytes} bytes did not reach this log and are lost ({message})"),
            ));
        }
        let Failure { code, message } = end.err()?;
        let message = format!(
            "{path}: all bytes have reached this log, but not its last checkpoint ({message}); where files end that have \
             changed since their last flush may be unknown after the next start"
        );
        Some(Failure::new(code, message))
    }
}

async fn look_again(shared: &Shared) {
    let written = shared.space.notified();
    let _ = timeout(LOOK_AGAIN, written).await;
}

/// Makes durable what columns owe. `trouble` is why the last one of those that could not has failed.
async fn settle_all(shared: &Shared, mut columns: Vec<Arc<Column>>, trouble: &mut Option<Failure>) {
    while let Some(column) = columns.last() {
        match column.settle().await {
            Ok(()) => {}
            Err(failure) if shared.tiers.iter().any(|tier| tier.log.failed().is_some()) => {
                // What is owed is owed to all logs: with this one it stays so.
                let message = format!("{}: {}", column.title(), failure.message);
                *trouble = Some(Failure::new(failure.code, message));
            }
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        }
        columns.pop();
    }
}

/// Makes the log's last checkpoint, which makes durable what it names, once the log has everything or the time is over.
async fn checkpoint(shared: &Shared, tier: &Tier, until: Instant) -> Result<(), Failure> {
    let mut last = None;
    loop {
        while tier.is_behind() && Instant::now() < until {
            look_again(shared).await;
        }
        if let Some(why) = tier.log.failed() {
            return Err(Failure::new(Code::Internal, why));
        }
        match timeout_at(until.into(), tier.log.checkpoint()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => last = Some(failure_of(&error)),
            Err(_) => {
                let late = || Failure::new(Code::Timeout, "its disk did not answer in time");
                return Err(last.unwrap_or_else(late));
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// All of it, under the first code.
fn told(troubles: impl Iterator<Item = Failure>) -> Result<(), Failure> {
    let all: Vec<Failure> = troubles.collect();
    let Some(first) = all.first() else { return Ok(()) };
    let messages: Vec<&str> = all.iter().map(|failure| failure.message.as_str()).collect();
    Err(Failure::new(first.code, messages.join("; ")))
}
