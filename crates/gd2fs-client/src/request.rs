//! A request: its parts in parallel, and what their results mean together.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use gd2fs_transport::Memory;
use gd2fs_wire::code::{Code, Failure};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use crate::control::Control;
use crate::dial::Caller;
use crate::layout::{Layout, Part, Replica};
use crate::layouts::{LayoutCell, Layouts};
use crate::link::{Link, Links, Ways};
use crate::part::transfer;
use crate::region::Regions;
use crate::requests::Requests;
use crate::stats::{Stats, add};
use crate::stop::{Stop, Stopper};
use crate::trouble::Trouble;

/// A budget counts in these units; a small part costs one, which also bounds the number of parts under way.
pub(crate) const BUDGET_UNIT_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read = 0,
    Write = 1,
}

/// What all requests of a client use.
pub(crate) struct Shared {
    pub control: Control,
    pub layouts: Layouts,
    pub links: Links,
    pub caller: Arc<Caller>,
    pub ways: Ways,
    /// Library memory, which nodes of this host reach by themselves.
    pub regions: Regions,
    /// Long copies leave their thread to others.
    pub apart: bool,
    pub verify: bool,
    /// Bytes of all requests that may be under way, in units.
    pub budget: Arc<Semaphore>,
    pub budget_units: u64,
    pub stats: Arc<Stats>,
}

pub(crate) struct Request {
    pub direction: Direction,
    pub cell: Arc<LayoutCell>,
    pub offset: u64,
    pub memory: Memory,
    pub stopper: Arc<Stopper>,
    /// What its only part met with on the short way.
    pub trouble: Option<Trouble>,
}

/// What a part holds from before its first try to after its last.
pub(crate) struct Admitted {
    _window: OwnedSemaphorePermit,
    _budget: OwnedSemaphorePermit,
}

impl Direction {
    pub(crate) fn counter(self, stats: &Stats) -> &AtomicU64 {
        match self {
            Direction::Read => &stats.bytes_read,
            Direction::Write => &stats.bytes_written,
        }
    }
}

impl Shared {
    pub fn link(&self, replica: &Replica) -> Result<Arc<Link>, Failure> {
        let make = || {
            let (caller, stats) = (self.caller.clone(), self.stats.clone());
            let node = Some(replica.node.clone());
            Link::new(node, replica.addresses.clone(), &self.ways, caller, stats)
        };
        let link = self.links.get(&replica.node, make)?;
        link.update_addresses(&replica.addresses);
        Ok(link)
    }

    /// A part's share of the bytes that may be under way, if nothing has to be waited for.
    pub fn try_admit(&self, link: &Link, bytes: u64) -> Option<Admitted> {
        let window = link.try_admit(bytes)?;
        let budget = self.budget.clone().try_acquire_many_owned(self.units(bytes)).ok()?;
        Some(Admitted { _window: window, _budget: budget })
    }

    fn units(&self, bytes: u64) -> u32 {
        bytes.div_ceil(BUDGET_UNIT_BYTES).clamp(1, self.budget_units) as u32
    }

    /// The highest acknowledged end of each column, asked anew.
    pub async fn column_ends(&self, layout: &Layout, stop: &mut Stop) -> Result<Vec<u64>, Failure> {
        let mut ends = Vec::with_capacity(layout.columns.len());
        for (index, column) in layout.columns.iter().enumerate() {
            let link = self.link(&column.replicas[0])?;
            let lane = link.lane(0);
            let asked = async {
                let connection = lane.connection(stop).await?;
                let reply = connection.open(&layout.capability, index as u32, stop).await?;
                tokio::spawn(connection.close(reply.handle));
                Ok(reply)
            };
            let reply = asked.await.map_err(Trouble::into_failure)?;
            if reply.lost {
                let node = &column.replicas[0].node;
                return Err(Failure::new(
                    Code::Lost,
                    format!("{}: node {node} has lost column {index}", layout.path),
                ));
            }
            ends.push(reply.length);
        }
        Ok(ends)
    }
}

impl Request {
    /// Runs it and hands its result over.
    pub async fn run_to_end(self, number: u64, shared: Arc<Shared>, requests: Arc<Requests>) {
        let result = self.run(shared.clone()).await;
        if result.is_err() {
            add(&shared.stats.failures, 1);
        }
        requests.end(number, result);
    }

    async fn run(mut self, shared: Arc<Shared>) -> Result<u64, Failure> {
        let layout = self.cell.current(self.direction);
        let parts: Vec<Part> = layout.parts(self.offset, self.memory.len() as u64).collect();
        let trouble = self.trouble.take();
        let mut moved = self.transfer_all(&shared, &layout, &parts, trouble).await?;
        if self.direction == Direction::Write {
            return Ok(moved.iter().sum());
        }
        let mut checked = None;
        while let Some(end) = first_short(&parts, &moved) {
            match self.check_end(&shared, &layout, &parts, &moved, end).await {
                Ok(()) => return Ok(end - self.offset),
                // The file may have grown while its parts were read: only what is still short at the same place is a hole.
                // Every other turn brought bytes, so their number is bounded, as their time is.
                Err(Failure { code: Code::Hole, .. }) if checked != Some(end) => checked = Some(end),
                Err(failure) => return Err(failure),
            }
            moved = self.transfer_all(&shared, &layout, &parts, None).await?;
        }
        Ok(self.memory.len() as u64)
    }

