//! The flush lag: how long the oldest bytes wait that no log has.

use std::time::{Duration, Instant};

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_store::Store;

use super::outages::put_units;
use super::tiers::{Disk, MIB, column, put, run};
use super::*;

const WRITES: [Kind; 2] = [Kind::Write, Kind::WriteSync];

fn lag(store: &Store) -> Duration {
    store.tier_stats().flush_lag
}

async fn until_clean(store: &Store) {
    while store.tier_stats().dirty_bytes > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_log_that_hangs_or_fails_lets_the_lag_grow_from_the_first_byte_on() {
    for effect in [Effect::Slow(Duration::from_millis(800)), Effect::Error(5)] {
        run(async {
            let faults = Faults::new(1);
            let mut disk = Disk::new(32 * MIB, 24 << 20);
            (disk.faults, disk.flush_delay) = (Some(faults.clone()), Duration::ZERO);
            let store = disk.open().await;
            let file = column(&store, 0).await;
            assert_eq!(lag(&store), Duration::ZERO);
            faults.add(Rule::new(effect).on(&WRITES));
            let before = Instant::now();
            put(&file, 0, 0, b"the oldest").await.unwrap();
            let after = Instant::now();
            for round in 0..5 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                // Later bytes, in the same chunk and in others, are not the oldest.
                put(&file, 0, 20 + 10 * round, b"newer").await.unwrap();
                put_units(&file, 1 + round..2 + round, 1).await.unwrap();
                let least = after.elapsed();
                let lag = lag(&store);
                assert!(least <= lag && lag <= before.elapsed(), "{effect:?}: {least:?} {lag:?}");
            }
            faults.clear();
            until_clean(&store).await;
            assert_eq!(lag(&store), Duration::ZERO, "{effect:?}");
        });
    }
}

#[test]
fn nothing_is_late_where_nothing_waits() {
    run(async {
        // The log's flusher would come back to the chunk only after this.
        let mut disk = Disk::new(32 * MIB, 24 << 20);
        disk.flush_delay = Duration::from_secs(3600);
        let store = disk.open().await;
        let file = column(&store, 0).await;
        put_units(&file, 0..4, 1).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(lag(&store) >= Duration::from_millis(50));
        file.flush().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((store.tier_stats().dirty_bytes, lag(&store)), (0, Duration::ZERO));
        // What is deleted waits no longer either.
        put(&file, 0, 4 * u64::from(UNIT), b"more").await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(lag(&store) > Duration::ZERO);
        store.delete(&[(file.file(), 0)]).unwrap();
        assert_eq!(lag(&store), Duration::ZERO);
    });
}

#[test]
fn what_changes_under_a_snapshot_is_as_old_as_its_change() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(32 * MIB, 24 << 20);
        (disk.faults, disk.flush_delay) = (Some(faults.clone()), Duration::from_millis(300));
        let store = disk.open().await;
        let file = column(&store, 0).await;
        faults.add(Rule::new(Effect::Slow(Duration::from_millis(400))).on(&WRITES));
        put(&file, 0, 0, b"first").await.unwrap();
        // Its snapshot is on its way from 300 ms on, for 400 ms.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let changed = Instant::now();
        put(&file, 0, 5, b"second").await.unwrap();
        while store.tier_stats().flushed_bytes == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (stats, since) = (store.tier_stats(), changed.elapsed());
        assert!(stats.dirty_bytes > 0, "the second waits still");
        assert!(
            stats.flush_lag > Duration::ZERO && stats.flush_lag <= since,
            "{:?} of {since:?}",
            stats.flush_lag
        );
        faults.clear();
        until_clean(&store).await;
        assert_eq!(lag(&store), Duration::ZERO);
    });
}
