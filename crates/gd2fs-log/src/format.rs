//! Whose a device is, and making a device a log.

use std::sync::Arc;

use gd2fs_device::{BLOCK, Buffer, Device, Op};

use crate::error::{LogError, Result};
use crate::inner::random_id;
use crate::log::{Options, record_bytes_max, segment_bytes};
use crate::record::{SEGMENT_HEADER_BLOCKS, SegmentHeader};
use crate::segment::Division;
use crate::superblock::{Superblock, SuperblockError};

/// With nothing but zeros in so many first and last bytes a device holds no file system, no partition table and no array that
/// is in use: all of them mark the first or the last 128 KiB.
const BLANK_BYTES: u64 = 1 << 20;
/// Headers of segments that are read at once.
pub(crate) const HEADERS_AT_ONCE: usize = 64;

/// A log that was found on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Drawn when the device was formatted: its name, wherever it lies.
    pub id: [u8; 16],
    /// Whether anything was ever written to it.
    pub used: bool,
}

/// Looks at a device and changes nothing. None: it is blank.
///
/// # Errors
/// `Superblock` if the device is not this node's; `Device`.
pub async fn identify(device: &Arc<Device>, options: &Options) -> Result<Option<Identity>> {
    let Some(found) = superblock(device, options).await? else { return Ok(None) };
    let division = Division::new(device.bytes(), found.segment_bytes);
    let segments: Vec<u32> = (0..division.segments).collect();
    for group in segments.chunks(HEADERS_AT_ONCE) {
        if headers(device, &found.device, division, group).await?.iter().any(Option::is_some) {
            return Ok(Some(Identity { id: found.device, used: true }));
        }
    }
    Ok(Some(Identity { id: found.device, used: false }))
}

/// Makes a blank device a log, and gives its id.
///
/// # Errors
/// `Superblock` if it is not blank; `Refused` for an option, or a device that is too small; `Device`.
pub async fn format(device: &Arc<Device>, options: &Options) -> Result<[u8; 16]> {
    match superblock(device, options).await? {
        Some(_) => Err(refused(device, SuperblockError::NotBlank)),
        None => Ok(write_superblock(device, options).await?.device),
    }
}

/// The superblock of a log; a blank device gets one.
pub(crate) async fn superblock_of(device: &Arc<Device>, options: &Options) -> Result<Superblock> {
    let Some(found) = superblock(device, options).await? else {
        return write_superblock(device, options).await;
    };
    let wanted = record_bytes_max(options);
    if found.segment_bytes < wanted {
        let reason =
            format!("segments have {} bytes and such a record {wanted}; format anew", found.segment_bytes);
        return Err(LogError::Refused { field: "payload_bytes_max", reason });
    }
    Ok(found)
}

/// The headers of some segments; None for what is none of this device's.
pub(crate) async fn headers(
    device: &Device,
    device_id: &[u8; 16],
    division: Division,
    segments: &[u32],
) -> Result<Vec<Option<SegmentHeader>>> {
    let reads = segments.iter().map(|segment| {
        let bytes = SEGMENT_HEADER_BLOCKS as usize * BLOCK;
        read_begun(device, division.start(*segment), bytes)
    });
    let mut found = Vec::with_capacity(segments.len());
    for (buffer, read) in reads.collect::<Vec<_>>() {
        read.await?;
        found.push(SegmentHeader::decode(&buffer, device_id));
    }
    Ok(found)
}

/// What the first and the last block say. None if the device is blank.
async fn superblock(device: &Arc<Device>, options: &Options) -> Result<Option<Superblock>> {
    let last_offset = device.bytes() - BLOCK as u64;
    let (first, last) = (read(device, 0, BLOCK).await?, read(device, last_offset, BLOCK).await?);
    let (cluster, node, bytes) = (&options.cluster, &options.node, device.bytes());
    if is_blank(&first) {
        let edge = BLANK_BYTES.min(bytes);
        let head = read(device, 0, BLANK_BYTES.min(last_offset).max(BLOCK as u64) as usize).await?;
        let tail = read(device, bytes - edge, edge as usize).await?;
        // A format writes the copy first: what it left behind when it was interrupted holds nothing yet. The same is true of
        // a log whose first MiB somebody has wiped, to give up what it holds.
        let beside_copy = &tail[..tail.len() - BLOCK];
        let copy = Superblock::is_copy_of(&last, cluster, node);
        if is_blank(&head)
            && (copy || is_blank(beside_copy) && (is_blank(&last) || Superblock::is_torn(&last)))
        {
            return Ok(None);
        }
    }
    Superblock::read(&first, &last, cluster, node, bytes).map(Some).map_err(|error| refused(device, error))
}

fn refused(device: &Device, error: SuperblockError) -> LogError {
    LogError::Superblock { path: device.path().into(), error }
}

fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

async fn write_superblock(device: &Arc<Device>, options: &Options) -> Result<Superblock> {
    Superblock::check_names(&options.cluster, &options.node).map_err(|error| refused(device, error))?;
    let superblock = Superblock {
        cluster: options.cluster.clone(),
        node: options.node.clone(),
        device: random_id(),
        segment_bytes: segment_bytes(device.bytes(), options)?,
        device_bytes: device.bytes(),
    };
    // The copy first: a device with a first block is a device with both.
    for offset in [device.bytes() - BLOCK as u64, 0] {
        let block = Arc::new(superblock.encode());
        // SAFETY: the operation keeps the block, which nobody writes any more.
        let memory = unsafe { block.slice() };
        device.perform(Op::write(offset, memory, block)).await?;
        device.perform(Op::sync()).await?;
    }
    Ok(superblock)
}

async fn read(device: &Device, offset: u64, bytes: usize) -> Result<Arc<Buffer>> {
    let (buffer, read) = read_begun(device, offset, bytes);
    read.await?;
    Ok(buffer)
}

/// A buffer that may be looked at once what is beside it has completed.
fn read_begun(
    device: &Device,
    offset: u64,
    bytes: usize,
) -> (Arc<Buffer>, impl Future<Output = gd2fs_device::Result<()>> + Send + use<>) {
    let buffer = Arc::new(Buffer::new(bytes));
    // SAFETY: the operation keeps the buffer; it is read only once the operation is over.
    let memory = unsafe { buffer.slice() };
    let read = device.perform(Op::read(offset, memory, Arc::clone(&buffer)));
    (buffer, read)
}
