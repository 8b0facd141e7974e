//! Which pages of a region nodes reach no more, and how much may be cut out of this process's memory in all.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ranges, severed or in danger of it, of all regions of this process. Each may cost it two mappings, and it has 65,530: half of
/// them stay for everybody else. What would go beyond is staged, so that whatever is in doubt can be severed.
pub(crate) const CUTS_MAX: usize = 16_384;

static CUTS: AtomicUsize = AtomicUsize::new(0);

/// A claim on so many cuts.
pub(crate) struct Cuts(usize);

impl Cuts {
    /// None if that would be too many.
    pub fn claim(count: usize) -> Option<Cuts> {
        let cuts = Cuts(count);
        // Given back by its drop if it was too much.
        (CUTS.fetch_add(count, Ordering::Relaxed) + count <= CUTS_MAX).then_some(cuts)
    }

    /// Whoever has to sever does; it claimed the cuts before.
    fn resize(&mut self, count: usize) {
        CUTS.fetch_add(count, Ordering::Relaxed);
        CUTS.fetch_sub(std::mem::replace(&mut self.0, count), Ordering::Relaxed);
    }
}

impl Drop for Cuts {
    fn drop(&mut self) {
        CUTS.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Ranges of one region; neighbours are one.
pub(crate) struct Severed {
    ends: BTreeMap<usize, usize>,
    cuts: Cuts,
}

impl Default for Severed {
    fn default() -> Severed {
        Severed { ends: BTreeMap::new(), cuts: Cuts(0) }
    }
}

impl Severed {
    pub fn insert(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        while let Some((&from, &upto)) = self.ends.range(..=end).next_back()
            && upto >= start
        {
            self.ends.remove(&from);
            (start, end) = (start.min(from), end.max(upto));
        }
        self.ends.insert(start, end);
        self.cuts.resize(self.ends.len());
    }

    pub fn overlaps(&self, range: &Range<usize>) -> bool {
        self.ends.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn neighbours_become_one(ranges in proptest::collection::vec((0usize..60, 1usize..9), 1..30)) {
            let (mut severed, mut plain) = (Severed::default(), [false; 70]);
            for (start, length) in ranges {
                severed.insert(start..start + length);
                plain[start..start + length].fill(true);
            }
            for (at, is_severed) in plain.iter().enumerate() {
                prop_assert_eq!(severed.overlaps(&(at..at + 1)), *is_severed);
            }
            let runs = plain.windows(2).filter(|pair| !pair[0] && pair[1]).count() + usize::from(plain[0]);
            prop_assert_eq!(severed.ends.len(), runs);
            prop_assert_eq!(severed.cuts.0, runs);
        }
    }
}
