//! Where a file ends is known, or known to be unknown: nothing is ever short without a word.

use std::time::Duration;

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, PowerCut, Rule};
use gd2fs_wire::messages::Tier;

use super::tiers::{Disk, MIB, PATIENCE, column, file, get, put, run};
use super::*;

const U: u64 = UNIT as u64;

/// Length, whether nobody knows the end, and the first byte that is missing, as control learns them.
fn told(store: &Store) -> (u64, bool, Option<u64>) {
    let report = store.report(1000);
    let item = report.items.iter().find(|item| item.file == FILE).expect("it is reported");
    let stat = store.stat(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f, 0).unwrap();
    (stat.length, stat.end_lost, item.valid)
}

#[test]
fn a_flushed_file_ends_where_it_ended() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        let written = column(&store, 0).await;
        put(&written, 0, 0, &pattern(1000, 1)).await.unwrap();
        put(&written, 0, U, &pattern(1000, 2)).await.unwrap();
        written.flush().await.unwrap();
        let empty = store.open(&file(9), 0).await.unwrap().0;
        empty.flush().await.unwrap();
        drop((written, empty, store));
        let store = disk.open().await;
        assert_eq!(
            told(&store),
            (U + 1000, false, Some(1000)),
            "what was never written is not told from lost"
        );
        let (found, opened) = store.open(&capability(0, 1, 1), 0).await.unwrap();
        assert!(!opened.lost);
        assert!(get(&found, U, 5000).await.unwrap() == pattern(1000, 2), "short at the end, as before");
        assert!(get(&found, U + 1000, 10).await.unwrap().is_empty());
        assert_eq!(found.whereabouts(U, 1 << 62).unwrap().rest, Some((U + 1000, Tier::Hole)));
        let (empty, opened) = store.open(&file(9), 0).await.unwrap();
        assert_eq!((opened.lost, opened.length, empty.stat().end_lost), (false, 0, false));
        // This life goes on from there, and the next one knows again.
        put(&found, 0, 3 * U, b"abc").await.unwrap();
        assert_eq!(code(get(&found, 2 * U, 10).await), Code::Hole);
        found.flush().await.unwrap();
        drop((found, empty, store));
        let store = disk.open().await;
        assert_eq!(told(&store), (3 * U + 3, false, Some(1000)));
    });
}

#[test]
fn a_file_that_grew_after_its_flush_has_no_known_end_after_a_kill() {
    run(async {
        for delay in [Duration::from_secs(3600), Duration::ZERO] {
            let mut disk = Disk::new(16 * MIB, 64 << 20);
            disk.flush_delay = delay;
            let store = disk.open().await;
            let written = column(&store, 0).await;
            put(&written, 0, 0, &pattern(1000, 1)).await.unwrap();
            written.flush().await.unwrap();
            put(&written, 0, 1000, &pattern(10, 2)).await.unwrap();
            drop((written, store));
            let store = disk.open().await;
            let (length, end_lost, valid) = told(&store);
            assert!(end_lost && length == 1010 && matches!(valid, Some(1000 | 1010)), "{length} {valid:?}");
            let found = column(&store, 0).await;
            // A flush makes the rest durable and finds no end.
            found.flush().await.unwrap();
            assert_eq!(code(get(&found, 1010, 10).await), Code::Lost);
            drop((found, store));
            assert!(told(&disk.open().await).1);
        }
    });
}

#[test]
fn what_was_never_flushed_has_no_known_end_after_a_kill() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let written = column(&store, 0).await;
        put(&written, 0, 0, &pattern(1000, 1)).await.unwrap();
        while store.tier_stats().dirty_bytes > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop((written, store));
        assert_eq!(told(&disk.open().await), (1000, true, Some(1000)));
    });
}

