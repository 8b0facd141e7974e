//! The node's DRAM: memfd slabs that are made when they are needed and returned when they are empty.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;

use crate::buddy::{Buddy, LEAF_BYTES, ORDER_MAX, order_of};
use crate::frame::Frame;

/// As large as the largest stripe unit, so that every chunk fits into one slab.
pub const SLAB_BYTES: usize = 64 << 20;
const SLAB_NAME: &CStr = c"gd2fs-slab";

pub struct Arena {
    capacity: usize,
    used: AtomicUsize,
    slabs: Mutex<Slabs>,
}

struct Slabs {
    list: Vec<Option<Slab>>,
    /// Slabs that have a free block, by the order of their largest one.
    by_largest: [BTreeSet<usize>; ORDER_MAX + 1],
    /// Slabs that could still be made.
    absent: BTreeSet<usize>,
}

struct Slab {
    mapping: Mapping,
    buddy: Buddy,
}

impl Arena {
    /// An arena of at most `capacity` bytes, rounded down to 32 KiB. No memory is taken yet.
    pub fn new(capacity: usize) -> Arena {
        let capacity = capacity / LEAF_BYTES * LEAF_BYTES;
        let count = capacity.div_ceil(SLAB_BYTES);
        let slabs = Slabs {
            list: (0..count).map(|_| None).collect(),
            by_largest: Default::default(),
            absent: (0..count).collect(),
        };
        Arena { capacity, used: AtomicUsize::new(0), slabs: Mutex::new(slabs) }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes in frames, in whole size classes.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes mapped from the operating system.
    pub fn mapped(&self) -> usize {
        self.slabs.lock().list.iter().flatten().map(|slab| slab.mapping.bytes).sum()
    }

    /// A frame of at least `bytes`, which is a chunk's size at most. Its content is whatever was there before.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Frame, Failure> {
        let order = order_of(bytes).ok_or_else(|| {
            Failure::new(
                Code::TooLarge,
                format!("a frame of {bytes} bytes is over the limit of {SLAB_BYTES}"),
            )
        })?;
        let mut slabs = self.slabs.lock();
        let index = match (order..=ORDER_MAX).find_map(|o| slabs.by_largest[o].first().copied()) {
            Some(index) => index,
            None => self.add_slab(&mut slabs, order)?,
        };
        let slab = slabs.list[index].as_mut().expect("ranked slabs exist");
        let before = slab.buddy.largest_free();
        let leaf = slab.buddy.allocate(order).expect("the slab's largest free block is large enough");
        let after = slab.buddy.largest_free();
        // SAFETY: the block lies inside the slab's mapping.
        let address = unsafe { slab.mapping.address.add(leaf as usize * LEAF_BYTES) };
        slabs.rank(index, before, after);
        drop(slabs);
        self.used.fetch_add(LEAF_BYTES << order, Ordering::Relaxed);
        Ok(Frame::new(self.clone(), address, index, leaf, order))
    }

    fn add_slab(&self, slabs: &mut Slabs, order: usize) -> Result<usize, Failure> {
        let slab_bytes = |index: usize| SLAB_BYTES.min(self.capacity - index * SLAB_BYTES);
        let no_space = |why: String| {
            let (used, capacity) = (self.used(), self.capacity);
            let wanted = LEAF_BYTES << order;
            Failure::new(
                Code::NoSpace,
                format!(
                    "no frame of {wanted} bytes: {used} of {capacity} bytes are used{why}; delete files or raise memory_bytes"
                ),
            )
        };
        // Only the last slab can be smaller than the others, so this looks at two at most.
        let index = slabs.absent.iter().copied().find(|index| {
            Buddy::new((slab_bytes(*index) / LEAF_BYTES) as u32).largest_free().is_some_and(|o| o >= order)
        });
        let index = index.ok_or_else(|| no_space(String::new()))?;
        let mapping = Mapping::new(slab_bytes(index))
            .map_err(|error| no_space(format!(", and the system gives no more memory ({error})")))?;
        let buddy = Buddy::new((mapping.bytes / LEAF_BYTES) as u32);
        slabs.rank(index, None, buddy.largest_free());
        slabs.absent.remove(&index);
        slabs.list[index] = Some(Slab { mapping, buddy });
        Ok(index)
    }

