//! A node's NVMe space: a log of snapshots of chunks, and notes about them, on one device.
//!
//! A [`Log`] divides its device into segments and appends records to one of them at a time. Records carry what makes them
//! recognisable and their sums, so that after a power cut a scan finds exactly what was durable: whole records in their order,
//! up to the first that is not. What a [`Log::sync`] or [`Log::note`] has acknowledged is found again; what was forgotten never
//! comes back; what does not hold what was written is never taken for data. Which chunks are kept, and which bytes of them are
//! valid, is for the [`Owner`] above; the log knows places, keys and sizes.
//!
//! The format is described where it is written: `superblock`, `record`, `checkpoint`. All numbers are little-endian; the unit
//! of everything is a block of 4,096 bytes.

mod append;
mod checkpoint;
mod entry;
mod error;
mod format;
mod inner;
mod log;
mod notes;
mod owner;
mod position;
mod record;
mod recover;
mod scan;
mod segment;
mod state;
mod superblock;
mod upkeep;
#[cfg(test)]
mod vectors;
mod witness;

pub use entry::{ChunkEntry, ColumnEntry, ColumnState, Key, Note, Snapshot, cover};
pub use error::{LogError, Result};
pub use format::{Identity, format, identify};
pub use log::{Log, Options, Stats};
pub use owner::{Entries, Owner};
pub use position::{Place, Position};
pub use record::RUNS_MAX;
pub use recover::Recovered;
pub use superblock::SuperblockError;