#[test]
fn a_stop_in_order_keeps_the_ends_of_all_files_with_few_syncs() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        for number in 0..100 {
            let written = store.open(&file(number), 0).await.unwrap().0;
            put(&written, 0, 0, &pattern(500, number)).await.unwrap();
        }
        while store.tier_stats().dirty_bytes > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let before = store.tier_stats().log_syncs;
        store.close(PATIENCE).await.unwrap();
        let syncs = store.tier_stats().log_syncs - before;
        assert!(syncs <= 3, "{syncs} syncs for the checkpoint that says it all");
        drop(store);
        let store = disk.open().await;
        for number in 0..100 {
            let (found, opened) = store.open(&file(number), 0).await.unwrap();
            assert_eq!((opened.lost, opened.length, found.stat().end_lost), (false, 500, false));
        }
    });
}

#[test]
fn an_empty_column_is_known_after_a_stop_in_order() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        for placed in [1, 2] {
            let store = disk.open().await;
            let wanted = Capability { columns: vec![(1, placed)], ..file(placed as u8) };
            drop(store.open(&wanted, 0).await.unwrap());
            store.close(PATIENCE).await.unwrap();
            drop(store);
            let store = disk.open().await;
            let known = store.stat(0x0101_0101_0101_0101_0101_0101_0101_0101 * u128::from(placed), 0);
            let opened = store.open(&wanted, 0).await.unwrap().1;
            // The second was placed in a life that ended without having heard of it.
            assert_eq!((known.is_some(), opened.lost, opened.length), (placed == 1, placed == 2, 0));
            drop(store);
        }
    });
}

/// A file of two units with a hole in the middle, another inside the first, and a third one between.
async fn put_with_holes(store: &Store) -> Arc<Column> {
    let written = column(store, 0).await;
    put(&written, 0, 100, &pattern(1000, 1)).await.unwrap();
    put(&written, 0, 3 * U, &pattern(1000, 2)).await.unwrap();
    written
}

const HOLES: [u64; 3] = [0, 1100, U];

#[test]
fn a_hole_is_a_hole_after_a_stop_in_order_and_only_then() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        put_with_holes(&store).await;
        store.close(PATIENCE).await.unwrap();
        drop(store);
        for life in 0..2 {
            let store = disk.open().await;
            let found = column(&store, 0).await;
            for hole in HOLES {
                assert_eq!(code(get(&found, hole, 10).await), Code::Hole, "life {life}");
            }
            let tiers = found.whereabouts(0, 3 * U).unwrap().extents;
            assert!(tiers.iter().all(|(.., tier)| *tier != Tier::Lost), "{tiers:?}");
            assert_eq!(told(&store), (3 * U + 1000, false, Some(0)));
            found.flush().await.unwrap();
            store.close(PATIENCE).await.unwrap();
        }
        // What this life has acknowledged and not written is no hole, and nobody knows which it is.
        let store = disk.open().await;
        let found = column(&store, 0).await;
        put(&found, 0, U, &pattern(1000, 3)).await.unwrap();
        drop((found, store));
        for _ in 0..2 {
            let store = disk.open().await;
            let found = column(&store, 0).await;
            for hole in HOLES {
                assert_eq!(code(get(&found, hole, 10).await), Code::Lost);
            }
            assert!(get(&found, 3 * U, 1000).await.unwrap() == pattern(1000, 2));
            store.close(PATIENCE).await.unwrap();
        }
    });
}

#[test]
fn a_stop_in_order_counts_for_one_start_also_if_that_life_writes_nothing() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        put_with_holes(&store).await;
        store.close(PATIENCE).await.unwrap();
        drop(store);
        drop(disk.open().await);
        assert_eq!(code(get(&column(&disk.open().await, 0).await, U, 10).await), Code::Lost);
    });
}

#[test]
fn what_a_log_that_is_not_there_had_is_no_hole() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        disk.logs = 2;
        let store = disk.open().await;
        let written = column(&store, 0).await;
        for unit in 0..4 {
            put(&written, 0, unit * U, &pattern(1000, 1)).await.unwrap();
        }
        store.close(PATIENCE).await.unwrap();
        drop((written, store));
        disk.logs = 1;
        let store = disk.open().await;
        let found = column(&store, 0).await;
        for unit in 0..4 {
            match get(&found, unit * U, 1000).await {
                Ok(bytes) => assert!(bytes == pattern(1000, 1)),
                Err(failure) => assert_eq!(failure.code, Code::Lost, "{failure}"),
            }
        }
        assert_eq!(code(get(&found, 2000, 10).await), Code::Lost);
    });
}

