//! A stop in order gives nothing up before its time is over, and says what it could not keep.

use std::time::{Duration, Instant};

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_store::{Store, TierError};

use super::outages::put_units;
use super::tiers::{Disk, MIB, PATIENCE, column, get, run};
use super::*;

const EIO: i32 = 5;
const U: u64 = UNIT as u64;
const UNITS: u64 = 16;
const WRITES: [Kind; 2] = [Kind::Write, Kind::WriteSync];

/// Two logs, of which `log1` has faults, and a file that neither has anything of.
async fn half_broken(rule: Rule) -> (Disk, Faults, Store) {
    let faults = Faults::new(1);
    let mut disk = Disk::new(32 * MIB, 24 << 20);
    (disk.logs, disk.faults, disk.faulty) = (2, Some(faults.clone()), Some("log1"));
    let store = disk.open().await;
    let file = column(&store, 0).await;
    faults.add(rule);
    put_units(&file, 0..UNITS, 1).await.unwrap();
    (disk, faults, store)
}

/// The units that are there after the next start, without a fault.
async fn found(mut disk: Disk) -> Vec<u64> {
    disk.faults = None;
    let begun = Instant::now();
    let store = loop {
        match disk.try_open().await {
            Ok(store) => break store,
            // What a stop has left behind, on a disk that hangs, holds the log until the disk answers.
            Err(TierError::Log { .. } | TierError::Device(_)) if begun.elapsed() < PATIENCE / 2 => {}
            Err(error) => panic!("{error}"),
        }
    };
    let file = column(&store, 0).await;
    let mut there = Vec::new();
    for unit in 0..UNITS {
        match get(&file, unit * U, UNIT).await {
            Ok(bytes) => {
                assert!(bytes == pattern(UNIT as usize, 1 + unit as u8), "unit {unit}");
                there.push(unit);
            }
            Err(failure) => assert!(matches!(failure.code, Code::Lost | Code::Hole), "{failure}"),
        }
    }
    there
}

#[test]
fn a_stop_waits_for_a_log_that_fails_for_a_while() {
    run(async {
        let (disk, faults, store) = half_broken(Rule::new(Effect::Error(EIO)).on(&WRITES)).await;
        let clearing = async {
            tokio::time::sleep(Duration::from_millis(700)).await;
            faults.clear();
        };
        let (closed, ()) = tokio::join!(store.close(PATIENCE / 3), clearing);
        closed.unwrap();
        assert_eq!(store.tier_stats().dirty_bytes, 0);
        drop(store);
        assert_eq!(found(disk).await.len() as u64, UNITS);
    });
}

#[test]
fn a_log_that_fails_to_the_end_costs_only_its_own_and_is_named() {
    run(async {
        let (disk, faults, store) = half_broken(Rule::new(Effect::Error(EIO)).on(&WRITES)).await;
        // It is known to fail before the stop begins.
        column(&store, 0).await.flush().await.unwrap_err();
        let begun = Instant::now();
        let failure = store.close(Duration::from_secs(2)).await.unwrap_err();
        let took = begun.elapsed();
        assert!((Duration::from_secs(2)..Duration::from_millis(3500)).contains(&took), "{took:?}");
        let lost = format!("log1: {} bytes did not reach", UNITS / 2 * U);
        for part in [lost.as_str(), "os error 5"] {
            assert!(failure.message.contains(part), "{part:?} is not in {failure}");
        }
        assert!(!failure.message.contains("log0: "), "{failure}");
        faults.clear();
        drop(store);
        assert_eq!(found(disk).await.len() as u64, UNITS / 2, "what the other log was to have");
    });
}

#[test]
fn a_log_that_takes_nothing_any_more_is_not_waited_for() {
    run(async {
        let (disk, _, store) = half_broken(Rule::new(Effect::Error(EIO)).on(&[Kind::Sync])).await;
        // Half of it reaches the log, whose sync then fails for good.
        column(&store, 0).await.flush().await.unwrap_err();
        assert_eq!(store.tier_stats().log_failed, 1);
        put_units(&column(&store, 0).await, 0..0, 1).await.unwrap();
        let begun = Instant::now();
        let failure = store.close(PATIENCE / 3).await.unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(failure.message.contains("log1") && failure.message.contains("sync"), "{failure}");
        drop(store);
        assert!(found(disk).await.len() as u64 >= UNITS / 2, "the other log has its own");
    });
}

#[test]
fn a_disk_that_hangs_neither_holds_up_the_other_nor_the_stop() {
    run(async {
        let hangs =
            Rule::new(Effect::Slow(Duration::from_secs(6))).on(&[Kind::Write, Kind::WriteSync, Kind::Sync]);
        let (disk, faults, store) = half_broken(hangs).await;
        let begun = Instant::now();
        let failure = store.close(Duration::from_secs(2)).await.unwrap_err();
        assert!(begun.elapsed() < Duration::from_millis(4500), "{:?}", begun.elapsed());
        let lost = format!("log1: {} bytes did not reach", UNITS / 2 * U);
        assert!(failure.code == Code::Timeout && failure.message.contains(&lost), "{failure}");
        assert!(!failure.message.contains("log0: "), "{failure}");
        faults.clear();
        drop(store);
        let there = found(disk).await;
        assert!(there.len() as u64 >= UNITS / 2, "{there:?}");
    });
}

#[test]
fn a_checkpoint_that_fails_is_no_lost_byte() {
    run(async {
        let mut disk = Disk::new(32 * MIB, 24 << 20);
        let store = disk.open().await;
        store.close(PATIENCE).await.unwrap();
        drop(store);
        let blocked = super::outages::next_checkpoint(&disk);
        let store = disk.open().await;
        // Placed in this life of the node: what an earlier one knew of its end is not what is tested.
        let file = store.open(&capability(0, 1, store.incarnation()), 0).await.unwrap().0;
        put_units(&file, 0..UNITS, 1).await.unwrap();
        std::fs::create_dir(&blocked).unwrap();
        let failure = store.close(Duration::from_secs(2)).await.unwrap_err();
        let said = &failure.message;
        assert!(said.contains("all bytes have reached this log") && said.contains("checkpoint"), "{failure}");
        std::fs::remove_dir(&blocked).unwrap();
        drop((file, store));
        let store = disk.open().await;
        let file = store.get(u128::from_str_radix(FILE, 16).unwrap(), 0).unwrap();
        let stat = file.stat();
        assert_eq!(
            (stat.length, stat.end_lost),
            (UNITS * U, false),
            "the snapshots of a stop say where files end"
        );
        drop((file, store));
        assert_eq!(found(disk).await.len() as u64, UNITS);
    });
}
