//! A log or a data directory that cannot be written for a while: nothing is given up for it, whoever waits learns why, and then
//! everything goes on.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_store::TierError;
use gd2fs_wire::messages::{PinItem, Tier};

use super::tiers::{Disk, MIB, PATIENCE, column, file, get, put, run};
use super::*;

const EIO: i32 = 5;
const U: u64 = UNIT as u64;

async fn put_units(column: &Arc<Column>, units: std::ops::Range<u64>, seed: u8) -> Result<(), Failure> {
    for unit in units {
        put(column, 0, unit * U, &pattern(UNIT as usize, seed + unit as u8)).await?;
    }
    Ok(())
}

/// Whether all of it is somewhere, asked in a way that is no use of it.
fn is_whole(column: &Arc<Column>, units: u64) -> bool {
    let extents = column.whereabouts(0, units * U).unwrap().extents;
    extents.iter().all(|(.., tier)| matches!(tier, Tier::Dram | Tier::Nvme))
}

/// Repeats it until it succeeds, and gives how long that took.
async fn soon<T, F: Future<Output = Result<T, Failure>>>(mut operation: impl FnMut() -> F) -> Duration {
    let begun = Instant::now();
    while let Err(failure) = operation().await {
        assert!(begun.elapsed() < Duration::from_secs(5), "{failure}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

#[test]
fn a_log_that_cannot_be_written_for_a_while_loses_nothing_and_goes_on_by_itself() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(32 * MIB, 24 << 20);
        disk.faults = Some(faults.clone());
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let kept = column(&store, 0).await;
        put_units(&kept, 0..16, 1).await.unwrap();
        kept.flush().await.unwrap();
        let before = store.tier_stats();
        // Long enough ago that it may be given up.
        tokio::time::sleep(Duration::from_millis(300)).await;
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Write, Kind::WriteSync]));
        let later = store.open(&file(7), 0).await.unwrap().0;
        put_units(&later, 0..16, 2).await.unwrap();
        let begun = Instant::now();
        let (mut told, mut asked) = (String::new(), 0);
        while begun.elapsed() < Duration::from_secs(2) {
            asked += 1;
            told = later.flush().await.unwrap_err().message;
            assert!(is_whole(&kept, 16), "{:?}", store.tier_stats());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(told.contains("os error 5"), "the cause: {told}");
        let after = store.tier_stats();
        assert_eq!((after.evicted_log_bytes, after.log_live), (0, before.log_live));
        assert!(before.log_free - after.log_free < 4 << 20, "{before:?}, then {after:?}");
        let tries = faults.all_hits()[0];
        // A flush's note is tried twice, with the header of its segment.
        assert!(
            tries < 200 + 4 * asked,
            "a broken disk was asked {tries} times in two seconds, by {asked} flushes"
        );
        faults.clear();
        let took = soon(|| later.flush()).await;
        assert!(took < Duration::from_secs(2), "{took:?}");
        drop((kept, later, store));
        let store = disk.open().await;
        for (column, seed) in [(column(&store, 0).await, 1), (store.open(&file(7), 0).await.unwrap().0, 2)] {
            for unit in 0..16 {
                let bytes = get(&column, unit * U, UNIT).await.unwrap();
                assert!(bytes == pattern(UNIT as usize, seed + unit as u8), "unit {unit}");
            }
        }
    });
}

/// The temporary name of the only log's checkpoint, once there is one.
fn next_checkpoint(disk: &Disk) -> PathBuf {
    let entries = std::fs::read_dir(disk.directory.path()).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("checkpoint") && !name.contains('.')
    });
    let found: Vec<PathBuf> = found.collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].with_extension("new")
}

#[test]
fn a_data_dir_that_cannot_be_written_is_told_to_writers_and_loses_nothing() {
    run(async {
        let mut disk = Disk::new(8 * MIB, 24 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        store.close(PATIENCE).await.unwrap();
        drop(store);
        let blocked = next_checkpoint(&disk);
        let store = disk.open().await;
        let kept = column(&store, 0).await;
        put_units(&kept, 0..16, 1).await.unwrap();
        kept.flush().await.unwrap();
        std::fs::create_dir(&blocked).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        // One file that is written again and again: what lives never fills the log.
        let hot = store.open(&file(7), 0).await.unwrap().0;
        let mut refused = None;
        for round in 0..20 {
            let begun = Instant::now();
            let put = put_units(&hot, 0..16, round).await;
            let flushed = if put.is_ok() { hot.flush().await } else { put };
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(4), "{took:?}");
            refused = flushed.err().or(refused);
            assert!(is_whole(&kept, 16), "{:?}", store.tier_stats());
        }
        let refused = refused.expect("the log's room ends").message;
        assert!(refused.contains(blocked.with_extension("").to_str().unwrap()), "{refused}");
        assert!(refused.contains("irectory"), "the cause: {refused}");
        assert_eq!(store.tier_stats().evicted_log_bytes, 0);
        std::fs::remove_dir(&blocked).unwrap();
        soon(|| async {
            put_units(&hot, 0..16, 99).await?;
            hot.flush().await
        })
        .await;
        assert!(is_whole(&kept, 16) && is_whole(&hot, 16));
    });
}

