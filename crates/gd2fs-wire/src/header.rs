//! The 64-byte header that begins every frame: `header ‖ ext ‖ sums ‖ payload`.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::code::{Code, Failure};
use crate::sums::crc32c;

pub const HEADER_BYTES: usize = 64;
pub const MAGIC: u32 = 0x5346_3244;
pub const VERSION: u8 = 1;

/// The frame answers a request.
pub const FLAG_RESPONSE: u16 = 1;
/// File data travels without sums; for measurement only.
pub const FLAG_RAW: u16 = 2;
/// The data does not travel in the frame: the node moves it to or from the registered memory that the request's ext lists.
pub const FLAG_ONE_SIDED: u16 = 4;
const FLAGS_KNOWN: u16 = FLAG_RESPONSE | FLAG_RAW | FLAG_ONE_SIDED;

/// Largest stripe unit, hence the largest file payload of one frame.
pub const PAYLOAD_BYTES_MAX: u32 = 64 << 20;
/// Largest JSON payload of a control operation: 4,096 items of under 1 KiB.
pub const CONTROL_BYTES_MAX: u32 = 4 << 20;
/// A range of `PAYLOAD_BYTES_MAX` that begins inside a piece touches one piece more than it fills.
pub const SUMS_BYTES_MAX: u32 = (PAYLOAD_BYTES_MAX / crate::sums::PIECE_BYTES as u32 + 1) * 4;

macro_rules! opcodes {
    ($($name:ident = $value:literal),+ $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Opcode { $($name = $value),+ }

        impl Opcode {
            pub const ALL: &[Opcode] = &[$(Opcode::$name),+];
            pub fn from_u8(value: u8) -> Option<Opcode> {
                match value { $($value => Some(Opcode::$name),)+ _ => None }
            }
        }
    };
}

opcodes! {
    Hello = 1,
    Open = 2,
    Close = 3,
    Read = 4,
    Write = 5,
    Ping = 6,
    Map = 7,
    Unmap = 8,
    Flush = 9,
    Warm = 10,
    Where = 11,
    Seal = 16,
    Delete = 17,
    Stat = 18,
    Pin = 19,
    Unpin = 20,
    List = 21,
    Scrub = 22,
}

impl Opcode {
    /// Operations that only control may ask for; their payload is JSON, not file data.
    pub fn is_control(self) -> bool {
        use Opcode::{Delete, List, Pin, Scrub, Seal, Stat, Unpin};
        matches!(self, Seal | Delete | Stat | Pin | Unpin | List | Scrub)
    }
}

/// The header as it lies in memory and on the wire, little-endian.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: U32,
    version: u8,
    opcode: u8,
    flags: U16,
    request: U64,
    handle: U32,
    epoch: U32,
    offset: U64,
    length: U32,
    sums_bytes: U32,
    incarnation: U32,
    status: U32,
    deadline_ms: U32,
    payload_crc: U32,
    ext_bytes: U16,
    priority: u8,
    reserved: u8,
    header_crc: U32,
}

const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);

/// A header after its checks. `opcode` stays a number so that an unknown one can be answered by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    pub opcode: u8,
    pub flags: u16,
    /// Chosen by the client, rising, unique in its connection; the reply repeats it.
    pub request: u64,
    pub handle: u32,
    pub epoch: u32,
    /// Byte offset in the file.
    pub offset: u64,
    /// Payload bytes that follow; in a READ request the bytes wanted, in a WRITE reply the bytes written.
    pub length: u32,
    pub sums_bytes: u32,
    pub incarnation: u32,
    pub status: u32,
    /// Milliseconds the node may take from the arrival of the header; 0 is the node's default.
    pub deadline_ms: u32,
    /// CRC-32C of what follows the header and is not covered by `sums`.
    pub payload_crc: u32,
    pub ext_bytes: u16,
    pub priority: u8,
}

impl Header {
    pub fn request(opcode: Opcode, request: u64) -> Header {
        Header { opcode: opcode as u8, request, ..Header::default() }
    }

