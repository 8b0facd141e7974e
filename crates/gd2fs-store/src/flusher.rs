//! Writes dirty chunks to their log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_log::LogError;
use gd2fs_wire::Failure;
use tokio::task::JoinSet;

use crate::column::Column;
use crate::dirty::Next;
use crate::shared::Shared;
use crate::tenants::Tenant;
use crate::tier::{Tier, failure_of};

/// Enough for any disk, at the usual chunk of 4 MiB.
const APPENDS_MAX: usize = 64;
const APPEND_BYTES_MAX: usize = 256 << 20;
/// After an append that failed, so that a broken disk is not asked without a pause: twice as long each time, but never so long
/// that a disk that works again is left alone.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What became of an append: bytes, and whether the next may follow at once.
struct Ended {
    bytes: usize,
    well: bool,
}

/// How a flusher treats a log that fails.
#[derive(Default)]
struct Pace {
    /// Nothing is begun before then.
    until: Option<Instant>,
    /// The last pause; zero while all is well.
    pause: Duration,
}

impl Pace {
    fn ended(&mut self, well: bool) {
        if well {
            *self = Pace::default();
        } else if self.until.is_none() {
            // Those that failed together with the first count once.
            self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            self.until = Some(Instant::now() + self.pause);
        }
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// After a failure one append finds out whether the log takes more.
    fn appends_max(&self) -> usize {
        match self.until {
            Some(_) => 0,
            None if self.pause.is_zero() => APPENDS_MAX,
            None => 1,
        }
    }
}

/// Runs until the log is closed.
pub(crate) async fn flush_behind(shared: Arc<Shared>, tier: Arc<Tier>) {
    let mut appends: JoinSet<Ended> = JoinSet::new();
    let mut bytes_in_flight = 0;
    let mut pace = Pace::default();
    loop {
        if pace.is_over() {
            pace.until = None;
        }
        let mut until = pace.until;
        while appends.len() < pace.appends_max() && bytes_in_flight < APPEND_BYTES_MAX {
            let delay = if shared.hurries() { Duration::ZERO } else { shared.flush_delay };
            match tier.queue.next(delay) {
                Next::Nothing => {
                    if appends.is_empty() {
                        // Nothing is left that the log has not taken.
                        *tier.trouble.lock() = None;
                        pace = Pace::default();
                    }
                    break;
                }
                Next::At(at) => {
                    until = Some(at);
                    break;
                }
                Next::Chunk((column, index)) => {
                    let Some(column) = column.upgrade() else { continue };
                    if let Some((bytes, version, append)) = column.begin_append(&tier, index) {
                        bytes_in_flight += bytes;
                        let (shared, tier) = (Arc::clone(&shared), Arc::clone(&tier));
                        appends.spawn(async move {
                            let begun = Instant::now();
                            let result = append.await;
                            shared.counters.flush_latency.record(begun.elapsed());
                            let well =
                                ended(&shared, &tier, &column, (begun, bytes), result.as_ref().err()).await;
                            if result.is_err() {
                                column.not_appended(&tier, index, version);
                            }
                            Ended { bytes, well }
                        });
                    }
                }
            }
        }
        let timer = async {
            match until {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(joined) = appends.join_next() => match joined {
                Ok(Ended { bytes, well }) => {
                    bytes_in_flight -= bytes;
                    pace.ended(well);
                }
                // A panic was reported by the panic's hook; its bytes count on, which is safe.
                Err(_) => pace.ended(false),
            },
            () = tier.queue.wake.notified() => {}
            () = timer => {}
        }
        if tier.is_closed() && appends.is_empty() {
            return;
        }
    }
}

/// Whether the log takes more after an append that began then and had so many bytes.
async fn ended(
    shared: &Shared,
    tier: &Arc<Tier>,
    column: &Column,
    (begun, bytes): (Instant, usize),
    error: Option<&LogError>,
) -> bool {
    let tenant = column.tenant();
    let trouble = match error {
        None | Some(LogError::Superseded) => {
            // One of those that end is enough, and others need not wait for it.
            if let Ok(_one) = tier.evicting.try_lock()
                && let Some(surplus) = tier.surplus()
                && let Err(failure) = shared.evict_log(tier, surplus, tenant).await
            {
                tracing::warn!("{}: {failure}", tier.path.display());
            }
            None
        }
        Some(full @ LogError::NoSpace { .. }) => match make_room(shared, tier, tenant, bytes as u64).await {
            Ok(freed) if freed > 0 => None,
            Ok(_) => Some(failure_of(full)),
            Err(failure) => Some(failure),
        },
        Some(other) => Some(failure_of(other)),
    };
    let well = trouble.is_none();
    if let Some(failure) = &trouble {
        tracing::warn!("{}: {failure}", tier.path.display());
    }
    *tier.trouble.lock() = trouble.map(|failure| (begun, failure));
    well
}

/// Gives something up for bytes that were acknowledged already. At last in disregard of the tenants' shares: a log that stood still
/// for one of them would do so for all.
async fn make_room(
    shared: &Shared,
    tier: &Arc<Tier>,
    tenant: &Arc<Tenant>,
    bytes: u64,
) -> Result<u64, Failure> {
    match shared.evict_log(tier, bytes, tenant).await {
        Ok(0) => shared.evict_log(tier, bytes, &shared.tenants.nobody).await,
        other => other,
    }
}
