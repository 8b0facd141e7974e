//! The Python face of the client.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gd2fs_client::{Completion, Direction, Options, Ticket, Transport, Warmth};
use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::buffers::{self, Keepers};
use crate::exit::{self, Inside};
use crate::iomem::{self, IOMEM};
use crate::raise;

/// Blocking calls look at signals this often, so that Ctrl-C works in all of them.
const SLICE: Duration = Duration::from_millis(50);
/// Longer than any transfer should take; keeps instants from overflowing.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A file by its layout.
#[pyclass(frozen, module = "gd2fs._native")]
pub struct File(pub gd2fs_client::File);

#[pyclass(frozen, module = "gd2fs._native")]
pub struct Client {
    client: gd2fs_client::Client,
    /// What keeps the memory of requests that are not reaped yet: native threads use it, so it is released only then.
    held: Mutex<HashMap<u64, Keepers>>,
    closed: AtomicBool,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (addresses, cluster, token, *, nics = vec![], io_threads = 0, memory_threads = 0, streams = 4,
                        transport = "auto", verify = true, outstanding_bytes_max = 1 << 30))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        addresses: Vec<String>,
        cluster: String,
        token: String,
        nics: Vec<String>,
        io_threads: usize,
        memory_threads: usize,
        streams: usize,
        transport: &str,
        verify: bool,
        outstanding_bytes_max: u64,
    ) -> PyResult<Client> {
        let parse = |nic: &String| {
            nic.parse::<IpAddr>().map_err(|_| {
                Failure::new(Code::Invalid, format!("nics: {nic:?} is not the IP address of a local NIC"))
            })
        };
        let make = || {
            let nics = nics.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
            let transport = match transport {
                "auto" => Transport::Auto,
                "tcp" => Transport::Tcp,
                "shm" => Transport::Shm,
                other => {
                    let why = format!("transport: {other:?} is none of auto, tcp, shm");
                    return Err(Failure::new(Code::Invalid, why));
                }
            };
            gd2fs_client::Client::new(&Options {
                addresses,
                cluster,
                token,
                nics,
                io_threads,
                memory_threads,
                streams,
                transport,
                verify,
                outstanding_bytes_max,
            })
        };
        let client = make().map_err(|failure| raise::failure(py, &failure))?;
        Ok(Client { client, held: Mutex::default(), closed: AtomicBool::new(false) })
    }

    #[pyo3(signature = (method, path, body, timeout_ms))]
    fn control(
        &self,
        py: Python<'_>,
        method: &str,
        path: &str,
        body: Option<Vec<u8>>,
        timeout_ms: i64,
    ) -> PyResult<(u16, Vec<u8>)> {
        let inside = exit::enter(py);
        let timeout = timeout(py, timeout_ms)?;
        wait(py, &inside, self.live(py)?.control(method, path, body, timeout))
    }

    fn file(&self, py: Python<'_>, layout: &str) -> PyResult<File> {
        self.live(py)?.file(layout).map(File).map_err(|failure| raise::failure(py, &failure))
    }

    fn submit_read(
        &self,
        file: &File,
        offset: u64,
        buffers: &Bound<'_, PyList>,
        timeout_ms: i64,
    ) -> PyResult<u64> {
        self.submit(
            buffers.py(),
            Direction::Read,
            file,
            offset,
            buffers::hold(buffers, Direction::Read)?,
            timeout_ms,
        )
    }

    fn submit_write(
        &self,
        file: &File,
        offset: u64,
        buffers: &Bound<'_, PyList>,
        timeout_ms: i64,
    ) -> PyResult<u64> {
        self.submit(
            buffers.py(),
            Direction::Write,
            file,
            offset,
            buffers::hold(buffers, Direction::Write)?,
            timeout_ms,
        )
    }

    #[pyo3(signature = (file, offset, addresses, lengths, timeout_ms, iomem = None))]
    fn submit_read_at(
        &self,
        file: &File,
        offset: u64,
        addresses: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        timeout_ms: i64,
        iomem: Option<&Bound<'_, IOMEM>>,
    ) -> PyResult<u64> {
        let held = buffers::fragments(addresses, lengths, iomem)?;
        self.submit(addresses.py(), Direction::Read, file, offset, held, timeout_ms)
    }

    #[pyo3(signature = (file, offset, addresses, lengths, timeout_ms, iomem = None))]
    fn submit_write_at(
        &self,
        file: &File,
        offset: u64,
        addresses: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        timeout_ms: i64,
        iomem: Option<&Bound<'_, IOMEM>>,
    ) -> PyResult<u64> {
        let held = buffers::fragments(addresses, lengths, iomem)?;
        self.submit(addresses.py(), Direction::Write, file, offset, held, timeout_ms)
    }

    fn alloc(&self, py: Python<'_>, length: usize) -> PyResult<IOMEM> {
        let inside = exit::enter(py);
        let client = self.live(py)?;
        let region = exit::detach(py, &inside, || client.allocate(length));
        Ok(IOMEM::of_region(region.map_err(|failure| raise::failure(py, &failure))?, length))
    }

    fn register(&self, buffer: &Bound<'_, PyAny>) -> PyResult<IOMEM> {
        self.live(buffer.py())?;
        iomem::register(buffer)
    }

    fn register_at(&self, py: Python<'_>, address: usize, length: usize) -> PyResult<IOMEM> {
        self.live(py)?;
        iomem::register_at(py, address, length)
    }

    fn cancel(&self, py: Python<'_>, request: u64) -> PyResult<()> {
        self.live(py)?.cancel(request);
        Ok(())
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.live(py)?.completions().fileno())
    }

    /// Appends to `into` without running Python code in between: a signal can't lose what was reaped.
    #[pyo3(signature = (max, timeout_ms, into = None))]
    fn reap<'py>(
        &self,
        py: Python<'py>,
        max: usize,
        timeout_ms: i64,
        into: Option<Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let inside = exit::enter(py);
        self.not_forked(py)?;
        let list = into.unwrap_or_else(|| PyList::empty(py));
        let until = if timeout_ms < 0 { None } else { Some(Instant::now() + timeout(py, timeout_ms)?) };
        loop {
            let closed = self.closed.load(Ordering::Acquire);
            let left =
                until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()).min(SLICE));
            let done = if left.is_zero() {
                self.client.completions().reap(max, left)
            } else {
                exit::detach(py, &inside, || self.client.completions().reap(max, left))
            };
            if !done.is_empty() {
                self.hand_over(done, &list)?;
                return Ok(list);
            }
            if closed {
                return Err(raise::closed(py));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(list);
            }
            py.check_signals()?;
        }
    }

    fn lengths(
        &self,
        py: Python<'_>,
        files: Vec<PyRef<'_, File>>,
        timeout_ms: i64,
    ) -> PyResult<Vec<Option<u64>>> {
        let inside = exit::enter(py);
        let timeout = timeout(py, timeout_ms)?;
        let files: Vec<gd2fs_client::File> = files.iter().map(|file| file.0.clone()).collect();
        wait(py, &inside, self.live(py)?.lengths(&files, timeout))
    }

    fn flush(&self, py: Python<'_>, file: &File, timeout_ms: i64) -> PyResult<()> {
        let inside = exit::enter(py);
        let timeout = timeout(py, timeout_ms)?;
        wait(py, &inside, self.live(py)?.flush(&file.0, timeout))
    }

    fn warm(
        &self,
        py: Python<'_>,
        file: &File,
        start: u64,
        end: u64,
        timeout_ms: i64,
    ) -> PyResult<(u64, u64, u64, u64)> {
        let inside = exit::enter(py);
        let timeout = timeout(py, timeout_ms)?;
        let Warmth { dram, nvme, missing, unreadable } =
            wait(py, &inside, self.live(py)?.warm(&file.0, start, end, timeout))?;
        Ok((dram, nvme, missing, unreadable))
    }

    fn whereabouts(
        &self,
        py: Python<'_>,
        file: &File,
        start: u64,
        end: u64,
        timeout_ms: i64,
    ) -> PyResult<Vec<(u64, u64, &'static str)>> {
        let inside = exit::enter(py);
        let timeout = timeout(py, timeout_ms)?;
        let extents = wait(py, &inside, self.live(py)?.whereabouts(&file.0, start, end, timeout))?;
        Ok(extents.into_iter().map(|(start, end, tier)| (start, end, tier.name())).collect())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.live(py)?.stats() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inside = exit::enter(py);
        self.not_forked(py)?;
        exit::detach(py, &inside, || self.client.close());
        self.closed.store(true, Ordering::Release);
        Ok(())
    }
}

