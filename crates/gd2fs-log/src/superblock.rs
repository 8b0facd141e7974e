//! The block that a log's device begins and ends with: whose it is, in which format, and how it is divided.

use gd2fs_device::{BLOCK, Buffer};
use gd2fs_wire::sums::crc32c;
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: &[u8; 8] = b"GD2FSLOG";
/// A node reads its own major version, and any minor: a minor adds what older nodes may ignore.
const MAJOR: u16 = 1;
const MINOR: u16 = 0;
/// Bits of features that a node must understand to use the device; none exists yet.
const FEATURES_KNOWN: u64 = 0;
const NAME_BYTES_MAX: usize = 255;

/// Why a device is not used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages say what the fields are.
pub enum SuperblockError {
    #[error(
        "it holds something that is not a GD2FS log; choose another, or, if nobody needs what it holds, remove the file (of \
         a block device wipe the first and the last MiB)"
    )]
    NotOurs,
    #[error("it is a log already")]
    NotBlank,
    #[error(
        "both of its superblocks are damaged; to give up what it holds remove the file (of a block device wipe the first and \
         the last MiB), start once without it in node.logs, and add it again"
    )]
    Damaged,
    #[error("it has format {major}.{minor}, this node reads {MAJOR}.x; use a node of that version")]
    Version { major: u16, minor: u16 },
    #[error("it needs features {0:#x} that this node does not have; use a newer node")]
    Features(u64),
    #[error("it belongs to cluster {found:?}, not {expected:?}; give this cluster its own device")]
    ForeignCluster { found: String, expected: String },
    #[error("it belongs to node {found:?}, not {expected:?}; give this node its own device")]
    ForeignNode { found: String, expected: String },
    #[error(
        "it has {found} bytes, and had {expected} when it was formatted (node.log_bytes); give it its {expected} bytes back, \
         or, to give up what it holds, remove the file (of a block device wipe the first and the last MiB), start once without it \
         in node.logs, and add it again"
    )]
    Size { found: u64, expected: u64 },
    #[error("segment_bytes {0} does not divide it; it was not written by this software")]
    Segments(u64),
    #[error("{field} {value:?} is not 1 to {NAME_BYTES_MAX} bytes long")]
    Name { field: &'static str, value: String },
}

/// Who a device belongs to and how it is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub cluster: String,
    pub node: String,
    pub device: [u8; 16],
    pub segment_bytes: u64,
    pub device_bytes: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawName {
    length: u8,
    bytes: [u8; NAME_BYTES_MAX],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSuperblock {
    magic: [u8; 8],
    major: U16,
    minor: U16,
    reserved: U32,
    features: U64,
    device: [u8; 16],
    segment_bytes: U64,
    device_bytes: U64,
    cluster: RawName,
    node: RawName,
    zeros: [u8; 3524],
    crc: U32,
}

const _: () = assert!(size_of::<RawSuperblock>() == BLOCK);

/// What a block is, before one looks at whose it is.
enum Found {
    Foreign,
    Damaged,
    Whole(Box<RawSuperblock>),
}

impl Superblock {
    pub fn check_names(cluster: &str, node: &str) -> Result<(), SuperblockError> {
        for (field, value) in [("cluster", cluster), ("node", node)] {
            if value.is_empty() || value.len() > NAME_BYTES_MAX {
                return Err(SuperblockError::Name { field, value: value.into() });
            }
        }
        Ok(())
    }

    pub fn encode(&self) -> Buffer {
        let mut raw = RawSuperblock {
            magic: *MAGIC,
            major: MAJOR.into(),
            minor: MINOR.into(),
            reserved: 0.into(),
            features: FEATURES_KNOWN.into(),
            device: self.device,
            segment_bytes: self.segment_bytes.into(),
            device_bytes: self.device_bytes.into(),
            cluster: RawName::new(&self.cluster),
            node: RawName::new(&self.node),
            zeros: [0; 3524],
            crc: 0.into(),
        };
        raw.crc = crc32c(&raw.as_bytes()[..BLOCK - 4]).into();
        let mut block = Buffer::new(BLOCK);
        block.copy_from_slice(raw.as_bytes());
        block
    }

    /// Whether a block is a whole superblock of this cluster and node.
    pub fn is_copy_of(block: &[u8], cluster: &str, node: &str) -> bool {
        let Found::Whole(raw) = Found::of(block) else { return false };
        raw.cluster.text() == cluster && raw.node.text() == node
    }

    /// Whether a block is a superblock of which not all was written.
    pub fn is_torn(block: &[u8]) -> bool {
        matches!(Found::of(block), Found::Damaged)
    }

    /// Reads a device's first and last block. One whole copy is enough.
    pub fn read(
        first: &[u8],
        last: &[u8],
        cluster: &str,
        node: &str,
        device_bytes: u64,
    ) -> Result<Superblock, SuperblockError> {
        Superblock::check_names(cluster, node)?;
        let raw = match (Found::of(first), Found::of(last)) {
            (Found::Whole(raw), _) | (Found::Foreign | Found::Damaged, Found::Whole(raw)) => raw,
            (Found::Damaged, _) => return Err(SuperblockError::Damaged),
            (Found::Foreign, _) => return Err(SuperblockError::NotOurs),
        };
        let (major, minor) = (raw.major.get(), raw.minor.get());
        if major != MAJOR {
            return Err(SuperblockError::Version { major, minor });
        }
        let unknown = raw.features.get() & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(SuperblockError::Features(unknown));
        }
        let found = Superblock {
            cluster: raw.cluster.text(),
            node: raw.node.text(),
            device: raw.device,
            segment_bytes: raw.segment_bytes.get(),
            device_bytes: raw.device_bytes.get(),
        };
        if found.cluster != cluster {
            return Err(SuperblockError::ForeignCluster { found: found.cluster, expected: cluster.into() });
        }
        if found.node != node {
            return Err(SuperblockError::ForeignNode { found: found.node, expected: node.into() });
        }
        if found.device_bytes != device_bytes {
            return Err(SuperblockError::Size { found: device_bytes, expected: found.device_bytes });
        }
        if found.segment_bytes < 2 * BLOCK as u64 || !found.segment_bytes.is_multiple_of(BLOCK as u64) {
            return Err(SuperblockError::Segments(found.segment_bytes));
        }
        Ok(found)
    }
}

impl Found {
    fn of(block: &[u8]) -> Found {
        let Ok(raw) = RawSuperblock::read_from_bytes(block) else { return Found::Foreign };
        match (&raw.magic == MAGIC, raw.crc.get() == crc32c(&block[..BLOCK - 4])) {
            (true, true) => Found::Whole(Box::new(raw)),
            (true, false) => Found::Damaged,
            (false, _) => Found::Foreign,
        }
    }
}

impl RawName {
    fn new(name: &str) -> RawName {
        let mut bytes = [0; NAME_BYTES_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        RawName { length: name.len() as u8, bytes }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes[..usize::from(self.length)]).into_owned()
    }
}
