//! Questions to all columns of a file at once: FLUSH, WARM, WHERE.

use std::sync::Arc;
use std::time::Duration;

use gd2fs_transport::Frame;
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{Header, Opcode};
use gd2fs_wire::messages::{Span, Tier, Warmth, Whereabouts};
use tokio::task::JoinSet;

use crate::call::{Call, Outgoing, bad_reply};
use crate::client::{Client, File, Ticket};
use crate::handles::deadline_ms;
use crate::layouts::LayoutCell;
use crate::request::{Direction, Shared};
use crate::stop::{Stop, Stopper};
use crate::tries::Tries;
use crate::trouble::Trouble;

/// Columns asked at once: the round trips of a wide file overlap, and its nodes are not all dialed in one moment.
const COLUMNS_AT_ONCE: usize = 64;
/// Extents of one answer to a caller, 24 MiB of them: beyond it a smaller range is to be asked for.
const EXTENTS_TOTAL_MAX: usize = 1 << 20;

/// `[start, end)` as file offsets, and where all of it is.
pub type Extent = (u64, u64, Tier);

impl Client {
    /// Waits until everything that this client has written to the file and seen acknowledged is durable.
    pub fn flush(&self, file: &File, timeout: Duration) -> Result<Ticket<()>, Failure> {
        let asking = self.asking(file, None, timeout)?;
        self.start(async move { asking.every_column(Asking::flush).await.map(drop) })
    }

    /// Has the nodes lift `[start, end)` into memory; its bytes by where they were just now.
    pub fn warm(
        &self,
        file: &File,
        start: u64,
        end: u64,
        timeout: Duration,
    ) -> Result<Ticket<Warmth>, Failure> {
        let asking = self.asking(file, Some(Span { start, end }), timeout)?;
        self.start(async move {
            let mut total = Warmth::default();
            for Warmth { dram, nvme, missing, unreadable } in asking.every_column(Asking::warm).await? {
                let sum = |a: u64, b: u64| {
                    a.checked_add(b).ok_or_else(|| bad_reply("more bytes than a file has".into()))
                };
                total = Warmth {
                    dram: sum(total.dram, dram)?,
                    nvme: sum(total.nvme, nvme)?,
                    missing: sum(total.missing, missing)?,
                    unreadable: sum(total.unreadable, unreadable)?,
                };
            }
            Ok(total)
        })
    }

    /// Where the bytes of `[start, end)` are: in order, neighbours of one kind merged.
    pub fn whereabouts(
        &self,
        file: &File,
        start: u64,
        end: u64,
        timeout: Duration,
    ) -> Result<Ticket<Vec<Extent>>, Failure> {
        let asking = self.asking(file, Some(Span { start, end }), timeout)?;
        self.start(async move {
            let shape = asking.cell.current(Direction::Read);
            let shape = Shape { unit: shape.stripe_unit, width: shape.columns.len() as u64 };
            let columns = asking.every_column(Asking::whereabouts).await?;
            let all = with_rests(columns, shape, end).map_err(|failure| asking.named(failure))?;
            Ok(merged(all))
        })
    }

    fn asking(&self, file: &File, span: Option<Span>, timeout: Duration) -> Result<Arc<Asking>, Failure> {
        if let Some(Span { start, end }) = span
            && (start >= end || end > i64::MAX as u64)
        {
            let message = format!("[{start}, {end}): start must be below end, and end at most 2^63 - 1");
            return Err(Failure::new(Code::BadRequest, message));
        }
        let span = span.unwrap_or(Span { start: 0, end: 0 });
        let (shared, cell) = (self.shared.clone(), file.0.clone());
        Ok(Arc::new(Asking { shared, cell, span, stopper: Stopper::new(timeout) }))
    }
}

/// What WHERE has found in one column.
struct Found {
    column: u64,
    extents: Vec<Extent>,
    /// From here on all is of one kind.
    rest: Option<(u64, Tier)>,
}

#[derive(Clone, Copy)]
struct Shape {
    unit: u64,
    width: u64,
}

/// One question about a file.
struct Asking {
    shared: Arc<Shared>,
    cell: Arc<LayoutCell>,
    /// Empty for FLUSH.
    span: Span,
    stopper: Arc<Stopper>,
}

