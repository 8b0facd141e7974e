//! What is lifted for a read that comes soon.

use std::time::Duration;

use super::tiers::{Disk, MIB, PATIENCE, column, get, put, run};
use super::*;

/// A store with chunks of a file in its log alone.
async fn cold(disk: &mut Disk, chunks: u64) -> (Store, Arc<Column>) {
    let store = disk.open().await;
    let file = column(&store, 0).await;
    for chunk in 0..chunks {
        put(&file, 0, chunk * u64::from(UNIT), &pattern(UNIT as usize, chunk as u8)).await.unwrap();
    }
    store.close(PATIENCE).await.unwrap();
    drop((file, store));
    let store = disk.open().await;
    let file = column(&store, 0).await;
    (store, file)
}

async fn lifted(store: &Store, bytes: u64) {
    let there = async {
        while store.tier_stats().lifted_bytes < bytes {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, there).await.expect("it must be lifted");
}

#[test]
fn a_read_that_was_expected_counts_as_one_from_the_log() {
    run(async {
        let mut disk = Disk::new(32 * MIB, 64 << 20);
        let (store, file) = cold(&mut disk, 3).await;
        let _ahead = file.read_ahead(0, UNIT).expect("it is cold, and there is room");
        lifted(&store, u64::from(UNIT)).await;
        for from_memory in 0..2 {
            assert!(get(&file, 0, UNIT).await.unwrap() == pattern(UNIT as usize, 0));
            let stats = store.tier_stats();
            assert_eq!(
                (stats.hits_nvme, stats.hits_dram, stats.lifted_bytes),
                (1, from_memory, u64::from(UNIT))
            );
        }
        assert!(file.read_ahead(0, UNIT).is_none(), "it is in memory");
        assert!(
            file.read_ahead(u64::from(UNIT), UNIT / 4).is_none(),
            "a small part is read without the rest"
        );
        assert!(file.read_ahead(9 * u64::from(UNIT), UNIT).is_none(), "there is no such chunk");
    });
}

#[test]
fn it_takes_a_share_of_the_memory_for_as_long_as_somebody_means_to_read_it() {
    run(async {
        let mut disk = Disk::new(32 * MIB, 64 << 20);
        let (store, file) = cold(&mut disk, 4).await;
        let ask = |chunk: u64| file.read_ahead(chunk * u64::from(UNIT), UNIT);
        let (first, second) = (ask(0).unwrap(), ask(1).unwrap());
        assert!(ask(2).is_none(), "a quarter of the memory is two of the largest usual chunks");
        lifted(&store, 2 * u64::from(UNIT)).await;
        assert!(ask(2).is_none(), "they were not read yet");
        drop(first);
        let third = tokio::time::timeout(PATIENCE, async {
            loop {
                match ask(2) {
                    Some(third) => break third,
                    None => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        });
        let third = third.await.expect("the task that lifted the first has ended");
        assert!(ask(3).is_none());
        drop((second, third));
        for chunk in 0..4 {
            let bytes = get(&file, chunk * u64::from(UNIT), UNIT).await.unwrap();
            assert!(bytes == pattern(UNIT as usize, chunk as u8));
        }
    });
}
