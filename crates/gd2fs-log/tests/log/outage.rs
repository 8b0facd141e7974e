//! A disk that fails for a while, and a checkpoint that cannot be written: nothing is used up, everybody learns the cause, and
//! afterwards everything goes on.

use std::time::{Duration, Instant};

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_log::{Key, Log, LogError, Note};

use crate::shelf::{Content, Shelf};
use crate::{Disk, PATIENCE, run};

const EIO: i32 = 5;
const SEGMENT: u64 = 256 << 10;

fn key(chunk: u64) -> Key {
    Key { file: 1, column: 0, chunk }
}

/// Writes over four hot chunks, 64 records of 28 KiB each time, so that segments are used up and freed.
async fn churn(log: &Log, shelf: &Shelf, version: &mut u64) -> gd2fs_log::Result<()> {
    for hot in 0..64 {
        *version += 1;
        shelf.put(log, &Content::whole(key(1000 + hot % 4), *version, 28 << 10)).await?;
    }
    Ok(())
}

#[test]
fn an_outage_uses_up_no_more_than_one_segment_however_long_it_lasts() {
    for effect in [Effect::Error(EIO), Effect::Torn(Some(EIO))] {
        let disk = Disk::new(12, SEGMENT, 64 << 10);
        run(async {
            let faults = Faults::new(1);
            let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
            let kept: Vec<Content> = (1..=20).map(|at| Content::whole(key(at), at, 28 << 10)).collect();
            for content in &kept {
                shelf.put(&log, content).await.unwrap();
            }
            log.sync().await.unwrap();
            let before = log.stats().free_bytes;
            faults.add(Rule::new(effect).on(&[Kind::Write]));
            for version in 100..200 {
                let put = shelf.put(&log, &Content::whole(key(version), version, 60 << 10)).await;
                assert!(matches!(put, Err(LogError::Write(_))), "{put:?}");
                let noted = log.note(Note::Forget { key: key(version), version }).await;
                assert!(matches!(noted, Err(LogError::Write(_))), "{noted:?}");
            }
            let used = before - log.stats().free_bytes;
            assert!(used <= SEGMENT, "{used} bytes were used up");
            faults.clear();
            let mut version = 300;
            for _ in 0..4 {
                churn(&log, &shelf, &mut version).await.expect("it goes on by itself");
            }
            log.sync().await.unwrap();
            log.close().await;
            drop((log, shelf));
            let (log, shelf, recovered) = disk.look().await;
            assert_eq!((recovered.chunks.len(), recovered.damaged_records), (24, 0), "{recovered:?}");
            for entry in recovered.chunks.iter().filter(|entry| entry.key.chunk <= 20) {
                let content = &kept[entry.key.chunk as usize - 1];
                assert!(content.matches(entry, &shelf.read(&log, entry).await.unwrap()));
            }
        });
    }
}

#[test]
fn a_log_without_room_says_what_its_disk_said_and_not_that_it_is_full() {
    let disk = Disk::new(8, SEGMENT, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        let mut version = 0;
        // A third of what can live: reclaim has room to make all the time.
        for chunk in 1..=10 {
            version += 1;
            shelf.put(&log, &Content::whole(key(chunk), version, 28 << 10)).await.unwrap();
        }
        for _ in 0..3 {
            churn(&log, &shelf, &mut version).await.unwrap();
            faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Write]));
            for _ in 0..30 {
                version += 1;
                let put = shelf.put(&log, &Content::whole(key(1000), version, 60 << 10)).await;
                assert!(matches!(put, Err(LogError::Write(_))), "{put:?}");
            }
            faults.clear();
            let begun = Instant::now();
            while let Err(error) = churn(&log, &shelf, &mut version).await {
                assert!(matches!(error, LogError::Write(_)), "{error}");
                assert!(begun.elapsed() < PATIENCE / 4, "{error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        log.close().await;
        drop((log, shelf));
        let (_, _, recovered) = disk.look().await;
        assert_eq!((recovered.chunks.len(), recovered.damaged_records), (14, 0));
    });
}

