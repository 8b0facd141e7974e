//! The measuring loops of `gd2fs bench`, as plain functions over memory that the caller prepared.
//!
//! They are compiled because what they measure is: an interpreter in the loop would be measured instead. Which of them runs
//! when, and what is made of the figures, is decided in `python/gd2fs/bench`.

pub mod copy;
pub mod raw_tcp;
pub mod redis;
pub mod requests;
mod socket;
mod together;
