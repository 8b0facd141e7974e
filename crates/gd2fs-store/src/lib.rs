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
mod column;
mod data_dir;
mod epochs;
mod frame;
mod geometry;
mod grains;
mod mapping;
mod pins;
mod read;
mod runs;
mod scrub;
mod store;
mod superblock;
mod write;

pub use arena::{Arena, SLAB_BYTES};
pub use column::{Column, Opened};
pub use data_dir::{DataDir, DataDirError};
pub use frame::Frame;
pub use geometry::Geometry;
pub use read::ReadView;
pub use runs::{Run, Runs};
pub use store::{Store, TOMBSTONE_LIFE};
pub use superblock::SuperblockError;
pub use write::WriteTicket;