impl Client {
    fn not_forked(&self, py: Python<'_>) -> PyResult<()> {
        if self.client.is_forked() { Err(raise::forked(py)) } else { Ok(()) }
    }

    pub fn live(&self, py: Python<'_>) -> PyResult<&gd2fs_client::Client> {
        self.not_forked(py)?;
        if self.closed.load(Ordering::Acquire) {
            return Err(raise::closed(py));
        }
        Ok(&self.client)
    }

    fn submit(
        &self,
        py: Python<'_>,
        direction: Direction,
        file: &File,
        offset: u64,
        held: buffers::Held,
        timeout_ms: i64,
    ) -> PyResult<u64> {
        let _inside = exit::enter(py);
        let client = self.live(py)?;
        let timeout = timeout(py, timeout_ms)?;
        // Locked before the request exists, so that its completion can't be handed over before its buffers are noted.
        let mut table = self.held.lock();
        // SAFETY: the buffers are held until `hand_over`; for raw addresses that is the caller's promise.
        let request = unsafe { client.submit(direction, &file.0, offset, held.memory, timeout) };
        if let Ok(request) = request {
            table.insert(request, held.keepers);
        }
        // Making an exception runs Python code, which may let another thread run that waits for this lock.
        drop(table);
        request.map_err(|failure| raise::failure(py, &failure))
    }

