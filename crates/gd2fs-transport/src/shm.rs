//! Memory that a client shares with a node of its host: one-sided transfers without a NIC.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use gd2fs_wire::messages::Map;
use gd2fs_wire::{Code, Failure};
use parking_lot::{Mutex, RwLock};

use crate::copy::{at_memory, copy_pieces};
use crate::memory::{Memory, Slice};
use crate::one_sided::{Moved, Remote, Segment};

/// Regions of one connection: each costs the node a mapping, of which a process has 65,530.
const REGIONS_MAX: usize = 1024;
/// Regions of all connections: half of the mappings that a process may have.
const MAPPINGS_MAX: usize = 32_768;
/// Bytes of one region: more than any host has, and no overflow anywhere.
const REGION_BYTES_MAX: u64 = 1 << 44;
const REGION_NAME: &CStr = c"gd2fs-region";

/// A mapped memfd whose size is sealed: whoever maps it can never be made to fault.
#[derive(Debug)]
pub struct Region {
    address: NonNull<u8>,
    length: usize,
    /// Kept by whoever made it, for its peers; thousands of a node's own would use up its descriptors.
    memory: Option<OwnedFd>,
    process: u32,
}

// SAFETY: a Region is an address range that it owns; who may touch which bytes is decided by requests.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// New memory of `length` bytes, in place: nobody waits for a page later. A forked child does not have it: what it wrote there
    /// would be its parent's.
    pub fn create(length: usize) -> io::Result<Region> {
        let check = |result: i32| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
        let length = length.next_multiple_of(page_bytes()).max(page_bytes());
        // SAFETY: plain system calls on a name that lives and on a descriptor that we own.
        let memory = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let memory = OwnedFd::from_raw_fd(check(libc::memfd_create(REGION_NAME.as_ptr(), flags))?);
            check(libc::ftruncate(memory.as_raw_fd(), length as libc::off_t))?;
            check(libc::fcntl(memory.as_raw_fd(), libc::F_ADD_SEALS, SEALS))?;
            memory
        };
        let mut region = Region::map(&memory, length)?;
        // SAFETY: the range was just mapped by us.
        check(unsafe { libc::madvise(region.address().cast(), length, libc::MADV_DONTFORK) })?;
        region.memory = Some(memory);
        Ok(region)
    }

    /// The memory that a client offers, if it can neither shrink nor be filled by the node.
    fn offered(memory: &OwnedFd, length: u64) -> Result<Region, Failure> {
        let refuse = |why: &str| Err(Failure::new(Code::BadRequest, format!("the offered memory {why}")));
        if length == 0 || length > REGION_BYTES_MAX {
            return refuse("has a length of 0, or of more than 16 TiB");
        }
        // A hole in reserved huge pages could not be filled again, and whoever touched it would die of it.
        if rustix::fs::fstatfs(memory).map_err(|error| internal(error.into()))?.f_type as i64 != TMPFS_MAGIC {
            return refuse("is not a memfd of ordinary pages");
        }
        let (size, blocks) = file_size(memory).map_err(internal)?;
        if size != length {
            return refuse("has another length than MAP says");
        }
        if blocks * 512 < length {
            // Its missing pages would be the node's to pay for.
            return refuse("is not populated; touch every page of it before MAP");
        }
        Region::map(memory, length as usize).map_err(internal)
    }

    fn map(memory: &OwnedFd, length: usize) -> io::Result<Region> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new shared mapping of a memfd that has `length` bytes and cannot shrink.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, memory.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address_of = NonNull::new(address.cast()).expect("not address 0");
        let region = Region { address: address_of, length, memory: None, process: std::process::id() };
        // SAFETY: the range was just mapped by us.
        if unsafe { libc::madvise(address, length, libc::MADV_POPULATE_WRITE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(region)
    }

    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether this is a child of the process that mapped it, and has nothing there, or something else.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// For the peer: another descriptor of the same memory.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.memory.as_ref().ok_or(io::ErrorKind::Unsupported)?.try_clone()
    }

    /// Puts fresh private pages in the place of `[start, start + length)`, whole pages of this process's view: whatever a peer
    /// still writes into the shared ones reaches nobody here.
    pub fn sever(&self, start: usize, length: usize) -> io::Result<()> {
        assert!(start.is_multiple_of(page_bytes()) && length.is_multiple_of(page_bytes()));
        assert!(start <= self.length && length <= self.length - start);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is ours and stays mapped; its content is lost, which a failed read allows.
        let address =
            unsafe { libc::mmap(self.address().add(start).cast(), length, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn slice(&self, segment: &Segment) -> Option<Slice> {
        let (offset, length) = (usize::try_from(segment.offset()).ok()?, segment.length() as usize);
        let inside = offset <= self.length && length <= self.length - offset;
        // SAFETY: inside the mapping, which the requests that use the slice keep alive.
        inside.then(|| unsafe { Slice::new(self.address().add(offset), length) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: the mapping is ours; whoever uses it keeps the region alive.
            unsafe { libc::munmap(self.address().cast(), self.length) };
        }
    }
}

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

pub fn page_bytes() -> usize {
    // SAFETY: a plain query.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Length and 512-byte blocks in place.
fn file_size(memory: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(memory)?;
    Ok((stat.st_size as u64, stat.st_blocks as u64))
}

fn internal(error: io::Error) -> Failure {
    Failure::new(Code::Internal, format!("the offered memory can't be mapped: {error}"))
}

/// A node's mappings of all clients: a client has several connections, and each offers the same memory.
pub struct Mappings {
    most: usize,
    by_file: Mutex<HashMap<(u64, u64), Weak<Region>>>,
}

impl Default for Mappings {
    fn default() -> Mappings {
        Mappings::with_limit(MAPPINGS_MAX)
    }
}

impl Mappings {
    pub fn with_limit(most: usize) -> Mappings {
        Mappings { most, by_file: Mutex::default() }
    }

    fn map(&self, memory: &OwnedFd, length: u64) -> Result<Arc<Region>, Failure> {
        check_descriptor(memory)?;
        let stat = rustix::fs::fstat(memory).map_err(|error| internal(error.into()))?;
        let key = (stat.st_dev, stat.st_ino);
        let known = |by_file: &HashMap<(u64, u64), Weak<Region>>| {
            by_file.get(&key).and_then(Weak::upgrade).filter(|region| region.len() as u64 == length)
        };
        {
            let mut by_file = self.by_file.lock();
            if let Some(region) = known(&by_file) {
                return Ok(region);
            }
            by_file.retain(|_, region| region.strong_count() > 0);
            if by_file.len() >= self.most {
                let message =
                    format!("{} regions are mapped on this node; use fewer, larger ones", self.most);
                return Err(Failure::new(Code::Overloaded, message));
            }
        }
        // Thousands of page-table entries: not while others wait for the lock.
        let region = Arc::new(Region::offered(memory, length)?);
        let mut by_file = self.by_file.lock();
        if let Some(earlier) = known(&by_file) {
            return Ok(earlier);
        }
        by_file.insert(key, Arc::downgrade(&region));
        Ok(region)
    }
}

/// Only a memfd whose size is sealed, and that its sender may write, is looked at any further: anything else may be a file that
/// makes whoever asks wait.
fn check_descriptor(memory: &OwnedFd) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::new(Code::BadRequest, format!("the offered memory {why}")));
    // SAFETY: system calls on our own descriptor.
    let (seals, flags) = unsafe {
        let fd = memory.as_raw_fd();
        (libc::fcntl(fd, libc::F_GET_SEALS), libc::fcntl(fd, libc::F_GETFL))
    };
    if seals < 0 || seals & SEALS != SEALS {
        return refuse("is not a memfd whose size is sealed (F_SEAL_SHRINK, F_SEAL_GROW)");
    }
    if flags < 0 || flags & libc::O_ACCMODE != libc::O_RDWR {
        return refuse("is not open for reading and writing");
    }
    Ok(())
}

/// What a client has registered on one connection. Its mappings go with the connection.
pub struct Regions {
    mappings: Arc<Mappings>,
    /// Long copies leave their thread to others.
    apart: bool,
    by_number: RwLock<HashMap<u32, Arc<Region>>>,
}

impl Regions {
    pub fn new(mappings: Arc<Mappings>, apart: bool) -> Regions {
        Regions { mappings, apart, by_number: RwLock::default() }
    }

    fn map(&self, number: u32, memory: OwnedFd, length: u64) -> Result<(), Failure> {
        let refuse = |code, why: String| Err(Failure::new(code, why));
        let full = |known: &HashMap<_, _>| known.len() >= REGIONS_MAX && !known.contains_key(&number);
        if full(&self.by_number.read()) {
            return refuse(Code::Overloaded, format!("{REGIONS_MAX} regions are registered; UNMAP some"));
        }
        let region = self.mappings.map(&memory, length)?;
        let mut by_number = self.by_number.write();
        let known = by_number.entry(number).or_insert_with(|| region.clone());
        if !Arc::ptr_eq(known, &region) {
            return refuse(
                Code::BadRequest,
                format!("region {number} is registered already; UNMAP it first"),
            );
        }
        Ok(())
    }

    /// The memory that `segments` name, and what keeps it mapped.
    fn memory(&self, segments: &[Segment]) -> Result<(Memory, Vec<Arc<Region>>), Failure> {
        let by_number = self.by_number.read();
        let mut held: Vec<Arc<Region>> = Vec::new();
        let mut slices = Vec::with_capacity(segments.len());
        for segment in segments {
            let region = by_number.get(&segment.region()).ok_or_else(|| unknown(segment.region()))?;
            let slice = region.slice(segment).ok_or_else(|| {
                let (number, offset, length) = (segment.region(), segment.offset(), segment.length());
                let message = format!(
                    "segment of {length} bytes at {offset} lies outside region {number} of {} bytes",
                    region.len()
                );
                Failure::new(Code::BadRequest, message)
            })?;
            if !held.last().is_some_and(|last| Arc::ptr_eq(last, region)) {
                held.push(region.clone());
            }
            slices.push(slice);
        }
        Ok((Memory::new(slices), held))
    }
}

fn unknown(number: u32) -> Failure {
    Failure::new(Code::BadRequest, format!("region {number} is not registered on this connection"))
}

impl Remote for Regions {
    fn register(&self, map: &Map, descriptor: Option<OwnedFd>) -> Result<(), Failure> {
        let memory = descriptor.ok_or_else(|| {
            Failure::new(Code::BadRequest, "MAP came without a descriptor of the memory that it offers")
        })?;
        self.map(map.region, memory, map.length)
    }

    fn unregister(&self, number: u32) -> Result<(), Failure> {
        match self.by_number.write().remove(&number) {
            Some(_) => Ok(()),
            None => Err(unknown(number)),
        }
    }

    unsafe fn put<'a>(&'a self, offset: u64, from: &'a Memory, to: &'a [Segment], summed: bool) -> Moved<'a> {
        Box::pin(async move {
            let (memory, _held) = self.memory(to)?;
            // SAFETY: the client gave these ranges to this transfer; `from` is the caller's promise.
            Ok(at_memory(self.apart, memory.len(), || unsafe { copy_pieces(offset, from, &memory, summed) }))
        })
    }

    unsafe fn get<'a>(&'a self, offset: u64, from: &'a [Segment], into: &'a Memory) -> Moved<'a> {
        Box::pin(async move {
            let (memory, _held) = self.memory(from)?;
            // SAFETY: a client that writes there meanwhile spoils its own bytes: each is read once, and what is summed is what
            // was read. `into` is the caller's promise.
            Ok(at_memory(self.apart, memory.len(), || unsafe { copy_pieces(offset, &memory, into, true) }))
        })
    }
}
