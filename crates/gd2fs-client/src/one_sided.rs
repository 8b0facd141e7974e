//! A part whose bytes the node moves itself: straight to or from library memory, or through the staging ring.

use std::ops::Range;
use std::sync::Arc;

use gd2fs_transport::Memory;
use gd2fs_transport::copy::{at_memory, copy_pieces};
use gd2fs_wire::header::{Header, Opcode};

use crate::call::{Call, verify};
use crate::connection::Connection;
use crate::link::Link;
use crate::region::{Direct, Region};
use crate::request::{Direction, Shared};
use crate::staging::{STAGED_BYTES_MAX, Slots};
use crate::stats::add;
use crate::stop::Stop;
use crate::trouble::Trouble;

/// What a node may touch until it has answered.
pub(crate) enum Held {
    Nothing,
    /// Nobody else's memory: it may wait for a late answer by itself.
    Slots {
        until_answered: Slots,
    },
    Ranges(Vec<(Arc<Region>, Range<usize>)>),
}

/// Bytes moved; None if this part has to go through the stream. `header` says what is wanted, by the stream's way.
pub(crate) async fn transfer(
    shared: &Shared,
    link: &Link,
    connection: &Arc<Connection>,
    header: Header,
    direction: Direction,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<Option<u64>, Trouble> {
    if let Some(direct) = shared.regions.direct(memory, direction)
        && map(connection, &direct, stop).await?
    {
        // The node sums in its copy, so that every byte of the memory is read once.
        let call = Call::one_sided(header, &direct.segments, Held::Ranges(direct.ranges));
        let moved = u64::from(connection.call(call, stop).await?.frame.header.length);
        add(&shared.stats.bytes_direct, moved);
        return Ok(Some(moved));
    }
    if memory.len() > STAGED_BYTES_MAX {
        return Ok(None);
    }
    let ring = link.ring(&shared.regions).map_err(Trouble::Refused)?;
    match map_region(connection, ring.region(), stop).await {
        // A node that maps no more takes the bytes through the socket.
        Err(Trouble::Refused(_)) => return Ok(None),
        mapped => mapped?,
    }
    let slots = ring.slots(memory.len(), stop).await?;
    let moved = match direction {
        Direction::Read => read(shared, connection, header, slots, memory, stop).await,
        Direction::Write => write(shared, connection, header, slots, memory, stop).await,
    }?;
    add(&shared.stats.bytes_staged, moved);
    Ok(Some(moved))
}

/// Whether the node has all regions of `direct` mapped now; one that it refuses goes through the ring.
async fn map(connection: &Arc<Connection>, direct: &Direct, stop: &mut Stop) -> Result<bool, Trouble> {
    let mut last = 0;
    for (region, _) in &direct.ranges {
        if region.number == last {
            continue;
        }
        last = region.number;
        match map_region(connection, region, stop).await {
            Ok(()) => {}
            Err(Trouble::Refused(failure)) => {
                tracing::debug!(%failure, "a node does not map a region");
                return Ok(false);
            }
            Err(trouble) => return Err(trouble),
        }
    }
    Ok(true)
}

async fn map_region(connection: &Arc<Connection>, region: &Region, stop: &mut Stop) -> Result<(), Trouble> {
    connection.map(region.number, region.capacity(), || region.descriptor(), stop).await
}

async fn read(
    shared: &Shared,
    connection: &Arc<Connection>,
    header: Header,
    slots: Slots,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    let (from, segments) = (slots.memory(), slots.segments());
    let call = Call::one_sided(header, &segments, Held::Slots { until_answered: slots });
    let reply = connection.call(call, stop).await?;
    let moved = reply.frame.header.length as usize;
    let (from, into) = (from.prefix(moved), memory.prefix(moved));
    // SAFETY: the node has answered, so the slots are ours, held by the reply; the memory is the caller's until its request
    // completes.
    let copy = || unsafe { copy_pieces(header.offset, &from, &into, !header.is_raw()) };
    let sums = at_memory(shared.apart, moved, copy);
    verify(&reply.frame, &sums).map_err(Trouble::Refused)?;
    Ok(moved as u64)
}

async fn write(
    shared: &Shared,
    connection: &Arc<Connection>,
    header: Header,
    slots: Slots,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    let into = slots.memory();
    // SAFETY: the slots are this transfer's; the memory is not written until its request completes.
    let copy = || unsafe { copy_pieces(header.offset, memory, &into, !header.is_raw()) };
    let sums = at_memory(shared.apart, memory.len(), copy);
    let segments = slots.segments();
    let held = Held::Slots { until_answered: slots };
    let call = Call { sums, ..Call::one_sided(header, &segments, held) };
    Ok(u64::from(connection.call(call, stop).await?.frame.header.length))
}

impl Held {
    /// Whether the node may still be writing into memory that is the caller's.
    pub fn is_in_doubt(&self, asked: &Header) -> bool {
        asked.opcode == Opcode::Read as u8 && matches!(self, Held::Ranges(_))
    }

    /// Takes the memory away from a node that does not say whether it still writes there.
    pub fn sever(&self) -> std::io::Result<()> {
        match self {
            Held::Nothing => {}
            Held::Slots { until_answered } => until_answered.retire_ring(),
            Held::Ranges(ranges) => {
                for (region, range) in ranges {
                    region.sever(range.clone())?;
                }
            }
        }
        Ok(())
    }
}
