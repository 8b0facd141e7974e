//! A storage node: frames from the network, checked, into and out of the store.

// Each of the counters that `json!` writes is a level for it.
#![recursion_limit = "256"]

mod config;
mod connection;
mod control;
mod fences;
mod hello;
mod local;
mod node;
mod one_sided;
mod open;
mod read;
mod server;
mod stats;
mod tiers;
mod write;

pub use config::{Config, StartError};
pub use node::Node;
