//! Buddy allocation inside one slab: blocks of 32 KiB times a power of two.

use std::collections::BTreeSet;

pub const LEAF_BYTES: usize = 32 << 10;
/// The largest block is 64 MiB, the largest stripe unit.
pub const ORDER_MAX: usize = 11;

/// The smallest order whose blocks hold `bytes`; None if no block does.
pub fn order_of(bytes: usize) -> Option<usize> {
    let leaves = bytes.div_ceil(LEAF_BYTES).max(1).next_power_of_two();
    let order = leaves.trailing_zeros() as usize;
    (order <= ORDER_MAX).then_some(order)
}

pub struct Buddy {
    /// Free blocks by order, named by their first leaf. Sorted, so that allocation packs low addresses, whose pages are there already.
    free: [BTreeSet<u32>; ORDER_MAX + 1],
}

impl Buddy {
    /// `leaves` need not be a power of two: the last slab of an arena is as large as the capacity leaves it.
    pub fn new(leaves: u32) -> Buddy {
        let mut buddy = Buddy { free: Default::default() };
        let mut leaf = 0;
        while leaf < leaves {
            let aligned = if leaf == 0 { ORDER_MAX } else { (leaf.trailing_zeros() as usize).min(ORDER_MAX) };
            let fitting = (leaves - leaf).ilog2() as usize;
            let order = aligned.min(fitting);
            buddy.free[order].insert(leaf);
            leaf += 1 << order;
        }
        buddy
    }

    /// The first leaf of a free block of this order.
    pub fn allocate(&mut self, order: usize) -> Option<u32> {
        let found = (order..=ORDER_MAX).find(|candidate| !self.free[*candidate].is_empty())?;
        let leaf = self.free[found].pop_first()?;
        for smaller in (order..found).rev() {
            self.free[smaller].insert(leaf + (1 << smaller));
        }
        Some(leaf)
    }

    pub fn release(&mut self, mut leaf: u32, mut order: usize) {
        while order < ORDER_MAX && self.free[order].remove(&(leaf ^ (1 << order))) {
            leaf &= !(1 << order);
            order += 1;
        }
        assert!(self.free[order].insert(leaf), "block {leaf} of order {order} was freed twice");
    }

    /// The order of the largest block that `allocate` would find.
    pub fn largest_free(&self) -> Option<usize> {
        (0..=ORDER_MAX).rev().find(|order| !self.free[*order].is_empty())
    }

    #[cfg(test)]
    fn free_leaves(&self) -> u32 {
        self.free.iter().enumerate().map(|(order, blocks)| (blocks.len() as u32) << order).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn orders() {
        assert_eq!(order_of(1), Some(0));
        assert_eq!(order_of(LEAF_BYTES + 1), Some(1));
        assert_eq!(order_of(64 << 20), Some(ORDER_MAX));
        assert_eq!(order_of((64 << 20) + 1), None);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_everything_comes_back(
            leaves in 1u32..300, steps in proptest::collection::vec((any::<bool>(), 0usize..6, any::<prop::sample::Index>()), 1..200)
        ) {
            let mut buddy = Buddy::new(leaves);
            let whole = buddy.largest_free();
            let mut owner = vec![false; leaves as usize];
            let mut held: Vec<(u32, usize)> = Vec::new();
            for (allocate, order, pick) in steps {
                if allocate {
                    let Some(leaf) = buddy.allocate(order) else { continue };
                    for cell in &mut owner[leaf as usize..leaf as usize + (1 << order)] {
                        prop_assert!(!*cell, "leaf handed out twice");
                        *cell = true;
                    }
                    held.push((leaf, order));
                } else if !held.is_empty() {
                    let (leaf, order) = held.swap_remove(pick.index(held.len()));
                    owner[leaf as usize..leaf as usize + (1 << order)].fill(false);
                    buddy.release(leaf, order);
                }
                let used = owner.iter().filter(|cell| **cell).count() as u32;
                prop_assert_eq!(buddy.free_leaves(), leaves - used);
            }
            for (leaf, order) in held {
                buddy.release(leaf, order);
            }
            prop_assert_eq!(buddy.free_leaves(), leaves);
            prop_assert_eq!(buddy.largest_free(), whole, "free blocks merge again");
        }
    }
}
