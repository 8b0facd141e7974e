//! Giving up memory, and space in the logs, for what is needed more.
//!
//! Columns of the lowest priority go first, among them those least recently used. What is gone for good goes from a column's
//! tail on, since the prefix that remains is of use. Of the columns that one session refers to, those with later tokens go first: a plan's end counts as
//! the last use of all that it has reused, from its last range to its first (see `Store::unpin`). By their reads alone it would
//! be the other way round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use gd2fs_wire::Failure;

use crate::column::Column;
use crate::ends::Loss;
use crate::ledger::{Ledger, Rank};
use crate::shared::Shared;
use crate::tenants::Tenant;
use crate::tier::Tier;

/// At least this part of a tier, or of a tenant's share, is given up at once, so that the search pays.
const PART: u64 = 64;
/// What was used so lately is not given up for good: whoever is about to use it, or still writes it, would lose it at once.
const RECENT_US: u64 = 250_000;

impl Shared {
    /// Gives up at least `bytes` of memory for a tenant if there is something to give up, and returns how many. `spare`:
    /// nothing that is being read, as long as the log is about to make other memory free.
    pub fn evict(&self, bytes: usize, asker: &Arc<Tenant>, spare: bool) -> usize {
        let _one = self.evicting.lock();
        let goal = (bytes as u64).max(asker.dram.bound.min(self.arena.capacity() as u64) / PART);
        let mut freed = 0;
        for sources in self.turns(|tenant| &tenant.dram, asker, bytes as u64) {
            let mut walk = Walk::new(sources);
            while freed < goal
                && let Some((column, most)) = walk.next()
            {
                let most = most.min(goal - freed);
                freed += if !self.tiers.is_empty() {
                    if spare && self.is_being_read(&column) { 0 } else { column.cool(most) }
                } else if self.is_recent(&column) {
                    walk.skip_priority();
                    0
                } else {
                    column.drop_tail(most)
                };
            }
        }
        if self.tiers.is_empty() && freed > 0 {
            self.precedence.gave_up();
        }
        self.counters.evicted_dram_bytes.fetch_add(freed, Relaxed);
        freed as usize
    }

    /// Gives up chunks of one log so that a tenant can write `bytes` or more, and returns how many bytes that was once it is
    /// durable that they are gone. They are gone, and counted, also where that fails.
    pub async fn evict_log(&self, tier: &Arc<Tier>, bytes: u64, asker: &Arc<Tenant>) -> Result<u64, Failure> {
        let goal = bytes.max(asker.log.bound.min(tier.live_bytes_max()) / PART);
        let (mut freed, mut settled) = (0, Ok(()));
        for sources in self.turns(|tenant| &tenant.log, asker, bytes) {
            let mut walk = Walk::new(sources);
            while freed < goal
                && settled.is_ok()
                && let Some((column, most)) = walk.next()
            {
                if self.is_recent(&column) {
                    walk.skip_priority();
                    continue;
                }
                let of_column = column.forget_tail(tier, most.min(goal - freed));
                freed += of_column;
                if of_column > 0 {
                    settled = column.settle().await;
                }
            }
        }
        if freed > 0 {
            self.precedence.gave_up();
        }
        self.counters.evicted_log_bytes.fetch_add(freed, Relaxed);
        settled.map(|()| freed)
    }

    /// Where `bytes` for a tenant are looked for, one after the other. Beyond its share: first among what is its own, then in
    /// what others have beyond theirs, or nobody has. Within: first in what others have beyond theirs, then everywhere.
    fn turns(
        &self,
        ledger: impl Fn(&Tenant) -> &Arc<Ledger>,
        asker: &Arc<Tenant>,
        bytes: u64,
    ) -> [Vec<Source>; 2] {
        let all = self.tenants.all();
        let ledgers = || all.iter().map(|tenant| Arc::clone(ledger(tenant)));
        let surplus = || {
            let above = ledgers().filter(|ledger| ledger.is_above(0));
            above.map(|ledger| Source { keeps: ledger.bound, ledger })
        };
        let whole = |ledger| Source { keeps: 0, ledger };
        if ledger(asker).is_above(bytes) {
            let nobodys = whole(Arc::clone(ledger(&self.tenants.nobody)));
            [vec![whole(Arc::clone(ledger(asker)))], surplus().chain([nobodys]).collect()]
        } else {
            [surplus().collect(), ledgers().map(whole).collect()]
        }
    }

    fn is_being_read(&self, column: &Column) -> bool {
        let read_at = column.read_at();
        read_at > 0 && self.now_us().saturating_sub(read_at) < RECENT_US
    }

