//! Which connection of a client's slot is the current one.
//!
//! A client that lost sight of a write retries it on a new connection with a higher generation. From the moment that HELLO is
//! answered, the older connection publishes nothing more: a publication asks `is_fenced` under the column's lock, so one that
//! asked before the HELLO is finished before anything later touches that column.

use std::collections::HashMap;
use std::sync::Arc;

use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;
use tokio::sync::watch;

/// (client, slot)
type Key = (u128, u32);

/// Bounded by the open connections: a line of generations goes with the last connection on it.
#[derive(Default)]
pub struct Fences {
    lines: Mutex<HashMap<Key, Line>>,
}

struct Line {
    highest: watch::Sender<u64>,
    members: usize,
}

/// A connection's place in its line, left by dropping it.
pub struct Membership {
    fences: Arc<Fences>,
    key: Key,
    generation: u64,
    highest: watch::Receiver<u64>,
}

impl Fences {
    /// Fences every older connection of the same client and slot.
    pub fn join(self: &Arc<Self>, key: Key, generation: u64) -> Result<Membership, Failure> {
        let mut lines = self.lines.lock();
        let highest = match lines.get_mut(&key) {
            Some(line) if generation <= *line.highest.borrow() => {
                let highest = *line.highest.borrow();
                return Err(Failure::new(
                    Code::StaleWriter,
                    format!(
                        "generation {generation} of slot {} is not above {highest}, which is connected already",
                        key.1
                    ),
                ));
            }
            Some(line) => {
                line.members += 1;
                line.highest.send_replace(generation);
                line.highest.subscribe()
            }
            None => {
                let (sender, receiver) = watch::channel(generation);
                lines.insert(key, Line { highest: sender, members: 1 });
                receiver
            }
        };
        Ok(Membership { fences: self.clone(), key, generation, highest })
    }
}

impl Membership {
    pub fn is_fenced(&self) -> bool {
        *self.highest.borrow() > self.generation
    }

    /// Waits until a newer connection has taken over.
    pub async fn fenced(&mut self) {
        let generation = self.generation;
        // The sender lives as long as this membership, so this only ends by a takeover.
        let _ = self.highest.wait_for(|highest| *highest > generation).await;
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut lines = self.fences.lines.lock();
        if let Some(line) = lines.get_mut(&self.key) {
            line.members -= 1;
            if line.members == 0 {
                lines.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_generation_fences_and_lines_go_with_their_connections() {
        let fences = Arc::new(Fences::default());
        let first = fences.join((1, 0), 5).unwrap();
        let other_slot = fences.join((1, 1), 1).unwrap();
        assert_eq!(fences.join((1, 0), 5).err().unwrap().code, Code::StaleWriter);
        let second = fences.join((1, 0), 6).unwrap();
        assert!(first.is_fenced() && !second.is_fenced() && !other_slot.is_fenced());
        drop(second);
        assert!(first.is_fenced());
        assert_eq!(fences.join((1, 0), 6).err().unwrap().code, Code::StaleWriter, "a zombie keeps the line");
        drop((first, other_slot));
        assert!(fences.lines.lock().is_empty());
        fences.join((1, 0), 1).unwrap();
    }
}
