//! The client of GD2FS: from layouts to nodes, over streams and NICs, with retries and a queue of completions.
//!
//! Nothing here knows Python; the Python module, and later the C library and FUSE, are faces of it.

mod alone;
mod call;
mod client;
mod completion;
mod connection;
mod control;
mod dial;
mod handles;
mod layout;
mod layouts;
mod left;
mod link;
mod node_link;
mod one_sided;
mod part;
mod pending;
mod region;
mod request;
mod requests;
mod severed;
mod staging;
mod stats;
mod stop;
mod tiers;
mod tries;
mod trouble;
mod unflushed;

pub use gd2fs_transport::{Memory, Slice};

pub use client::{Client, File, Options, Ticket};
pub use completion::{Completion, Completions};
pub use dial::Transport;
pub use gd2fs_wire::messages::{Tier, Warmth};
pub use layout::{Column, Layout, Part, Replica};
pub use node_link::{Answer, NodeLink};
pub use region::Region;
pub use request::Direction;
pub use requests::REQUESTS_MAX;
pub use stats::Stats;
pub use tiers::Extent;