    fn hand_over(&self, done: Vec<Completion>, list: &Bound<'_, PyList>) -> PyResult<()> {
        for completion in done {
            let keepers = self.held.lock().remove(&completion.request);
            // Released here, attached to the interpreter and outside the lock: releasing may run Python code.
            drop(keepers);
            list.append((completion.request, completion.code as u32, completion.bytes, completion.message))?;
        }
        Ok(())
    }
}

/// Waits for a result while signals are looked at.
pub fn wait<T: Send + 'static>(
    py: Python<'_>,
    inside: &Inside,
    ticket: Result<Ticket<T>, Failure>,
) -> PyResult<T> {
    finish(py, inside, ticket)?.map_err(|failure| raise::failure(py, &failure))
}

/// As `wait`, with a failure as a value; an Err here is a signal's exception.
pub fn finish<T: Send + 'static>(
    py: Python<'_>,
    inside: &Inside,
    ticket: Result<Ticket<T>, Failure>,
) -> PyResult<Result<T, Failure>> {
    let mut ticket = match ticket {
        Ok(ticket) => ticket,
        Err(failure) => return Ok(Err(failure)),
    };
    loop {
        match exit::detach(py, inside, || ticket.wait(SLICE)) {
            Some(result) => return Ok(result),
            None => py.check_signals()?,
        }
    }
}

pub fn timeout(py: Python<'_>, timeout_ms: i64) -> PyResult<Duration> {
    match u64::try_from(timeout_ms).map(Duration::from_millis) {
        Ok(timeout) => Ok(timeout.min(TIMEOUT_MAX)),
        Err(_) => {
            let why = format!("timeout_ms: {timeout_ms} is negative");
            Err(raise::failure(py, &Failure::new(Code::Invalid, why)))
        }
    }
}
