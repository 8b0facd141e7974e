//! Bits that turned: what is hit is missing, never wrong, and nothing older takes its place.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gd2fs_log::{Key, Note, Recovered};

use crate::shelf::{Content, Dice};
use crate::{Disk, run};

const KEYS: u64 = 6;

fn key(chunk: u64) -> Key {
    Key { file: 7, column: 0, chunk }
}

/// Two versions of every chunk, each durable, then a deletion of another column and one more durable record behind.
fn filled(checkpoint: bool) -> (Disk, BTreeMap<u64, Content>) {
    let disk = Disk::new(8, 1 << 20, 128 << 10);
    let contents = run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        let mut contents = BTreeMap::new();
        for version in 1..=2 * KEYS {
            let content = Content::whole(key(version % KEYS), version, 16 << 10);
            shelf.put(&log, &content).await.unwrap();
            log.sync().await.unwrap();
            contents.insert(version % KEYS, content);
            if checkpoint && version == KEYS + 2 {
                log.checkpoint().await.unwrap();
            }
        }
        shelf.note(&log, Note::Delete { file: 8, column: 0, version: 100 }).await.unwrap();
        log.close().await;
        contents
    });
    (disk, contents)
}

/// Opens, and checks that every chunk is missing or as it was last.
fn reopened(disk: &Disk, contents: &BTreeMap<u64, Content>) -> Recovered {
    run(async {
        let (log, shelf, recovered) = disk.look().await;
        for entry in &recovered.chunks {
            let content = &contents[&entry.key.chunk];
            assert_eq!(entry.version, content.version, "an older version took the place of a damaged one");
            let payload = shelf.read(&log, entry).await.unwrap();
            // From the checkpoint nothing is read: the reader's sums find such damage.
            assert!(content.matches(entry, &payload) || recovered.from_checkpoint);
        }
        log.close().await;
        recovered
    })
}

/// Device offsets of the records of `filled`, each of one header block and four of payload.
fn record(index: u64) -> u64 {
    4096 + 2 * 4096 + index * 5 * 4096
}

#[test]
fn a_damaged_payload_costs_its_own_chunk() {
    let (disk, contents) = filled(false);
    disk.change(record(8) + 4096 + 5000, 1, |byte| byte[0] ^= 4);
    let recovered = reopened(&disk, &contents);
    assert_eq!(recovered.chunks.len() as u64, KEYS - 1);
    assert_eq!((recovered.damaged_records, recovered.given_up), (1, false));
}

#[test]
fn a_damaged_header_costs_everything_but_is_never_wrong() {
    for (offset, length) in [(0, 1), (30, 1), (90, 1), (200, 1), (4095, 1), (0, 4096)] {
        let (disk, contents) = filled(false);
        disk.change(record(8) + offset, length, |bytes| bytes.iter_mut().for_each(|byte| *byte ^= 0x10));
        let recovered = reopened(&disk, &contents);
        assert!(recovered.given_up && recovered.chunks.is_empty(), "byte {offset}: {recovered:?}");
        // The log goes on as a new one.
        run(async {
            let (log, shelf, recovered) = disk.shelf(disk.device(None, None)).await;
            assert!(recovered.from_checkpoint && !recovered.given_up && recovered.version_max >= 2 * KEYS);
            shelf.put(&log, &contents[&3]).await.unwrap();
            log.sync().await.unwrap();
            log.close().await;
        });
        assert_eq!(reopened(&disk, &contents).chunks.len(), 1);
    }
}

#[test]
fn one_copy_of_what_is_there_twice_is_enough() {
    let (disk, contents) = filled(true);
    let last = disk.bytes - 4096;
    let flip = |bytes: &mut [u8]| bytes[0] ^= 1;
    for offset in [20, 4096 + 20] {
        disk.change(offset, 1, flip);
        assert_eq!(reopened(&disk, &contents).chunks.len() as u64, KEYS, "byte {offset}");
        disk.change(offset, 1, flip);
    }
    disk.change(20, 1, flip);
    let checkpoint = disk.checkpoint();
    let bytes = std::fs::read(&checkpoint).unwrap();
    for at in [0, 9, 20, 40, bytes.len() / 2, bytes.len() - 1] {
        let mut bad = bytes.clone();
        bad[at] ^= 8;
        std::fs::write(&checkpoint, &bad).unwrap();
        let recovered = reopened(&disk, &contents);
        assert_eq!((recovered.chunks.len() as u64, recovered.from_checkpoint), (KEYS, true), "byte {at}");
    }
    std::fs::write(&checkpoint, &bytes[..bytes.len() - 3]).unwrap();
    std::fs::write(disk.directory.path().join("checkpoint.copy"), &bytes[..5]).unwrap();
    let recovered = reopened(&disk, &contents);
    assert!(!recovered.from_checkpoint && recovered.given_up, "{recovered:?}");
    disk.change(last + 20, 1, flip);
    let error = run(disk.refused(disk.options())).to_string();
    assert!(error.contains("both of its superblocks are damaged"), "{error}");
}

#[test]
fn both_headers_of_a_segment_lost_are_never_wrong() {
    let (disk, contents) = filled(true);
    for block in 1..3 {
        disk.change(block * 4096 + 9, 1, |byte| byte[0] ^= 1);
    }
    let recovered = reopened(&disk, &contents);
    assert!(recovered.chunks.is_empty() && recovered.damaged_records > 0, "{recovered:?}");
}

