//! One part of a request: an exchange with one node, tried again where that is safe and can help.

use std::sync::Arc;

use gd2fs_transport::Memory;
use gd2fs_wire::code::Failure;
use gd2fs_wire::header::{FLAG_RAW, Header, Opcode};

use crate::call::Call;
use crate::connection::Connection;
use crate::handles::deadline_ms;
use crate::layout::{Layout, Part, Replica};
use crate::layouts::LayoutCell;
use crate::link::Link;
use crate::request::{Direction, Shared};
use crate::stats::add;
use crate::stop::Stop;
use crate::tries::Tries;
use crate::trouble::Trouble;

/// Moves one part; the bytes moved, fewer only for a read that reaches the end of its column. `first` is what the first try, made
/// elsewhere, met with.
pub(crate) async fn transfer(
    shared: &Arc<Shared>,
    cell: &Arc<LayoutCell>,
    direction: Direction,
    part: Part,
    memory: Memory,
    mut first: Option<Trouble>,
    mut stop: Stop,
) -> Result<u64, Failure> {
    let mut tries = Tries::new(shared, cell, direction);
    loop {
        let layout = cell.current(direction);
        let trouble = match first.take() {
            Some(trouble) => trouble,
            None => {
                match attempt(shared, &layout, direction, part, &memory, tries.count(), &mut stop).await {
                    Ok(moved) => {
                        if direction == Direction::Write {
                            cell.unflushed.acknowledged(part.column, moved.incarnation);
                        }
                        return Ok(moved.bytes);
                    }
                    Err(trouble) => trouble,
                }
            }
        };
        let what = || format!("{} [{}, {})", layout.path, part.offset, part.offset + part.length);
        tries.wait(trouble, &layout, what, &mut stop).await?;
    }
}

/// What one try of a part has brought.
struct Moved {
    bytes: u64,
    /// Of the node that moved it.
    incarnation: u32,
}

/// What asks for a part, but for the time that it may take.
pub(crate) fn header_for(
    shared: &Shared,
    layout: &Layout,
    direction: Direction,
    part: Part,
    handle: u32,
    replica: &Replica,
) -> Header {
    let opcode = match direction {
        Direction::Read => Opcode::Read,
        Direction::Write => Opcode::Write,
    };
    Header {
        opcode: opcode as u8,
        handle,
        epoch: layout.columns[part.column].epoch,
        incarnation: replica.incarnation,
        offset: part.offset,
        length: part.length as u32,
        flags: if shared.verify { 0 } else { FLAG_RAW },
        ..Header::default()
    }
}

async fn attempt(
    shared: &Arc<Shared>,
    layout: &Layout,
    direction: Direction,
    part: Part,
    memory: &Memory,
    turn: u32,
    stop: &mut Stop,
) -> Result<Moved, Trouble> {
    let column = &layout.columns[part.column];
    // Any replica may be read; a write enters at the first one.
    let replica = match direction {
        Direction::Read => &column.replicas[turn as usize % column.replicas.len()],
        Direction::Write => &column.replicas[0],
    };
    let link = shared.link(replica).map_err(Trouble::Refused)?;
    if direction == Direction::Write {
        link.settle(stop).await?;
    }
    let lane = link.lane(part.length as usize);
    let connection = lane.connection(stop).await?;
    let (handle, _open) = connection.handle(&layout.capability, part.column as u32, stop).await?;
    let mut header = header_for(shared, layout, direction, part, handle, replica);
    header.deadline_ms = deadline_ms(stop);
    let exchange = Exchange { shared, link: &link, connection: &connection, header, direction, memory };
    let bytes = exchange.run(stop).await?;
    lane.arrived();
    add(direction.counter(&shared.stats), bytes);
    Ok(Moved { bytes, incarnation: connection.incarnation })
}

/// One try of one part with one node.
pub(crate) struct Exchange<'a> {
    pub shared: &'a Shared,
    pub link: &'a Link,
    pub connection: &'a Arc<Connection>,
    /// What is wanted, by the stream's way.
    pub header: Header,
    pub direction: Direction,
    pub memory: &'a Memory,
}

impl Exchange<'_> {
    /// Bytes moved, by whichever way this connection and this memory allow.
    async fn run(&self, stop: &mut Stop) -> Result<u64, Trouble> {
        if self.connection.is_local()
            && let Some(moved) = self.one_sided(stop).await?
        {
            return Ok(moved);
        }
        let call = Call::streamed(self.header, self.direction, self.memory);
        Ok(u64::from(self.connection.call(call, stop).await?.frame.header.length))
    }
}
