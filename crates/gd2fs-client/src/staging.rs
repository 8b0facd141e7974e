//! The bounded way for memory that no node can map: through slots of a ring that both sides share.

use std::sync::Arc;

use gd2fs_transport::shm;
use gd2fs_transport::{Memory, Segment, Slice};
use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::stop::Stop;
use crate::trouble::Trouble;

/// A slot and what is copied out of it fit into a core's cache together.
const SLOT_BYTES: usize = 256 << 10;
/// Two parts of a request: one is filled while the other is emptied.
const SLOTS: usize = 32;

/// The ring of one connection. It goes with it: a node that stands still keeps pages that nobody reads.
pub(crate) struct Ring {
    pub number: u32,
    pub memory: shm::Region,
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
}

/// Slots of one transfer; free again when this is dropped, which is when the node has answered.
pub(crate) struct Slots {
    ring: Arc<Ring>,
    indices: Vec<usize>,
    length: usize,
    _permits: OwnedSemaphorePermit,
}

impl Ring {
    pub fn new(number: u32) -> Result<Ring, Failure> {
        let memory = shm::Region::create(SLOTS * SLOT_BYTES).map_err(|error| {
            Failure::new(Code::NoSpace, format!("the system gives no memory for a staging ring: {error}"))
        })?;
        let free = Mutex::new((0..SLOTS).collect());
        Ok(Ring { number, memory, free, permits: Arc::new(Semaphore::new(SLOTS)) })
    }

    /// Slots for `length` bytes, which is a part's length at most.
    pub async fn slots(self: &Arc<Ring>, length: usize, stop: &mut Stop) -> Result<Slots, Trouble> {
        let count = length.div_ceil(SLOT_BYTES);
        let permits = stop.race(self.permits.clone().acquire_many_owned(count as u32)).await;
        let permits = permits.map_err(Trouble::Stopped)?.expect("the ring's semaphore is never closed");
        let mut free = self.free.lock();
        let rest = free.len() - count;
        let mut indices = free.split_off(rest);
        // Neighbours make one segment.
        indices.sort_unstable();
        Ok(Slots { ring: self.clone(), indices, length, _permits: permits })
    }
}

impl Slots {
    fn pieces(&self) -> impl Iterator<Item = (usize, usize)> {
        let begins = self.indices.iter().map(|index| index * SLOT_BYTES);
        begins.enumerate().map(|(i, begin)| (begin, SLOT_BYTES.min(self.length - i * SLOT_BYTES)))
    }

    pub fn memory(&self) -> Memory {
        let base = self.ring.memory.address();
        // SAFETY: inside the ring, which `self` keeps mapped; its slots are this transfer's alone.
        Memory::new(
            self.pieces().map(|(begin, length)| unsafe { Slice::new(base.add(begin), length) }).collect(),
        )
    }

    pub fn segments(&self) -> Vec<Segment> {
        let number = self.ring.number;
        self.pieces().map(|(begin, length)| Segment::new(number, begin as u64, length as u32)).collect()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.ring.free.lock().append(&mut self.indices);
    }
}
