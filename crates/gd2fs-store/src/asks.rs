//! What a node is asked beyond reads and writes: where bytes are, that they stay, and which there are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_wire::capability::{format_file_id, parse_file_id};
use gd2fs_wire::messages::{
    ColumnName, EXTENTS_MAX, ITEMS_MAX, List, ListItem, Listing, PIN_TTL_MS_MAX, PinItem, PinReply, Report,
    ReportItem, Scrub, ScrubState, Tier, UnpinItem, UnpinReply, Whereabouts,
};
use gd2fs_wire::{Code, Failure};

use crate::column::{Column, bytes_of};
use crate::columns::Slot;
use crate::pins::RANGES_MAX;
use crate::store::Store;

/// Chunks and runs that one WHERE looks at under the column's lock: a millisecond or so.
const LOOKS_MAX: usize = 65_536;

impl Column {
    /// Where the bytes of `[start, end)` in this column are, from the start on as far as one answer goes.
    pub fn whereabouts(&self, start: u64, end: u64) -> Result<Whereabouts, Failure> {
        check_span(start, end)?;
        let state = self.lock_alive()?;
        let (lost_below, unit) = (self.lost_below(&state), u64::from(self.geometry().stripe_unit));
        let column_end = self.length(&state).max(state.sealed);
        let upto = end.min(column_end).max(start);
        let mut found = Whereabouts::default();
        let (mut looks, mut at) = (0, start);
        for (index, chunk) in state.chunks.range(start / unit..upto.div_ceil(unit)) {
            let first = self.geometry().offset(*index, 0);
            if looks >= LOOKS_MAX {
                if self.absent(&mut found, at, first, lost_below) {
                    found.next = Some(first);
                }
                return Ok(found);
            }
            looks += 1;
            let tier = if chunk.is_cold() { Tier::Nvme } else { Tier::Dram };
            let inside = (start.saturating_sub(first) as u32, (upto - first).min(unit) as u32);
            for (from, to) in chunk.runs().valid_parts(inside.0, inside.1) {
                looks += 1;
                let (from, to) = (first + u64::from(from), first + u64::from(to));
                if !self.absent(&mut found, at, from, lost_below) || !extend(&mut found, from, to, tier) {
                    return Ok(found);
                }
                at = to;
            }
        }
        if self.absent(&mut found, at, upto, lost_below) && upto < end {
            found.rest = Some((upto, if column_end < lost_below { Tier::Lost } else { Tier::Hole }));
        }
        Ok(found)
    }

    /// Adds what of `[start, end)`, in which nothing is there, lies in this column; of that what lies below `lost_below` is lost.
    /// False: it does not all fit.
    fn absent(&self, found: &mut Whereabouts, start: u64, end: u64, lost_below: u64) -> bool {
        let mut add = |start: u64, end: u64| {
            let middle = lost_below.clamp(start, end);
            extend(found, start, middle, Tier::Lost) && extend(found, middle, end, Tier::Hole)
        };
        if self.geometry().width == 1 {
            return start >= end || add(start, end);
        }
        let at = |chunk, inside| self.geometry().offset(chunk, inside);
        self.geometry().chunks_between(start, end).all(|p| add(at(p.chunk, p.start), at(p.chunk, p.end)))
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
            nvme_bytes: state
                .chunks
                .values()
                .filter_map(|chunk| chunk.record.as_ref())
                .map(|r| u64::from(r.place.bytes))
                .sum(),
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
        let tenant = column.tenant();
        let held = tenant.pins.hold_within(item.end - item.start);
        let pinned = held.is_some_and(|held| self.shared.pins.pin(held, pin, name, chunks, until, now));
        let valid = match column.lock_alive() {
            Ok(state) => column.gap(&state, item.start, item.end),
            Err(failure) => return refuse(failure),
        };
        if pinned {
            return PinReply { status: Code::Ok as u32, valid, message: String::new() };
        }
        let message = format!(
            "{RANGES_MAX} ranges are pinned on this node, or tenant {:?} has pinned its share (node.tenant_share); UNPIN some, or go on without",
            tenant.name
        );
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
        let column = match self.columns.lock(name).get(&name) {
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

    /// Lets go all that is pinned under one id. That counts as its last use, of what was pinned first the latest: of a session, whose
    /// ranges are pinned in the order of their tokens, the beginning is of use without the rest, and must go last.
    pub fn unpin(&self, item: &UnpinItem) -> Result<UnpinReply, Failure> {
        let names = self.shared.pins.unpin(parse_pin(&item.pin)?, Instant::now());
        let now_us = self.shared.now_us();
        for (step, name) in names.iter().rev().enumerate() {
            if let Some(column) = self.columns.get(*name) {
                column.touch_at(now_us + step as u64);
            }
        }
        Ok(UnpinReply { ranges: names.len() as u64 })
    }

    /// A page of the columns that are not deleted, in the order of (file, column).
    pub fn list(&self, ask: &List) -> Result<Listing, Failure> {
        if !(1..=ITEMS_MAX).contains(&ask.limit) {
            let message = format!("limit {} is not in 1..{ITEMS_MAX}", ask.limit);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let after =
            ask.after.as_ref().map(|name| Ok((parse_file_id(&name.file)?, name.column))).transpose()?;
        let mut names = self.columns.names_after(after, ask.limit + 1);
        let more = names.len() > ask.limit;
        names.truncate(ask.limit);
        let last = names.last().filter(|_| more);
        Ok(Listing {
            next: last.map(|(file, column)| ColumnName { file: format_file_id(*file), column: *column }),
            // What was deleted since its name was taken is left out.
            items: names.iter().filter_map(|(file, column)| self.get(*file, *column)?.list_item()).collect(),
        })
    }

    /// Begins a scrub of all columns if that is asked for and none runs; how far it is.
    pub fn scrub(&self, ask: &Scrub) -> ScrubState {
        if ask.start {
            self.scrubber.start(|| self.columns.all());
        }
        self.scrubber.state()
    }

    /// At most `limit` columns whose valid prefix has changed since control last heard of them.
    pub fn report(&self, limit: usize) -> Report {
        let (sequence, names) = self.shared.changed.first(limit);
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
        self.shared.changed.told(sequence);
    }
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

pub(crate) fn check_span(start: u64, end: u64) -> Result<(), Failure> {
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
