//! The file in a data directory that names the logs of the node's last life.

use std::path::Path;

use gd2fs_wire::sums::crc32c;

use crate::data_dir::{DataDirError, read_if_there, write_durably};
use crate::log_set::LogId;

const MAGIC: &[u8; 8] = b"GD2FSLGS";
const ID_BYTES: usize = size_of::<LogId>();

/// The ids; none in a directory that never had a log.
///
/// # Errors
/// `Io`; `Logs` if it is damaged.
pub(crate) fn read(path: &Path) -> Result<Vec<LogId>, DataDirError> {
    match read_if_there(path)? {
        None => Ok(Vec::new()),
        Some(bytes) => decode(&bytes).ok_or_else(|| DataDirError::Logs(path.into())),
    }
}

/// Replaces the list; durable when this returns.
pub(crate) fn write(path: &Path, ids: &[LogId]) -> Result<(), DataDirError> {
    write_durably(path, &encode(ids)).map_err(DataDirError::io(path))
}

/// magic 8, the ids of 16 bytes each, CRC-32C u32; little-endian.
fn encode(ids: &[LogId]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    ids.iter().for_each(|id| bytes.extend_from_slice(&id.0));
    bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Vec<LogId>> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    let ids = body.strip_prefix(MAGIC)?.chunks_exact(ID_BYTES);
    let whole = ids.remainder().is_empty() && u32::from_le_bytes(*sum) == crc32c(body);
    whole.then(|| ids.map(|id| LogId(id.try_into().expect("chunks of this size"))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        for count in [0, 1, 3] {
            let ids: Vec<LogId> = (0..count).map(|index| LogId([index; 16])).collect();
            let good = encode(&ids);
            assert_eq!(decode(&good), Some(ids));
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(&bad), None, "bit {bit}");
            }
            (0..good.len()).for_each(|length| assert_eq!(decode(&good[..length]), None, "{length} bytes"));
        }
    }
}