    /// A reply to `self` that carries no data yet.
    pub fn reply(&self, incarnation: u32, code: Code) -> Header {
        Header {
            opcode: self.opcode,
            flags: FLAG_RESPONSE | (self.flags & (FLAG_RAW | FLAG_ONE_SIDED)),
            request: self.request,
            handle: self.handle,
            epoch: self.epoch,
            offset: self.offset,
            incarnation,
            status: code as u32,
            ..Header::default()
        }
    }

    pub fn opcode(&self) -> Result<Opcode, Failure> {
        Opcode::from_u8(self.opcode)
            .ok_or_else(|| Failure::new(Code::UnknownOpcode, format!("opcode {} is not known", self.opcode)))
    }

    pub fn is_response(&self) -> bool {
        self.flags & FLAG_RESPONSE != 0
    }

    pub fn is_raw(&self) -> bool {
        self.flags & FLAG_RAW != 0
    }

    pub fn is_one_sided(&self) -> bool {
        self.flags & FLAG_ONE_SIDED != 0
    }

    /// Whether the payload is file data (covered by `sums`) and not JSON (covered by `payload_crc`).
    pub fn carries_file_data(&self) -> bool {
        !self.is_one_sided() && self.speaks_of_file_data()
    }

    /// Whether the frame hands over file data, in itself or in registered memory.
    fn speaks_of_file_data(&self) -> bool {
        match (Opcode::from_u8(self.opcode), self.is_response()) {
            (Some(Opcode::Write), false) => true,
            (Some(Opcode::Read), true) => self.status == 0,
            _ => false,
        }
    }

    /// Bytes of payload that follow ext and sums on the wire.
    pub fn payload_bytes(&self) -> u32 {
        match (Opcode::from_u8(self.opcode), self.is_response()) {
            (Some(Opcode::Read), false) | (Some(Opcode::Write), true) => 0,
            _ if self.is_one_sided() => 0,
            _ => self.length,
        }
    }

