//! Memory that a transfer reads or fills and that somebody else keeps alive.

use smallvec::{SmallVec, smallvec};

/// A range of bytes by address.
///
/// The transports move bytes between the network and memory that no Rust reference may cover for the whole of a
/// transfer: a caller's buffer behind a C or Python call, a frame that readers share. Whoever makes a `Slice` promises that
/// the range stays mapped, and is not used otherwise, until the transfer has completed.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    address: *mut u8,
    length: usize,
}

// SAFETY: a Slice is only an address; the promise of `Slice::new` covers use from any thread.
unsafe impl Send for Slice {}
// SAFETY: as above; all methods that touch the memory are unsafe.
unsafe impl Sync for Slice {}

impl Slice {
    /// # Safety
    /// `[address, address + length)` stays mapped until every transfer that got this slice has completed. It is written by
    /// nobody else in that time if a transfer reads it, and neither read nor written if a transfer fills it.
    pub unsafe fn new(address: *mut u8, length: usize) -> Slice {
        Slice { address, length }
    }

    pub fn address(&self) -> *mut u8 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The part `[start, start + length)` of this slice.
    pub fn part(&self, start: usize, length: usize) -> Slice {
        assert!(start <= self.length && length <= self.length - start, "a part lies inside its slice");
        // SAFETY: start <= self.length, so the address stays inside the same mapped range.
        Slice { address: unsafe { self.address.add(start) }, length }
    }

    /// # Safety
    /// Nobody writes the range while the returned reference lives.
    pub unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: mapped by the promise of `new`, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address, self.length) }
    }

    /// # Safety
    /// Nobody else reads or writes the range during the call.
    pub unsafe fn fill_from(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.length);
        // SAFETY: both ranges hold `length` bytes; `bytes` is a live reference, so nobody fills it meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address, self.length) }
    }
}

/// The system's form of a scatter list, without empty slices.
pub fn iovecs(slices: &[Slice]) -> Vec<libc::iovec> {
    let filled = slices.iter().filter(|slice| !slice.is_empty());
    filled.map(|slice| libc::iovec { iov_base: slice.address().cast(), iov_len: slice.len() }).collect()
}

/// A list of slices that counts as one range of bytes.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    slices: SmallVec<[Slice; 1]>,
    length: usize,
}

impl From<Slice> for Memory {
    fn from(slice: Slice) -> Memory {
        Memory { length: slice.len(), slices: smallvec![slice] }
    }
}

impl Memory {
    pub fn new(slices: Vec<Slice>) -> Memory {
        let length = slices.iter().map(Slice::len).sum();
        Memory { slices: slices.into(), length }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Cuts consecutive parts of the given lengths out of the list in one walk; what lies beyond them is dropped.
    pub fn split(&self, lengths: impl IntoIterator<Item = usize>) -> Vec<Memory> {
        let (mut index, mut inside) = (0, 0);
        lengths
            .into_iter()
            .map(|mut wanted| {
                let mut part: SmallVec<[Slice; 1]> = SmallVec::new();
                while wanted > 0 {
                    let slice = &self.slices[index];
                    let take = wanted.min(slice.len() - inside);
                    if take > 0 {
                        part.push(slice.part(inside, take));
                    }
                    inside += take;
                    wanted -= take;
                    if inside == slice.len() {
                        (index, inside) = (index + 1, 0);
                    }
                }
                let length = part.iter().map(Slice::len).sum();
                Memory { slices: part, length }
            })
            .collect()
    }

    /// The first `length` bytes.
    pub fn prefix(&self, length: usize) -> Memory {
        if length == self.length { self.clone() } else { self.split([length]).remove(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn split_keeps_every_byte_in_order(sizes in proptest::collection::vec(0usize..50, 1..20), cut in 0usize..1000) {
            let mut buffers: Vec<Vec<u8>> = Vec::new();
            let mut next = 0u8;
            for size in &sizes {
                buffers.push((0..*size).map(|_| { next = next.wrapping_add(1); next }).collect());
            }
            let whole: Vec<u8> = buffers.concat();
            let cut = cut % (whole.len() + 1);
            // SAFETY: the buffers outlive the slices and are not written.
            let memory = Memory::new(buffers.iter_mut().map(|b| unsafe { Slice::new(b.as_mut_ptr(), b.len()) }).collect());
            let parts = memory.split([cut, whole.len() - cut]);
            let bytes: Vec<u8> = parts.iter().flat_map(|part| part.slices())
                // SAFETY: as above.
                .flat_map(|slice| unsafe { slice.bytes() }.to_vec()).collect();
            prop_assert_eq!(&bytes, &whole);
            prop_assert_eq!(parts[0].len(), cut);
        }
    }
}
