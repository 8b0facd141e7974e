//! All columns of a node.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

use gd2fs_log::{Note, Owner, Recovered};
use gd2fs_wire::capability::Capability;
use gd2fs_wire::messages::{ColumnStat, SealItem};
use gd2fs_wire::{Clock, Code, Failure};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;

use crate::arena::Arena;
use crate::changed::Changed;
use crate::column::{Column, Opened};
use crate::columns::{Columns, Name, Slot};
use crate::data_dir::{DataDir, DataDirError};
use crate::flusher::flush_behind;
use crate::geometry::Geometry;
use crate::log_set::open_all;
use crate::owner::TierOwner;
use crate::pins::Pins;
use crate::precedence::Precedence;
use crate::recovery::{evict_surplus, recover, settle_all};
use crate::scrub::Scrubber;
use crate::shared::{Counters, Shared};
use crate::tenants::Tenants;
use crate::tier::{Tier, TierError, Tiers};
use crate::warming::{WARMING_MAX, ahead_units};

/// Twice the longest life of a capability, in the cluster's time, which capabilities expire by: when a tombstone goes, nothing
/// that could bring the file back is valid any more.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(7200);

/// What a node keeps. With logs it runs tasks of its own on the runtime on which it was opened.
pub struct Store {
    pub(crate) columns: Arc<Columns>,
    pub(crate) shared: Arc<Shared>,
    /// Kept alive for the logs, which know them weakly.
    owners: Vec<Arc<TierOwner>>,
    pub(crate) flushers: Mutex<Vec<JoinHandle<()>>>,
    pub(crate) scrubber: Scrubber,
}

impl Store {
    /// A store of at most `memory_bytes` over a data directory, with the epochs and tombstones that outlived the last one, and
    /// without a log.
    ///
    /// # Errors
    /// `Io`: the directory must learn that this life has no log.
    pub fn new(memory_bytes: usize, data: DataDir) -> Result<Store, DataDirError> {
        data.keep_logs(&[])?;
        Ok(Store::over(memory_bytes, data, Duration::ZERO, 0, Vec::new(), 1.0))
    }

    /// The same with logs, and with what they hold.
    ///
    /// # Errors
    /// Why a log cannot be used; what exists is then left as it was.
    pub async fn with_logs(memory_bytes: usize, data: DataDir, tiers: Tiers) -> Result<Store, TierError> {
        let (opened, all_there) = open_all(&tiers, &data).await?;
        let (logs, found): (Vec<Arc<Tier>>, Vec<Recovered>) = opened.into_iter().unzip();
        let dirty_bytes_max = match tiers.dirty_bytes_max {
            0 => memory_bytes / 2,
            bytes => bytes.min(memory_bytes),
        };
        let mut store =
            Store::over(memory_bytes, data, tiers.flush_delay, dirty_bytes_max, logs, tiers.tenant_share);
        recover(&store, found, all_there);
        for tier in &store.shared.tiers {
            tier.warn_if_small();
            let others =
                store.shared.tiers.iter().filter(|other| !Arc::ptr_eq(other, tier)).cloned().collect();
            let (tier, columns, runtime) = (Arc::clone(tier), Arc::clone(&store.columns), Handle::current());
            let owner = Arc::new(TierOwner { tier: Arc::clone(&tier), others, columns, runtime });
            tier.log.start(Arc::downgrade(&owner) as std::sync::Weak<dyn Owner>);
            store.owners.push(owner);
            let flusher = tokio::spawn(flush_behind(Arc::clone(&store.shared), tier));
            store.flushers.get_mut().push(flusher);
        }
        evict_surplus(&store).await;
        settle_all(&store).await;
        Ok(store)
    }

    fn over(
        memory_bytes: usize,
        data: DataDir,
        flush_delay: Duration,
        dirty_bytes_max: usize,
        tiers: Vec<Arc<Tier>>,
        tenant_share: f64,
    ) -> Store {
        let columns = Arc::new(Columns::default());
        for name in data.epochs.tombstones() {
            columns.lock(name).insert(name, Slot::Deleted);
        }
        let live_bytes_max = tiers.iter().map(|tier| tier.live_bytes_max()).sum();
        let shared = Shared {
            tenants: Tenants::new(tenant_share, memory_bytes, live_bytes_max),
            arena: Arc::new(Arena::new(memory_bytes)),
            data,
            tiers,
            flush_delay,
            dirty_bytes_max,
            space: Notify::new(),
            pressed: AtomicUsize::new(0),
            evicting: Mutex::default(),
            precedence: Precedence::new(),
            changed: Changed::default(),
            pins: Pins::default(),
            warming: Arc::new(Semaphore::new(WARMING_MAX)),
            ahead: Arc::new(Semaphore::new(ahead_units(memory_bytes))),
            counters: Counters::default(),
            version: AtomicU64::new(0),
            began: Instant::now(),
            clock: Clock::default(),
            closing: false.into(),
        };
        Store {
            columns,
            shared: Arc::new(shared),
            owners: Vec::new(),
            flushers: Mutex::default(),
            scrubber: Scrubber::default(),
        }
    }

