//! A full log: refused before anything is written, room by release, reclaim beside readers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gd2fs_log::{Key, Log, LogError, Note, Options};

use crate::shelf::{Content, Shelf};
use crate::{Disk, run};

fn key(chunk: u64) -> Key {
    Key { file: 1, column: 0, chunk }
}

#[test]
fn a_full_log_says_so_before_it_writes_and_release_makes_room() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        let mut version = 0;
        let full = loop {
            version += 1;
            if let Err(error) = shelf.put(&log, &Content::whole(key(version), version, 28 << 10)).await {
                break error;
            }
            assert!(version < 100, "eight segments do not hold so much");
        };
        assert!(
            matches!(full, LogError::NoSpace { .. }) && full.is_retryable() && full.has_no_side_effects(),
            "{full}"
        );
        let before = log.stats().appended_bytes;
        assert!(version > 40, "two segments are reserved, not more: {version}");
        let again = shelf.put(&log, &Content::whole(key(version), version, 28 << 10)).await;
        assert!(matches!(again, Err(LogError::NoSpace { .. })));
        assert_eq!(log.stats().appended_bytes, before, "nothing was written");
        shelf.note(&log, Note::Forget { key: key(1), version: version + 1 }).await.expect("a note has room");
        for chunk in (2..version).filter(|chunk| chunk % 3 == 0) {
            shelf.evict(&key(chunk));
        }
        for more in 1..=8 {
            let version = version + 1 + more;
            shelf
                .put(&log, &Content::whole(key(version), version, 28 << 10))
                .await
                .expect("there is room again");
        }
        assert!(log.stats().reclaimed_bytes > 0 && log.stats().checkpoints > 0);
        log.close().await;
    });
}

#[test]
fn reclaim_moves_what_lives_while_it_is_read() {
    let disk = Disk::new(10, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        // Cold chunks, spread over all segments by what is written and replaced between them.
        let cold: Vec<Content> =
            (0..20).map(|chunk| Content::whole(key(chunk), chunk + 1, 16 << 10)).collect();
        let mut version = 100;
        for content in &cold {
            shelf.put(&log, content).await.unwrap();
            for hot in 0..2 {
                version += 1;
                shelf.put(&log, &Content::whole(key(1000 + hot), version, 24 << 10)).await.unwrap();
            }
        }
        let done = Arc::new(AtomicBool::new(false));
        let reader = {
            let (log, shelf, done, cold) =
                (Arc::clone(&log), Arc::clone(&shelf), Arc::clone(&done), cold.clone());
            tokio::spawn(async move {
                let mut reads = 0u64;
                while !done.load(Ordering::Relaxed) || reads < 100 {
                    let content = &cold[(reads % 20) as usize];
                    let entry = shelf.state.lock().chunks[&content.key].clone();
                    match shelf.read(&log, &entry).await {
                        Ok(payload) => assert!(content.matches(&entry, &payload), "{entry:?}"),
                        // It was moved, and its segment reused, between the look and the read.
                        Err(LogError::Gone(place)) => {
                            assert_ne!(shelf.state.lock().chunks[&content.key].place, place)
                        }
                        Err(error) => panic!("{error}"),
                    }
                    reads += 1;
                }
                reads
            })
        };
        for _ in 0..600 {
            version += 1;
            shelf.put(&log, &Content::whole(key(1000 + version % 8), version, 24 << 10)).await.unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.await.unwrap() >= 100);
        assert!(shelf.state.lock().moved > 0 && log.stats().reclaimed_bytes > 0, "{:?}", log.stats());
        log.close().await;
        drop((log, shelf));
        let (log, shelf, recovered) = disk.look().await;
        for content in &cold {
            let entry = recovered
                .chunks
                .iter()
                .find(|entry| entry.key == content.key)
                .expect("it was moved, not lost");
            assert!(content.matches(entry, &shelf.read(&log, entry).await.unwrap()));
        }
        log.close().await;
    });
}