#[test]
fn a_checkpoint_that_fails_is_told_to_whoever_waits_for_room() {
    let disk = Disk::new(8, SEGMENT, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        let blocked = disk.checkpoint().with_extension("new");
        std::fs::create_dir(&blocked).unwrap();
        let mut version = 0;
        let failed = churn(&log, &shelf, &mut version).await.unwrap_err();
        assert!(matches!(failed, LogError::Checkpoint { .. }), "{failed}");
        let text = failed.to_string();
        assert!(text.contains(disk.checkpoint().to_str().unwrap()) && text.contains("irectory"), "{text}");
        let begun = Instant::now();
        let again = churn(&log, &shelf, &mut version).await.unwrap_err();
        assert!(matches!(again, LogError::Checkpoint { .. }), "{again}");
        assert!(begun.elapsed() < Duration::from_secs(2), "nobody waits for what does not come");
        std::fs::remove_dir(&blocked).unwrap();
        let begun = Instant::now();
        while let Err(error) = churn(&log, &shelf, &mut version).await {
            assert!(begun.elapsed() < Duration::from_secs(5), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(log.stats().checkpoints > 0);
        log.close().await;
    });
}

#[test]
fn reads_that_fail_for_a_while_cost_reclaim_nothing() {
    let disk = Disk::new(8, SEGMENT, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        let mut version = 0;
        // What stays lies in every segment, so that reclaim must read it.
        for chunk in 1..=12 {
            for wanted in [key(chunk), key(1000), key(1001)] {
                version += 1;
                shelf.put(&log, &Content::whole(wanted, version, 28 << 10)).await.unwrap();
            }
        }
        let rule = faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Read]));
        // Upkeep tries once a second; no number of tries makes damage of it.
        let (begun, mut failures) = (Instant::now(), 0);
        while failures == 0 || begun.elapsed() < Duration::from_millis(9500) {
            if let Err(failed) = churn(&log, &shelf, &mut version).await {
                assert!(matches!(failed, LogError::Device(_)) && faults.hits(rule) > 0, "{failed}");
                failures += 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        faults.clear();
        let begun = Instant::now();
        while let Err(error) = churn(&log, &shelf, &mut version).await {
            assert!(begun.elapsed() < Duration::from_secs(5), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(shelf.state.lock().damaged.is_empty());
        log.close().await;
    });
}

#[test]
fn a_spot_that_cannot_be_read_costs_its_segment_and_nobody_waits_for_it() {
    // Of the segments in which something stays, this one's has the least, and is the first that reclaim turns to.
    const SPOT: Key = Key { file: 1, column: 0, chunk: 4 };
    let disk = Disk::new(9, SEGMENT, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        let (mut version, mut spot) = (0, None);
        for chunk in 1..=12 {
            for wanted in [key(chunk), key(1000), key(1001)] {
                version += 1;
                shelf.put(&log, &Content::whole(wanted, version, 28 << 10)).await.unwrap();
            }
            if key(chunk) == SPOT {
                // Before there is anything to reclaim.
                let broken = shelf.state.lock().chunks[&SPOT].clone();
                let range = broken.place.offset..broken.place.offset + u64::from(broken.place.bytes);
                let rule = Rule::new(Effect::Error(EIO)).on(&[Kind::Read]).within(range);
                spot = Some((broken, faults.add(rule)));
            }
        }
        let (broken, rule) = spot.expect("it was put");
        for _ in 0..12 {
            churn(&log, &shelf, &mut version).await.expect("there is room elsewhere");
        }
        assert!((1..=8).contains(&faults.hits(rule)), "asked {} times", faults.hits(rule));
        assert!(shelf.state.lock().moved >= 8, "what lies elsewhere was moved");
        assert!(matches!(shelf.read(&log, &broken).await, Err(LogError::Device(_))));
        faults.clear();
        {
            let state = shelf.state.lock();
            assert!(state.damaged.is_empty() && state.chunks[&SPOT].place == broken.place);
        }
        let payload = shelf.read(&log, &broken).await.expect("nobody took it for damage");
        assert!(Content::whole(SPOT, broken.version, 28 << 10).matches(&broken, &payload));
        log.close().await;
    });
}
