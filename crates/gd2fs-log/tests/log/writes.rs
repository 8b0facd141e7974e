//! A device that fails: writes are repeated once, a failed sync is the end, and reclaim spreads no damage.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, Rule};
use gd2fs_log::{Key, LogError, Note};

use crate::shelf::Content;
use crate::{Disk, run};

const EIO: i32 = 5;

fn key(chunk: u64) -> Key {
    Key { file: 1, column: 0, chunk }
}

#[test]
fn a_write_that_fails_goes_to_another_segment_with_all_behind_it() {
    for effect in [Effect::Error(EIO), Effect::Torn(Some(EIO))] {
        let disk = Disk::new(8, 256 << 10, 64 << 10);
        run(async {
            let faults = Faults::new(1);
            let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
            let rule = faults.add(Rule::new(effect).on(&[Kind::Write]).chance(0.3).times(1));
            let contents: Vec<Content> = (1..=12).map(|at| Content::whole(key(at), at, 8 << 10)).collect();
            let mut puts = tokio::task::JoinSet::new();
            for content in contents.clone() {
                let (log, shelf) = (Arc::clone(&log), Arc::clone(&shelf));
                puts.spawn(async move { shelf.put(&log, &content).await });
            }
            while let Some(put) = puts.join_next().await {
                put.unwrap().expect("the second try succeeds");
            }
            assert_eq!(faults.hits(rule), 1);
            log.sync().await.unwrap();
            log.close().await;
            drop((log, shelf));
            let (log, shelf, recovered) = disk.look().await;
            assert_eq!((recovered.chunks.len(), recovered.damaged_records), (12, 0));
            for entry in &recovered.chunks {
                let content = &contents[entry.key.chunk as usize - 1];
                assert!(content.matches(entry, &shelf.read(&log, entry).await.unwrap()));
            }
        });
    }
}

#[test]
fn a_device_that_always_fails_gives_an_error() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Write]));
        let error = shelf.put(&log, &Content::whole(key(1), 1, 8 << 10)).await.unwrap_err();
        assert!(matches!(error, LogError::Write(_)) && !error.has_no_side_effects(), "{error}");
        faults.clear();
        shelf.put(&log, &Content::whole(key(1), 2, 8 << 10)).await.expect("the log goes on");
        assert_eq!(log.failed(), None);
    });
}

#[test]
fn a_failed_sync_is_the_end_of_writing() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        let content = Content::whole(key(1), 1, 8 << 10);
        shelf.put(&log, &content).await.unwrap();
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Sync]).times(1));
        assert!(matches!(log.sync().await, Err(LogError::Failed(_))));
        let later = shelf.put(&log, &Content::whole(key(2), 2, 8 << 10)).await;
        assert!(matches!(later, Err(LogError::Failed(_))));
        assert!(matches!(log.note(Note::Forget { key: key(2), version: 3 }).await, Err(LogError::Failed(_))));
        assert!(matches!(log.sync().await, Err(LogError::Failed(_))) && log.failed().is_some());
        let entry = shelf.state.lock().chunks[&key(1)].clone();
        assert!(
            content.matches(&entry, &shelf.read(&log, &entry).await.unwrap()),
            "what is there can be read"
        );
    });
}

#[test]
fn a_sync_that_nobody_waits_for_any_more_fails_all_the_same() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let faults = Faults::new(1);
        let (log, shelf, _) = disk.shelf(disk.device(None, Some(faults.clone()))).await;
        shelf.put(&log, &Content::whole(key(1), 1, 8 << 10)).await.unwrap();
        faults.add(Rule::new(Effect::Error(EIO)).on(&[Kind::Sync]).times(1));
        {
            let mut begun = std::pin::pin!(log.sync());
            std::future::poll_fn(|context| Poll::Ready(begun.as_mut().poll(context).is_ready())).await;
        }
        while log.failed().is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(matches!(log.sync().await, Err(LogError::Failed(_))));
    });
}

#[test]
fn an_owner_that_panics_does_not_hold_up_the_log() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        // The shelf expects nothing that it did not put.
        log.append(Content::whole(key(1), 1, 8 << 10).snapshot()).await.expect("it is written");
        shelf.put(&log, &Content::whole(key(2), 2, 8 << 10)).await.unwrap();
        log.sync().await.unwrap();
        assert_eq!(log.stats().live_records, 1, "nobody knows the other's place");
        log.close().await;
    });
}

#[test]
fn reclaim_spreads_no_damage() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        shelf.put(&log, &Content::whole(key(1), 1, 16 << 10)).await.unwrap();
        let place = shelf.state.lock().chunks[&key(1)].place;
        let file = std::fs::OpenOptions::new().write(true).open(disk.path()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"damage", place.offset + 9000).unwrap();
        // Alone in its segment, so that reclaim takes it first.
        for version in 2..6 {
            shelf.put(&log, &Content::whole(key(100), version, 60 << 10)).await.unwrap();
        }
        // Other chunks that stay, spread over all segments, leave reclaim nothing but to move what lives.
        for version in 2..20 {
            shelf.put(&log, &Content::whole(key(version), version, 16 << 10)).await.unwrap();
            shelf.put(&log, &Content::whole(key(100), 100 + version, 60 << 10)).await.unwrap();
        }
        for version in 200..260 {
            shelf.put(&log, &Content::whole(key(100), version, 60 << 10)).await.unwrap();
        }
        assert_eq!(shelf.state.lock().damaged, [key(1)]);
        log.close().await;
        drop((log, shelf));
        let recovered = disk.open(disk.device(None, None)).await.1;
        assert_eq!((recovered.chunks.len(), recovered.damaged_records), (19, 0));
    });
}