#[test]
fn nothing_is_written_once_the_store_has_closed() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        let written = put_with_holes(&store).await;
        let late = written.begin_write(1, 0, U, 10).await.unwrap();
        fill(&late, &[1; 10]);
        store.close(PATIENCE).await.unwrap();
        let sums = sums::piece_sums(U, &[1; 10]);
        // SAFETY: `fill` is over.
        assert_eq!(code(unsafe { late.publish(&sums, None, || false) }.await), Code::ShuttingDown);
        assert_eq!(code(put(&written, 0, U, b"abc").await), Code::ShuttingDown);
        assert_eq!(code(store.open(&file(9), 0).await), Code::ShuttingDown);
        drop((written, store));
        assert_eq!(code(get(&column(&disk.open().await, 0).await, U, 10).await), Code::Hole);
    });
}

#[test]
fn what_was_evicted_counts_after_a_stop_in_order() {
    run(async {
        let mut disk = Disk::new(4 * MIB, 24 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let old = column(&store, 0).await;
        for chunk in 0..4u64 {
            put(&old, 0, chunk * U, &pattern(UNIT as usize, chunk as u8)).await.unwrap();
        }
        old.flush().await.unwrap();
        let mut number = 0;
        while old.whereabouts(0, 4 * U).unwrap().extents.last().unwrap().2 != Tier::Lost {
            let other = store.open(&file(number), 0).await.unwrap().0;
            for chunk in 0..4u64 {
                put(&other, 0, chunk * U, &pattern(UNIT as usize, number)).await.unwrap();
            }
            number += 1;
        }
        let failure = get(&old, 3 * U, UNIT).await.unwrap_err();
        assert!(failure.code == Code::Lost && failure.message.contains("want of room"), "{failure}");
        store.close(PATIENCE).await.unwrap();
        drop((old, store));
        let store = disk.open().await;
        let (length, end_lost, valid) = told(&store);
        assert!(
            length == 4 * U && !end_lost && valid.is_some_and(|valid| valid <= 3 * U),
            "{length} {valid:?}"
        );
        let failure = get(&column(&store, 0).await, 3 * U, UNIT).await.unwrap_err();
        assert!(failure.code == Code::Lost && failure.message.contains("recompute"), "{failure}");
    });
}

#[test]
fn a_last_chunk_that_rotted_still_counts() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 32 << 20);
        let store = disk.open().await;
        let written = column(&store, 0).await;
        put(&written, 0, 0, &pattern(UNIT as usize, 1)).await.unwrap();
        let marker = b"no other place has these bytes";
        put(&written, 0, U, &[&marker[..], &pattern(970, 2)].concat()).await.unwrap();
        store.close(PATIENCE).await.unwrap();
        drop((written, store));
        disk.change_log(|log| {
            let at = log.windows(marker.len()).position(|window| window == marker).unwrap();
            log[at] ^= 1;
        });
        let store = disk.open().await;
        let found = column(&store, 0).await;
        assert_eq!(code(get(&found, U, 1000).await), Code::Corrupt);
        let failure = get(&found, U, 1000).await.unwrap_err();
        assert!(failure.code == Code::Lost && failure.message.contains("did not match its sum"), "{failure}");
        assert_eq!(told(&store), (U + 1000, false, Some(U)));
        store.close(PATIENCE).await.unwrap();
        drop((found, store));
        assert_eq!(told(&disk.open().await), (U + 1000, false, Some(U)), "the next life knows it too");
    });
}

