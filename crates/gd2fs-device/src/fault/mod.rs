//! Devices that fail on purpose, where the system calls are made, so that splitting, continuing and reporting above are
//! the real ones. All chance comes from a seed; the draws fall in the order in which system calls are begun.

mod faults;
mod power_cut;

pub use faults::{Effect, Faults, Rule};
pub use power_cut::{Cut, PowerCut};

/// What a disk writes as a whole even when its power fails.
pub const SECTOR: usize = 512;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// 0 to `limit - 1`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// True with this probability.
    pub fn falls(&mut self, chance: f64) -> bool {
        ((self.next() >> 11) as f64) < chance * (1u64 << 53) as f64
    }

    /// Which of `sectors` consecutive sectors of a write reach the disk: a prefix, or any.
    pub fn tear(&mut self, sectors: usize) -> Vec<bool> {
        if sectors == 0 {
            Vec::new()
        } else if self.falls(0.5) {
            let whole = self.below(sectors);
            (0..sectors).map(|sector| sector < whole).collect()
        } else {
            (0..sectors).map(|_| self.falls(0.5)).collect()
        }
    }
}
