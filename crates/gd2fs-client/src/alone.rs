//! The short way: a request of one part whose way is open already is sent by the caller's thread and completed by the
//! connection's task. A small request costs no task of its own; whatever is not plain success takes the long way.

use std::sync::Arc;

use crate::call::{Call, Reply};
use crate::handles::deadline_ms;
use crate::one_sided::Held;
use crate::part::header_for;
use crate::request::{Direction, Request, Shared};
use crate::requests::Requests;
use crate::stats::add;
use crate::trouble::Trouble;

/// Starts `request` if nothing has to be waited for; else gives it back.
pub(crate) fn start(
    mut request: Request,
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
    header.deadline_ms = deadline_ms(&request.stopper.stop());
    let call = if connection.is_local() {
        let Some(direct) = shared.regions.direct(&request.memory, request.direction) else {
            return Some(request);
        };
        if !direct.ranges.regions().all(|region| connection.has_mapped(region.number)) {
            return Some(request);
        }
        Call::one_sided(header, &direct.segments, Held::Ranges(direct.ranges))
    } else {
        Call::streamed(header, request.direction, &request.memory)
    };
    let (stopper, length, local) = (request.stopper.clone(), part.length, connection.is_local());
    let (shared, requests, runtime) = (shared.clone(), requests.clone(), runtime.clone());
    let done = Box::new(move |result: Result<Reply, Trouble>| {
        if result.is_ok() {
            lane.arrived();
        }
        drop((admitted, lane, open));
        if let Ok(reply) = &result
            && u64::from(reply.frame.header.length) == length
        {
            if request.direction == Direction::Write {
                request.cell.unflushed.acknowledged(part.column, reply.frame.header.incarnation);
            }
            add(request.direction.counter(&shared.stats), length);
            if local {
                add(&shared.stats.bytes_direct, length);
            }
            return requests.end_quietly(number, Ok(length));
        }
        // Short, stopped, refused or lost: what that means, and what may be tried again, the long way knows.
        request.trouble = result.err();
        runtime.spawn(request.run_to_end(number, shared, requests));
    });
    let call_number = connection.submit(call, done);
    if let Some(call_number) = call_number {
        stopper.leave_alone(connection, call_number);
    }
    None
}
