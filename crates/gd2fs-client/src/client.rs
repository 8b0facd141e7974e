//! The client object: requests go in, completions come out.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use gd2fs_transport::Memory;
use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

use crate::alone;
use crate::completion::Completions;
use crate::control::Control;
use crate::dial::{Caller, Transport};
use crate::layouts::{LayoutCell, Layouts};
use crate::link::{Links, Ways};
use crate::region::{Region, Regions};
use crate::request::{BUDGET_UNIT_BYTES, Direction, Request, Shared};
use crate::requests::Requests;
use crate::stats::{Stats, add};
use crate::stop::Stopper;

/// Longest time that `close` waits for everything to end by itself.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// What is cut off then still runs to its next await, which a machine out of breath can delay: its memory is free only then.
const CUT_OFF_TIMEOUT: Duration = Duration::from_secs(10);
const STREAMS_MAX: usize = 64;
const IO_THREADS_MAX: usize = 64;
/// More than these are kept busy by no network that one process serves.
const IO_THREADS_AUTO_MAX: usize = 4;
/// For looking up control's name.
const SPARE_THREADS: usize = 2;

#[derive(Clone, Debug)]
pub struct Options {
    /// `http://HOST:PORT` of control.
    pub addresses: Vec<String>,
    pub cluster: String,
    pub token: String,
    /// Local addresses to connect from; empty: whatever the routes say.
    pub nics: Vec<IpAddr>,
    /// 0: one for each two processors, at most 4.
    pub io_threads: usize,
    /// Spare threads that take over from an I/O thread while it copies much (staged transfers); 0: what else it serves waits.
    pub memory_threads: usize,
    /// Connections per node and NIC.
    pub streams: usize,
    pub transport: Transport,
    pub verify: bool,
    /// Bytes of all requests together that may be under way; further requests wait.
    pub outstanding_bytes_max: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            addresses: Vec::new(),
            cluster: String::new(),
            token: String::new(),
            nics: Vec::new(),
            io_threads: 0,
            memory_threads: 0,
            streams: 4,
            transport: Transport::Auto,
            verify: true,
            outstanding_bytes_max: 1 << 30,
        }
    }
}

pub struct Client {
    pub(crate) shared: Arc<Shared>,
    requests: Arc<Requests>,
    runtime: Mutex<Option<Runtime>>,
    /// Held by whoever closes: a second one must not return before the memory of all requests is free.
    closing: Mutex<()>,
    /// Threads of the runtime that have not ended.
    threads: Arc<AtomicUsize>,
    /// Threads do not survive a fork: in a child nothing here works, and nothing may be joined.
    process: u32,
}

/// A file by its layout, for requests.
#[derive(Clone)]
pub struct File(pub(crate) Arc<LayoutCell>);

/// A result that is still being made. Dropping it gives it up.
pub struct Ticket<T> {
    result: mpsc::Receiver<Result<T, Failure>>,
    task: tokio::task::AbortHandle,
}

