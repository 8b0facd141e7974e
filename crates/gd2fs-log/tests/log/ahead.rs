//! An owner that is ahead of its log: it has made changes, and their notes and releases come later.

use std::sync::Arc;
use std::time::Duration;

use gd2fs_log::{ColumnState, Entries, Key, LogError, Note, Owner, Place};
use tokio::sync::mpsc;

use crate::shelf::{Content, Shelf};
use crate::{Disk, run};

fn key(chunk: u64) -> Key {
    Key { file: 1, column: 0, chunk }
}

#[test]
fn a_version_that_only_a_checkpoint_has_is_not_given_again() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        shelf.put(&log, &Content::whole(key(1), 1, 16 << 10)).await.unwrap();
        let state = ColumnState { grant: 70, ..ColumnState::default() };
        shelf.state.lock().apply(&Note::Column { file: 1, column: 0, version: 7, state });
        log.checkpoint().await.unwrap();
        log.close().await;
        drop((log, shelf));
        let (log, _, recovered) = disk.look().await;
        assert_eq!((recovered.columns[0].version, recovered.columns[0].state), (7, state));
        assert_eq!(recovered.version_max, 7);
        log.close().await;
    });
}

#[test]
fn what_a_checkpoint_does_not_name_is_not_moved_behind_it() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        // The first segment holds one chunk that lives, so that reclaim takes it before any other.
        for chunk in 1..=9 {
            shelf.put(&log, &Content::whole(key(chunk), chunk, 28 << 10)).await.unwrap();
        }
        for chunk in 2..=7 {
            shelf.evict(&key(chunk));
        }
        let forget = Note::Forget { key: key(1), version: 10 };
        let unreleased = shelf.state.lock().apply(&forget);
        assert_eq!(unreleased.len(), 1);
        log.note(forget).await.unwrap();
        log.checkpoint().await.unwrap();
        // The last checkpoint: no later one is to hide what is moved from here on.
        let blocked = disk.checkpoint().with_extension("new");
        std::fs::create_dir(&blocked).unwrap();
        let mut version = 10;
        let full = loop {
            version += 1;
            if let Err(error) = shelf.put(&log, &Content::whole(key(version), version, 28 << 10)).await {
                break error;
            }
            assert!(version < 100, "eight segments do not hold so much");
        };
        assert!(matches!(full, LogError::NoSpace { .. }), "{full}");
        log.sync().await.unwrap();
        log.close().await;
        drop((log, shelf));
        std::fs::remove_dir(&blocked).unwrap();
        let (log, _, recovered) = disk.look().await;
        assert!(recovered.from_checkpoint && recovered.scanned_records > 10, "{recovered:?}");
        assert!(recovered.chunks.iter().all(|entry| entry.key != key(1)), "its end was acknowledged");
        log.close().await;
    });
}

/// A shelf that says what it was told before it returns, and takes its time with that.
struct Slow {
    shelf: Arc<Shelf>,
    told: mpsc::UnboundedSender<Key>,
}

impl Owner for Slow {
    fn appended(&self, key: Key, version: u64, place: Place) -> bool {
        let wanted = self.shelf.appended(key, version, place);
        self.told.send(key).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        wanted
    }

    fn moved(&self, key: Key, version: u64, from: Place, to: Place) -> bool {
        self.shelf.moved(key, version, from, to)
    }

    fn damaged(&self, key: Key, version: u64, place: Place) {
        self.shelf.damaged(key, version, place);
    }

    fn live(&self, entries: &mut dyn Entries) -> gd2fs_log::Result<()> {
        self.shelf.live(entries)
    }
}

#[test]
fn a_checkpoint_lies_behind_whatever_the_owner_was_told() {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async {
        let (log, recovered) = disk.open(disk.device(None, None)).await;
        let log = Arc::new(log);
        let shelf = Shelf::new(&log, &recovered);
        let (told, mut heard) = mpsc::unbounded_channel();
        let owner = Arc::new(Slow { shelf: Arc::clone(&shelf), told });
        log.start(Arc::downgrade(&owner) as _);
        let content = Content::whole(key(1), 1, 16 << 10);
        let put = shelf.put(&log, &content);
        let end = async {
            assert_eq!(heard.recv().await, Some(key(1)));
            log.checkpoint().await.unwrap();
        };
        tokio::join!(async { put.await.unwrap() }, end);
        log.close().await;
        drop((log, shelf, owner));
        let (_, _, recovered) = disk.look().await;
        // What the checkpoint writes behind itself is the only record that is not in it.
        assert_eq!((recovered.chunks.len(), recovered.scanned_records), (1, 1), "{recovered:?}");
    });
}