    pub(crate) fn release(&self, index: usize, leaf: u32, order: usize) {
        let mut slabs = self.slabs.lock();
        let slab = slabs.list[index].as_mut().expect("a slab with a frame in it exists");
        let before = slab.buddy.largest_free();
        slab.buddy.release(leaf, order);
        let after = slab.buddy.largest_free();
        let returned = if slab.buddy.is_empty() {
            slabs.rank(index, before, None);
            slabs.absent.insert(index);
            slabs.list[index].take()
        } else {
            slabs.rank(index, before, after);
            None
        };
        drop(slabs);
        self.used.fetch_sub(LEAF_BYTES << order, Ordering::Relaxed);
        // Unmapping 64 MiB takes milliseconds: not under the lock.
        drop(returned);
    }
}

impl Slabs {
    fn rank(&mut self, index: usize, before: Option<usize>, after: Option<usize>) {
        if before != after {
            before.map(|order| self.by_largest[order].remove(&index));
            after.map(|order| self.by_largest[order].insert(index));
        }
    }
}

/// A mapped memfd, sealed against any change of its size: a peer that maps it can never be made to fault.
struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
    _memory: OwnedFd,
}

// SAFETY: a Mapping is an address range that it owns; who may touch which bytes is decided by frames and chunks.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> io::Result<Mapping> {
        const HUGE_PAGE: usize = 2 << 20;
        if bytes.is_multiple_of(HUGE_PAGE)
            && let Ok(mapping) = Mapping::create(bytes, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB)
            // The probe: a huge page that a container may not have shows as an error here and as SIGBUS anywhere else.
            // SAFETY: the range was just mapped by us.
            && unsafe { libc::madvise(mapping.address.as_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0
        {
            return Ok(mapping);
        }
        let mapping = Mapping::create(bytes, 0)?;
        // SAFETY: as above. Transparent huge pages are a wish; without them everything works all the same.
        unsafe { libc::madvise(mapping.address.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Ok(mapping)
    }

    fn create(bytes: usize, flags: libc::c_uint) -> io::Result<Mapping> {
        let check = |result: i32| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
        let all = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
        // SAFETY: plain system calls on a name that lives and on a descriptor that we own.
        let memory = unsafe {
            let memory = OwnedFd::from_raw_fd(check(libc::memfd_create(SLAB_NAME.as_ptr(), all))?);
            check(libc::ftruncate(memory.as_raw_fd(), bytes as libc::off_t))?;
            check(libc::fcntl(
                memory.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
            ))?;
            memory
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new shared mapping of a memfd that has `bytes` bytes and cannot shrink.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, memory.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).expect("mmap never maps address 0");
        Ok(Mapping { address, bytes, _memory: memory })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no frame lies in it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_made_lazily_and_returned_when_empty() {
        let arena = Arc::new(Arena::new(SLAB_BYTES + (1 << 20)));
        assert_eq!(arena.mapped(), 0);
        let large = arena.allocate(SLAB_BYTES).unwrap();
        assert_eq!(arena.mapped(), SLAB_BYTES);
        let small = arena.allocate(1 << 20).unwrap();
        assert_eq!(arena.mapped(), arena.capacity());
        assert_eq!(arena.allocate(1).err().unwrap().code, Code::NoSpace);
        drop(large);
        assert_eq!(arena.mapped(), 1 << 20);
        drop(small);
        assert_eq!((arena.mapped(), arena.used()), (0, 0));
    }

    #[test]
    fn slabs_cannot_change_their_size() {
        let mapping = Mapping::create(LEAF_BYTES, 0).unwrap();
        for bytes in [0, 2 * LEAF_BYTES] {
            // SAFETY: a system call on our own descriptor.
            assert_eq!(unsafe { libc::ftruncate(mapping._memory.as_raw_fd(), bytes as libc::off_t) }, -1);
        }
    }

    #[test]
    fn the_capacity_is_exact() {
        let arena = Arc::new(Arena::new(3 * LEAF_BYTES + 5));
        let frames: Vec<Frame> = (0..3).map(|_| arena.allocate(1).unwrap()).collect();
        assert_eq!(arena.allocate(1).err().unwrap().code, Code::NoSpace);
        assert_eq!(arena.used(), 3 * LEAF_BYTES);
        drop(frames);
        assert_eq!(arena.allocate(SLAB_BYTES + 1).err().unwrap().code, Code::TooLarge);
    }
}