    /// A read that ends at `end` is a success only if the file ends there too.
    async fn check_end(
        &self,
        shared: &Arc<Shared>,
        layout: &Layout,
        parts: &[Part],
        moved: &[u64],
        end: u64,
    ) -> Result<(), Failure> {
        let hole = |file_end: u64| {
            let why =
                format!("{} [{end}, …): never written, while bytes up to {file_end} exist", layout.path);
            Err(Failure::new(Code::Hole, why))
        };
        let beyond = parts.iter().zip(moved).rfind(|(part, moved)| part.offset > end && **moved > 0);
        if let Some((part, moved)) = beyond {
            return hole(part.offset + moved);
        }
        if layout.columns.len() > 1 {
            let mut stop = self.stopper.stop();
            let file_end = shared.column_ends(layout, &mut stop).await?.into_iter().max().unwrap_or(0);
            if file_end > end {
                return hole(file_end);
            }
        }
        Ok(())
    }

    /// Bytes moved of each part. The first failure stops the others; it is returned when all have ended.
    async fn transfer_all(
        &self,
        shared: &Arc<Shared>,
        layout: &Layout,
        parts: &[Part],
        trouble: Option<Trouble>,
    ) -> Result<Vec<u64>, Failure> {
        let mut memories = self.memory.split(parts.iter().map(|part| part.length as usize));
        if let [part] = parts {
            // The common small request needs no task of its own.
            let _admitted = self.admit(shared, layout, part).await?;
            let stop = self.stopper.stop();
            let memory = memories.remove(0);
            let moved = transfer(shared, &self.cell, self.direction, *part, memory, trouble, stop).await?;
            return Ok(vec![moved]);
        }
        let mut running = JoinSet::new();
        let mut results: Vec<Result<u64, Failure>> = Vec::with_capacity(parts.len());
        for (index, (part, memory)) in parts.iter().copied().zip(memories).enumerate() {
            results.push(Ok(0));
            let admitted = match self.admit(shared, layout, &part).await {
                Ok(admitted) => admitted,
                Err(failure) => {
                    results[index] = Err(failure);
                    break;
                }
            };
            let (shared, cell, direction) = (shared.clone(), self.cell.clone(), self.direction);
            let stopper = self.stopper.clone();
            running.spawn(async move {
                let _admitted = admitted;
                let moved = transfer(&shared, &cell, direction, part, memory, None, stopper.stop()).await;
                if moved.is_err() {
                    stopper.cancel();
                }
                (index, moved)
            });
        }
        while let Some(done) = running.join_next().await {
            match done {
                Ok((index, moved)) => results[index] = moved,
                Err(panic) => {
                    // Its memory may still be under a reader: only the end of every connection proves that it is not.
                    self.stopper.cancel();
                    shared.links.end().await;
                    results
                        .push(Err(Failure::new(Code::Internal, format!("a transfer ended badly: {panic}"))));
                }
            }
        }
        in_total(results)
    }

    /// Waits for its share of the bytes that may be under way: first of its node's, then of the whole client's, so that what
    /// waits for a slow node holds nothing that transfers with other nodes need.
    async fn admit(&self, shared: &Arc<Shared>, layout: &Layout, part: &Part) -> Result<Admitted, Failure> {
        let link = shared.link(&layout.columns[part.column].replicas[0])?;
        let mut stop = self.stopper.stop();
        let window = link.admit(part.length, &mut stop).await?;
        let units = shared.units(part.length);
        let budget = stop.race(shared.budget.clone().acquire_many_owned(units)).await?;
        Ok(Admitted { _window: window, _budget: budget.expect("the budget is never closed") })
    }
}

/// The failure that caused the others (they were only stopped by it), or all the numbers.
fn in_total(results: Vec<Result<u64, Failure>>) -> Result<Vec<u64>, Failure> {
    let failures = results.iter().filter_map(|result| result.as_ref().err());
    match failures.min_by_key(|failure| failure.code == Code::Cancelled) {
        Some(failure) => Err(failure.clone()),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// Where the first part that came back short ends, as a file offset.
fn first_short(parts: &[Part], moved: &[u64]) -> Option<u64> {
    let short = parts.iter().zip(moved).find(|(part, moved)| part.length != **moved);
    short.map(|(part, moved)| part.offset + moved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_reported_and_not_what_it_stopped() {
        let cancelled = Err(Failure::new(Code::Cancelled, "c"));
        let results = vec![Ok(1), cancelled.clone(), Err(Failure::new(Code::Hole, "h")), cancelled];
        assert_eq!(in_total(results).unwrap_err().code, Code::Hole);
        assert_eq!(in_total(vec![Ok(1), Ok(2)]).unwrap(), [1, 2]);
    }

    #[test]
    fn a_short_part_ends_the_read() {
        let parts = [Part { column: 0, offset: 0, length: 10 }, Part { column: 1, offset: 10, length: 10 }];
        assert_eq!(first_short(&parts, &[10, 10]), None);
        assert_eq!(first_short(&parts, &[10, 3]), Some(13));
        assert_eq!(first_short(&parts, &[4, 0]), Some(4));
    }
}