#[test]
fn a_log_that_is_full_of_large_records_says_so_and_does_not_move_them_for_ever() {
    // A record of 33 blocks leaves 29 of its segment's 64 unused: to move it and to free its segment gains nothing, and all
    // but the segment's header speaks for a gain.
    let disk = Disk::new(6, 256 << 10, 128 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        for version in 1..=4 {
            shelf.put(&log, &Content::whole(key(version), version, 128 << 10)).await.unwrap();
        }
        let full = shelf.put(&log, &Content::whole(key(5), 5, 128 << 10)).await;
        assert!(matches!(full, Err(LogError::NoSpace { .. })), "{full:?}");
        assert!(log.stats().checkpoints < 100, "{:?}", log.stats());
        log.close().await;
    });
}

#[test]
fn what_is_called_usable_can_live_and_is_most_of_the_device() {
    // As a log of 256 MiB and chunks of 4 MiB, and as one that is twice as small; a sixteenth of their size.
    for (device_mib, least_percent) in [(16, 70), (8, 50)] {
        let mut disk = Disk::new(1, device_mib << 20, 256 << 10);
        disk.bytes = device_mib << 20;
        run(async {
            let options = Options { segment_bytes: None, ..disk.options() };
            let (log, recovered) = Log::open(disk.device(None, None), options).await.unwrap();
            let log = Arc::new(log);
            let shelf = Shelf::new(&log, &recovered);
            log.start(Arc::downgrade(&shelf) as _);
            let mut version = 0;
            loop {
                version += 1;
                match shelf.put(&log, &Content::whole(key(version), version, 256 << 10)).await {
                    Ok(()) => {}
                    Err(LogError::NoSpace { .. }) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            let stats = log.stats();
            assert!(stats.live_bytes >= stats.usable_bytes, "{stats:?}");
            assert!(stats.usable_bytes >= disk.bytes / 100 * least_percent, "{stats:?}");
            log.close().await;
        });
    }
}

#[test]
fn a_log_that_was_made_for_larger_chunks_still_takes_them() {
    for (device_mib, made_for) in
        [(34, 1 << 20), (40, 1 << 20), (48, 1 << 20), (63, 1 << 20), (16, 256 << 10)]
    {
        let mut disk = Disk::new(1, device_mib << 20, made_for);
        disk.bytes = device_mib << 20;
        run(async {
            let options = |payload_bytes_max| Options {
                segment_bytes: None,
                payload_bytes_max,
                checkpoint_records: 1 << 40,
                ..disk.options()
            };
            let content = |chunk: u64| Content::whole(key(chunk), chunk, made_for);
            for (chunk, largest) in [(1, made_for), (2, made_for / 8), (3, made_for)] {
                let opened = Log::open(disk.device(None, None), options(largest)).await;
                let (log, recovered) = opened.unwrap();
                assert_eq!((recovered.chunks.len() as u64, recovered.damaged_records), (chunk - 1, 0));
                assert!(log.payload_bytes_max() >= made_for, "{device_mib} MiB: {}", log.payload_bytes_max());
                let log = Arc::new(log);
                let shelf = Shelf::new(&log, &recovered);
                log.start(Arc::downgrade(&shelf) as _);
                for entry in &recovered.chunks {
                    assert!(content(entry.key.chunk).matches(entry, &shelf.read(&log, entry).await.unwrap()));
                }
                shelf.put(&log, &content(chunk)).await.unwrap();
                log.sync().await.unwrap();
                log.close().await;
            }
        });
    }
}

#[test]
fn without_an_owner_nobody_waits_for_room() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        drop(shelf);
        let mut version = 0;
        let full = loop {
            version += 1;
            if let Err(error) = log.append(Content::whole(key(version), version, 28 << 10).snapshot()).await {
                break error;
            }
            assert!(version < 100, "eight segments do not hold so much");
        };
        assert!(matches!(full, LogError::NoSpace { .. }), "{full}");
        log.close().await;
    });
}
