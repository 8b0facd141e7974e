//! What decides when a column goes: whose it is, its priority, and when it was last used.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use gd2fs_wire::Capability;

use crate::column::{Column, State};
use crate::ledger::{Ledger, Rank};
use crate::tenants::Tenant;

/// Known to this process only: after a restart a column is nobody's and of the lowest priority, until it is opened.
#[derive(Default)]
pub(crate) struct Standing {
    tenant: OnceLock<Arc<Tenant>>,
    priority: AtomicU8,
    /// Microseconds of the store; it never sinks. 0: not in this life.
    used_at: AtomicU64,
    /// When it was last read; 0: never.
    read_at: AtomicU64,
}

/// Which ledgers of its tenant list a column: those of the tiers in which it may have something to give up.
#[derive(Clone, Copy, Default)]
pub(crate) struct Listed {
    pub dram: bool,
    pub log: bool,
}

impl Column {
    pub(crate) fn tenant(&self) -> &Arc<Tenant> {
        self.standing.tenant.get().unwrap_or(&self.shared.tenants.nobody)
    }

    pub(crate) fn rank(&self) -> Rank {
        let Standing { priority, used_at, .. } = &self.standing;
        Rank { priority: priority.load(Relaxed), used_at: used_at.load(Relaxed), name: self.name() }
    }

    /// Notes that somebody uses the column, and says when.
    pub(crate) fn touch(&self) -> u64 {
        let now = self.shared.now_us().max(1);
        self.touch_at(now);
        now
    }

    /// The same of a reader.
    pub(crate) fn touch_read(&self) -> u64 {
        let now = self.touch();
        self.standing.read_at.store(now, Relaxed);
        now
    }

    pub(crate) fn read_at(&self) -> u64 {
        self.standing.read_at.load(Relaxed)
    }

    pub(crate) fn touch_at(&self, used_at: u64) {
        self.standing.used_at.fetch_max(used_at, Relaxed);
    }

    /// Takes over what a capability says about the file: what the column has counts for its tenant from now on.
    pub(crate) fn belong(self: &Arc<Self>, state: &mut State, capability: &Capability) {
        let former = Arc::clone(self.tenant());
        let same_priority = self.standing.priority.swap(capability.priority, Relaxed) == capability.priority;
        let tenant = self.standing.tenant.get_or_init(|| self.shared.tenants.intern(&capability.tenant));
        let same_tenant = Arc::ptr_eq(tenant, &former);
        if same_tenant && same_priority {
            return;
        }
        if !same_tenant {
            for record in state.chunks.values_mut().filter_map(|chunk| chunk.record.as_mut()) {
                record.held = tenant.log.hold(u64::from(record.place.bytes));
            }
        }
        let move_to = |listed: bool, from: &Ledger, to: &Ledger| {
            if listed {
                from.leave(self.name());
                to.enter(self);
            }
        };
        move_to(state.listed.dram, &former.dram, &tenant.dram);
        move_to(state.listed.log, &former.log, &tenant.log);
    }

    /// The column has memory that could be given up.
    pub(crate) fn list_dram(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.listed.dram, true) {
            self.tenant().dram.enter(self);
        }
    }

    /// The column has records that could be given up.
    pub(crate) fn list_log(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.listed.log, true) {
            self.tenant().log.enter(self);
        }
    }

    pub(crate) fn unlist_dram(&self, state: &mut State) {
        if std::mem::take(&mut state.listed.dram) {
            self.tenant().dram.leave(self.name());
        }
    }

    pub(crate) fn unlist_log(&self, state: &mut State) {
        if std::mem::take(&mut state.listed.log) {
            self.tenant().log.leave(self.name());
        }
    }
}
