//! A frame without its file data: header, ext and sums, with the sum over them.

use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::messages::Refusal;
use gd2fs_wire::sums;
use serde::Serialize;
use thiserror::Error;

/// Why a connection can't go on.
#[derive(Debug, Error)]
pub enum FrameError {
    #[error("the connection ended: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Malformed(#[from] Failure),
    /// The header is intact but not acceptable; `header` knows opcode and request only, enough for an answer.
    #[error("{failure}")]
    Refused { header: Header, failure: Failure },
}

impl FrameError {
    pub fn into_failure(self) -> Failure {
        match self {
            FrameError::Io(error) => Failure::new(Code::Disconnected, error.to_string()),
            FrameError::Malformed(failure) | FrameError::Refused { failure, .. } => failure,
        }
    }
}

/// What precedes the payload, received or about to be sent.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    pub header: Header,
    pub ext: Vec<u8>,
    pub sums: Vec<u32>,
}

impl Frame {
    pub fn new(header: Header) -> Frame {
        Frame { header, ..Frame::default() }
    }

    /// A frame whose ext is `message` as JSON.
    pub fn with_message(header: Header, message: &impl Serialize) -> Result<Frame, Failure> {
        let ext = serde_json::to_vec(message).expect("plain data serialises");
        if ext.len() > usize::from(u16::MAX) {
            return Err(Failure::new(Code::TooLarge, format!("ext of {} bytes is over 65,535", ext.len())));
        }
        Ok(Frame { header, ext, sums: Vec::new() })
    }

    /// The answer that refuses `request`.
    pub fn refusal(request: &Header, incarnation: u32, failure: &Failure) -> Frame {
        // Long messages are cut: an error must never grow into one that cannot be sent.
        let message = failure.message.chars().take(4096).collect();
        Frame::with_message(request.reply(incarnation, failure.code), &Refusal { message })
            .expect("4,096 characters fit into an ext")
    }

    /// What a refusing reply says.
    pub fn failure(&self) -> Failure {
        let message = serde_json::from_slice::<Refusal>(&self.ext).map(|refusal| refusal.message);
        Failure::new(self.header.code(), message.unwrap_or_else(|_| "the peer gave no reason".into()))
    }

    pub fn message<T: serde::de::DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.ext)
            .map_err(|error| Failure::new(Code::BadRequest, format!("ext is not understood: {error}")))
    }

    /// Appends header, ext and sums as they go out; `json_payload` is covered by payload_crc as well, file data is not.
    pub fn encode_into(&mut self, json_payload: &[u8], out: &mut Vec<u8>) {
        let sums = sums::sums_to_bytes(&self.sums);
        self.header.ext_bytes = self.ext.len().try_into().expect("ext was checked against 65,535");
        self.header.sums_bytes = sums.len() as u32;
        self.header.payload_crc = sums::crc32c_of([self.ext.as_slice(), sums, json_payload]);
        out.extend_from_slice(&self.header.encode());
        out.extend_from_slice(&self.ext);
        out.extend_from_slice(sums);
    }

    /// The frame as it goes out, without a payload.
    pub fn encode(&mut self, json_payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.ext.len() + 4 * self.sums.len());
        self.encode_into(json_payload, &mut bytes);
        bytes
    }

    /// Checks payload_crc of a received frame.
    pub fn check(&self, json_payload: &[u8]) -> Result<(), Failure> {
        let sums = sums::sums_to_bytes(&self.sums);
        let actual = sums::crc32c_of([self.ext.as_slice(), sums, json_payload]);
        if actual != self.header.payload_crc {
            return Err(Failure::new(
                Code::BadFrame,
                format!("payload_crc {:#010x} but the frame sums to {actual:#010x}", self.header.payload_crc),
            ));
        }
        Ok(())
    }
}