    pub fn code(&self) -> Code {
        Code::from_u32(self.status)
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = Raw {
            magic: MAGIC.into(),
            version: VERSION,
            opcode: self.opcode,
            flags: self.flags.into(),
            request: self.request.into(),
            handle: self.handle.into(),
            epoch: self.epoch.into(),
            offset: self.offset.into(),
            length: self.length.into(),
            sums_bytes: self.sums_bytes.into(),
            incarnation: self.incarnation.into(),
            status: self.status.into(),
            deadline_ms: self.deadline_ms.into(),
            payload_crc: self.payload_crc.into(),
            ext_bytes: self.ext_bytes.into(),
            priority: self.priority,
            reserved: 0,
            header_crc: 0.into(),
        };
        raw.header_crc = crc32c(&raw.as_bytes()[..HEADER_BYTES - 4]).into();
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads and checks a header: sum first, since no other field can be trusted before it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Failure> {
        let raw = Raw::read_from_bytes(bytes).expect("the sizes are equal");
        let bad = |message: String| Err(Failure::new(Code::BadFrame, message));
        if raw.magic != MAGIC {
            return bad(format!("magic {:#010x} is not GD2FS's {MAGIC:#010x}", raw.magic.get()));
        }
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        if raw.header_crc != sum {
            return bad(format!(
                "header_crc {:#010x} but the header sums to {sum:#010x}",
                raw.header_crc.get()
            ));
        }
        if raw.version != VERSION {
            return Err(Failure::new(
                Code::Version,
                format!("protocol version {} is not spoken here, only {VERSION}", raw.version),
            ));
        }
        if raw.flags.get() & !FLAGS_KNOWN != 0 {
            return bad(format!("flags {:#06x} hold an unknown bit", raw.flags.get()));
        }
        if raw.reserved != 0 {
            return bad("reserved must be 0".into());
        }
        let header = Header {
            opcode: raw.opcode,
            flags: raw.flags.get(),
            request: raw.request.get(),
            handle: raw.handle.get(),
            epoch: raw.epoch.get(),
            offset: raw.offset.get(),
            length: raw.length.get(),
            sums_bytes: raw.sums_bytes.get(),
            incarnation: raw.incarnation.get(),
            status: raw.status.get(),
            deadline_ms: raw.deadline_ms.get(),
            payload_crc: raw.payload_crc.get(),
            ext_bytes: raw.ext_bytes.get(),
            priority: raw.priority,
        };
        header.check_lengths()?;
        Ok(header)
    }

    /// Opcode and request of a header that is intact but was refused, say for its version: enough to answer it.
    pub fn identify(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let raw = Raw::read_from_bytes(bytes).expect("the sizes are equal");
        let intact = raw.magic == MAGIC && raw.header_crc == crc32c(&bytes[..HEADER_BYTES - 4]);
        intact.then(|| Header { opcode: raw.opcode, request: raw.request.get(), ..Header::default() })
    }

    /// Refuses lengths before anybody reserves memory for them.
    fn check_lengths(&self) -> Result<(), Failure> {
        let too_large = |what: &str, is: u32, max: u32| {
            Err(Failure::new(Code::TooLarge, format!("{what} {is} is over the limit of {max}")))
        };
        let control = Opcode::from_u8(self.opcode).is_some_and(Opcode::is_control);
        let max = if control { CONTROL_BYTES_MAX } else { PAYLOAD_BYTES_MAX };
        if self.length > max {
            return too_large("length", self.length, max);
        }
        if self.sums_bytes > SUMS_BYTES_MAX {
            return too_large("sums_bytes", self.sums_bytes, SUMS_BYTES_MAX);
        }
        if self.offset.checked_add(u64::from(self.length)).is_none() {
            return Err(Failure::new(Code::BadRequest, "offset + length exceeds 64 bits"));
        }
        let want = if self.speaks_of_file_data() && !self.is_raw() {
            crate::sums::piece_count(self.offset, u64::from(self.length)) as u32 * 4
        } else {
            0
        };
        // Where the node moves the bytes in one pass with their sums, the writer need not have summed them before.
        let unsummed = self.is_one_sided() && !self.is_response() && self.sums_bytes == 0;
        if self.sums_bytes != want && !unsummed {
            return Err(Failure::new(
                Code::BadFrame,
                format!("sums_bytes {} where this range has {want}", self.sums_bytes),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Header {
        Header {
            opcode: Opcode::Write as u8,
            request: 0x0102_0304_0506_0708,
            handle: 7,
            epoch: 3,
            offset: 32 * 1024 - 1,
            length: 2,
            sums_bytes: 8,
            incarnation: 5,
            deadline_ms: 30_000,
            payload_crc: 0xdead_beef,
            priority: 1,
            ..Header::default()
        }
    }

    #[test]
    fn round_trip() {
        assert_eq!(Header::decode(&sample().encode()).unwrap(), sample());
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let good = sample().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_well_summed_header_with_bad_fields_is_refused_by_name() {
        let reseal = |change: &dyn Fn(&mut [u8; HEADER_BYTES])| {
            let mut bytes = sample().encode();
            change(&mut bytes);
            let sum = crc32c(&bytes[..60]).to_le_bytes();
            bytes[60..].copy_from_slice(&sum);
            Header::decode(&bytes).unwrap_err()
        };
        assert_eq!(reseal(&|b| b[4] = 2).code, Code::Version);
        assert_eq!(Header::identify(&sample().encode()).unwrap().request, sample().request);
        assert_eq!(Header::identify(&[0; HEADER_BYTES]), None);
        assert_eq!(reseal(&|b| b[6] = 8).code, Code::BadFrame);
        assert_eq!(reseal(&|b| b[59] = 1).code, Code::BadFrame);
        assert_eq!(reseal(&|b| b[35] = 0xff).code, Code::TooLarge);
        assert_eq!(reseal(&|b| b[36] = 4).code, Code::BadFrame);
    }

    proptest! {
        #[test]
        fn garbage_never_passes_nor_panics(bytes in proptest::array::uniform32(any::<u8>())) {
            let mut header = [0u8; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            header[32..].copy_from_slice(&bytes);
            prop_assert!(Header::decode(&header).is_err());
        }
    }
}
