//! Which writes no FLUSH has covered yet. A node that was started anew makes durable what it has, and knows nothing of what it
//! had acknowledged before: only whoever wrote can tell that the answer comes from another one than the promise.

use std::sync::atomic::{AtomicU64, Ordering};

use gd2fs_wire::code::{Code, Failure};

/// An incarnation that no node answers with: writes were acknowledged by two of them, of which one is gone.
const SEVERAL: u32 = u32::MAX;

/// Of one file: for each column the incarnation that has acknowledged writes since the last FLUSH, and how many, as
/// (incarnation << 32 | count); 0: none.
pub(crate) struct Unflushed(Box<[AtomicU64]>);

/// The writes of a column that were acknowledged before a FLUSH was sent.
#[derive(Clone, Copy)]
pub(crate) struct Covered {
    column: usize,
    state: u64,
}

impl Unflushed {
    pub fn new(width: usize) -> Unflushed {
        Unflushed((0..width).map(|_| AtomicU64::new(0)).collect())
    }

    /// A write to a column was acknowledged. Must be called before anybody learns of it.
    pub fn acknowledged(&self, column: usize, incarnation: u32) {
        let next = |state: u64| {
            let (before, count) = ((state >> 32) as u32, state as u32);
            let now = if before == 0 || before == incarnation { incarnation } else { SEVERAL };
            // The count only tells that there was another write: it may begin anew.
            Some(u64::from(now) << 32 | u64::from(count.wrapping_add(1)))
        };
        let _ = self.0[column].fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }

    /// What a FLUSH that is sent from now on covers.
    pub fn before_flush(&self, column: usize) -> Covered {
        Covered { column, state: self.0[column].load(Ordering::SeqCst) }
    }

    /// A node of this incarnation says that all is durable that it has acknowledged. LOST, once: what it covers was acknowledged by
    /// an earlier one.
    pub fn flushed(&self, covered: Covered, incarnation: u32) -> Result<(), Failure> {
        let Covered { column, state } = covered;
        // Writes acknowledged meanwhile wait for the next one.
        let _ = self.0[column].compare_exchange(state, 0, Ordering::SeqCst, Ordering::SeqCst);
        let promised = (state >> 32) as u32;
        if state == 0 || promised == incarnation {
            return Ok(());
        }
        let message = format!(
            "the node of column {column} was started anew, as incarnation {incarnation}, after it had acknowledged writes: what of \
             them it had not made durable by then is lost; read them back, or write them again"
        );
        Err(Failure::new(Code::Lost, message))
    }

    pub fn is_clean(&self) -> bool {
        self.0.iter().all(|state| state.load(Ordering::SeqCst) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flush(unflushed: &Unflushed, incarnation: u32) -> Result<(), Code> {
        unflushed.flushed(unflushed.before_flush(0), incarnation).map_err(|failure| failure.code)
    }

    #[test]
    fn a_restart_between_write_and_flush_is_told_once() {
        let unflushed = Unflushed::new(2);
        assert_eq!(flush(&unflushed, 1), Ok(()), "nothing was written");
        unflushed.acknowledged(0, 1);
        assert_eq!(flush(&unflushed, 1), Ok(()));
        assert_eq!(flush(&unflushed, 2), Ok(()), "all was durable before the node went");
        unflushed.acknowledged(0, 2);
        assert!(!unflushed.is_clean());
        assert_eq!(flush(&unflushed, 3), Err(Code::Lost));
        assert_eq!((flush(&unflushed, 3), unflushed.is_clean()), (Ok(()), true));
    }

    #[test]
    fn a_write_to_the_new_node_does_not_hide_the_loss_of_the_former() {
        let unflushed = Unflushed::new(1);
        unflushed.acknowledged(0, 1);
        unflushed.acknowledged(0, 2);
        assert_eq!(flush(&unflushed, 2), Err(Code::Lost));
    }

    #[test]
    fn what_is_written_during_a_flush_waits_for_the_next() {
        let unflushed = Unflushed::new(1);
        unflushed.acknowledged(0, 1);
        let covered = unflushed.before_flush(0);
        unflushed.acknowledged(0, 1);
        unflushed.flushed(covered, 1).unwrap();
        assert!(!unflushed.is_clean());
        assert_eq!(flush(&unflushed, 2), Err(Code::Lost));
    }
}