impl Client {
    pub fn new(options: &Options) -> Result<Client, Failure> {
        let check = |name: &str, value: usize, min: usize, max: usize| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Failure::new(Code::Invalid, format!("{name}: {value} is not in {min}..{max}")))
        };
        check("io_threads", options.io_threads, 0, IO_THREADS_MAX)?;
        check("memory_threads", options.memory_threads, 0, IO_THREADS_MAX)?;
        check("streams", options.streams, 1, STREAMS_MAX)?;
        let internal = |error: std::io::Error| Failure::new(Code::Internal, error.to_string());
        let budget_units = options.outstanding_bytes_max.div_ceil(BUDGET_UNIT_BYTES).clamp(1, 1 << 28);
        let completions = Arc::new(Completions::new().map_err(internal)?);
        let (regions, mut gone) = Regions::new();
        let shared = Shared {
            control: Control::new(&options.addresses, &options.token)?,
            layouts: Layouts::default(),
            links: Links::default(),
            caller: Arc::new(
                Caller::new(&options.cluster, &options.token, Some(completions.clone())).map_err(internal)?,
            ),
            ways: Ways { transport: options.transport, nics: options.nics.clone(), streams: options.streams },
            regions,
            apart: options.memory_threads > 0,
            verify: options.verify,
            budget: Arc::new(Semaphore::new(budget_units as usize)),
            budget_units,
            stats: Arc::new(Stats::default()),
        };
        let threads = Arc::new(AtomicUsize::new(0));
        let (begun, ended) = (threads.clone(), threads.clone());
        let io_threads = match options.io_threads {
            0 => std::thread::available_parallelism()
                .map_or(1, |all| all.get().div_ceil(2))
                .min(IO_THREADS_AUTO_MAX),
            some => some,
        };
        let runtime = builder(io_threads, "gd2fs-io")
            .max_blocking_threads(SPARE_THREADS + options.memory_threads)
            .on_thread_start(move || {
                begun.fetch_add(1, Ordering::SeqCst);
            })
            .on_thread_stop(move || {
                ended.fetch_sub(1, Ordering::SeqCst);
            })
            .build()
            .map_err(internal)?;
        let shared = Arc::new(shared);
        let requests = Arc::new(Requests::new(completions));
        let watched = requests.clone();
        runtime.spawn(async move { watched.watch().await });
        let links = Arc::downgrade(&shared);
        runtime.spawn(async move {
            while let Some(region) = gone.recv().await
                && let Some(shared) = links.upgrade()
            {
                shared.links.unmap(region);
            }
        });
        Ok(Client {
            shared,
            requests,
            runtime: Mutex::new(Some(runtime)),
            closing: Mutex::default(),
            threads,
            process: std::process::id(),
        })
    }

    /// Whether this is a forked child of the process that made the client. All other methods must not be called then.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// The file that a layout (JSON) describes.
    pub fn file(&self, layout: &str) -> Result<File, Failure> {
        self.shared.layouts.get(layout).map(File)
    }

    /// Starts a transfer between `memory` and the file range that begins at `offset`; its number comes back as a completion.
    ///
    /// # Safety
    /// The memory stays mapped until that completion has been reaped; it is not written meanwhile, and for a read it is not
    /// read either.
    pub unsafe fn submit(
        &self,
        direction: Direction,
        file: &File,
        offset: u64,
        memory: Memory,
        timeout: Duration,
    ) -> Result<u64, Failure> {
        // The node's table of offsets, and JSON, count in i64.
        if offset.checked_add(memory.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Failure::new(
                Code::BadRequest,
                format!("offset {offset} + {} bytes is over 2^63", memory.len()),
            ));
        }
        let stopper = Stopper::new(timeout);
        let runtime = self.handle()?;
        let number = self.requests.admit(&stopper)?;
        add(&self.shared.stats.requests, 1);
        let request = Request { direction, cell: file.0.clone(), offset, memory, stopper, trouble: None };
        if let Some(request) = alone::start(request, number, &self.shared, &self.requests, &runtime) {
            runtime.spawn(request.run_to_end(number, self.shared.clone(), self.requests.clone()));
        }
        Ok(number)
    }

    /// Asks for an early end; the request still completes, as CANCELLED or with its result.
    pub fn cancel(&self, request: u64) {
        self.requests.cancel(request);
    }

    /// Memory that nodes of this host can fill and empty by themselves; `length` bytes at least, in whole pages.
    pub fn allocate(&self, length: usize) -> Result<Arc<Region>, Failure> {
        self.shared.regions.allocate(length)
    }

    pub fn completions(&self) -> &Completions {
        &self.requests.completions
    }

    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let mut stats = self.shared.stats.snapshot();
        stats.push(("requests_pending", self.requests.pending() as u64));
        stats
    }

    /// An HTTP call to control: status and body.
    pub fn control(
        &self,
        method: &str,
        path: &str,
        body: Option<Vec<u8>>,
        timeout: Duration,
    ) -> Result<Ticket<(u16, Vec<u8>)>, Failure> {
        let (shared, method, path) = (self.shared.clone(), method.to_owned(), path.to_owned());
        self.start(async move { shared.control.call(&method, &path, body, timeout).await })
    }

    /// The highest acknowledged end of each file as its nodes say; None for a file whose node can't be reached or has lost it.
    pub fn lengths(&self, files: &[File], timeout: Duration) -> Result<Ticket<Vec<Option<u64>>>, Failure> {
        let cells: Vec<Arc<LayoutCell>> = files.iter().map(|file| file.0.clone()).collect();
        let shared = self.shared.clone();
        self.start(async move {
            let stopper = Stopper::new(timeout);
            let mut lengths = Vec::with_capacity(cells.len());
            for cell in cells {
                let layout = cell.current(Direction::Read);
                lengths.push(match shared.column_ends(&layout, &mut stopper.stop()).await {
                    Ok(ends) => ends.into_iter().max(),
                    Err(failure) if is_absence(failure.code) => None,
                    Err(failure) => return Err(failure),
                });
            }
            Ok(lengths)
        })
    }

    /// Completes everything as CANCELLED, closes the connections and ends the threads; idempotent.
    pub fn close(&self) {
        let _closing = self.closing.lock();
        let until = Instant::now() + CLOSE_TIMEOUT;
        self.requests.close(until);
        let Some(runtime) = self.runtime.lock().take() else { return };
        let connections = self.shared.links.connections();
        // The sockets close now, whoever still holds this object.
        let links = self.shared.links.end();
        let _ = runtime.block_on(async { tokio::time::timeout_at(until.into(), links).await });
        runtime.shutdown_timeout(
            until.saturating_duration_since(Instant::now()).max(Duration::from_millis(100)),
        );
        let cut_off = Instant::now() + CUT_OFF_TIMEOUT;
        let runs = || self.threads.load(Ordering::SeqCst) > 0 && self.requests.pending() > 0;
        while runs() && Instant::now() < cut_off {
            std::thread::sleep(Duration::from_millis(1));
        }
        // With the threads gone nothing can touch memory: what had not ended by itself has ended now.
        connections.iter().for_each(|connection| connection.abandon());
        self.requests.complete_rest();
    }

    fn handle(&self) -> Result<tokio::runtime::Handle, Failure> {
        self.runtime.lock().as_ref().map(|runtime| runtime.handle().clone()).ok_or_else(closed)
    }

    pub(crate) fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<Ticket<T>, Failure> {
        Ok(Ticket::start(&self.handle()?, work))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.close();
        } else if let Some(runtime) = self.runtime.get_mut().take() {
            // Its threads are the parent's: joining them here would wait for ever. Its epoll descriptor is shared with the
            // parent: a socket dropped here would be taken off the parent's list.
            std::mem::forget(runtime);
            std::mem::forget(self.shared.clone());
        }
    }
}