/// Two versions of a chunk, each durable, and on demand a seal of its column; nothing behind them. Then `wait`, and the end of
/// the node without a word.
fn killed(sealed: bool, wait: Duration) -> (Disk, BTreeMap<u64, Content>) {
    let disk = Disk::new(8, 1 << 20, 128 << 10);
    let contents = run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        let contents = [1, 2].map(|version| Content::whole(key(1), version, 16 << 10));
        for content in &contents {
            shelf.put(&log, content).await.unwrap();
            log.sync().await.unwrap();
        }
        let [_, last] = contents;
        if sealed {
            let note = Note::Column { file: 7, column: 0, version: 3, state: last.state() };
            shelf.note(&log, note).await.unwrap();
        }
        tokio::time::sleep(wait).await;
        BTreeMap::from([(1, last)])
    });
    (disk, contents)
}

/// Longer than a log leaves the end of what is durable without a witness.
const QUIET: Duration = Duration::from_millis(200);

#[test]
fn the_newest_record_is_not_taken_for_a_torn_tail() {
    // The newest is the second version, or the note behind it.
    for (sealed, offset, given_up) in [
        (false, record(1) + 4096 + 7000, false),
        (false, record(1) + 100, true),
        (true, record(2) + 100, true),
        (true, record(2) + 4000, true),
    ] {
        let (disk, contents) = killed(sealed, QUIET);
        disk.change(offset, 1, |byte| byte[0] ^= 1);
        let recovered = reopened(&disk, &contents);
        assert!(recovered.chunks.is_empty(), "byte {offset}: {recovered:?}");
        assert_eq!((recovered.damaged_records, recovered.given_up), (1, given_up), "byte {offset}");
    }
}

#[test]
fn what_a_start_has_found_gets_a_witness_too() {
    // Killed at once: no header says that the note was durable. The next life says it of all that it has found, also where it can
    // make no checkpoint of that.
    for blocked in [false, true] {
        let (disk, contents) = killed(true, Duration::ZERO);
        let new = disk.checkpoint().with_extension("new");
        if blocked {
            std::fs::create_dir(&new).unwrap();
        }
        run(async {
            let (log, _shelf, recovered) = disk.shelf(disk.device(None, None)).await;
            assert_eq!(recovered.chunks.len(), 1);
            tokio::time::sleep(QUIET).await;
            log.close().await;
        });
        disk.change(record(2) + 100, 1, |byte| byte[0] ^= 1);
        if blocked {
            std::fs::remove_dir(&new).unwrap();
        }
        let recovered = reopened(&disk, &contents);
        if blocked {
            assert!(recovered.given_up, "{recovered:?}");
        } else {
            assert!(recovered.from_checkpoint && !recovered.given_up, "{recovered:?}");
            assert_eq!(
                (recovered.chunks.len(), recovered.columns[0].version, recovered.scanned_records),
                (1, 3, 1)
            );
        }
    }
}

#[test]
fn an_idle_log_writes_one_witness_and_a_busy_one_none() {
    let disk = Disk::new(8, 1 << 20, 128 << 10);
    run(async {
        let (log, shelf, _) = disk.shelf(disk.device(None, None)).await;
        let content = |version| Content::whole(key(1), version, 4 << 10);
        shelf.put(&log, &content(1)).await.unwrap();
        log.sync().await.unwrap();
        tokio::time::sleep(QUIET).await;
        let stats = log.stats();
        assert_eq!((stats.appended_bytes, stats.syncs), (3 * 4096, 2), "a block and a sync, once");
        // Each sync has a record behind it before it has been quiet for long.
        let begun = Instant::now();
        let (mut version, mut longest) = (1, Duration::ZERO);
        while begun.elapsed() < QUIET {
            let put = Instant::now();
            version += 1;
            shelf.put(&log, &content(version)).await.unwrap();
            log.sync().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
            longest = longest.max(put.elapsed());
        }
        let witnesses = log.stats().appended_bytes / 4096 - (2 * version + 1);
        assert!(witnesses == 0 || longest > Duration::from_millis(10), "{witnesses} of {version}");
        log.close().await;
    });
    let recovered = run(async { disk.look().await.2 });
    assert_eq!((recovered.dropped_records, recovered.given_up), (0, false));
}

#[test]
fn a_dropped_tail_whose_header_is_unreadable_is_counted_once() {
    let (disk, contents) = killed(true, QUIET);
    // The witness itself: nothing speaks of it.
    disk.change(record(2) + 4096 + 50, 1, |byte| byte[0] ^= 1);
    let dropped = [0, 1].map(|_| {
        let recovered = reopened(&disk, &contents);
        assert_eq!((recovered.chunks.len(), recovered.damaged_records), (1, 0));
        recovered.dropped_records
    });
    assert_eq!(dropped, [1, 0]);
}

#[test]
fn any_flipped_bit_is_found() {
    let mut dice = Dice(5);
    for _ in 0..60 {
        let (disk, contents) = filled(dice.below(2) == 0);
        let offset = dice.below(4096 * 70);
        disk.change(offset, 1, |byte| byte[0] ^= 1 << dice.below(8));
        reopened(&disk, &contents);
    }
}
