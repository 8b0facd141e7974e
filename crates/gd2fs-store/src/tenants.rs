//! Whose the bytes of a node are.
//!
//! A tenant may take what nobody else wants. Where a tier is short, one above its share gives up its own first, and nobody is
//! deprived of what lies within a share for one that is above.

use std::collections::HashMap;
use std::sync::Arc;

use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;

use crate::arena::Arena;
use crate::frame::Frame;
use crate::ledger::Ledger;

/// A tenant above its share leaves this part of the memory to the others, who would have to wait for an eviction otherwise.
const SPARE: usize = 16;

/// One tenant's ledgers.
pub(crate) struct Tenant {
    /// Empty: nobody's, from the start of a node until somebody opens the column.
    pub name: Box<str>,
    pub dram: Arc<Ledger>,
    pub log: Arc<Ledger>,
    /// What it has pinned, a range once for each pin: more than its share would keep from the others what is theirs.
    pub pins: Arc<Ledger>,
}

/// The tenants that were seen: as many at most as control knows, since a name comes with a signed capability.
pub(crate) struct Tenants {
    dram_bound: u64,
    log_bound: u64,
    pins_bound: u64,
    pub nobody: Arc<Tenant>,
    known: Mutex<HashMap<Box<str>, Arc<Tenant>>>,
}

impl Tenants {
    /// `share` of each tier is what one tenant may hold while others want room; 1: no bound.
    pub fn new(share: f64, memory_bytes: usize, log_bytes: u64) -> Tenants {
        let bound = |bytes: u64| if share < 1.0 { (bytes as f64 * share) as u64 } else { u64::MAX };
        Tenants {
            dram_bound: bound(memory_bytes as u64),
            log_bound: bound(log_bytes),
            pins_bound: bound(if log_bytes > 0 { log_bytes } else { memory_bytes as u64 }),
            nobody: Arc::new(Tenant::new("", u64::MAX, u64::MAX, u64::MAX)),
            known: Mutex::default(),
        }
    }

    pub fn get(&self, name: &str) -> Option<Arc<Tenant>> {
        self.known.lock().get(name).cloned()
    }

    /// The one of this name, always the same.
    pub fn intern(&self, name: &str) -> Arc<Tenant> {
        let mut known = self.known.lock();
        if let Some(tenant) = known.get(name) {
            return Arc::clone(tenant);
        }
        let tenant = Arc::new(Tenant::new(name, self.dram_bound, self.log_bound, self.pins_bound));
        known.insert(name.into(), Arc::clone(&tenant));
        tenant
    }

    /// All of them, and nobody.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        let mut all: Vec<_> = self.known.lock().values().cloned().collect();
        all.push(Arc::clone(&self.nobody));
        all
    }
}

impl Tenant {
    fn new(name: &str, dram_bound: u64, log_bound: u64, pins_bound: u64) -> Tenant {
        let [dram, log, pins] = [dram_bound, log_bound, pins_bound].map(|bound| Arc::new(Ledger::new(bound)));
        Tenant { name: name.into(), dram, log, pins }
    }

    /// A frame of at least `bytes` that counts for the tenant until its last holder is gone.
    pub fn frame(&self, arena: &Arc<Arena>, bytes: usize) -> Result<Frame, Failure> {
        let capacity = Arena::frame_bytes(bytes)?;
        let spare = arena.capacity() / SPARE;
        let held = match self.dram.hold_within(capacity as u64) {
            Some(held) => held,
            None if arena.used() + capacity + spare <= arena.capacity() => self.dram.hold(capacity as u64),
            None => return Err(self.above("memory", &self.dram)),
        };
        arena.allocate_for(bytes, Some(held))
    }

    /// The refusal of what a tier is too short for.
    pub fn above(&self, tier: &str, ledger: &Ledger) -> Failure {
        let (name, held, bound) = (&self.name, ledger.held(), ledger.bound);
        let message = format!(
            "the {tier} of this node is short, and tenant {name:?} holds {held} bytes of it, its share being {bound}: what it has is in use or pinned, and the rest is others'; delete files, or raise node.tenant_share"
        );
        Failure::new(Code::NoSpace, message)
    }
}