    /// Nothing counts that was before this life.
    fn is_recent(&self, column: &Column) -> bool {
        let used_at = column.rank().used_at;
        used_at > 0 && self.now_us().saturating_sub(used_at) < RECENT_US
    }
}

/// A ledger of which something may go, down to what it keeps.
struct Source {
    ledger: Arc<Ledger>,
    keeps: u64,
}

/// The columns of several ledgers in the order in which they go: a step costs the logarithm of their number.
struct Walk {
    sources: Vec<Source>,
    /// The next column of each source.
    heads: BTreeMap<(Rank, usize), Arc<Column>>,
    /// Where the last column came from, and behind which rank its source goes on.
    last: Option<(usize, Rank)>,
}

impl Walk {
    fn new(sources: Vec<Source>) -> Walk {
        let mut walk = Walk { heads: BTreeMap::new(), last: None, sources };
        (0..walk.sources.len()).for_each(|source| walk.advance(source, None));
        walk
    }

    fn advance(&mut self, source: usize, after: Option<Rank>) {
        if let Some((rank, column)) = self.sources[source].ledger.next(after) {
            self.heads.insert((rank, source), column);
        }
    }

    /// A column, and the bytes that may go of its tenant.
    fn next(&mut self) -> Option<(Arc<Column>, u64)> {
        loop {
            if let Some((source, rank)) = self.last.take() {
                self.advance(source, Some(rank));
            }
            let ((rank, source), column) = self.heads.pop_first()?;
            let Source { ledger, keeps } = &self.sources[source];
            let most = ledger.held().saturating_sub(*keeps);
            if most > 0 {
                self.last = Some((source, rank));
                return Some((column, most));
            }
        }
    }

    /// Leaves out what comes behind the last column in its source and has its priority: it was used later still.
    fn skip_priority(&mut self) {
        self.last = self.last.map(|(source, rank)| (source, Rank::end_of(rank.priority)));
    }
}

impl Column {
    /// Gives up the frames of clean chunks, those that were used least recently first, until `goal` bytes are free. They can be
    /// lifted again: what counts is who needs them next, and not which prefix remains.
    fn cool(&self, goal: u64) -> u64 {
        let mut state = self.state.lock();
        let mut clean: Vec<_> = state.chunks.values_mut().rev().filter(|chunk| chunk.is_clean()).collect();
        clean.sort_by_key(|chunk| chunk.used_at);
        let mut freed = 0;
        let mut more = false;
        for chunk in clean {
            if freed >= goal {
                more = true;
                break;
            }
            if chunk.can_go() {
                freed += chunk.cool() as u64;
            } else {
                more = true;
            }
        }
        if !more {
            self.unlist_dram(&mut state);
        }
        freed
    }

    /// Without a log: gives up whole chunks, from the last on, until `goal` bytes are free.
    fn drop_tail(&self, goal: u64) -> u64 {
        let now = Instant::now();
        let mut state = self.state.lock();
        let mut freed = 0;
        while freed < goal
            && let Some((index, chunk)) = state.chunks.last_key_value()
            && chunk.can_go()
            && !self.is_pinned(*index, now)
        {
            freed += chunk.frame().map_or(0, |frame| frame.capacity() as u64);
            let index = *index;
            self.lose(&mut state, index, Loss::Evicted);
        }
        if state.chunks.is_empty() {
            self.unlist_dram(&mut state);
        }
        freed
    }

    /// Gives up chunks that `tier` has, from the last on, until `goal` bytes of it are free.
    fn forget_tail(&self, tier: &Arc<Tier>, goal: u64) -> u64 {
        let now = Instant::now();
        let mut state = self.state.lock();
        let (mut going, mut wanted, mut freed) = (Vec::new(), 0, 0);
        for (index, chunk) in state.chunks.iter().rev() {
            if freed >= goal || !chunk.can_go() || self.is_pinned(*index, now) {
                break;
            }
            // Also those of other logs: a hole in the middle makes what lies behind it useless.
            going.push(*index);
            if let Some(record) = chunk.record.as_ref().filter(|record| Arc::ptr_eq(&record.tier, tier)) {
                freed += u64::from(record.place.bytes);
                wanted = going.len();
            }
        }
        going[..wanted].iter().for_each(|index| self.lose(&mut state, *index, Loss::Evicted));
        if freed == 0 && state.chunks.values().all(|chunk| chunk.record.is_none()) {
            self.unlist_log(&mut state);
        }
        freed
    }

    fn is_pinned(&self, index: u64, now: Instant) -> bool {
        let (file, column) = self.name();
        self.shared.pins.is_pinned(file, column, index..index + 1, now)
    }
}
