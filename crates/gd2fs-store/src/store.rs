//! All columns of a node.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use gd2fs_wire::capability::Capability;
use gd2fs_wire::messages::{ColumnStat, SealItem};
use gd2fs_wire::{Code, Failure};
use parking_lot::{Mutex, RwLock};

use crate::arena::Arena;
use crate::asks::Asks;
use crate::column::{Column, Opened, Shared};
use crate::data_dir::DataDir;
use crate::geometry::Geometry;
use crate::scrub::Scrubber;

/// Enough that opens and deletes of different files do not meet; reads and writes hold their column and never come here.
const SHARDS: usize = 64;
/// Twice the longest life of a capability: when a tombstone goes, nothing that could bring the file back is valid any more.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(7200);

pub(crate) type Name = (u128, u32);

/// The columns are bounded by control's namespace: one appears only for a capability or seal that control signed or sent, and
/// goes when control deletes the file.
pub struct Store {
    pub(crate) shards: [RwLock<HashMap<Name, Slot>>; SHARDS],
    hasher: RandomState,
    /// Tombstones in the order in which they expire.
    graves: Mutex<VecDeque<(Instant, Name)>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) scrubber: Scrubber,
}

pub(crate) enum Slot {
    Live(Arc<Column>),
    Deleted,
}

impl Store {
    /// A store of at most `memory_bytes` over a data directory, with the epochs and tombstones that outlived the last one.
    pub fn new(memory_bytes: usize, data: DataDir) -> Store {
        let store = Store {
            shards: std::array::from_fn(|_| RwLock::default()),
            hasher: RandomState::new(),
            graves: Mutex::default(),
            shared: Arc::new(Shared {
                arena: Arc::new(Arena::new(memory_bytes)),
                data,
                asks: Asks::default(),
            }),
            scrubber: Scrubber::default(),
        };
        let now = SystemTime::now();
        for (name, deleted_at) in store.shared.data.epochs.tombstones() {
            let age = now.duration_since(deleted_at).unwrap_or_default();
            store.shard(name).write().insert(name, Slot::Deleted);
            store.graves.lock().push_back((Instant::now() + TOMBSTONE_LIFE.saturating_sub(age), name));
        }
        store
    }

    pub fn incarnation(&self) -> u32 {
        self.shared.data.incarnation
    }

    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Number of columns that are not deleted.
    pub fn columns(&self) -> usize {
        let live = |slot: &&Slot| matches!(slot, Slot::Live(_));
        self.shards.iter().map(|shard| shard.read().values().filter(live).count()).sum()
    }

    /// Admits a capability, whose signature and expiry the caller has checked, to one of its columns.
    pub fn open(&self, capability: &Capability, column: u32) -> Result<(Arc<Column>, Opened), Failure> {
        let geometry = Geometry::new(column, capability.width, capability.stripe_unit)?;
        if capability.columns.len() != capability.width as usize {
            let message =
                format!("columns has {} entries for width {}", capability.columns.len(), capability.width);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let (epoch, born) = capability.columns[column as usize];
        let column = self.column(capability.file_id()?, geometry)?;
        let opened = column.open(capability, epoch, born)?;
        Ok((column, opened))
    }

    pub fn seal(&self, item: &SealItem) -> Result<u64, Failure> {
        let geometry = Geometry::new(item.column, item.width, item.stripe_unit)?;
        let file = gd2fs_wire::capability::parse_file_id(&item.file)?;
        self.column(file, geometry)?.seal(item)
    }

    /// Frees the columns at once and remembers, across a restart too, that they are gone. Returns the bytes of each.
    pub fn delete(&self, names: &[(u128, u32)]) -> Result<Vec<u64>, Failure> {
        self.bury_expired();
        // Persisted first: an answered deletion is never forgotten.
        self.shared.data.epochs.bury(names, SystemTime::now())?;
        let expiry = Instant::now() + TOMBSTONE_LIFE;
        let freed = names.iter().map(|name| {
            let former = self.shard(*name).write().insert(*name, Slot::Deleted);
            if !matches!(former, Some(Slot::Deleted)) {
                self.graves.lock().push_back((expiry, *name));
            }
            match former {
                Some(Slot::Live(column)) => column.delete(),
                _ => 0,
            }
        });
        Ok(freed.collect())
    }

    /// None if the node knows nothing of the column.
    pub fn stat(&self, file: u128, column: u32) -> Option<ColumnStat> {
        match self.shard((file, column)).read().get(&(file, column)) {
            Some(Slot::Live(column)) => Some(column.stat()),
            _ => None,
        }
    }

    /// The column itself, if it is there.
    pub fn get(&self, file: u128, column: u32) -> Option<Arc<Column>> {
        match self.shard((file, column)).read().get(&(file, column)) {
            Some(Slot::Live(column)) => Some(column.clone()),
            _ => None,
        }
    }

    fn column(&self, file: u128, geometry: Geometry) -> Result<Arc<Column>, Failure> {
        let name = (file, geometry.column);
        let mut shard = self.shard(name).write();
        let slot = shard
            .entry(name)
            .or_insert_with(|| Slot::Live(Arc::new(Column::new(file, geometry, self.shared.clone()))));
        match slot {
            Slot::Deleted => Err(Failure::new(Code::Deleted, format!("file {file:032x} was deleted"))),
            Slot::Live(column) if column.geometry() != geometry => Err(Failure::new(
                Code::BadRequest,
                format!("file {file:032x} has the shape {:?}, not {geometry:?}", column.geometry()),
            )),
            Slot::Live(column) => Ok(column.clone()),
        }
    }

    /// Forgets tombstones whose time is over; every deletion pays for it, so their number follows the rate of deletions.
    fn bury_expired(&self) {
        let now = Instant::now();
        let mut graves = self.graves.lock();
        while graves.front().is_some_and(|(expiry, _)| *expiry <= now) {
            let (_, name) = graves.pop_front().expect("just seen");
            let mut shard = self.shard(name).write();
            if matches!(shard.get(&name), Some(Slot::Deleted)) {
                shard.remove(&name);
            }
        }
    }

    pub(crate) fn shard(&self, name: Name) -> &RwLock<HashMap<Name, Slot>> {
        &self.shards[self.hasher.hash_one(name) as usize % SHARDS]
    }
}
