//! A part whose bytes the node moves itself: straight to or from library memory, or through the staging ring.

use std::sync::Arc;

use gd2fs_transport::Memory;
use gd2fs_transport::copy::{at_memory, copy_pieces};
use gd2fs_wire::header::{Header, Opcode};

use crate::call::{Call, verify};
use crate::connection::Connection;
use crate::part::Exchange;
use crate::region::{Direct, Ranges, Region};
use crate::request::Direction;
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
    Ranges(Ranges),
}

impl Exchange<'_> {
    /// Bytes moved; None if this part has to go through the stream.
    pub async fn one_sided(&self, stop: &mut Stop) -> Result<Option<u64>, Trouble> {
        let Exchange { shared, connection, memory, .. } = *self;
        if let Some(direct) = shared.regions.direct(memory, self.direction)
            && map(connection, &direct, stop).await?
        {
            // The node sums in its copy, so that every byte of the memory is read once.
            let call = Call::one_sided(self.header, &direct.segments, Held::Ranges(direct.ranges));
            let moved = u64::from(connection.call(call, stop).await?.frame.header.length);
            add(&shared.stats.bytes_direct, moved);
            return Ok(Some(moved));
        }
        if memory.len() > STAGED_BYTES_MAX {
            return Ok(None);
        }
        let ring = self.link.ring(&shared.regions).map_err(Trouble::Refused)?;
        match map_region(connection, ring.region(), stop).await {
            // A node that maps no more takes the bytes through the socket.
            Err(Trouble::Refused(_)) => return Ok(None),
            mapped => mapped?,
        }
        let slots = ring.slots(memory.len(), stop).await?;
        let moved = match self.direction {
            Direction::Read => self.staged_read(slots, stop).await,
            Direction::Write => self.staged_write(slots, stop).await,
        }?;
        add(&shared.stats.bytes_staged, moved);
        Ok(Some(moved))
    }

    async fn staged_read(&self, slots: Slots, stop: &mut Stop) -> Result<u64, Trouble> {
        let (from, segments) = (slots.memory(), slots.segments());
        let call = Call::one_sided(self.header, &segments, Held::Slots { until_answered: slots });
        let reply = self.connection.call(call, stop).await?;
        let moved = reply.frame.header.length as usize;
        // SAFETY: the node has answered, so the slots are ours, held by the reply.
        let sums = unsafe { self.copy(&from.prefix(moved), &self.memory.prefix(moved)) };
        verify(&reply.frame, &sums).map_err(Trouble::Refused)?;
        Ok(moved as u64)
    }

    async fn staged_write(&self, slots: Slots, stop: &mut Stop) -> Result<u64, Trouble> {
        // SAFETY: the slots are this transfer's.
        let sums = unsafe { self.copy(self.memory, &slots.memory()) };
        let segments = slots.segments();
        let held = Held::Slots { until_answered: slots };
        let call = Call { sums, ..Call::one_sided(self.header, &segments, held) };
        Ok(u64::from(self.connection.call(call, stop).await?.frame.header.length))
    }

    /// Copies between slots and the caller's memory, which is the transfer's until its request completes; the sums of what was
    /// copied, where they are wanted.
    ///
    /// # Safety
    /// The slots are nobody else's meanwhile.
    unsafe fn copy(&self, from: &Memory, into: &Memory) -> Vec<u32> {
        let Header { offset, .. } = self.header;
        // SAFETY: the caller's promise, and the one of whoever submitted the request.
        let copy = || unsafe { copy_pieces(offset, from, into, !self.header.is_raw()) };
        at_memory(self.shared.apart, into.len(), copy)
    }
}

/// Whether the node has all regions of `direct` mapped now; one that it refuses goes through the ring.
async fn map(connection: &Arc<Connection>, direct: &Direct, stop: &mut Stop) -> Result<bool, Trouble> {
    let mut last = 0;
    for region in direct.ranges.regions() {
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

impl Held {
    /// Whether the node may still be writing into memory that is the caller's.
    pub fn is_in_doubt(&self, asked: &Header) -> bool {
        asked.opcode == Opcode::Read as u8 && matches!(self, Held::Ranges(_))
    }

    /// Whether it is in a staging ring.
    pub fn is_staged(&self) -> bool {
        matches!(self, Held::Slots { .. })
    }

    /// Takes the memory away from a node that does not say whether it still writes there.
    pub fn sever(&self) -> std::io::Result<()> {
        match self {
            Held::Nothing => {}
            Held::Slots { until_answered } => until_answered.retire_ring(),
            Held::Ranges(ranges) => ranges.sever()?,
        }
        Ok(())
    }
}
