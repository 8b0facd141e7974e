//! A part whose bytes the node moves itself: straight to or from library memory, or through the staging ring.

use std::ops::Range;
use std::sync::Arc;

use gd2fs_transport::Memory;
use gd2fs_transport::copy::copy_pieces;
use gd2fs_transport::one_sided::encode;
use gd2fs_wire::header::{FLAG_ONE_SIDED, Header};

use crate::connection::{Call, Connection, Outgoing, verify};
use crate::region::{Direct, Region};
use crate::request::{Direction, Shared};
use crate::staging::Slots;
use crate::stats::add;
use crate::stop::Stop;
use crate::trouble::Trouble;

/// What a node may touch until it has answered.
pub(crate) enum Held {
    Nothing,
    /// Nobody else's memory: it may wait for a late answer by itself.
    Slots {
        _until_answered: Slots,
    },
    Ranges(Vec<(Arc<Region>, Range<usize>)>),
}

/// Bytes moved. `header` says what is wanted, by the stream's way.
pub(crate) async fn transfer(
    shared: &Shared,
    connection: &Arc<Connection>,
    mut header: Header,
    direction: Direction,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    header.flags |= FLAG_ONE_SIDED;
    if let Some(direct) = shared.regions.direct(memory, direction)
        && map(connection, &direct, stop).await?
    {
        let ext = encode(&direct.segments);
        let held = Held::Ranges(direct.ranges);
        // The node sums in its copy, so that every byte of the memory is read once.
        let call = Call { header, ext, sums: Vec::new(), out: Outgoing::Nothing, held };
        let moved = u64::from(connection.call(call, stop).await?.frame.header.length);
        add(&shared.stats.bytes_direct, moved);
        return Ok(moved);
    }
    let ring = connection.ring(|| shared.regions.fresh_number(), stop).await?;
    let slots = ring.slots(memory.len(), stop).await?;
    let moved = match direction {
        Direction::Read => read(connection, header, slots, memory, stop).await,
        Direction::Write => write(connection, header, slots, memory, stop).await,
    }?;
    add(&shared.stats.bytes_staged, moved);
    Ok(moved)
}

/// Whether the node has all regions of `direct` mapped now; one that it refuses goes through the ring.
async fn map(connection: &Arc<Connection>, direct: &Direct, stop: &mut Stop) -> Result<bool, Trouble> {
    let mut last = 0;
    for (region, _) in &direct.ranges {
        if region.number == last {
            continue;
        }
        last = region.number;
        match connection.map(region.number, region.capacity(), || region.descriptor(), stop).await {
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

async fn read(
    connection: &Arc<Connection>,
    header: Header,
    slots: Slots,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    let (from, ext) = (slots.memory(), encode(&slots.segments()));
    let call = Call {
        header,
        ext,
        sums: Vec::new(),
        out: Outgoing::Nothing,
        held: Held::Slots { _until_answered: slots },
    };
    let reply = connection.call(call, stop).await?;
    let moved = reply.frame.header.length as usize;
    // SAFETY: the node has answered, so the slots are ours, held by the reply; the memory is the caller's until its request
    // completes.
    let sums =
        unsafe { copy_pieces(header.offset, &from.prefix(moved), &memory.prefix(moved), !header.is_raw()) };
    verify(&reply.frame, &sums).map_err(Trouble::Refused)?;
    Ok(moved as u64)
}

async fn write(
    connection: &Arc<Connection>,
    header: Header,
    slots: Slots,
    memory: &Memory,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    // SAFETY: the slots are this transfer's; the memory is not written until its request completes.
    let sums = unsafe { copy_pieces(header.offset, memory, &slots.memory(), !header.is_raw()) };
    let ext = encode(&slots.segments());
    let call =
        Call { header, ext, sums, out: Outgoing::Nothing, held: Held::Slots { _until_answered: slots } };
    Ok(u64::from(connection.call(call, stop).await?.frame.header.length))
}

impl Held {
    /// Whether the node may still be writing into memory that is the caller's.
    pub fn is_in_doubt(&self, asked: &Header) -> bool {
        asked.opcode == gd2fs_wire::header::Opcode::Read as u8 && matches!(self, Held::Ranges(_))
    }

    /// Takes the memory away from a node that does not say whether it still writes there.
    pub fn sever(&self) -> std::io::Result<()> {
        if let Held::Ranges(ranges) = self {
            for (region, range) in ranges {
                region.sever(range.clone())?;
            }
        }
        Ok(())
    }
}
