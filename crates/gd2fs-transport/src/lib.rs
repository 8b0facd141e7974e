//! How frames and file data cross between two processes.
//!
//! Two families: a *stream* (`Stream`: TCP, a local socket) carries frames and, where the peers share no memory, their data,
//! received straight into its destination. In the *one-sided* family (`Remote`: shared memory) the node moves the data itself,
//! and the stream carries requests and completions only.

pub mod address;
pub mod batch;
pub mod copy;
#[cfg(feature = "fake")]
pub mod fake;
pub mod frame;
pub mod memory;
pub mod one_sided;
pub mod receiver;
pub mod shm;
pub mod stream;

pub use address::Address;
pub use batch::Batch;
pub use frame::{Frame, FrameError};
pub use memory::{Memory, Slice, iovecs};
pub use one_sided::{Remote, Segment};
pub use receiver::Receiver;
pub use stream::Stream;
