//! The bounded way for memory that no node can map: through slots of a ring that both sides share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gd2fs_transport::{Memory, Segment, Slice};
use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::region::{Region, Regions};
use crate::stop::Stop;
use crate::trouble::Trouble;

/// A slot and what is copied out of it fit into a core's cache together.
const SLOT_BYTES: usize = 256 << 10;
/// Two parts of a request: one is filled while the other is emptied.
const SLOTS: usize = 32;

/// Longer parts are sent through the socket: they belong to files with stripe units far above the default.
pub(crate) const STAGED_BYTES_MAX: usize = SLOTS * SLOT_BYTES;

/// The ring between this client and one node.
pub(crate) struct Ring {
    region: Arc<Region>,
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
    /// A node that stands still may yet fill some of its slots: nobody takes any more of it.
    retired: AtomicBool,
}

/// Slots of one transfer; free again when this is dropped, which is when the node has answered.
pub(crate) struct Slots {
    ring: Arc<Ring>,
    indices: Vec<usize>,
    length: usize,
    _permits: OwnedSemaphorePermit,
}

impl Ring {
    pub fn new(regions: &Regions) -> Result<Ring, Failure> {
        Ok(Ring {
            region: regions.allocate(STAGED_BYTES_MAX)?,
            free: Mutex::new((0..SLOTS).collect()),
            permits: Arc::new(Semaphore::new(SLOTS)),
            retired: AtomicBool::new(false),
        })
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::SeqCst)
    }

    /// Slots for `length` bytes, `STAGED_BYTES_MAX` at most.
    pub async fn slots(self: &Arc<Ring>, length: usize, stop: &mut Stop) -> Result<Slots, Trouble> {
        let count = length.div_ceil(SLOT_BYTES);
        let permits = stop.race(self.permits.clone().acquire_many_owned(count as u32)).await;
        let permits = permits.map_err(Trouble::Stopped)?.expect("the ring's semaphore is never closed");
        if self.is_retired() {
            let why = "the node did not answer, and its staging ring was given up";
            return Err(Trouble::Lost(Failure::new(Code::Disconnected, why)));
        }
        let mut free = self.free.lock();
        let rest = free.len() - count;
        let indices = free.split_off(rest);
        Ok(Slots { ring: self.clone(), indices, length, _permits: permits })
    }
}

impl Slots {
    fn pieces(&self) -> impl Iterator<Item = (usize, usize)> {
        let begins = self.indices.iter().map(|index| index * SLOT_BYTES);
        begins.enumerate().map(|(i, begin)| (begin, SLOT_BYTES.min(self.length - i * SLOT_BYTES)))
    }

    /// These slots may never be used again, and with them the ring.
    pub fn retire_ring(&self) {
        self.ring.retired.store(true, Ordering::SeqCst);
    }

    pub fn memory(&self) -> Memory {
        let base = self.ring.region.address();
        // SAFETY: inside the ring, which `self` keeps mapped; its slots are this transfer's alone.
        Memory::new(
            self.pieces().map(|(begin, length)| unsafe { Slice::new(base.add(begin), length) }).collect(),
        )
    }

    pub fn segments(&self) -> Vec<Segment> {
        let number = self.ring.region.number;
        self.pieces().map(|(begin, length)| Segment::new(number, begin as u64, length as u32)).collect()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.ring.free.lock().append(&mut self.indices);
    }
}
