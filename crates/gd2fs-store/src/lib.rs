//! What a node keeps, and the rules under which it changes. Nothing here knows a network.
//!
//! A write is a [`WriteTicket`]: it reserves memory first, is filled by whoever receives the bytes, and is published in one
//! step under the lock of its column. Bytes that were published once never change in the frame that holds them; a frame is
//! freed when its last reader and writer are gone. Readers therefore need no lock while they send.

mod arena;
mod asks;
mod buddy;
mod changed;
mod chunk;
mod closing;
mod column;
mod columns;
mod data_dir;
mod dirty;
mod ends;
mod epochs;
mod evict;
mod flusher;
mod frame;
mod geometry;
mod grains;
mod histogram;
mod hurdle;
mod keeping;
mod ledger;
mod log_list;
mod log_set;
mod mapping;
mod own_files;
mod owner;
mod pins;
mod precedence;
mod read;
mod reading;
mod recovery;
mod room;
mod runs;
mod scrub;
mod shared;
mod standing;
mod stats;
mod store;
mod superblock;
mod tenants;
mod tier;
mod warming;
mod write;
mod writing;

pub use arena::{Arena, SLAB_BYTES};
pub use column::{Column, Opened};
pub use data_dir::{DataDir, DataDirError};
pub use frame::Frame;
pub use geometry::{Geometry, STRIPE_UNIT_MAX};
pub use histogram::{Histogram, LATENCY_BOUNDS_US};
pub use read::ReadView;
pub use runs::{Run, Runs};
pub use stats::TierStats;
pub use store::{Store, TOMBSTONE_LIFE};
pub use superblock::SuperblockError;
pub use tier::{LogDevice, STRIPE_UNIT_DEFAULT, TierError, Tiers};
pub use warming::Ahead;
pub use write::WriteTicket;
