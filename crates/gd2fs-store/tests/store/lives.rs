//! Random lives of a store with logs, against a model of what a chunk may be after a power cut.

use std::time::Duration;

use gd2fs_device::fault::PowerCut;
use gd2fs_wire::messages::Tier;

use super::tiers::{Disk, PATIENCE, column, get, put, run};
use super::*;

pub const CHUNKS: usize = 8;

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

/// One chunk's bytes, None where nothing was written.
pub type Bytes = Vec<Option<u8>>;

#[derive(Clone)]
pub struct Chunk {
    /// What the chunk was since it was last durable, oldest first; the last is what it is. A cut may go back to any of them.
    past: Vec<Bytes>,
    /// Bytes that are durable.
    durable: Vec<bool>,
}

impl Chunk {
    pub fn new() -> Chunk {
        Chunk { past: vec![vec![None; UNIT as usize]], durable: vec![false; UNIT as usize] }
    }

    pub fn now(&self) -> &Bytes {
        self.past.last().unwrap()
    }

    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        let mut next = self.now().clone();
        for (old, new) in next[start..].iter_mut().zip(bytes) {
            *old = Some(*new);
        }
        self.past.push(next);
        if self.durable[start..start + bytes.len()].contains(&true) {
            self.settle();
        }
    }

    pub fn settle(&mut self) {
        self.past.drain(..self.past.len() - 1);
        self.durable = self.now().iter().map(Option::is_some).collect();
    }

    /// Takes what a recovery found for the truth.
    pub fn recover(&mut self, found: &Bytes, context: &str) {
        assert!(self.past.contains(found), "{context}: the chunk is none of its {} pasts", self.past.len());
        self.past = vec![found.clone()];
        self.settle();
    }

    /// The same after logs were lost: any of it may be missing, but what is there is of one past.
    pub fn recover_in_part(&mut self, found: &Bytes, context: &str) {
        let fits = |past: &Bytes| found.iter().zip(past).all(|(now, then)| now.is_none() || now == then);
        assert!(
            self.past.iter().any(fits),
            "{context}: bytes of none of the chunk's {} pasts",
            self.past.len()
        );
        self.past = vec![found.clone()];
        self.settle();
    }
}

/// All that is valid of a chunk, in the pieces of one read each.
pub async fn look(file: &Arc<Column>, chunk: usize) -> Bytes {
    let mut found = vec![None; UNIT as usize];
    let base = chunk as u64 * u64::from(UNIT);
    let extents = file.whereabouts(base, base + u64::from(UNIT)).unwrap();
    assert_eq!(extents.next, None);
    for (start, end, tier) in extents.extents {
        if matches!(tier, Tier::Dram | Tier::Nvme) {
            let bytes = get(file, start, (end - start) as u32).await.unwrap();
            for (place, byte) in found[(start - base) as usize..].iter_mut().zip(bytes) {
                *place = Some(byte);
            }
        }
    }
    found
}

async fn life(seed: u64) {
    let mut dice = Dice(seed);
    // Half of the chunks fit into memory.
    let mut disk = Disk::new(CHUNKS / 2 * UNIT as usize, 32 << 20);
    disk.logs = 1 + dice.below(2);
    disk.flush_delay = Duration::from_millis([0, 0, 3, 3_600_000][dice.below(4)]);
    let mut model: Vec<Chunk> = (0..CHUNKS).map(|_| Chunk::new()).collect();
    for round in 0..4 {
        let power = PowerCut::new(seed * 10 + round);
        disk.power = Some(power.clone());
        let store = disk.open().await;
        let file = column(&store, 0).await;
        for (index, chunk) in model.iter_mut().enumerate() {
            let context = format!("seed {seed}, round {round}, chunk {index}");
            chunk.recover(&look(&file, index).await, &context);
        }
        for step in 0..40 + dice.below(40) {
            let context = format!("seed {seed}, round {round}, step {step}");
            let index = dice.below(CHUNKS);
            let start = dice.below(UNIT as usize - 1);
            let longest = [100, 5000, 300_000][dice.below(3)].min(UNIT as usize - start);
            let length = 1 + dice.below(longest);
            let offset = (index * UNIT as usize + start) as u64;
            match dice.below(10) {
                0 => {
                    file.flush().await.unwrap();
                    model.iter_mut().for_each(Chunk::settle);
                }
                1..=5 => {
                    let bytes = pattern(length, dice.below(256) as u8);
                    match put(&file, 0, offset, &bytes).await {
                        Ok(()) => model[index].write(start, &bytes),
                        Err(failure) => assert_eq!(failure.code, Code::NoSpace, "{context}: {failure}"),
                    }
                }
                _ => {
                    let expected: Option<Vec<u8>> =
                        model[index].now()[start..start + length].iter().copied().collect();
                    match (get(&file, offset, length as u32).await, expected) {
                        (Ok(bytes), Some(expected)) => assert!(bytes == expected, "{context}: other bytes"),
                        // Beyond the column's end.
                        (Ok(bytes), None) => {
                            let known: Option<Vec<u8>> =
                                model[index].now()[start..][..bytes.len()].iter().copied().collect();
                            assert!(
                                known.is_some_and(|known| known == bytes),
                                "{context}: bytes from nowhere"
                            );
                        }
                        (Err(failure), None) => {
                            assert!(matches!(failure.code, Code::Hole | Code::Lost), "{context}: {failure}");
                        }
                        (Err(failure), Some(_)) => panic!("{context}: {failure}"),
                    }
                }
            }
        }
        if dice.below(3) == 0 {
            store.close(PATIENCE).await.unwrap();
            model.iter_mut().for_each(Chunk::settle);
        } else {
            power.cut().unwrap();
        }
        drop((file, store));
    }
}

#[test]
fn a_chunk_is_after_a_cut_what_it_was_when_it_was_last_durable_or_later() {
    let seeds = std::env::var("GD2FS_STORE_SEEDS").map_or(12, |text| text.parse::<u64>().unwrap());
    let first = std::env::var("GD2FS_STORE_FIRST_SEED").map_or(0, |text| text.parse::<u64>().unwrap());
    for seed in first..first + seeds {
        run(life(seed));
    }
}
