//! A storage node: frames from the network, checked, into and out of the store.

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
