//! The one-sided family: a request names the client's registered memory, and the *node* moves the bytes.
//!
//! The client never holds a key to the node's memory, and a transfer is over when the node says so. Shared memory is one
//! such transport (`shm`), RDMA will be another: requests, segments and completions are the same.

use std::os::fd::OwnedFd;
use std::pin::Pin;

use gd2fs_wire::messages::Map;
use gd2fs_wire::{Code, Failure};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::memory::Memory;

/// A range of a client's registered memory, as a request lists it in its ext.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Segment {
    region: U32,
    length: U32,
    offset: U64,
}

/// As many as fit into the ext of one frame.
pub const SEGMENTS_MAX: usize = u16::MAX as usize / size_of::<Segment>();

impl Segment {
    pub fn new(region: u32, offset: u64, length: u32) -> Segment {
        Segment { region: region.into(), length: length.into(), offset: offset.into() }
    }

    pub fn region(&self) -> u32 {
        self.region.get()
    }

    /// From the begin of its region.
    pub fn offset(&self) -> u64 {
        self.offset.get()
    }

    pub fn length(&self) -> u32 {
        self.length.get()
    }
}

pub fn encode(segments: &[Segment]) -> Vec<u8> {
    segments.as_bytes().to_vec()
}

/// The segments in an ext, which must hold `length` bytes together.
pub fn decode(ext: &[u8], length: u64) -> Result<Vec<Segment>, Failure> {
    let segments = <[Segment]>::ref_from_bytes(ext)
        .map_err(|_| Failure::new(Code::BadRequest, "ext: not a list of segments of 16 bytes"))?;
    let total: u64 = segments.iter().map(|segment| u64::from(segment.length())).sum();
    if total != length {
        let message = format!("ext: segments of {total} bytes for a request of {length}");
        return Err(Failure::new(Code::BadRequest, message));
    }
    Ok(segments.to_vec())
}

/// The end of a move: the sums of its pieces as they were moved. It may take any number of polls.
///
/// Dropping it ends the move. When the drop returns, nothing touches the memory of either side for it any more: the node then
/// gives its frame back and tells the client, who may use its memory for other things. (A NIC that still has work of the move
/// in its queue must be stopped by the drop.)
pub type Moved<'a> = Pin<Box<dyn Future<Output = Result<Vec<u32>, Failure>> + Send + 'a>>;

/// One client's registered memory, as the node reaches it through one connection, and with which it goes.
///
/// What MAP says of a region is this trait's implementation's own business: shared memory needs the descriptor that came beside
/// the frame and a length; a NIC would need an address and a key, which `Map` would carry as further fields.
pub trait Remote: Send + Sync {
    /// Makes a region reachable under its number. The same region may come again: a client that gave up waiting for the answer
    /// asks once more. May take as long as the system needs for the page tables of the region.
    fn register(&self, map: &Map, descriptor: Option<OwnedFd>) -> Result<(), Failure>;

    /// Forgets a region. Moves that are under way keep what they need of it.
    fn unregister(&self, number: u32) -> Result<(), Failure>;

    /// Copies `from`, which lies at `offset` of its file, into the client's memory. No sums if `summed` is false.
    ///
    /// # Safety
    /// `from` is valid and nobody writes it until the future is done or dropped.
    unsafe fn put<'a>(&'a self, offset: u64, from: &'a Memory, to: &'a [Segment], summed: bool) -> Moved<'a>;

    /// Copies from the client's memory `into` what belongs at `offset` of a file.
    ///
    /// # Safety
    /// `into` is valid and nobody else uses it until the future is done or dropped.
    unsafe fn get<'a>(&'a self, offset: u64, from: &'a [Segment], into: &'a Memory) -> Moved<'a>;
}
