//! A node in this process: its own runtime, its store, its listeners.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_store::{DataDir, Store};
use gd2fs_transport::Address;
use gd2fs_wire::{Code, Failure};
use parking_lot::{Condvar, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::config::{self, Config, StartError};
use crate::local::LocalListener;
use crate::server::{self, Listener, Shared};

/// What the end of the grace cuts off ends at its next wait. A thread that is in the middle of a copy or of a system call by then
/// gets this long, of which a copy of 64 MiB takes a hundredth and a disk that is well a tenth.
const CUT_OFF: Duration = Duration::from_secs(2);
/// What is left of the runtime after its connections have ended gets this long; nothing should be.
const RUNTIME_END: Duration = Duration::from_millis(500);
/// For those that wait for the disk under the epochs, or for page tables.
const SPARE_THREADS: usize = 16;

/// A running node. Dropping it stops it at once.
pub struct Node {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    /// None: serving. Otherwise the time at which running requests are cut off.
    shutdown: watch::Sender<Option<Instant>>,
    ended: Arc<Ended>,
    runtime: Mutex<Option<Runtime>>,
}

#[derive(Default)]
struct Ended {
    flag: Mutex<bool>,
    changed: Condvar,
}

/// Marks the end, also if the task that holds it panics: `stop` must never wait for nothing.
struct End(Arc<Ended>);

impl Drop for End {
    fn drop(&mut self) {
        *self.0.flag.lock() = true;
        self.0.changed.notify_all();
    }
}

impl Node {
    /// Opens the data directory, listens and serves. Everything that can be refused is refused before a byte is accepted.
    pub fn start(config: Config) -> Result<Node, StartError> {
        let begun = Instant::now();
        let (keys, wanted) = config.check()?;
        let tiers = config.tiers()?;
        tiers.check_places(&config.data_dir)?;
        let data = DataDir::open(&config.data_dir, &config.cluster, &config.node, config.incarnation)?;
        let listeners = wanted.into_iter().map(config::listen).collect::<Result<Vec<_>, _>>()?;
        let local = LocalListener::bind(&config.shm)?;
        let memory_bytes = usize::try_from(config.memory_bytes).unwrap_or(usize::MAX);
        let threads = match config.io_threads {
            // More threads than this only wait for memory.
            0 => std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 16),
            threads => threads,
        };
        let spare = SPARE_THREADS + config.memory_threads;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(spare)
            .thread_name("gd2fs-node")
            .enable_all()
            .build()
            .map_err(StartError::Runtime)?;
        let store = runtime.block_on(Store::with_logs(memory_bytes, data, tiers))?;
        if let Some(now) = config.now {
            store.clock().hear(now + begun.elapsed().as_secs_f64());
        }
        let shared = Arc::new(Shared::new(config, keys, store));
        let _inside = runtime.enter();
        let mut addresses = Vec::with_capacity(listeners.len() + 1);
        let mut accepting = Vec::with_capacity(listeners.len() + 1);
        for listener in listeners {
            let listener = TcpListener::from_std(listener).map_err(StartError::Runtime)?;
            addresses.push(Address::Tcp(listener.local_addr().map_err(StartError::Runtime)?));
            accepting.push(Listener::Tcp(listener));
        }
        if let Some((listener, address)) = local {
            accepting.push(Listener::Local(listener.into_async().map_err(StartError::Runtime)?));
            addresses.push(address);
        }
        let (shutdown, stopping) = watch::channel(None);
        let ended = Arc::new(Ended::default());
        let (task_shared, end) = (shared.clone(), End(ended.clone()));
        runtime.spawn(async move {
            server::run(accepting, task_shared, stopping).await;
            drop(end);
        });
        drop(_inside);
        Ok(Node { shared, addresses, shutdown, ended, runtime: Mutex::new(Some(runtime)) })
    }

    /// Where it listens, with the ports that were given for port 0.
    pub fn addresses(&self) -> Vec<String> {
        self.addresses.iter().map(Address::to_string).collect()
    }

    /// Counters as a JSON object.
    pub fn stats(&self) -> String {
        self.shared.stats.to_json(&self.shared.store).to_string()
    }

    /// Control says that it is `now`, in unix seconds.
    pub fn hear_time(&self, now: f64) {
        self.shared.store.clock().hear(now);
    }

    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Accepts nothing more, answers SHUTTING_DOWN to new requests, lets running ones finish within `grace`, and returns when
    /// all connections have ended, or 3 s after the grace at the latest, and everything is in the log, or `flush_s` later. A
    /// second call can only shorten the grace.
    ///
    /// A thread that does not come back from the system by then (a disk that hangs) is left behind with all that it uses: the
    /// memory of the node stays, and so does the lock of its data directory, until the process ends.
    ///
    /// # Errors
    /// What did not reach the logs, and why; it has stopped all the same. Who calls first learns it.
    pub fn stop(&self, grace: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + grace;
        self.shutdown
            .send_modify(|current| *current = Some(current.map_or(deadline, |set| set.min(deadline))));
        let mut flag = self.ended.flag.lock();
        // One that waits with a longer grace looks again.
        self.ended.changed.notify_all();
        loop {
            let latest = self.shutdown.borrow().expect("set above, never unset") + CUT_OFF;
            if *flag || Instant::now() >= latest {
                break;
            }
            self.ended.changed.wait_until(&mut flag, latest);
        }
        if !*flag {
            let connections = self.shared.stats.connections.load(Relaxed);
            let requests = self.shared.running();
            tracing::error!(connections, requests, "the node stops without these, which do not end");
        }
        drop(flag);
        let Some(runtime) = self.runtime.lock().take() else { return Ok(()) };
        let (shared, patience) = (self.shared.clone(), Duration::from_secs(self.shared.config.flush_s));
        // In a task: a thread that does not come back from the system must not hold this one up.
        let closing = runtime.spawn(async move { shared.store.close(patience).await });
        let closed = runtime.block_on(async { tokio::time::timeout(patience + CUT_OFF, closing).await });
        let lost = |why: String| {
            let bytes = self.shared.store.tier_stats().dirty_bytes;
            Err(Failure::new(
                Code::Internal,
                format!("{bytes} bytes did not reach the logs and are lost ({why})"),
            ))
        };
        let kept = match closed {
            Ok(Ok(kept)) => kept,
            Ok(Err(panic)) => lost(panic.to_string()),
            Err(_) => lost("they do not end".to_owned()),
        };
        runtime.shutdown_timeout(RUNTIME_END);
        kept
    }

    /// Whether the node has ended, waiting for it at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut flag = self.ended.flag.lock();
        while !*flag && !self.ended.changed.wait_until(&mut flag, deadline).timed_out() {}
        *flag
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(failure) = self.stop(Duration::ZERO) {
            tracing::error!("{failure}");
        }
    }
}
