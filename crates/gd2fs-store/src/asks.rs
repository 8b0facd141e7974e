//! What a node is asked beyond reads and writes: where bytes are, that they stay, that they are durable, and whether they are
//! still what they were. These are the answers of a node that keeps nothing beyond its memory.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_wire::capability::{format_file_id, parse_file_id};
use gd2fs_wire::messages::{
    ColumnName, EXTENTS_MAX, ITEMS_MAX, List, ListItem, Listing, PIN_TTL_MS_MAX, PinItem, PinReply, Report,
    ReportItem, Scrub, ScrubState, Tier, UnpinItem, UnpinReply, Warmth, Whereabouts,
};
use gd2fs_wire::{Code, Failure};

use crate::changed::Changed;
use crate::chunk::Chunk;
use crate::column::{Column, State, bytes_of};
use crate::geometry::Place;
use crate::pins::{Pins, RANGES_MAX};
use crate::store::{Name, Slot, Store};

/// Chunks that WARM counts before it lets others have the column's lock: a fraction of a millisecond.
const CHUNKS_A_STEP: usize = 256;
/// Chunks and runs that one WHERE looks at under the column's lock: about as long.
const LOOKS_MAX: usize = 65_536;

/// What the store keeps for these questions, beside the columns.
#[derive(Default)]
pub(crate) struct Asks {
    pub pins: Pins,
    pub changed: Changed,
}

impl Column {
    /// Returns when all that was acknowledged before is durable.
    pub async fn flush(self: &Arc<Self>) -> Result<(), Failure> {
        drop(self.lock_alive()?);
        Err(Failure::new(Code::Unsupported, "this node keeps nothing beyond its memory: set node.logs"))
    }

    /// Bytes of `[start, end)` in this column by where they are now.
    pub fn warm(self: &Arc<Self>, start: u64, end: u64) -> Result<Warmth, Failure> {
        check_span(start, end)?;
        let unit = u64::from(self.geometry().stripe_unit);
        let (mut next, last) = (start / unit, (end - 1) / unit);
        let mut dram = 0;
        loop {
            let state = self.lock_alive()?;
            let mut seen = 0;
            for (index, chunk) in state.chunks.range(next..=last).take(CHUNKS_A_STEP) {
                let first = self.geometry().offset(*index, 0);
                let inside = (start.saturating_sub(first) as u32, (end - first).min(unit) as u32);
                dram += valid_parts(chunk, inside).map(|(from, to)| u64::from(to - from)).sum::<u64>();
                (next, seen) = (*index + 1, seen + 1);
            }
            if seen < CHUNKS_A_STEP || next > last {
                let missing = self.geometry().bytes_between(start, end) - dram;
                return Ok(Warmth { dram, nvme: 0, missing });
            }
        }
    }

    /// Where the bytes of `[start, end)` in this column are, from the start on as far as one answer goes.
    pub fn whereabouts(&self, start: u64, end: u64) -> Result<Whereabouts, Failure> {
        check_span(start, end)?;
        let state = self.lock_alive()?;
        let absent = if self.is_lost(&state) { Tier::Lost } else { Tier::Hole };
        let mut found = Whereabouts::default();
        let mut looks = 0;
        for Place { chunk: index, start, end } in self.geometry().chunks_between(start, end) {
            let at = |inside| self.geometry().offset(index, inside);
            if looks >= LOOKS_MAX {
                found.next = Some(at(start));
                return Ok(found);
            }
            looks += 1;
            let mut upto = start;
            for (from, to) in state.chunks.get(&index).into_iter().flat_map(|c| valid_parts(c, (start, end)))
            {
                looks += 1;
                let fits = extend(&mut found, at(upto), at(from), absent)
                    && extend(&mut found, at(from), at(to), Tier::Dram);
                if !fits {
                    return Ok(found);
                }
                upto = to;
            }
            if !extend(&mut found, at(upto), at(end), absent) {
                return Ok(found);
            }
        }
        Ok(found)
    }

