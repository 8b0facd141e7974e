//! Accepting connections, and the end of all of them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use gd2fs_store::Store;
use gd2fs_transport::Stream;
use gd2fs_transport::address::check_peer;
use gd2fs_transport::shm::Mappings;
use gd2fs_wire::Keys;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;

use crate::config::Config;
use crate::connection;
use crate::fences::Fences;
use crate::local::LocalListener;
use crate::one_sided;
use crate::stats::Stats;

/// After an accept that failed for want of something (descriptors, memory): time for it to be given back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A peer that vanished without a word is noticed after about a minute; until then it costs one connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// What all connections of a node share.
pub struct Shared {
    pub config: Config,
    pub keys: Keys,
    pub store: Store,
    pub stats: Stats,
    pub fences: Arc<Fences>,
    /// Memory that clients of this host share.
    pub mappings: Arc<Mappings>,
    /// Memory of the open handles of all connections.
    pub handle_bytes: Arc<AtomicUsize>,
    /// Requests between their header and the end of their reply.
    running: AtomicUsize,
    /// A request has ended, during a shutdown.
    ended: Notify,
    connections: Arc<Semaphore>,
}

/// Counts as a running request while it lives.
pub struct Running<'a>(&'a Shared);

impl Shared {
    pub fn new(config: Config, keys: Keys, store: Store) -> Shared {
        let connections = Arc::new(Semaphore::new(config.connections_max));
        Shared {
            config,
            keys,
            store,
            stats: Stats::default(),
            fences: Arc::default(),
            mappings: Arc::default(),
            handle_bytes: Arc::default(),
            running: AtomicUsize::new(0),
            ended: Notify::new(),
            connections,
        }
    }

    /// Requests that are not answered yet.
    pub fn running(&self) -> usize {
        self.running.load(SeqCst)
    }

    pub fn begin_request(&self) -> Running<'_> {
        self.running.fetch_add(1, SeqCst);
        Running(self)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, SeqCst) == 1 {
            self.0.ended.notify_waiters();
        }
    }
}

/// Serves until `shutdown` names a time, then lets running requests finish until then. Returns when no connection is left.
pub async fn run(listeners: Vec<Listener>, shared: Arc<Shared>, shutdown: watch::Receiver<Option<Instant>>) {
    let mut all = JoinSet::new();
    for listener in listeners {
        all.spawn(accept(listener, shared.clone(), shutdown.clone()));
    }
    while all.join_next().await.is_some() {}
}

pub enum Listener {
    Tcp(TcpListener),
    Local(LocalListener<UnixListener>),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Tcp(listener) => prepare(listener.accept().await?.0),
            Listener::Local(local) => {
                let stream = local.listener.accept().await?.0;
                check_peer(&stream)?;
                Ok(stream.into())
            }
        }
    }
}

async fn accept(listener: Listener, shared: Arc<Shared>, shutdown: watch::Receiver<Option<Instant>>) {
    let mut connections = JoinSet::new();
    let mut begun = shutdown.clone();
    loop {
        tokio::select! {
            () = async { drop(begun.wait_for(Option::is_some).await) } => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok(stream) => admit(stream, &shared, &shutdown, &mut connections),
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    if error.kind() != io::ErrorKind::PermissionDenied {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            },
        }
    }
    drop(listener);
    drain(&shared, shutdown).await;
    connections.shutdown().await;
}

fn prepare(stream: TcpStream) -> io::Result<Stream> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream.into())
}

fn admit(
    stream: Stream,
    shared: &Arc<Shared>,
    shutdown: &watch::Receiver<Option<Instant>>,
    connections: &mut JoinSet<()>,
) {
    let Ok(permit) = shared.connections.clone().try_acquire_owned() else {
        shared.stats.connections_refused.fetch_add(1, Relaxed);
        tracing::warn!(
            max = shared.config.connections_max,
            "connections_max is reached, a connection was closed"
        );
        return;
    };
    let (shared, shutdown) = (shared.clone(), shutdown.clone());
    connections.spawn(async move {
        shared.stats.connections.fetch_add(1, Relaxed);
        let _counted = Counted(&shared.stats);
        let remote = one_sided::remote_of(&stream, &shared);
        connection::serve(stream, remote, &shared, &shutdown).await;
        drop(permit);
    });
}

/// Takes a connection off the count, also when its task is aborted.
struct Counted<'a>(&'a Stats);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

/// Until nothing runs any more, or the grace is over; the grace may be shortened meanwhile.
async fn drain(shared: &Shared, mut shutdown: watch::Receiver<Option<Instant>>) {
    loop {
        let ended = shared.ended.notified();
        tokio::pin!(ended);
        // Registered before the look, so that no end in between is missed.
        ended.as_mut().enable();
        if shared.running() == 0 {
            return;
        }
        let deadline = (*shutdown.borrow_and_update()).expect("only called in a shutdown");
        tokio::select! {
            () = ended => {}
            () = tokio::time::sleep_until(deadline.into()) => return,
            Ok(()) = shutdown.changed() => {}
        }
    }
}
