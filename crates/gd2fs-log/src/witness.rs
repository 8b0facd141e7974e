//! Whether the device itself says how far the log is durable.
//!
//! Only a header that was written after a sync says what that sync made durable. As long as there is none, damage to the last
//! records cannot be told from a tail that a power cut has torn, and a recovery would take what they replaced for the last
//! word. So where nothing is appended after a sync anyhow, a record that says nothing else follows it.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{LogError, Result};
use crate::inner::Inner;
use crate::position::Position;
use crate::record::Body;
use crate::state::Class;
use crate::upkeep::PAUSE_AFTER_FAILURE;

/// A sync waits so long for a record that is appended anyhow. Under load that is each next one, which costs nothing; a client
/// that flushes now and then has one block and one sync more for each time. Until it has passed, and the block is durable,
/// damage to what the sync covered may go unnoticed.
const QUIET: Duration = Duration::from_millis(25);

/// How far records say something, and how far headers call that durable.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Witness {
    /// Behind the last complete record that says something. A record that was written as a witness does not, so that it needs none.
    pub said: Position,
    /// The highest position that a complete header calls durable.
    pub called: Position,
    /// What `said` was at the last sync.
    wanted: Position,
    /// The highest position that a durable header calls durable.
    durable: Position,
}

impl Witness {
    /// What a recovery has found, and made durable: records that say something up to `said`, headers that speak of `called`.
    pub fn found(said: Position, called: Position) -> Witness {
        Witness { said, called, wanted: said, durable: called }
    }

    /// A sync has made durable what was complete when it began.
    pub fn synced(&mut self, at_begin: Witness) {
        (self.wanted, self.durable) = (at_begin.said, at_begin.called);
    }

    /// The position that no durable header calls durable yet.
    fn lacking(&self) -> Option<Position> {
        (self.durable < self.wanted).then_some(self.wanted)
    }
}

impl Inner {
    /// Runs until the log is closed or takes no more writes.
    pub async fn bear_witness(self: Arc<Self>) {
        loop {
            let lacking = {
                let state = self.state.lock();
                if state.closed || state.failed.is_some() {
                    return;
                }
                state.witness.lacking()
            };
            let Some(wanted) = lacking else {
                self.synced.notified().await;
                continue;
            };
            self.rest(QUIET).await;
            match self.witness(wanted).await {
                Ok(()) | Err(LogError::Closed | LogError::Failed(_)) => {}
                Err(error) => {
                    // Without room the records that it would speak of are the last ones for now: the next try is soon enough.
                    tracing::debug!("{}: {error}", self.device.path().display());
                    self.rest(PAUSE_AFTER_FAILURE).await;
                }
            }
        }
    }

    /// Makes a header durable that calls everything before `wanted` durable, unless there is one.
    async fn witness(self: &Arc<Self>, wanted: Position) -> Result<()> {
        let witness = self.state.lock().witness;
        if witness.durable >= wanted {
            return Ok(());
        }
        if witness.called >= wanted {
            return self.sync().await;
        }
        self.append_durably(Class::Note, &Body::Notes(Vec::new())).await
    }

    /// Waits, unless the log is closed.
    async fn rest(&self, time: Duration) {
        let over = tokio::time::Instant::now() + time;
        // Each sync wakes it as well.
        while !self.state.lock().closed && tokio::time::timeout_at(over, self.synced.notified()).await.is_ok()
        {
        }
    }
}