    /// The first byte of `[start, end)` in this column, as a file offset, that is not there. Looks at no more than is there.
    fn first_missing(&self, state: &State, start: u64, end: u64) -> Option<u64> {
        self.geometry().chunks_between(start, end).find_map(|Place { chunk: index, start, end }| {
            let chunk = state.chunks.get(&index);
            let there = chunk.into_iter().flat_map(|chunk| valid_parts(chunk, (start, end)));
            let upto = there.fold(start, |upto, (from, to)| if from == upto { to } else { upto });
            (upto < end).then(|| self.geometry().offset(index, upto))
        })
    }

    /// The first byte below the column's length or seal that is not there.
    fn valid(&self, state: &State) -> Option<u64> {
        let end = self.length(state).max(state.sealed).max(state.dropped_below);
        self.first_missing(state, 0, end)
    }

    fn list_item(&self) -> Option<ListItem> {
        let state = self.lock_alive().ok()?;
        Some(ListItem {
            file: format_file_id(self.file()),
            column: self.geometry().column,
            epoch: state.epoch,
            sealed: state.sealed,
            grant: state.grant,
            length: self.length(&state),
            valid: self.valid(&state),
            dram_bytes: bytes_of(&state.chunks),
            nvme_bytes: 0,
        })
    }
}

impl Store {
    /// Keeps a range from being evicted for a while.
    pub fn pin(&self, item: &PinItem) -> PinReply {
        let refuse = |failure: Failure| PinReply {
            status: failure.code as u32,
            // Whoever goes on all the same may count on nothing.
            valid: Some(item.start),
            message: failure.message,
        };
        let (pin, column) = match self.pinnable(item) {
            Ok(found) => found,
            Err(failure) => return refuse(failure),
        };
        let unit = u64::from(column.geometry().stripe_unit);
        let chunks = item.start / unit..(item.end - 1) / unit + 1;
        let now = Instant::now();
        let until = now + Duration::from_millis(item.ttl_ms);
        let name = (column.file(), column.geometry().column);
        // Pinned before anybody looks: what is there then stays.
        let pinned = self.shared.asks.pins.pin(pin, name, chunks, until, now);
        let valid = match column.lock_alive() {
            Ok(state) => column.first_missing(&state, item.start, item.end),
            Err(failure) => return refuse(failure),
        };
        if pinned {
            return PinReply { status: Code::Ok as u32, valid, message: String::new() };
        }
        let message = format!("{RANGES_MAX} ranges are pinned on this node; UNPIN some, or go on without");
        PinReply { status: Code::Overloaded as u32, valid, message }
    }

