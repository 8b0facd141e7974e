//! What one tenant holds of a tier, and in which order it would go.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::column::Column;
use crate::columns::Name;

/// A column's place in the order of eviction, the least goes first: by priority, then by its last use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub priority: u8,
    /// Microseconds of the store.
    pub used_at: u64,
    pub name: Name,
}

impl Rank {
    /// Behind every column of this priority.
    pub fn end_of(priority: u8) -> Rank {
        Rank { priority, used_at: u64::MAX, name: (u128::MAX, u32::MAX) }
    }
}

/// One tenant's account of one tier.
pub(crate) struct Ledger {
    /// Bytes that the tenant may hold while others want room.
    pub bound: u64,
    held: AtomicU64,
    order: Mutex<Order>,
}

/// The columns that have something to give up in this tier. A use does not come here: it only changes the column's own rank, and
/// the order is put right where somebody walks along it. That is once a use at most, at the price of one step in the map.
#[derive(Default)]
struct Order {
    columns: BTreeMap<Rank, Weak<Column>>,
    ranks: HashMap<Name, Rank>,
}

impl Ledger {
    pub fn new(bound: u64) -> Ledger {
        Ledger { bound, held: AtomicU64::new(0), order: Mutex::default() }
    }

    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// Whether `bytes` more would be beyond the tenant's share.
    pub fn is_above(&self, bytes: u64) -> bool {
        self.held().saturating_add(bytes) > self.bound
    }

    /// Counts `bytes` for the tenant until what is returned goes.
    pub fn hold(self: &Arc<Self>, bytes: u64) -> Held {
        self.held.fetch_add(bytes, Relaxed);
        Held { ledger: Arc::clone(self), bytes }
    }

    /// The same within the tenant's share only: however many ask at once, together they stay within it.
    pub fn hold_within(self: &Arc<Self>, bytes: u64) -> Option<Held> {
        let within = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.bound);
        self.held.fetch_update(Relaxed, Relaxed, within).ok()?;
        Some(Held { ledger: Arc::clone(self), bytes })
    }

    /// Lists a column, under its lock.
    pub fn enter(&self, column: &Arc<Column>) {
        let rank = column.rank();
        let mut order = self.order.lock();
        if let Some(former) = order.ranks.insert(rank.name, rank) {
            order.columns.remove(&former);
        }
        order.columns.insert(rank, Arc::downgrade(column));
    }

    /// Forgets a column, under its lock.
    pub fn leave(&self, name: Name) {
        let mut order = self.order.lock();
        if let Some(rank) = order.ranks.remove(&name) {
            order.columns.remove(&rank);
        }
    }

    /// The first column behind `after`.
    pub fn next(&self, after: Option<Rank>) -> Option<(Rank, Arc<Column>)> {
        let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
        loop {
            let mut order = self.order.lock();
            let (listed, column) = order.columns.range((begin, Bound::Unbounded)).next()?;
            let (listed, column) = (*listed, column.upgrade());
            let rank = column.as_ref().map(|column| column.rank());
            if rank == Some(listed) {
                return Some((listed, column.expect("it has a rank")));
            }
            let entry = order.columns.remove(&listed).expect("just seen");
            match rank {
                Some(rank) => {
                    order.columns.insert(rank, entry);
                    order.ranks.insert(rank.name, rank);
                }
                None => drop(order.ranks.remove(&listed.name)),
            }
            // Before the column, which may be the last of its kind to go.
            drop(order);
        }
    }
}

/// Bytes that count for a tenant, until this goes.
pub(crate) struct Held {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.held.fetch_sub(self.bytes, Relaxed);
    }
}
