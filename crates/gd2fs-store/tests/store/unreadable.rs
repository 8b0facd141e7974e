//! A log whose disk cannot be read for a while: that says nothing of what it holds, and nothing is given up for it.

use std::time::Duration;

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_wire::messages::{Scrub, ScrubState, Warmth};

use super::outages::put_units;
use super::tiers::{Disk, MIB, PATIENCE, column, get, run};
use super::*;

const U: u64 = UNIT as u64;
const UNITS: u64 = 6;

async fn scrubbed(store: &Store) -> ScrubState {
    let rounds = store.scrub(&Scrub { start: true }).rounds;
    loop {
        let state = store.scrub(&Scrub { start: false });
        if state.rounds > rounds {
            return state;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A store whose file is cold, on a disk that fails every read.
async fn unreadable() -> (Disk, Faults, Store) {
    let faults = Faults::new(1);
    let mut disk = Disk::new(32 * MIB, 24 << 20);
    disk.faults = Some(faults.clone());
    let store = disk.open().await;
    put_units(&column(&store, 0).await, 0..UNITS, 1).await.unwrap();
    store.close(PATIENCE).await.unwrap();
    drop(store);
    let store = disk.open().await;
    faults.add(Rule::new(Effect::Error(5)).on(&[Kind::Read]));
    (disk, faults, store)
}

/// All of it is there, and nothing was counted as damaged.
async fn is_whole(store: &Store) {
    let file = column(store, 0).await;
    for unit in 0..UNITS {
        assert!(get(&file, unit * U, UNIT).await.unwrap() == pattern(UNIT as usize, 1 + unit as u8));
    }
    let stats = store.tier_stats();
    assert_eq!((stats.corrupt, stats.scrub_corrupt, stats.misses_lost), (0, 0, 0));
    assert_eq!(
        store.report(9).items.iter().find(|item| item.valid.is_some()),
        None,
        "control hears of no loss"
    );
}

#[test]
fn a_read_that_the_disk_fails_is_neither_corrupt_nor_lost() {
    run(async {
        let (_disk, faults, store) = unreadable().await;
        let file = column(&store, 0).await;
        // A part, and all of a chunk.
        for length in [100, UNIT] {
            let failure = get(&file, 0, length).await.unwrap_err();
            assert_eq!(failure.code, Code::Internal, "{failure}");
            assert!(failure.message.contains("log0") && failure.message.contains("os error 5"), "{failure}");
        }
        assert_eq!(store.tier_stats().log_read_errors, 2);
        faults.clear();
        is_whole(&store).await;
        assert_eq!(store.tier_stats().log_read_errors, 2);
    });
}

#[test]
fn a_scrub_counts_what_it_cannot_read_and_drops_nothing() {
    run(async {
        let (_disk, faults, store) = unreadable().await;
        let state = scrubbed(&store).await;
        assert_eq!((state.unreadable_chunks, state.corrupt_chunks), (UNITS, 0));
        let stats = store.tier_stats();
        assert_eq!((stats.scrub_unreadable, stats.scrub_corrupt), (UNITS, 0));
        faults.clear();
        let state = scrubbed(&store).await;
        assert_eq!((state.unreadable_chunks, state.corrupt_chunks), (0, 0));
        assert_eq!(store.tier_stats().scrub_unreadable, UNITS, "of all rounds");
        is_whole(&store).await;
    });
}

#[test]
fn warm_says_what_it_could_not_lift() {
    run(async {
        let (_disk, faults, store) = unreadable().await;
        let file = column(&store, 0).await;
        let all = UNITS * U;
        let cold = |unreadable| Warmth { dram: 0, nvme: all, missing: 0, unreadable };
        assert_eq!(file.warm(0, all).unwrap(), cold(0), "nothing was tried yet");
        while store.tier_stats().log_read_errors < UNITS {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut warmth = cold(0);
        while warmth != cold(all) {
            assert_eq!((warmth.nvme, warmth.missing), (all, 0));
            tokio::time::sleep(Duration::from_millis(1)).await;
            warmth = file.warm(0, all).unwrap();
        }
        faults.clear();
        while warmth != (Warmth { dram: all, nvme: 0, missing: 0, unreadable: 0 }) {
            assert!(warmth.unreadable <= warmth.nvme, "{warmth:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
            warmth = file.warm(0, all).unwrap();
        }
        is_whole(&store).await;
    });
}
