//! The measuring loops, for `gd2fs.bench` only: everything here takes memory by its address, and believes it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::FromRawFd;

use gd2fs_bench::copy::{Fragment, Kind};
use gd2fs_bench::raw_tcp::{self, Operation};
use gd2fs_bench::requests::{self, Transfer};
use gd2fs_bench::{copy, redis};
use gd2fs_client::Direction;
use gd2fs_transport::Slice;
use gd2fs_wire::code::{Code, Failure};
use pyo3::prelude::*;

use crate::client::{self, Client};
use crate::{buffers, exit, raise};

/// Address and length of one range.
type Range = (usize, usize);

#[pyfunction]
pub fn bench_copy(
    py: Python<'_>,
    streaming: bool,
    sources: &Bound<'_, PyAny>,
    targets: &Bound<'_, PyAny>,
    lengths: &Bound<'_, PyAny>,
    threads: usize,
) -> PyResult<f64> {
    let inside = exit::enter(py);
    let (from, to) = (buffers::raw(sources, lengths)?, buffers::raw(targets, lengths)?);
    let fragments: Vec<Fragment> =
        from.slices().iter().zip(to.slices()).map(|(from, to)| Fragment::new(*from, *to)).collect();
    let kind = if streaming { Kind::Streaming } else { Kind::Memcpy };
    // SAFETY: the Python interface asks its caller for mapped ranges that nobody else uses.
    let time = exit::detach(py, &inside, || unsafe { copy::copy(kind, &fragments, threads) });
    Ok(time.as_secs_f64())
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn bench_requests(
    py: Python<'_>,
    client: &Client,
    write: bool,
    layout: &str,
    offsets: Vec<u64>,
    addresses: &Bound<'_, PyAny>,
    lengths: &Bound<'_, PyAny>,
    outstanding: usize,
    timeout_ms: i64,
) -> PyResult<(f64, Vec<f64>)> {
    let inside = exit::enter(py);
    let memory = buffers::raw(addresses, lengths)?;
    let fragments = memory.slices();
    if offsets.is_empty() || !fragments.len().is_multiple_of(offsets.len()) {
        let why = format!("offsets: {} requests can't share {} fragments", offsets.len(), fragments.len());
        return Err(raise::failure(py, &Failure::new(Code::Invalid, why)));
    }
    let each = (fragments.len() / offsets.len()).max(1);
    let transfers: Vec<Transfer> = offsets
        .iter()
        .zip(fragments.chunks(each))
        .map(|(offset, fragments)| Transfer { offset: *offset, fragments: fragments.to_vec() })
        .collect();
    let direction = if write { Direction::Write } else { Direction::Read };
    let (client, timeout) = (client.live(py)?, client::timeout(py, timeout_ms)?);
    // SAFETY: the Python interface asks its caller for mapped ranges that nobody else uses.
    let outcome = exit::detach(py, &inside, || unsafe {
        requests::run(client, direction, layout, &transfers, outstanding, timeout)
    })
    .map_err(|failure| raise::failure(py, &failure))?;
    let latencies = outcome.latencies.iter().map(std::time::Duration::as_secs_f64).collect();
    Ok((outcome.time.as_secs_f64(), latencies))
}

/// Serves until the process ends.
#[pyfunction]
pub fn raw_tcp_serve(py: Python<'_>, listener: i32, memory: Range) -> PyResult<()> {
    // SAFETY: the caller hands over its listening socket.
    let listener = unsafe { TcpListener::from_raw_fd(listener) };
    // SAFETY: the caller keeps the range mapped and unused as long as the process lives.
    py.detach(|| unsafe { raw_tcp::serve(&listener, slice(memory)) })?;
    Ok(())
}

#[pyclass(frozen, module = "gd2fs._native")]
pub struct RawTcp(raw_tcp::RawTcp);

#[pymethods]
impl RawTcp {
    #[new]
    fn new(py: Python<'_>, port: u16, streams: usize, buffer_bytes: u32) -> PyResult<RawTcp> {
        let buffer = (buffer_bytes > 0).then_some(buffer_bytes);
        let raw = py.detach(|| raw_tcp::RawTcp::connect(loopback(port), streams, buffer))?;
        Ok(RawTcp(raw))
    }

    fn run(
        &self,
        py: Python<'_>,
        write: bool,
        offset: usize,
        memory: Range,
        part_bytes: usize,
        ahead: usize,
    ) -> PyResult<f64> {
        let inside = exit::enter(py);
        let operation = if write { Operation::Write } else { Operation::Read };
        // SAFETY: the Python interface asks its caller for a mapped range that nobody else uses.
        let time = exit::detach(py, &inside, || unsafe {
            self.0.run(operation, offset, slice(memory), part_bytes, ahead)
        })?;
        Ok(time.as_secs_f64())
    }
}

#[pyclass(frozen, module = "gd2fs._native")]
pub struct RedisReader(redis::Reader);

#[pymethods]
impl RedisReader {
    #[new]
    fn new(py: Python<'_>, port: u16, connections: usize) -> PyResult<RedisReader> {
        Ok(RedisReader(py.detach(|| redis::Reader::connect(loopback(port), connections))?))
    }

    fn get(
        &self,
        py: Python<'_>,
        keys: Vec<Vec<u8>>,
        value_bytes: usize,
        memory: Range,
        depth: usize,
    ) -> PyResult<f64> {
        let inside = exit::enter(py);
        // SAFETY: the Python interface asks its caller for a mapped range that nobody else uses.
        let time =
            exit::detach(py, &inside, || unsafe { self.0.get(&keys, value_bytes, slice(memory), depth) })?;
        Ok(time.as_secs_f64())
    }
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// # Safety
/// As of `Slice::new`.
unsafe fn slice((address, length): Range) -> Slice {
    // SAFETY: the caller's promise.
    unsafe { Slice::new(address as *mut u8, length) }
}