#[test]
fn writers_that_wait_learn_why_within_their_time() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(4 * MIB, 24 << 20);
        disk.faults = Some(faults.clone());
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let file = column(&store, 0).await;
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Write, Kind::WriteSync]));
        let begun = Instant::now();
        let refused = put_units(&file, 0..64, 1).await.unwrap_err();
        let took = begun.elapsed();
        assert!(refused.message.contains("os error 5"), "{refused}");
        assert!(took < Duration::from_secs(3), "{took:?}");
        faults.clear();
        soon(|| put_units(&file, 0..64, 1)).await;
    });
}

#[test]
fn a_log_that_cannot_be_read_at_the_start_is_named_with_a_remedy_and_others_start_without_it() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(16 * MIB, 24 << 20);
        disk.logs = 2;
        let store = disk.open().await;
        let kept = column(&store, 0).await;
        put_units(&kept, 0..16, 1).await.unwrap();
        kept.flush().await.unwrap();
        drop((kept, store));
        // Both logs have them: of two disks, one is broken.
        disk.faults = Some(faults.clone());
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Read]).within(MIB as u64..MIB as u64 + 8192));
        let error = disk.try_open().await.err().expect("it may not start as if nothing was there");
        let TierError::Log { path, .. } = &error else { panic!("{error}") };
        let text = error.to_string();
        for part in [path.to_str().unwrap(), "offset", "os error 5", "node.logs", "the other logs"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        faults.clear();
        disk.logs = 1;
        let store = disk.open().await;
        let kept = column(&store, 0).await;
        let mut there = 0;
        for unit in 0..16 {
            match get(&kept, unit * U, UNIT).await {
                Ok(bytes) => {
                    assert!(bytes == pattern(UNIT as usize, 1 + unit as u8), "unit {unit}");
                    there += 1;
                }
                Err(failure) => assert!(matches!(failure.code, Code::Lost | Code::Hole), "{failure}"),
            }
        }
        assert_eq!(there, 8, "what the other log has");
    });
}

#[test]
fn a_read_that_failed_or_was_given_up_holds_nothing() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(8 * MIB, 24 << 20);
        disk.faults = Some(faults.clone());
        let store = disk.open().await;
        let old = column(&store, 0).await;
        put_units(&old, 0..16, 1).await.unwrap();
        store.close(PATIENCE).await.unwrap();
        drop((old, store));
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let old = column(&store, 0).await;
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Read]));
        for unit in 8..16 {
            get(&old, unit * U, UNIT).await.unwrap_err();
        }
        faults.clear();
        faults.add(Rule::new(Effect::Slow(Duration::from_millis(200))).on(&[Kind::Read]));
        for unit in 0..8 {
            let soon = Duration::from_millis(20);
            tokio::time::timeout(soon, get(&old, unit * U, UNIT)).await.expect_err("the disk is slower");
        }
        faults.clear();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut newer = Vec::new();
        while is_whole(&old, 16) {
            assert!(newer.len() < 24, "the log cannot hold that much beside the old file");
            let column = store.open(&file(newer.len() as u8), 0).await.unwrap().0;
            put_units(&column, 0..4, 2).await.unwrap();
            column.flush().await.unwrap();
            newer.push(column);
        }
        assert!(newer.iter().all(|column| is_whole(column, 4)), "what is idle goes first");
    });
}

