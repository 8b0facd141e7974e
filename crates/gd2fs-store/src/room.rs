//! Making room for a frame.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_wire::Failure;
use tokio::time::{timeout, timeout_at};

use crate::shared::Shared;

/// What is dirty now may be clean so soon. A disk takes 64 MiB in a tenth of this; whoever waits longer is told NO_SPACE, before
/// the payload of a write is sent.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Frames also come back without a word, from readers that end.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// So long a write waits for the log, while that has something to write, rather than push out what is being read.
const SPARE: Duration = Duration::from_secs(1);

/// One operation's patience.
pub(crate) struct Room {
    shared: Arc<Shared>,
    began: Instant,
    /// Whether it spares what is being read.
    spares: bool,
}

impl Room {
    pub fn to_write(shared: &Arc<Shared>) -> Room {
        Room { shared: Arc::clone(shared), began: Instant::now(), spares: true }
    }

    pub fn to_read(shared: &Arc<Shared>) -> Room {
        Room { spares: false, ..Room::to_write(shared) }
    }

    /// Returns when it is worth asking the arena for `bytes` again; `refusal` if nothing comes free in time.
    pub async fn make(&mut self, bytes: usize, refusal: Failure) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        let space = shared.space.notified();
        tokio::pin!(space);
        space.as_mut().enable();
        // What has just become clean is held for a moment by the write that made it so.
        let patience = if shared.dirty_bytes() > 0 { SPARE } else { LOOK_AGAIN };
        let spare = self.spares && self.began.elapsed() < patience;
        if shared.evict(bytes, spare) > 0 {
            return Ok(());
        }
        if shared.tiers.iter().all(|tier| tier.check().is_err()) || self.is_over() {
            return Err(refusal);
        }
        let _wanted = Wanted::new(&shared);
        shared.tiers.iter().for_each(|tier| tier.queue.wake.notify_one());
        let _ = timeout(LOOK_AGAIN, timeout_at(self.until().into(), space)).await;
        Ok(())
    }

    /// Returns when so little waits for the log that a write may add to it.
    pub async fn wait_clean(&mut self, refusal: impl FnOnce() -> Failure) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        while !shared.tiers.is_empty() && shared.dirty_bytes() > shared.dirty_bytes_max {
            if self.is_over() {
                return Err(refusal());
            }
            let space = shared.space.notified();
            let _ = timeout(LOOK_AGAIN, space).await;
        }
        Ok(())
    }

    fn until(&self) -> Instant {
        self.began + WAIT_MAX
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until()
    }
}

/// Somebody waits for memory: nothing dirty is left time to grow.
struct Wanted<'a>(&'a Shared);

impl Wanted<'_> {
    fn new(shared: &Shared) -> Wanted<'_> {
        shared.wanting.fetch_add(1, Relaxed);
        Wanted(shared)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.wanting.fetch_sub(1, Relaxed);
    }
}
