//! What travels between a GD2FS client and a node: nothing here does I/O.

pub mod capability;
pub mod clock;
pub mod code;
pub mod fold;
pub mod guard;
pub mod header;
pub mod messages;
pub mod signing;
pub mod sums;

pub use capability::{Capability, PlanToken, Role, Token};
pub use clock::Clock;
pub use code::{Code, Failure};
pub use header::{Header, Opcode};
pub use signing::{Keys, Signed, SigningError};