    pub fn incarnation(&self) -> u32 {
        self.shared.data.incarnation
    }

    /// What time it is for whatever expires here; whoever hears it from control says so.
    pub fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Number of columns that are not deleted.
    pub fn columns(&self) -> usize {
        self.columns.count()
    }

    /// Admits a capability, whose signature and expiry the caller has checked, to one of its columns.
    pub async fn open(&self, capability: &Capability, column: u32) -> Result<(Arc<Column>, Opened), Failure> {
        let geometry = Geometry::new(column, capability.width, capability.stripe_unit)?;
        if capability.columns.len() != capability.width as usize {
            let message =
                format!("columns has {} entries for width {}", capability.columns.len(), capability.width);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let (epoch, born) = capability.columns[column as usize];
        let column = self.column(capability.file_id()?, geometry)?;
        let opened = column.open(capability, epoch, born).await?;
        Ok((column, opened))
    }

    /// Seals a column; durable, as far as a log knows the column, when this returns.
    pub async fn seal(&self, item: &SealItem) -> Result<u64, Failure> {
        let geometry = Geometry::new(item.column, item.width, item.stripe_unit)?;
        let file = gd2fs_wire::capability::parse_file_id(&item.file)?;
        let column = self.column(file, geometry)?;
        let sealed = column.seal(item)?;
        column.settle().await?;
        Ok(sealed)
    }

    /// Frees the columns at once and remembers, across a restart too, that they are gone. Returns the bytes of each.
    ///
    /// Forgets tombstones whose time is over: every deletion pays for it, so their number follows the rate of deletions.
    pub fn delete(&self, names: &[(u128, u32)]) -> Result<Vec<u64>, Failure> {
        let clock = &self.shared.clock;
        // Persisted first: an answered deletion is never forgotten.
        for name in self.shared.data.epochs.bury(names, clock.now(), clock.certain())? {
            self.columns.lock(name).remove(&name);
        }
        let freed = names.iter().map(|name| match self.columns.lock(*name).insert(*name, Slot::Deleted) {
            Some(Slot::Live(column)) => column.delete(),
            _ => 0,
        });
        Ok(freed.collect())
    }

    /// None if the node knows nothing of the column, not even that it was deleted.
    pub fn stat(&self, file: u128, column: u32) -> Option<ColumnStat> {
        if self.columns.is_deleted((file, column)) {
            return Some(ColumnStat { deleted: true, ..ColumnStat::default() });
        }
        self.get(file, column).map(|column| column.stat())
    }

    /// The column itself, if it is there.
    pub fn get(&self, file: u128, column: u32) -> Option<Arc<Column>> {
        self.columns.get((file, column))
    }

    fn column(&self, file: u128, geometry: Geometry) -> Result<Arc<Column>, Failure> {
        if let Some(tier) =
            self.shared.tiers.iter().find(|t| t.log.payload_bytes_max() < geometry.stripe_unit)
        {
            let (unit, most) = (geometry.stripe_unit, tier.log.payload_bytes_max());
            let message = format!(
                "stripe_unit {unit} is over the {most} bytes that {} takes at once; create the file with a smaller \
                 stripe_unit, or give the node a larger log (node.log_bytes)",
                tier.path.display()
            );
            return Err(Failure::new(Code::BadRequest, message));
        }
        let name = (file, geometry.column);
        let mut shard = self.columns.lock(name);
        if self.shared.closing.load(Relaxed) && shard.get(&name).is_none() {
            // It would miss what `close` does with every column.
            return Err(Failure::new(Code::ShuttingDown, "the node is stopping and takes no new files"));
        }
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
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.tiers.iter().for_each(|tier| tier.close());
    }
}

/// Bytes of a deleted column's records that a log found again: its tombstone says that they are gone.
pub(crate) fn bury(shared: &Shared, (file, column): Name) {
    shared.note(Note::Delete { file, column, version: shared.next_version() }).for_each(drop);
}
