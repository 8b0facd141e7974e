//! Memory that slabs are made of: huge pages wherever the system has them.

use std::io;
use std::ptr::NonNull;

/// x86-64's and arm64's (with 4 KiB granules) next page size, and what the flags below ask for.
const HUGE_PAGE: usize = 2 << 20;

/// Private anonymous memory, unmapped with its owner.
///
/// No peer maps a slab: a node moves bytes into its clients' memory, not the other way round. So a slab needs no descriptor,
/// and private memory gets transparent huge pages on machines that refuse them to shared memory (`shmem_enabled` is `never` or
/// `advise` nearly everywhere). A slab that clients map would be a sealed memfd again.
pub(crate) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a Mapping is an address range that it owns; who may touch which bytes is decided by frames and chunks.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Reserved huge pages if there are enough, transparent ones otherwise, small ones where those are switched off.
    pub fn new(bytes: usize) -> io::Result<Mapping> {
        if bytes.is_multiple_of(HUGE_PAGE)
            && let Ok(mapping) = Mapping::create(bytes, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB)
            // The probe: a huge page that a container may not have shows as an error here and as SIGBUS anywhere else.
            && mapping.advise(libc::MADV_POPULATE_WRITE).is_ok()
        {
            return Ok(mapping);
        }
        let mapping = Mapping::aligned(bytes)?;
        // A wish: without huge pages everything works all the same.
        let _ = mapping.advise(libc::MADV_HUGEPAGE);
        Ok(mapping)
    }

    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins at a multiple of `HUGE_PAGE`: only whole aligned ranges of that size become huge pages, and the system places
    /// mappings by small ones.
    fn aligned(bytes: usize) -> io::Result<Mapping> {
        let mut wide = Mapping::create(bytes + HUGE_PAGE, 0)?;
        let skip = wide.address.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `skip` is less than HUGE_PAGE, so the three parts lie inside the mapping, and the middle one has `bytes`.
        unsafe {
            let (start, middle) = (wide.address.as_ptr(), wide.address.add(skip));
            unmap(start, skip);
            unmap(middle.as_ptr().add(bytes), HUGE_PAGE - skip);
            (wide.address, wide.bytes) = (middle, bytes);
        }
        Ok(wide)
    }

    fn create(bytes: usize, flags: libc::c_int) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        // SAFETY: a new mapping at an address that the system chooses.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).expect("mmap never maps address 0");
        Ok(Mapping { address, bytes })
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is our own, and none of the advice that is given here loses what it holds.
        match unsafe { libc::madvise(self.address.as_ptr().cast(), self.bytes, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no frame lies in it any more.
        unsafe { unmap(self.address.as_ptr(), self.bytes) };
    }
}

/// # Safety
/// The range belongs to the caller's mapping, and nobody uses it any more.
unsafe fn unmap(address: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { libc::munmap(address.cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_can_be_written_and_whole_huge_pages_are_aligned() {
        for bytes in [32 << 10, HUGE_PAGE, 3 * HUGE_PAGE, 3 * HUGE_PAGE + (32 << 10)] {
            let mapping = Mapping::new(bytes).unwrap();
            assert_eq!((mapping.bytes(), mapping.address().addr().get() % HUGE_PAGE), (bytes, 0));
            // SAFETY: the range is the mapping's, and nobody else knows it.
            let all = unsafe { std::slice::from_raw_parts_mut(mapping.address().as_ptr(), bytes) };
            assert!(all.iter().all(|byte| *byte == 0));
            all.fill(0xa5);
            assert!(all.iter().all(|byte| *byte == 0xa5));
        }
    }
}
