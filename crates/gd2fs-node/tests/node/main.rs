//! A node over real sockets on loopback, and a tiny blocking peer that can also misbehave.

mod control;
mod data;
mod fencing;
mod hello;
mod hostile;
mod lifecycle;
mod local;
mod mutated;
mod peer;
mod tiers;
mod vectors;

use std::task::{Context, Poll, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use gd2fs_node::{Config, Node, StartError};
use gd2fs_wire::capability::{Capability, Class, Right};
use gd2fs_wire::{Keys, Role, Token};

pub use peer::{Answer, Peer, hello};

pub const UNIT: u32 = 4 << 20;
pub const FILE: &str = "00112233445566778899aabbccddeeff";
pub const KEYS: &str = "1:000102030405060708090a0b0c0d0e0f";

/// A node with its data directory, which survives a restart.
pub struct Bench {
    pub node: Node,
    pub config: Config,
    directory: tempfile::TempDir,
}

impl Bench {
    pub fn start() -> Bench {
        Bench::start_with(|_| ())
    }

    pub fn start_with(change: impl FnOnce(&mut Config)) -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config {
            cluster: "test".into(),
            node: "n1".into(),
            incarnation: 1,
            now: None,
            keys: KEYS.into(),
            listen: vec!["tcp://127.0.0.1:0".into()],
            memory_bytes: 256 << 20,
            data_dir: directory.path().into(),
            logs: vec![],
            log_bytes: 0,
            log_engine: "auto".into(),
            flush_delay_ms: 3_600_000,
            dirty_bytes_max: 0,
            tenant_share: 1.0,
            flush_s: 20,
            connections_max: 64,
            shm: "auto".into(),
            io_threads: 0,
            memory_threads: 0,
        };
        change(&mut config);
        Bench { node: Node::start(config.clone()).unwrap(), config, directory }
    }

    /// The same node after its memory was lost.
    pub fn restart(self) -> Bench {
        let Bench { node, mut config, directory } = self;
        drop(node);
        config.incarnation += 1;
        Bench { node: Node::start(config.clone()).unwrap(), config, directory }
    }

    /// Tries to start a second node with a changed configuration.
    pub fn start_another(&self, change: impl FnOnce(&mut Config)) -> Result<Node, StartError> {
        let mut config = self.config.clone();
        config.incarnation += 1;
        change(&mut config);
        Node::start(config)
    }

    pub fn stats(&self) -> serde_json::Value {
        serde_json::from_str(&self.node.stats()).unwrap()
    }

    /// A client of tenant `t`, greeted.
    pub fn peer(&self) -> Peer {
        Peer::connect(&self.node).greeted(&hello("t", Role::Client))
    }

    /// The same through the local socket.
    pub fn local_peer(&self) -> Peer {
        Peer::connect_locally(&self.node).greeted(&hello("t", Role::Client))
    }
}

pub fn keys() -> Keys {
    Keys::parse(KEYS).unwrap()
}

pub fn in_seconds(seconds: i64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    now.checked_add_signed(seconds).unwrap()
}

pub fn token(tenant: &str, role: Role, seconds: i64) -> String {
    keys().sign(&Token { tenant: tenant.into(), role, expiry: in_seconds(seconds) })
}

/// Everything allowed, plain file semantics, epoch 1, born 1.
pub fn capability() -> Capability {
    Capability {
        tenant: "t".into(),
        file: FILE.into(),
        class: Class::Cache,
        stripe_unit: UNIT,
        width: 1,
        rights: vec![Right::Read, Right::Write],
        ranges: vec![],
        grant: 0,
        columns: vec![(1, 1)],
        nodes: vec![vec!["n1".into()]],
        expiry: in_seconds(3600),
        bearer: false,
        priority: 0,
    }
}

pub fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(37).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// Without a log nothing in the store waits for anything.
pub fn now<T>(operation: impl Future<Output = T>) -> T {
    match std::pin::pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("it waits"),
    }
}