impl<T: Send + 'static> Ticket<T> {
    pub(crate) fn start(
        runtime: &tokio::runtime::Handle,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Ticket<T> {
        let (sender, result) = mpsc::channel();
        let task = runtime.spawn(async move {
            // Nobody may be waiting any more.
            let _ = sender.send(work.await);
        });
        Ticket { result, task: task.abort_handle() }
    }

    /// None: not yet. Waiting in slices lets the caller look at signals in between.
    pub fn wait(&mut self, at_most: Duration) -> Option<Result<T, Failure>> {
        match self.result.recv_timeout(at_most) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(Failure::new(Code::Cancelled, "the client was closed during the call")))
            }
        }
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn builder(threads: usize, name: &str) -> Builder {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all();
    builder
}

pub(crate) fn closed() -> Failure {
    Failure::new(Code::Cancelled, "the client is closed")
}

/// Codes that say that a file's bytes can't be had, rather than that the question was wrong.
fn is_absence(code: Code) -> bool {
    matches!(
        code,
        Code::Disconnected
            | Code::Timeout
            | Code::Lost
            | Code::StaleIncarnation
            | Code::WrongNode
            | Code::ShuttingDown
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn close_completes_nothing_that_is_still_running() {
        let client = Client::new(&Options::default()).unwrap();
        let number = client.requests.admit(&Stopper::new(Duration::from_secs(60))).unwrap();
        let running = Arc::new(AtomicBool::new(true));
        let (step, (began, has_begun)) = (running.clone(), mpsc::channel());
        client.handle().unwrap().spawn(async move {
            began.send(()).unwrap();
            // A thread that the machine lets wait in the middle of a copy.
            std::thread::sleep(CLOSE_TIMEOUT + Duration::from_millis(500));
            step.store(false, Ordering::SeqCst);
        });
        has_begun.recv().unwrap();
        client.close();
        assert!(!running.load(Ordering::SeqCst));
        assert_eq!(client.completions().reap(9, Duration::ZERO)[0].request, number);
    }
}
