//! Making room for a frame.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_wire::Failure;
use tokio::time::{timeout, timeout_at};

use crate::column::Column;
use crate::shared::Shared;
use crate::tenants::Tenant;

/// What is dirty now may be clean so soon. A disk takes 64 MiB in a tenth of this; whoever waits longer is told NO_SPACE, or
/// why a log takes nothing, before the payload of a write is sent.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(2);
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

/// While it lives the flushers hurry.
struct Pressure<'a>(&'a Shared);

impl Pressure<'_> {
    fn new(shared: &Shared) -> Pressure<'_> {
        shared.pressed.fetch_add(1, Relaxed);
        shared.tiers.iter().for_each(|tier| tier.queue.wake.notify_one());
        Pressure(shared)
    }
}

impl Drop for Pressure<'_> {
    fn drop(&mut self) {
        self.0.pressed.fetch_sub(1, Relaxed);
    }
}

impl Room {
    pub fn to_write(shared: &Arc<Shared>) -> Room {
        Room { shared: Arc::clone(shared), began: Instant::now(), spares: true }
    }

    pub fn to_read(shared: &Arc<Shared>) -> Room {
        Room { spares: false, ..Room::to_write(shared) }
    }

    fn until(&self) -> Instant {
        self.began + WAIT_MAX
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until()
    }

    /// Returns when it is worth asking for a frame of `bytes` again; `refusal` if nothing comes free in time.
    pub async fn make(&mut self, asker: &Arc<Tenant>, bytes: usize, refusal: Failure) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        let space = shared.space.notified();
        tokio::pin!(space);
        space.as_mut().enable();
        if self.is_over() {
            return Err(shared.trouble().unwrap_or(refusal));
        }
        // What has just become clean is held for a moment by the write that made it so.
        let patience = if shared.dirty_bytes() > 0 { SPARE } else { LOOK_AGAIN };
        let spare = self.spares && self.began.elapsed() < patience;
        if shared.evict(bytes, asker, spare) > 0 {
            return Ok(());
        }
        if shared.tiers.iter().all(|tier| tier.log.failed().is_some()) {
            return Err(shared.trouble().unwrap_or(refusal));
        }
        let _pressure = Pressure::new(&shared);
        let _ = timeout(LOOK_AGAIN, timeout_at(self.until().into(), space)).await;
        Ok(())
    }

    /// Returns when the log of a chunk may have more of the column's tenant: one above its share gives up its own first where the
    /// log is short.
    pub async fn make_log(&mut self, column: &Column, index: u64) -> Result<(), Failure> {
        let tenant = column.tenant();
        let Some(tier) = self.shared.tier_of(&column.key(index)) else { return Ok(()) };
        while tenant.log.is_above(0) && tier.surplus().is_some() {
            let refused = || tenant.above("log", &tenant.log);
            let one = timeout_at(self.until().into(), tier.evicting.lock()).await.map_err(|_| refused())?;
            let Some(surplus) = tier.surplus() else { break };
            if self.shared.evict_log(tier, surplus, tenant).await? > 0 {
                break;
            }
            drop(one);
            if self.is_over() {
                return Err(refused());
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Returns when so little waits for the log that a write may add to it.
    pub async fn wait_clean(&mut self, refusal: impl FnOnce() -> Failure) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        while !shared.tiers.is_empty() && shared.dirty_bytes() > shared.dirty_bytes_max {
            if self.is_over() {
                return Err(shared.trouble().unwrap_or_else(refusal));
            }
            let space = shared.space.notified();
            let _ = timeout(LOOK_AGAIN, space).await;
        }
        Ok(())
    }
}
