//! The lowest layer of a node's log: preallocated files and block devices, read and written in blocks.
//!
//! A [`Device`] is opened with direct I/O, locked against every other node, and moves whole blocks of [`BLOCK`] bytes
//! between itself and memory that the caller keeps alive. It splits, queues and continues; below it an [`Engine`] makes
//! the system calls: io_uring where the machine allows it ([`probe`]), a pool of threads elsewhere. With the feature
//! `fault` the system calls can be made to fail ([`fault`]).

mod buffer;
mod device;
mod engine;
mod error;
#[cfg(feature = "fault")]
pub mod fault;
mod file;
mod op;
mod pool;
mod queue;
mod request;
mod uring;
mod workers;

pub use buffer::Buffer;
pub use device::{Device, Load};
pub use engine::{Attempt, Engine, EngineKind, Options};
pub use error::{Error, Result};
pub use op::{Done, Keep, Kind, Op};
pub use request::PART_BYTES_MAX;
pub use uring::probe;

/// The unit of every transfer: offsets, lengths and addresses are multiples of 4,096 bytes. It is the largest logical block
/// of common disks, so that direct I/O is never refused, and the smallest page.
pub const BLOCK: usize = 4096;
