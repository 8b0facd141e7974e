//! The stream family of transports: frames over TCP, received straight into their destination.

pub mod frame;
pub mod memory;
pub mod receiver;
pub mod sender;

pub use frame::{Frame, FrameError};
pub use memory::{Memory, Slice};
pub use receiver::Receiver;
pub use sender::Sender;