#[test]
fn only_the_first_growth_after_a_flush_waits_for_the_disk() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        let written = column(&store, 0).await;
        let syncs = || store.tier_stats().log_syncs;
        put(&written, 0, 0, &pattern(1000, 1)).await.unwrap();
        put(&written, 0, U, &pattern(1000, 1)).await.unwrap();
        assert_eq!(syncs(), 0, "nothing was promised");
        written.flush().await.unwrap();
        assert_eq!(syncs(), 1, "the snapshots say where it ends");
        put(&written, 0, 2000, &pattern(10, 2)).await.unwrap();
        assert_eq!(syncs(), 1, "it did not grow");
        put(&written, 0, U + 1000, &pattern(10, 2)).await.unwrap();
        assert_eq!(syncs(), 2);
        put(&written, 0, U + 1010, &pattern(10, 2)).await.unwrap();
        assert_eq!(syncs(), 2);
    });
}

#[test]
fn a_grant_pays_for_no_end() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let store = disk.open().await;
        let written = column(&store, 1).await;
        let syncs = || store.tier_stats().log_syncs;
        put(&written, 1, 0, &pattern(1000, 1)).await.unwrap();
        written.flush().await.unwrap();
        assert_eq!(syncs(), 1);
        put(&written, 1, 1000, &pattern(1000, 1)).await.unwrap();
        assert_eq!(syncs(), 1, "growth is told by the seal alone");
        store.seal(&seal(1, 2000)).await.unwrap();
        assert_eq!(syncs(), 2);
        put(&written, 1, 2000, &pattern(1000, 1)).await.unwrap();
        assert_eq!(syncs(), 2);
        written.flush().await.unwrap();
        store.seal(&seal(1, 3000)).await.unwrap();
        let before = syncs();
        put(&written, 1, 3000, &pattern(10, 1)).await.unwrap();
        assert_eq!(syncs(), before);
        store.close(PATIENCE).await.unwrap();
        drop((written, store));
        // What lies beyond the seal is nobody's: it is not missed.
        let store = disk.open().await;
        assert_eq!(told(&store), (3010, false, None));
        assert_eq!(column(&store, 2).await.stat().length, 3000);
    });
}

#[test]
fn no_growth_is_answered_before_the_log_knows_it() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 64 << 20);
        let faults = Faults::new(1);
        disk.faults = Some(faults.clone());
        let store = disk.open().await;
        let written = column(&store, 0).await;
        put(&written, 0, 0, &pattern(1000, 1)).await.unwrap();
        written.flush().await.unwrap();
        faults.add(Rule::new(Effect::Error(libc::EIO)).on(&[Kind::Sync]));
        assert_eq!(code(put(&written, 0, 1000, b"abc").await), Code::Internal);
        assert_eq!(code(put(&written, 0, 1003, b"abc").await), Code::Internal, "the note is still owed");
    });
}

#[test]
fn after_any_power_cut_an_end_is_right_or_unknown() {
    run(async {
        let (mut known, mut unknown) = (0, 0);
        for seed in 0..60 {
            let mut disk = Disk::new(8 * MIB, 32 << 20);
            disk.logs = 1 + seed as usize % 2;
            disk.flush_delay = if seed % 3 == 0 { Duration::from_secs(3600) } else { Duration::ZERO };
            let power = PowerCut::new(seed);
            disk.power = Some(power.clone());
            let store = disk.open().await;
            let written = column(&store, 0).await;
            let mut end = 0;
            for step in 0..1 + seed % 7 {
                let length = 100 + (seed * 37 + step * 911) % 9000;
                put(&written, 0, end, &pattern(length as usize, step as u8)).await.unwrap();
                end = (end + length).next_multiple_of(if step % 2 == 0 { U } else { 1 });
                if (seed + step) % 3 == 0 {
                    written.flush().await.unwrap();
                }
            }
            let length = written.stat().length;
            power.cut().unwrap();
            drop((written, store));
            disk.power = None;
            let store = disk.open().await;
            let Some(stat) = store.stat(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f, 0) else { continue };
            if stat.end_lost {
                unknown += 1;
            } else {
                assert_eq!(stat.length, length, "seed {seed}");
                known += 1;
            }
        }
        assert!(known >= 10 && unknown >= 10, "{known} known, {unknown} unknown");
    });
}