#[test]
fn a_disk_that_works_again_is_asked_before_its_former_failure_is_told() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(16 * MIB, 24 << 20);
        disk.faults = Some(faults.clone());
        let store = disk.open().await;
        let one = column(&store, 0).await;
        let other = store.open(&file(7), 0).await.unwrap().0;
        for file in [&one, &other] {
            put_units(file, 0..1, 1).await.unwrap();
            file.flush().await.unwrap();
        }
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Write, Kind::WriteSync]));
        put(&one, 0, U, b"abc").await.unwrap_err();
        assert_eq!(code(one.flush().await), Code::Internal);
        // It is asked more and more seldom.
        tokio::time::sleep(Duration::from_secs(1)).await;
        faults.clear();
        put(&other, 0, 0, b"abc").await.unwrap();
        other.flush().await.unwrap();
        one.flush().await.unwrap();
    });
}

#[test]
fn a_flush_waits_while_all_that_a_full_log_has_was_used_just_now() {
    run(async {
        let mut disk = Disk::new(16 * MIB, 24 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = Arc::new(disk.open().await);
        let writers = (0..6).map(|writer| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for round in 0..4 {
                    let column = store.open(&file(writer * 4 + round), 0).await.unwrap().0;
                    put_units(&column, 0..8, round).await.unwrap();
                    column.flush().await.unwrap();
                }
            })
        });
        for writer in writers.collect::<Vec<_>>() {
            writer.await.unwrap();
        }
        assert!(store.tier_stats().evicted_log_bytes > 0, "it was full");
    });
}

/// Writes more than a log takes into one pinned file.
async fn fill_log(store: &Store) -> Failure {
    let kept = column(store, 0).await;
    let (pin, file, end) = ("a".repeat(32), FILE.into(), 100 * U);
    let pin = PinItem { pin, file, column: 0, epoch: 1, start: 0, end, ttl_ms: 60_000 };
    assert_eq!(store.pin(&pin).status, 0);
    put_units(&kept, 0..100, 1).await.unwrap();
    kept.flush().await.unwrap_err()
}

#[test]
fn a_full_log_of_what_cannot_go_says_what_helps() {
    run(async {
        let mut disk = Disk::new(64 * MIB, 24 << 20);
        let store = disk.open().await;
        let begun = Instant::now();
        let refused = fill_log(&store).await;
        let took = begun.elapsed();
        assert_eq!(refused.code, Code::NoSpace);
        for part in ["full", "delete files", "node.log_bytes"] {
            assert!(refused.message.contains(part), "{part:?} is not in {refused}");
        }
        assert!((Duration::from_secs(2)..Duration::from_secs(5)).contains(&took), "{took:?}");
    });
}

#[test]
fn what_a_killed_life_has_left_beyond_its_share_goes_before_the_next_one_serves() {
    run(async {
        let mut disk = Disk::new(64 * MIB, 24 << 20);
        let store = disk.open().await;
        fill_log(&store).await;
        let before = store.tier_stats();
        assert!(before.log_live > before.log_capacity, "{before:?}");
        drop(store);
        let store = disk.open().await;
        let after = store.tier_stats();
        assert!(after.log_live <= after.log_capacity && after.evicted_log_bytes > 0, "{after:?}");
        assert!(after.log_live > after.log_capacity / 10 * 9, "no more than that: {after:?}");
    });
}

#[test]
fn a_flush_tells_what_went_while_it_waited() {
    run(async {
        let faults = Faults::new(1);
        let mut disk = Disk::new(64 * MIB, 24 << 20);
        disk.faults = Some(faults.clone());
        disk.flush_delay = Duration::ZERO;
        disk.logs = 2;
        let store = disk.open().await;
        let old = column(&store, 0).await;
        // One of the two logs hangs.
        let hangs = faults.add(Rule::new(Effect::Slow(Duration::from_secs(4))).on(&[Kind::Write]).times(1));
        put_units(&old, 0..1, 1).await.unwrap();
        soon(|| async {
            if faults.hits(hangs) == 1 { Ok(()) } else { Err(Failure::new(Code::Timeout, "")) }
        })
        .await;
        put(&old, 0, U, &pattern(UNIT as usize, 2)).await.unwrap();
        let flushing = tokio::spawn({
            let old = Arc::clone(&old);
            async move { old.flush().await }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Of these every chunk belongs into the other log.
        for number in 0..25 {
            let column = store.open(&file(2 * number + 1), 0).await.unwrap().0;
            for unit in [1, 3, 5, 7] {
                put(&column, 0, unit * U, &pattern(UNIT as usize, number)).await.unwrap();
            }
        }
        while is_whole(&old, 2) {
            assert!(!flushing.is_finished(), "{:?}", store.tier_stats());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let failure = flushing.await.unwrap().unwrap_err();
        assert!(failure.code == Code::Lost && failure.message.contains("want of room"), "{failure}");
    });
}