    fn pinnable(&self, item: &PinItem) -> Result<(u128, Arc<Column>), Failure> {
        let pin = parse_pin(&item.pin)?;
        let name = (parse_file_id(&item.file)?, item.column);
        check_span(item.start, item.end)?;
        if !(1..=PIN_TTL_MS_MAX).contains(&item.ttl_ms) {
            let message = format!("ttl_ms {} is not in 1..{PIN_TTL_MS_MAX}", item.ttl_ms);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let column = match self.shard(name).read().get(&name) {
            Some(Slot::Live(column)) => column.clone(),
            Some(Slot::Deleted) => {
                return Err(Failure::new(Code::Deleted, format!("file {} was deleted", item.file)));
            }
            None => {
                let message = format!("file {} column {} is not known here", item.file, item.column);
                return Err(Failure::new(Code::NotFound, message));
            }
        };
        let state = column.lock_alive()?;
        column.check_epoch(&state, item.epoch)?;
        drop(state);
        Ok((pin, column))
    }

    /// Lets go all that is pinned under one id.
    pub fn unpin(&self, item: &UnpinItem) -> Result<UnpinReply, Failure> {
        let ranges = self.shared.asks.pins.unpin(parse_pin(&item.pin)?, Instant::now());
        Ok(UnpinReply { ranges })
    }

    /// A page of the columns that are not deleted, in the order of (file, column).
    pub fn list(&self, ask: &List) -> Result<Listing, Failure> {
        if !(1..=ITEMS_MAX).contains(&ask.limit) {
            let message = format!("limit {} is not in 1..{ITEMS_MAX}", ask.limit);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let after =
            ask.after.as_ref().map(|name| Ok((parse_file_id(&name.file)?, name.column))).transpose()?;
        let mut names = self.names_after(after, ask.limit + 1);
        let more = names.len() > ask.limit;
        names.truncate(ask.limit);
        let last = names.last().filter(|_| more);
        Ok(Listing {
            next: last.map(|(file, column)| ColumnName { file: format_file_id(*file), column: *column }),
            // What was deleted since its name was taken is left out.
            items: names.iter().filter_map(|(file, column)| self.get(*file, *column)?.list_item()).collect(),
        })
    }

    /// The first names behind `after`, in order: a look at all of them, and memory for those that are wanted.
    fn names_after(&self, after: Option<Name>, count: usize) -> Vec<Name> {
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

    /// Begins a scrub of all columns if that is asked for and none runs; how far it is.
    pub fn scrub(&self, ask: &Scrub) -> ScrubState {
        if ask.start {
            let live = |slot: &Slot| if let Slot::Live(column) = slot { Some(column.clone()) } else { None };
            self.scrubber.start(|| {
                self.shards
                    .iter()
                    .flat_map(|shard| shard.read().values().filter_map(live).collect::<Vec<_>>())
                    .collect()
            });
        }
        self.scrubber.state()
    }

    /// At most `limit` columns whose valid prefix has changed since control last heard of them.
    pub fn report(&self, limit: usize) -> Report {
        let (sequence, names) = self.shared.asks.changed.first(limit);
        let items = names.iter().filter_map(|(file, column)| {
            // Of what was deleted meanwhile control knows already.
            let ListItem { file, column, valid, sealed, epoch, length, .. } =
                self.get(*file, *column)?.list_item()?;
            Some(ReportItem { file, column, valid, sealed, epoch, length })
        });
        Report { sequence, items: items.collect() }
    }

    /// Control has taken everything up to this report.
    pub fn reported(&self, sequence: u64) {
        self.shared.asks.changed.told(sequence);
    }
}

/// The valid bytes of a chunk inside `[start, end)` of it, as far as they touch each other in one piece.
fn valid_parts(chunk: &Chunk, (start, end): (u32, u32)) -> impl Iterator<Item = (u32, u32)> {
    let mut runs = chunk.runs().touched(start, end).iter().peekable();
    std::iter::from_fn(move || {
        let first = runs.next()?;
        let mut upto = first.end;
        while let Some(next) = runs.next_if(|next| next.start == upto) {
            upto = next.end;
        }
        Some((first.start.max(start), upto.min(end)))
    })
}

/// Adds an extent that may be empty; false, with the place to go on: it does not fit any more.
fn extend(found: &mut Whereabouts, start: u64, end: u64, tier: Tier) -> bool {
    if start == end {
        return true;
    }
    if let Some((_, upto, last)) = found.extents.last_mut()
        && *upto == start
        && *last == tier
    {
        *upto = end;
        return true;
    }
    if found.extents.len() == EXTENTS_MAX {
        found.next = Some(start);
        return false;
    }
    found.extents.push((start, end, tier));
    true
}

fn check_span(start: u64, end: u64) -> Result<(), Failure> {
    if start >= end {
        return Err(Failure::new(Code::BadRequest, format!("start {start} is not below end {end}")));
    }
    Ok(())
}

fn parse_pin(text: &str) -> Result<u128, Failure> {
    (text.len() == 32)
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
        .ok_or_else(|| Failure::new(Code::BadRequest, format!("pin {text:?} is not 32 hex digits")))
}
