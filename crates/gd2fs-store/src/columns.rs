//! Which columns there are, and which were deleted.

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use parking_lot::{RwLock, RwLockWriteGuard};

use crate::column::Column;

/// Enough that opens and deletes of different files do not meet; reads and writes hold their column and never come here.
const SHARDS: usize = 64;

/// File and column.
pub(crate) type Name = (u128, u32);

pub(crate) enum Slot {
    Live(Arc<Column>),
    Deleted,
}

/// Bounded by control's namespace: a column appears only for a capability or seal that control signed or sent, and goes when
/// control deletes the file.
pub(crate) struct Columns {
    shards: [RwLock<HashMap<Name, Slot>>; SHARDS],
    hasher: RandomState,
}

impl Default for Columns {
    fn default() -> Columns {
        Columns { shards: std::array::from_fn(|_| RwLock::default()), hasher: RandomState::new() }
    }
}

impl Columns {
    pub fn get(&self, name: Name) -> Option<Arc<Column>> {
        match self.shard(name).read().get(&name) {
            Some(Slot::Live(column)) => Some(Arc::clone(column)),
            _ => None,
        }
    }

    /// Whether there is a tombstone of it.
    pub fn is_deleted(&self, name: Name) -> bool {
        matches!(self.shard(name).read().get(&name), Some(Slot::Deleted))
    }

    /// The part of the table that has or would have this column.
    pub fn lock(&self, name: Name) -> RwLockWriteGuard<'_, HashMap<Name, Slot>> {
        self.shard(name).write()
    }

    /// Every column that is not deleted.
    pub fn all(&self) -> Vec<Arc<Column>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(shard.read().values().filter_map(|slot| match slot {
                Slot::Live(column) => Some(Arc::clone(column)),
                Slot::Deleted => None,
            }));
        }
        all
    }

    /// The first names behind `after`, in order: a look at all of them, and memory for those that are wanted.
    pub fn names_after(&self, after: Option<Name>, count: usize) -> Vec<Name> {
        let mut smallest: BinaryHeap<Name> = BinaryHeap::with_capacity(count + 1);
        for shard in &self.shards {
            for (name, slot) in shard.read().iter() {
                if matches!(slot, Slot::Live(_)) && Some(*name) > after {
                    smallest.push(*name);
                    if smallest.len() > count {
                        smallest.pop();
                    }
                }
            }
        }
        smallest.into_sorted_vec()
    }

    pub fn count(&self) -> usize {
        let live = |slot: &&Slot| matches!(slot, Slot::Live(_));
        self.shards.iter().map(|shard| shard.read().values().filter(live).count()).sum()
    }

    fn shard(&self, name: Name) -> &RwLock<HashMap<Name, Slot>> {
        &self.shards[self.hasher.hash_one(name) as usize % SHARDS]
    }
}
