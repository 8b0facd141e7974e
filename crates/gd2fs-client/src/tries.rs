//! What is tried again, how often, and after how long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_wire::code::{Code, Failure};

use crate::dial::CONNECT_TIMEOUT;
use crate::layout::Layout;
use crate::layouts::LayoutCell;
use crate::request::{Direction, Shared};
use crate::stats::add;
use crate::stop::Stop;
use crate::trouble::Trouble;

const RETRIES_MAX: u32 = 4;
/// Wrong bytes once are an accident of the way; twice, the way is broken.
const CHECKSUM_RETRIES_MAX: u32 = 1;
const BACKOFF_FIRST: Duration = Duration::from_millis(20);

/// The tries of one exchange with a node that may be repeated.
pub(crate) struct Tries<'a> {
    shared: &'a Shared,
    cell: &'a Arc<LayoutCell>,
    direction: Direction,
    began: Instant,
    retries: u32,
    checksums: u32,
}

impl<'a> Tries<'a> {
    pub fn new(shared: &'a Shared, cell: &'a Arc<LayoutCell>, direction: Direction) -> Tries<'a> {
        Tries { shared, cell, direction, began: Instant::now(), retries: 0, checksums: 0 }
    }

    /// How often it was tried again so far.
    pub fn count(&self) -> u32 {
        self.retries
    }

    /// After a try that brought nothing: returns when the next one is due, with a newer layout in the cell where `layout` was what
    /// was wrong. Err: there is none; `what` names what was tried.
    pub async fn wait(
        &mut self,
        trouble: Trouble,
        layout: &Arc<Layout>,
        what: impl Fn() -> String,
        stop: &mut Stop,
    ) -> Result<(), Failure> {
        if trouble.is_checksum() {
            add(&self.shared.stats.checksum_failures, 1);
        }
        let named = |failure: Failure| Failure::new(failure.code, format!("{}: {}", what(), failure.message));
        let again = self.again(&trouble, layout);
        let failure = trouble.into_failure();
        if !again {
            return Err(named(failure));
        }
        add(&self.shared.stats.retries, 1);
        let wait = async {
            if needs_layout(failure.code) {
                let timeout = CONNECT_TIMEOUT * 2;
                self.cell.refresh(layout, self.direction, &self.shared.control, timeout).await?;
            }
            tokio::time::sleep(self.backoff()).await;
            Ok::<(), Failure>(())
        };
        match stop.race(wait).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(refresh)) => {
                let why = format!("{}; no newer layout: {}", failure.message, refresh.message);
                Err(named(Failure::new(failure.code, why)))
            }
            Err(stopped) => {
                let why = format!("{} (before that, {})", stopped.message, failure);
                Err(named(Failure::new(stopped.code, why)))
            }
        }
    }

    fn again(&mut self, trouble: &Trouble, layout: &Layout) -> bool {
        self.retries += 1;
        self.retries <= RETRIES_MAX
            && match trouble {
                Trouble::Stopped(_) => false,
                Trouble::Lost(_) => true,
                // An absent node costs its caller one connect timeout, not one per retry.
                Trouble::Unreachable(_) => self.began.elapsed() < CONNECT_TIMEOUT,
                Trouble::Refused(failure) => match failure.code {
                    Code::Overloaded | Code::ShuttingDown => true,
                    Code::Checksum => {
                        self.checksums += 1;
                        self.checksums <= CHECKSUM_RETRIES_MAX
                    }
                    code => needs_layout(code) && layout.refresh,
                },
            }
    }

    fn backoff(&self) -> Duration {
        let full = BACKOFF_FIRST * 2u32.pow(self.retries.min(RETRIES_MAX));
        // Half of it is random, so that a crowd that failed together does not return together.
        full / 2 + full.mul_f64(random_fraction() / 2.0)
    }
}

fn needs_layout(code: Code) -> bool {
    matches!(
        code,
        Code::StaleLayout | Code::StaleIncarnation | Code::WrongNode | Code::NotHere | Code::Expired
    )
}

/// In [0, 1); good enough to spread retries.
fn random_fraction() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as f64 / (u64::MAX as f64 + 1.0)
}
