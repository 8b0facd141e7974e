//! The short way: a request of one part whose way is open already is sent by the caller's thread and completed by the
//! connection's task. A small request costs no task of its own; whatever is not plain success takes the long way.

use std::sync::Arc;

use gd2fs_wire::header::{FLAG_ONE_SIDED, Header};

use crate::connection::{Call, Outgoing};
use crate::one_sided::Held;
use crate::part::header_for;
use crate::request::{Direction, Request, Shared};
use crate::requests::Requests;
use crate::stats::add;

/// Starts `request` if nothing has to be waited for; else gives it back.
pub(crate) fn start(
    request: Request,
    number: u64,
    shared: &Arc<Shared>,
    requests: &Arc<Requests>,
    runtime: &tokio::runtime::Handle,
) -> Option<Request> {
    let layout = request.cell.current(request.direction);
    let mut parts = layout.parts(request.offset, request.memory.len() as u64);
    let (Some(part), None) = (parts.next(), parts.next()) else { return Some(request) };
    let column = &layout.columns[part.column];
    let Some(link) = shared.links.find(&column.replicas[0].node) else { return Some(request) };
    let Some(admitted) = shared.try_admit(&link, part.length) else { return Some(request) };
    if request.direction == Direction::Write && !link.is_settled() {
        return Some(request);
    }
    let lane = link.lane(part.length as usize);
    let Some(connection) = lane.usable() else { return Some(request) };
    let Some((handle, open)) = connection.open_handle(&layout.capability, part.column as u32) else {
        return Some(request);
    };
    let mut header = header_for(shared, &layout, request.direction, part, handle, &column.replicas[0]);
    header.deadline_ms = u32::try_from(request.stopper.remaining().as_millis()).unwrap_or(u32::MAX).max(1);
    let call = if connection.is_local() {
        let Some(direct) = shared.regions.direct(&request.memory, request.direction) else {
            return Some(request);
        };
        if !direct.ranges.iter().all(|(region, _)| connection.has_mapped(region.number)) {
            return Some(request);
        }
        header.flags |= FLAG_ONE_SIDED;
        let ext = gd2fs_transport::one_sided::encode(&direct.segments);
        Call { header, ext, sums: Vec::new(), out: Outgoing::Nothing, held: Held::Ranges(direct.ranges) }
    } else {
        stream_call(header, &request)
    };
    let (stopper, length, local) = (request.stopper.clone(), part.length, connection.is_local());
    let (shared, requests, runtime) = (shared.clone(), requests.clone(), runtime.clone());
    let done = Box::new(move |result: Result<crate::connection::Reply, crate::trouble::Trouble>| {
        drop((admitted, lane, open));
        match (result, request.stopper.ended()) {
            (Ok(reply), _) if u64::from(reply.frame.header.length) == length => {
                let moved = length;
                add(request.direction.counter(&shared.stats), moved);
                if local {
                    add(&shared.stats.bytes_direct, moved);
                }
                requests.end(number, Ok(moved));
            }
            (Err(_), Some(failure)) => requests.end(number, Err(failure)),
            // Short, refused or lost: what that means, and what may be tried again, the long way knows.
            (result, _) => {
                if result.is_err() {
                    add(&shared.stats.retries, 1);
                }
                runtime.spawn(request.run_to_end(number, shared, requests));
            }
        }
    });
    let call_number = connection.submit(call, done);
    if let Some(call_number) = call_number {
        stopper.leave_alone(connection, call_number);
    }
    None
}

fn stream_call(header: Header, request: &Request) -> Call {
    let out = match request.direction {
        Direction::Read => Outgoing::Landing(request.memory.clone()),
        Direction::Write => Outgoing::Data(request.memory.clone()),
    };
    Call::new(header, out)
}