impl Asking {
    /// The answers of all columns, in no order. With the first failure, or when nobody waits any more, the others are given up.
    async fn every_column<T, F>(
        self: &Arc<Self>,
        ask: impl Fn(Arc<Asking>, usize) -> F,
    ) -> Result<Vec<T>, Failure>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let width = self.cell.current(Direction::Read).columns.len();
        let (mut running, mut answers) = (JoinSet::new(), Vec::with_capacity(width));
        let mut columns = 0..width;
        loop {
            while running.len() < COLUMNS_AT_ONCE
                && let Some(column) = columns.next()
            {
                running.spawn(ask(self.clone(), column));
            }
            match running.join_next().await {
                None => return Ok(answers),
                Some(Ok(answer)) => answers.push(answer?),
                Some(Err(panic)) => {
                    return Err(Failure::new(Code::Internal, format!("a question ended badly: {panic}")));
                }
            }
        }
    }

    async fn flush(self: Arc<Self>, column: usize) -> Result<(), Failure> {
        let covered = self.cell.unflushed.before_flush(column);
        let reply = self.ask(Opcode::Flush, column, None).await?;
        let flushed = self.cell.unflushed.flushed(covered, reply.header.incarnation);
        flushed.map_err(|failure| self.named(failure))
    }

    async fn warm(self: Arc<Self>, column: usize) -> Result<Warmth, Failure> {
        self.ask(Opcode::Warm, column, Some(self.span)).await?.message()
    }

    async fn whereabouts(self: Arc<Self>, column: usize) -> Result<Found, Failure> {
        let (mut rest, mut found) = (self.span, Vec::new());
        loop {
            let page: Whereabouts = self.ask(Opcode::Where, column, Some(rest)).await?.message()?;
            let upto = page.next.unwrap_or(rest.end);
            check_page(&page, Span { start: rest.start, end: upto }, rest.end)
                .map_err(|failure| self.named(failure))?;
            found.extend(page.extents);
            check_count(found.len()).map_err(|failure| self.named(failure))?;
            if page.next.is_none() {
                return Ok(Found { column: column as u64, extents: found, rest: page.rest });
            }
            rest.start = upto;
        }
    }

    /// Asks the node of one column, again where that is safe (it always is) and can help.
    async fn ask(&self, opcode: Opcode, column: usize, message: Option<Span>) -> Result<Frame, Failure> {
        let mut stop = self.stopper.stop();
        let mut tries = Tries::new(&self.shared, &self.cell, Direction::Read);
        loop {
            let layout = self.cell.current(Direction::Read);
            match self.attempt(opcode, column, message.as_ref(), &mut stop).await {
                Ok(frame) => return Ok(frame),
                Err(trouble) => {
                    let what = || format!("{} column {column}: {opcode:?}", layout.path);
                    tries.wait(trouble, &layout, what, &mut stop).await?;
                }
            }
        }
    }

    async fn attempt(
        &self,
        opcode: Opcode,
        column: usize,
        message: Option<&Span>,
        stop: &mut Stop,
    ) -> Result<Frame, Trouble> {
        let layout = self.cell.current(Direction::Read);
        let replica = &layout.columns[column].replicas[0];
        let link = self.shared.link(replica).map_err(Trouble::Refused)?;
        let lane = link.lane(0);
        let connection = lane.connection(stop).await?;
        let (handle, _open) = connection.handle(&layout.capability, column as u32, stop).await?;
        let header = Header {
            handle,
            epoch: layout.columns[column].epoch,
            incarnation: replica.incarnation,
            deadline_ms: deadline_ms(stop),
            ..Header::request(opcode, 0)
        };
        let call = match message {
            Some(span) => Call::with_message(header, span, Outgoing::Nothing),
            None => Call::new(header, Outgoing::Nothing),
        };
        Ok(connection.call(call, stop).await?.frame)
    }

    fn named(&self, failure: Failure) -> Failure {
        let path = &self.cell.current(Direction::Read).path;
        Failure::new(failure.code, format!("{path}: {}", failure.message))
    }
}

/// An answer must lie in the range that it is said to cover, and lead on.
fn check_page(page: &Whereabouts, covered: Span, end: u64) -> Result<(), Failure> {
    let mut at = covered.start;
    for (start, upto, _) in &page.extents {
        if *start < at || upto <= start || *upto > covered.end {
            let Span { start: from, end: to } = covered;
            return Err(bad_reply(format!("an extent [{start}, {upto}) in answer to WHERE [{from}, {to})")));
        }
        at = *upto;
    }
    if page.next.is_some_and(|next| next <= covered.start || next >= end) {
        return Err(bad_reply(format!("WHERE goes on at {:?} of {end}", page.next)));
    }
    if let Some((from, _)) = page.rest
        && (page.next.is_some() || from < at || from >= end)
    {
        return Err(bad_reply(format!(
            "WHERE says that from {from} on all is of one kind, of [{at}, {end})"
        )));
    }
    Ok(())
}

fn check_count(extents: usize) -> Result<(), Failure> {
    if extents > EXTENTS_TOTAL_MAX {
        let message = format!("more than {EXTENTS_TOTAL_MAX} extents; ask for a smaller range");
        return Err(Failure::new(Code::TooLarge, message));
    }
    Ok(())
}

