//! One operation on a device.

use std::any::Any;
use std::fmt;

use gd2fs_transport::Memory;

use crate::{BLOCK, Result};

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Fills the memory from the device.
    Read,
    /// Writes the memory; durable only after a `Sync` that begins once this has completed.
    Write,
    /// Makes every write that had completed durable (fdatasync).
    Sync,
    /// Writes the memory; durable when it completes (`RWF_DSYNC`: FUA where the disk has it). Says nothing about others.
    WriteSync,
}

impl Kind {
    /// Whether it changes bytes of the device.
    pub fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::WriteSync)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Sync => "sync",
            Kind::WriteSync => "durable write",
        })
    }
}

/// Who owns an operation's memory; dropped only when neither kernel nor engine touches that memory any more.
pub type Keep = Box<dyn Any + Send>;

/// Told once, when an operation is over and nothing touches its memory any more. It runs on a thread of the engine: it must
/// not block, and whatever it takes holds up the device. An operation that is refused is told on the caller's thread, before
/// `submit` returns. A panic in it is reported and goes no further.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// One operation. Offset, and each slice's address and length, are multiples of [`BLOCK`]; the range lies on the device.
pub struct Op {
    /// What to do.
    pub kind: Kind,
    /// Bytes from the device's start; 0 for a `Sync`.
    pub offset: u64,
    /// The memory to fill or to write, as long as the range; empty for a `Sync`.
    pub memory: Memory,
    /// The memory's owner.
    pub keep: Keep,
}

impl Op {
    /// Fills `memory` from the device.
    pub fn read(offset: u64, memory: impl Into<Memory>, keep: impl Any + Send) -> Op {
        Op { kind: Kind::Read, offset, memory: memory.into(), keep: Box::new(keep) }
    }

    /// Writes `memory`.
    pub fn write(offset: u64, memory: impl Into<Memory>, keep: impl Any + Send) -> Op {
        Op { kind: Kind::Write, offset, memory: memory.into(), keep: Box::new(keep) }
    }

    /// Writes `memory` durably.
    pub fn write_sync(offset: u64, memory: impl Into<Memory>, keep: impl Any + Send) -> Op {
        Op { kind: Kind::WriteSync, offset, memory: memory.into(), keep: Box::new(keep) }
    }

    /// Makes all completed writes durable.
    pub fn sync() -> Op {
        Op { kind: Kind::Sync, offset: 0, memory: Memory::default(), keep: Box::new(()) }
    }

    /// What is wrong with it on a device of `bytes` bytes.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), String> {
        let (offset, length) = (self.offset, self.memory.len());
        if self.kind == Kind::Sync {
            return if length == 0 && offset == 0 {
                Ok(())
            } else {
                Err("memory and offset: a sync has none; it covers the device".into())
            };
        }
        if length == 0 {
            return Err(format!("memory: a {} moves at least one block of {BLOCK} bytes", self.kind));
        }
        if !offset.is_multiple_of(BLOCK as u64) {
            return Err(format!("offset: {offset} is no multiple of {BLOCK}"));
        }
        for slice in self.memory.slices() {
            let address = slice.address().addr();
            if !slice.len().is_multiple_of(BLOCK) || !address.is_multiple_of(BLOCK) {
                let length = slice.len();
                return Err(format!(
                    "memory: {length} bytes at address {address:#x}: both must be multiples of {BLOCK}"
                ));
            }
        }
        if offset.checked_add(length as u64).is_none_or(|end| end > bytes) {
            return Err(format!("offset: {length} bytes at {offset} end beyond the device's {bytes} bytes"));
        }
        Ok(())
    }
}
