//! The block that every data directory begins with: whose it is, and in which format.

use gd2fs_wire::sums::crc32c;
use thiserror::Error;

/// One block of any disk.
pub const SUPERBLOCK_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"GD2FSDIR";
/// A node reads its own major version, and any minor: a minor adds what older nodes may ignore.
pub const MAJOR: u16 = 1;
pub const MINOR: u16 = 0;
/// Bits of features that a node must understand to use the directory; none exists yet.
const FEATURES_KNOWN: u64 = 0;
const NAME_BYTES_MAX: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SuperblockError {
    #[error("it begins with \"{}\", so it is no superblock of GD2FS; give an empty directory", .0.escape_ascii())]
    Magic([u8; 8]),
    #[error("it has {0} bytes, not {SUPERBLOCK_BYTES}; restore it or give an empty directory")]
    Size(usize),
    #[error(
        "it is damaged: stored sum {stored:#010x}, its bytes sum to {actual:#010x}; give an empty directory"
    )]
    Damaged { stored: u32, actual: u32 },
    #[error("it has format {major}.{minor}, this node reads {MAJOR}.x; use a node of that version")]
    Version { major: u16, minor: u16 },
    #[error("it needs features {0:#x} that this node does not have; use a newer node")]
    Features(u64),
    #[error("it belongs to cluster {found:?}, not {expected:?}; give this cluster its own directory")]
    ForeignCluster { found: String, expected: String },
    #[error("it belongs to node {found:?}, not {expected:?}; give this node its own directory")]
    ForeignNode { found: String, expected: String },
    #[error("{field} {value:?} is not 1 to {NAME_BYTES_MAX} bytes long")]
    Name { field: &'static str, value: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub cluster: String,
    pub node: String,
}

impl Superblock {
    pub fn new(cluster: &str, node: &str) -> Result<Superblock, SuperblockError> {
        for (field, value) in [("cluster", cluster), ("node", node)] {
            if value.is_empty() || value.len() > NAME_BYTES_MAX {
                return Err(SuperblockError::Name { field, value: value.into() });
            }
        }
        Ok(Superblock { cluster: cluster.into(), node: node.into() })
    }

    /// magic 8, major u16, minor u16, features u64, two names as u16 length and bytes, zeros, CRC-32C u32; little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SUPERBLOCK_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&MAJOR.to_le_bytes());
        bytes.extend_from_slice(&MINOR.to_le_bytes());
        bytes.extend_from_slice(&FEATURES_KNOWN.to_le_bytes());
        for name in [&self.cluster, &self.node] {
            bytes.extend_from_slice(&(name.len() as u16).to_le_bytes());
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes.resize(SUPERBLOCK_BYTES - 4, 0);
        let sum = crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Refuses, by name, anything but a superblock of `self`'s own cluster and node in a format that is understood.
    pub fn check(&self, bytes: &[u8]) -> Result<(), SuperblockError> {
        if bytes.len() != SUPERBLOCK_BYTES {
            return Err(SuperblockError::Size(bytes.len()));
        }
        let (body, sum) = bytes.split_at(SUPERBLOCK_BYTES - 4);
        let mut fields = Fields(body);
        let magic: [u8; 8] = fields.take(8).try_into().expect("8 bytes");
        if &magic != MAGIC {
            return Err(SuperblockError::Magic(magic));
        }
        let (stored, actual) = (u32::from_le_bytes(sum.try_into().expect("4 bytes")), crc32c(body));
        if stored != actual {
            return Err(SuperblockError::Damaged { stored, actual });
        }
        let (major, minor) = (fields.u16(), fields.u16());
        if major != MAJOR {
            return Err(SuperblockError::Version { major, minor });
        }
        let unknown = u64::from_le_bytes(fields.take(8).try_into().expect("8 bytes")) & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(SuperblockError::Features(unknown));
        }
        let (cluster, node) = (fields.name(), fields.name());
        if cluster != self.cluster {
            return Err(SuperblockError::ForeignCluster { found: cluster, expected: self.cluster.clone() });
        }
        if node != self.node {
            return Err(SuperblockError::ForeignNode { found: node, expected: self.node.clone() });
        }
        Ok(())
    }
}

/// Reads fields in order; what a length says beyond the block is cut, never read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (field, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        field
    }

    fn u16(&mut self) -> u16 {
        self.take(2).try_into().map_or(0, u16::from_le_bytes)
    }

    fn name(&mut self) -> String {
        let length = self.u16();
        String::from_utf8_lossy(self.take(usize::from(length))).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resealed(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = Superblock::new("c", "n1").unwrap().encode();
        change(&mut bytes);
        let sum = crc32c(&bytes[..SUPERBLOCK_BYTES - 4]).to_le_bytes();
        bytes[SUPERBLOCK_BYTES - 4..].copy_from_slice(&sum);
        bytes
    }

    #[test]
    fn everything_foreign_is_refused_by_name() {
        let mine = Superblock::new("c", "n1").unwrap();
        assert_eq!(mine.check(&mine.encode()), Ok(()));
        assert_eq!(mine.check(&resealed(|b| b[10] = 9)), Ok(()), "a newer minor version is fine");
        let refused = |bytes: &[u8]| mine.check(bytes).unwrap_err();
        assert!(matches!(refused(&resealed(|b| b[0] = b'X')), SuperblockError::Magic(_)));
        assert_eq!(refused(&resealed(|b| b[8] = 2)), SuperblockError::Version { major: 2, minor: 0 });
        assert_eq!(refused(&resealed(|b| b[12] = 4)), SuperblockError::Features(4));
        let other = |c: &str, n: &str| refused(&Superblock::new(c, n).unwrap().encode());
        assert!(matches!(other("d", "n1"), SuperblockError::ForeignCluster { .. }));
        assert!(matches!(other("c", "n2"), SuperblockError::ForeignNode { .. }));
        assert_eq!(refused(&mine.encode()[1..]), SuperblockError::Size(SUPERBLOCK_BYTES - 1));
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let mine = Superblock::new("cluster", "node").unwrap();
        let good = mine.encode();
        for bit in (0..64 * 8).chain((SUPERBLOCK_BYTES - 4) * 8..SUPERBLOCK_BYTES * 8) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(mine.check(&bad).is_err(), "bit {bit}");
        }
    }
}
