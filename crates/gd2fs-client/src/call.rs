//! One request to a node, and what makes a reply an answer to it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gd2fs_transport::one_sided::encode;
use gd2fs_transport::{Frame, Memory, Segment};
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{FLAG_ONE_SIDED, Header, Opcode};
use gd2fs_wire::sums::PieceSums;

use crate::one_sided::Held;
use crate::request::Direction;

/// One request.
pub(crate) struct Call {
    pub header: Header,
    pub ext: Vec<u8>,
    /// Of data that the node fetches itself.
    pub sums: Vec<u32>,
    pub out: Outgoing,
    /// Where the reply's data is received.
    pub landing: Option<Memory>,
    pub held: Held,
}

/// What goes out after the header.
#[derive(Clone)]
pub(crate) enum Outgoing {
    Nothing,
    Json(Vec<u8>),
    /// Straight from the caller's memory.
    Data(Memory),
    /// Nothing, but a descriptor beside it.
    Descriptor(Arc<OwnedFd>),
}

pub(crate) struct Reply {
    pub frame: Frame,
    /// Of operations whose payload is JSON.
    pub json: Vec<u8>,
    /// What the node has filled.
    pub _held: Held,
}

impl Call {
    pub fn new(header: Header, out: Outgoing) -> Call {
        Call { header, ext: Vec::new(), sums: Vec::new(), out, landing: None, held: Held::Nothing }
    }

    /// A part that travels in frames, straight from or to the caller's memory.
    pub fn streamed(header: Header, direction: Direction, memory: &Memory) -> Call {
        match direction {
            Direction::Read => Call { landing: Some(memory.clone()), ..Call::new(header, Outgoing::Nothing) },
            Direction::Write => Call::new(header, Outgoing::Data(memory.clone())),
        }
    }

    /// A part that the node moves itself.
    pub fn one_sided(header: Header, segments: &[Segment], held: Held) -> Call {
        let header = Header { flags: header.flags | FLAG_ONE_SIDED, ..header };
        Call { ext: encode(segments), held, ..Call::new(header, Outgoing::Nothing) }
    }

    /// `message` as the ext; it must be known to fit.
    pub fn with_message(header: Header, message: &impl serde::Serialize, out: Outgoing) -> Call {
        let ext = serde_json::to_vec(message).expect("plain data serialises");
        Call { ext, ..Call::new(header, out) }
    }
}

/// A reply must answer what was asked: other bytes must never pass for the wanted ones.
pub(crate) fn check_reply(asked: &Header, reply: &Header) -> Result<(), Failure> {
    if asked.opcode != reply.opcode {
        return Err(bad_reply(format!("opcode {} answers opcode {}", reply.opcode, asked.opcode)));
    }
    if reply.code() != Code::Ok {
        return Ok(());
    }
    match reply.opcode() {
        // Without its sums a reply would pass unverified: only whoever asked for that gets it.
        Ok(Opcode::Read)
            if reply.offset != asked.offset
                || reply.length > asked.length
                || (reply.is_raw(), reply.is_one_sided()) != (asked.is_raw(), asked.is_one_sided()) =>
        {
            Err(bad_reply(format!(
                "[{}, +{}) answers a READ of [{}, +{})",
                reply.offset, reply.length, asked.offset, asked.length
            )))
        }
        Ok(Opcode::Write) if reply.length != asked.length => {
            Err(bad_reply(format!("{} bytes written of {}", reply.length, asked.length)))
        }
        _ => Ok(()),
    }
}

pub(crate) fn bad_reply(why: String) -> Failure {
    Failure::new(Code::BadFrame, format!("the node sent a reply that makes no sense: {why}"))
}

pub(crate) fn verify(frame: &Frame, actual: &[u32]) -> Result<(), Failure> {
    match actual.iter().zip(&frame.sums).position(|(actual, sum)| actual != sum) {
        None => Ok(()),
        Some(piece) => Err(Failure::new(
            Code::Checksum,
            format!("piece {piece} sums to {:#010x}, not {:#010x}", actual[piece], frame.sums[piece]),
        )),
    }
}

pub(crate) fn sums_of(header: &Header, out: &Outgoing) -> Vec<u32> {
    match out {
        Outgoing::Data(memory) if !header.is_raw() => {
            let mut sums = PieceSums::with_capacity(header.offset, memory.len() as u64);
            for slice in memory.slices() {
                // SAFETY: the memory is the caller's until its request completes; nobody writes it meanwhile by its promise.
                sums.update(unsafe { slice.bytes() });
            }
            sums.finish()
        }
        _ => Vec::new(),
    }
}
