//! When a transfer has to end: its deadline, or somebody who no longer wants it.

use std::time::Duration;

use gd2fs_wire::code::{Code, Failure};
use tokio::sync::watch;
use tokio::time::Instant;

/// Ends every `Stop` that was made from it.
pub struct Stopper {
    wanted: watch::Sender<bool>,
    deadline: Instant,
}

/// Every await of a transfer races with one of these.
#[derive(Clone)]
pub struct Stop {
    unwanted: watch::Receiver<bool>,
    deadline: Instant,
}

impl Stopper {
    pub fn new(timeout: Duration) -> Stopper {
        Stopper { wanted: watch::Sender::new(false), deadline: Instant::now() + timeout }
    }

    pub fn stop(&self) -> Stop {
        Stop { unwanted: self.wanted.subscribe(), deadline: self.deadline }
    }

    pub fn cancel(&self) {
        self.wanted.send_replace(true);
    }
}

impl Stop {
    /// Resolves with TIMEOUT or CANCELLED; never earlier.
    pub async fn wait(&mut self) -> Failure {
        tokio::select! {
            // A dropped Stopper means that nobody waits for the result any more.
            _ = self.unwanted.wait_for(|unwanted| *unwanted) => Failure::new(Code::Cancelled, "cancelled by the caller"),
            () = tokio::time::sleep_until(self.deadline) => Failure::new(Code::Timeout, "its time is over"),
        }
    }

    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Runs `work` until it is done or the transfer has to end; `work` is then dropped.
    pub async fn race<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            failure = self.wait() => Err(failure),
        }
    }
}
