//! The request code over a transport that is not shared memory: its moves take many polls, and stop where a test wants them to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_store::{DataDir, Store};
use gd2fs_transport::fake::{self, Faults, RemoteMemory};
use gd2fs_transport::one_sided::encode;
use gd2fs_transport::{Batch, Frame, Receiver, Segment, Stream};
use gd2fs_wire::capability::Class;
use gd2fs_wire::header::FLAG_ONE_SIDED;
use gd2fs_wire::messages::{Hello, Map, Open, Unmap};
use gd2fs_wire::sums::piece_sums;
use gd2fs_wire::{Capability, Code, Header, Keys, Opcode};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::capability_of;
use crate::config::Config;
use crate::connection;
use crate::server::Shared;

const FILE: &str = "00112233445566778899aabbccddeeff";
const BYTES: usize = 100_000;

/// A node's half of one connection, whose client has shared `memory` by way of a NIC that is not there.
struct World {
    shared: Arc<Shared>,
    memory: Arc<RemoteMemory>,
    serving: tokio::task::JoinHandle<()>,
    stream: Arc<Stream>,
    receiver: Receiver,
    _stopping: watch::Sender<Option<Instant>>,
    _directory: tempfile::TempDir,
}