/// The extents of all columns up to `end`. Where from some offset on all of them have nothing but one kind, the file has; before
/// that the chunks of a column take turns with those of others.
fn with_rests(columns: Vec<Found>, shape: Shape, end: u64) -> Result<Vec<Extent>, Failure> {
    let Shape { unit, width } = shape;
    let tiers: Vec<Option<Tier>> = columns.iter().map(|found| found.rest.map(|(_, tier)| tier)).collect();
    let common =
        tiers.first().copied().flatten().filter(|tier| tiers.iter().all(|other| *other == Some(*tier)));
    let latest = columns.iter().filter_map(|found| found.rest).map(|(from, _)| from).max();
    let upto = common.and(latest).unwrap_or(end);
    let mut all: Vec<Extent> =
        common.filter(|_| upto < end).map(|tier| (upto, end, tier)).into_iter().collect();
    for Found { column, extents, rest } in columns {
        all.extend(extents);
        check_count(all.len())?;
        let Some((from, tier)) = rest else { continue };
        let mut chunk = from / unit;
        chunk += (column + width - chunk % width) % width;
        while from.max(chunk * unit) < upto {
            all.push((from.max(chunk * unit), upto.min((chunk + 1) * unit), tier));
            check_count(all.len())?;
            chunk += width;
        }
    }
    Ok(all)
}

/// The extents of all columns as those of the file.
fn merged(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.sort_unstable_by_key(|(start, ..)| *start);
    let mut merged: Vec<Extent> = Vec::new();
    for (start, end, tier) in extents {
        match merged.last_mut() {
            Some((_, upto, last)) if *upto == start && *last == tier => *upto = end,
            _ => merged.push((start, end, tier)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_a_file() {
        let (dram, hole) = (Tier::Dram, Tier::Hole);
        let extents = vec![(0, 10, dram), (20, 30, dram), (30, 31, hole), (10, 20, dram), (40, 50, hole)];
        assert_eq!(merged(extents), [(0, 30, dram), (30, 31, hole), (40, 50, hole)]);
    }

    #[test]
    fn what_all_columns_lack_is_one_extent_however_long_it_is() {
        let (dram, hole, lost) = (Tier::Dram, Tier::Hole, Tier::Lost);
        let found = |column, extents: &[Extent], rest| Found { column, extents: extents.to_vec(), rest };
        let far = 1 << 62;
        let where_of = |columns, width, end| {
            let found =
                with_rests(columns, Shape { unit: 10, width }, end).map_err(|failure| failure.code)?;
            assert!(found.iter().all(|(start, end, _)| start < end), "{found:?}");
            Ok(merged(found))
        };
        let one = |rest| vec![found(0, &[(0, 15, dram)], rest)];
        assert_eq!(where_of(one(Some((15, hole))), 1, far), Ok(vec![(0, 15, dram), (15, far, hole)]));
        assert_eq!(where_of(one(None), 1, 15), Ok(vec![(0, 15, dram)]));
        let two =
            |rest| vec![found(1, &[(10, 15, dram)], rest), found(0, &[(0, 10, dram)], Some((10, hole)))];
        let wide = |tier| Ok(vec![(0, 15, dram), (15, far, tier)]);
        assert_eq!(where_of(two(Some((15, hole))), 2, far), wide(hole));
        let expected = vec![(0, 15, dram), (15, 20, lost), (20, 30, hole), (30, 35, lost)];
        assert_eq!(where_of(two(Some((15, lost))), 2, 35), Ok(expected));
        assert_eq!(where_of(two(Some((15, lost))), 2, far), Err(Code::TooLarge));
        let expected = vec![(0, 10, dram), (10, 33, hole)];
        let empty = vec![found(0, &[(0, 10, dram)], Some((10, hole))), found(1, &[], Some((3, hole)))];
        assert_eq!(where_of(empty, 2, 33), Ok(expected));
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_refused() {
        let check = |extents: &[(u64, u64)], next| {
            let extents = extents.iter().map(|(start, end)| (*start, *end, Tier::Dram)).collect();
            let page = Whereabouts { extents, next, rest: None };
            let upto = page.next.unwrap_or(100);
            check_page(&page, Span { start: 10, end: upto }, 100).map_err(|failure| failure.code)
        };
        assert_eq!(check(&[(10, 20), (20, 30), (40, 100)], None), Ok(()));
        assert_eq!(check(&[(10, 20)], Some(20)), Ok(()));
        for (extents, next) in [
            (&[(9, 20)][..], None),
            (&[(10, 20), (19, 30)], None),
            (&[(20, 20)], None),
            (&[(30, 20)], None),
            (&[(90, 101)], None),
            (&[(10, 30)], Some(20)),
            (&[], Some(10)),
            (&[], Some(100)),
        ] {
            assert_eq!(check(extents, next), Err(Code::BadFrame), "{extents:?} {next:?}");
        }
    }
}
