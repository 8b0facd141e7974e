//! Requests to GD2FS, a fixed number of them under way all the time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gd2fs_client::{Client, Direction, Memory, Slice};
use gd2fs_wire::code::{Code, Failure};

/// One wait for completions. It is repeated: every request ends within its own timeout, and until then its memory is in use.
const WAIT: Duration = Duration::from_secs(1);

/// One range of a file and the memory it moves to or from, in one or many fragments.
pub struct Transfer {
    pub offset: u64,
    pub fragments: Vec<Slice>,
}

pub struct Outcome {
    /// From the first submit to the last completion.
    pub time: Duration,
    /// Of each request, from its submit to when its completion was reaped.
    pub latencies: Vec<Duration>,
}

/// Runs all transfers, in order, with `outstanding` of them under way.
///
/// Only one caller may reap a client's completions: nobody else may have requests under way on it.
///
/// # Safety
/// The memory is mapped, and nobody else uses it during the call. Transfers that can be under way together don't overlap.
pub unsafe fn run(
    client: &Client,
    direction: Direction,
    layout: &str,
    transfers: &[Transfer],
    outstanding: usize,
    timeout: Duration,
) -> Result<Outcome, Failure> {
    let file = client.file(layout)?;
    let mut latencies = Vec::with_capacity(transfers.len());
    let mut under_way: HashMap<u64, (Instant, u64)> = HashMap::with_capacity(outstanding);
    let mut failed = None;
    let mut rest = transfers.iter();
    let start = Instant::now();
    loop {
        while under_way.len() < outstanding.max(1)
            && failed.is_none()
            && let Some(transfer) = rest.next()
        {
            let submitted = Instant::now();
            // The list is built here: any caller of the library has to do it, so it is part of what is measured.
            let memory = Memory::new(transfer.fragments.clone());
            let bytes = memory.len() as u64;
            // SAFETY: the caller's promise, and this function returns only when all have completed.
            match unsafe { client.submit(direction, &file, transfer.offset, memory, timeout) } {
                Ok(request) => drop(under_way.insert(request, (submitted, bytes))),
                Err(failure) => failed = Some(failure),
            }
        }
        if under_way.is_empty() {
            break;
        }
        let done = client.completions().reap(outstanding.max(1), WAIT);
        let now = Instant::now();
        for completion in done {
            let Some((submitted, bytes)) = under_way.remove(&completion.request) else { continue };
            latencies.push(now - submitted);
            if completion.code != Code::Ok {
                failed.get_or_insert(Failure::new(completion.code, completion.message));
            } else if completion.bytes != bytes {
                let text = format!("{} of {bytes} bytes were moved", completion.bytes);
                failed.get_or_insert(Failure::new(Code::Internal, text));
            }
        }
    }
    let time = start.elapsed();
    failed.map_or(Ok(Outcome { time, latencies }), Err)
}
