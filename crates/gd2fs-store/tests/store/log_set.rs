//! Logs that are added, moved, left out for a life, copied and lost: exact bytes, `LOST`, or a start that is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Faults, PowerCut, Rule};
use gd2fs_store::TierError;

use super::tiers::{Disk, MIB, PATIENCE, column, get, put, run};
use super::*;

const CHUNKS: u64 = 8;

fn disk(names: &[&str]) -> Disk {
    let mut disk = Disk::new(16 * MIB, 32 << 20);
    use_logs(&mut disk, names);
    disk
}

fn use_logs(disk: &mut Disk, names: &[&str]) {
    disk.names = Some(names.iter().map(|name| String::from(*name)).collect());
}

async fn put_all(file: &Arc<Column>, seed: u8) {
    for chunk in 0..CHUNKS {
        put(file, 0, chunk * u64::from(UNIT), &pattern(10_000, seed + chunk as u8)).await.unwrap();
    }
}

/// How many chunks hold what `put_all` wrote with this seed. All others must be lost.
async fn held(file: &Arc<Column>, seed: u8) -> u64 {
    let mut held = 0;
    for chunk in 0..CHUNKS {
        match get(file, chunk * u64::from(UNIT), 10_000).await {
            Ok(bytes) => {
                assert!(bytes == pattern(10_000, seed + chunk as u8), "chunk {chunk}: other bytes");
                held += 1;
            }
            Err(failure) => assert_eq!(failure.code, Code::Lost, "chunk {chunk}: {failure}"),
        }
    }
    held
}

/// One life in which everything is written and flushed. A `killed` node is not closed.
async fn written(disk: &mut Disk, seed: u8, killed: bool) {
    let store = disk.open().await;
    let file = column(&store, 0).await;
    put_all(&file, seed).await;
    file.flush().await.unwrap();
    if !killed {
        store.close(PATIENCE).await.unwrap();
    }
}

async fn found(disk: &mut Disk, seed: u8) -> u64 {
    let store = disk.open().await;
    let held = held(&column(&store, 0).await, seed).await;
    store.close(PATIENCE).await.unwrap();
    held
}

/// Why a start is refused, and that it leaves everything as it is.
async fn refused(disk: &mut Disk) -> String {
    let before = contents(&disk.path(""));
    let error = disk.try_open().await.err().expect("it must be refused");
    let after = contents(&disk.path(""));
    assert!(after == before, "a refused start changed one of {:?}: {error}", after.keys());
    error.to_string()
}

/// All files but the one by which each start counts.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let names =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = names.filter(|name| name != "incarnation" && directory.join(name).is_file());
    names.map(|name| (name.clone(), fs::read(directory.join(name)).unwrap())).collect()
}

#[test]
fn an_overwrite_is_not_undone_by_the_loss_of_the_log_that_has_it() {
    run(async {
        for (killed, flushed) in [(true, true), (false, true), (true, false)] {
            let mut disk = disk(&["a"]);
            written(&mut disk, 1, false).await;
            use_logs(&mut disk, &["a", "b"]);
            if flushed {
                written(&mut disk, 100, killed).await;
            } else {
                // Bytes that replace flushed ones are durable when the write returns.
                let store = disk.open().await;
                put_all(&column(&store, 0).await, 100).await;
            }
            use_logs(&mut disk, &["a"]);
            assert_eq!(found(&mut disk, 100).await, CHUNKS / 2, "those of the log that is still there");
        }
    });
}

#[test]
fn of_records_that_two_logs_have_only_the_newest_counts_from_the_next_start_on() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        // Half of the chunks go to the other log when they grow. That contradicts nothing, and nobody flushes: both records stay.
        use_logs(&mut disk, &["a", "b"]);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let file = column(&store, 0).await;
        for chunk in 0..CHUNKS {
            put(&file, 0, chunk * u64::from(UNIT) + 10_000, &pattern(10_000, 7)).await.unwrap();
        }
        while store.tier_stats().dirty_bytes > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop((file, store));
        // The newer of them is overwritten in its own log.
        let store = disk.open().await;
        let file = column(&store, 0).await;
        put_all(&file, 100).await;
        drop((file, store));
        use_logs(&mut disk, &["a"]);
        assert_eq!(found(&mut disk, 100).await, CHUNKS / 2, "those of the log that is still there");
    });
}

#[test]
fn a_record_is_kept_until_what_replaces_it_in_another_log_is_durable() {
    run(async {
        for seed in 0..8 {
            let mut disk = disk(&["a"]);
            written(&mut disk, 1, false).await;
            use_logs(&mut disk, &["a", "b"]);
            disk.flush_delay = Duration::ZERO;
            let power = PowerCut::new(seed);
            disk.power = Some(power.clone());
            let store = disk.open().await;
            let file = column(&store, 0).await;
            for chunk in 0..CHUNKS {
                put(&file, 0, chunk * u64::from(UNIT) + 10_000, &pattern(10_000, 7)).await.unwrap();
            }
            while store.tier_stats().dirty_bytes > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // One log alone goes round until what is dead in it is reused; nothing makes the other one durable.
            let mut hot = capability(0, 1, 1);
            hot.file = "ff".repeat(16);
            let hot = store.open(&hot, 0).await.unwrap().0;
            for round in 0..160u64 {
                let chunk = round % 4 * 2 + seed % 2;
                put(&hot, 0, chunk * u64::from(UNIT), &pattern(UNIT as usize, round as u8)).await.unwrap();
            }
            power.cut().unwrap();
            drop((file, hot, store));
            disk.power = None;
            assert_eq!(found(&mut disk, 1).await, CHUNKS, "seed {seed}: all of it was flushed");
        }
    });
}

#[test]
fn a_log_that_has_missed_a_life_is_refused() {
    run(async {
        let mut disk = disk(&["a", "b"]);
        written(&mut disk, 1, false).await;
        for absent in [&["a"][..], &[]] {
            let spare = contents(&disk.path(""));
            use_logs(&mut disk, absent);
            let store = disk.open().await;
            put_all(&column(&store, 0).await, 50).await;
            store.close(PATIENCE).await.unwrap();
            drop(store);
            use_logs(&mut disk, &["a", "b"]);
            let message = refused(&mut disk).await;
            let stale = if absent.is_empty() { "a" } else { "b" };
            assert!(message.starts_with(disk.path(stale).to_str().unwrap()), "{message}");
            assert!(message.contains("missed a life") && message.contains("remove the file"), "{message}");
            // As the message says, in part and in whole.
            fs::remove_file(disk.path("b")).unwrap();
            if absent.is_empty() {
                assert!(refused(&mut disk).await.contains("missed a life"));
                fs::remove_file(disk.path("a")).unwrap();
            }
            found(&mut disk, 50).await;
            for (name, bytes) in spare {
                fs::write(disk.path(&name), bytes).unwrap();
            }
        }
    });
}

/// As a drive that is not mounted, and one on which somebody has put an empty file.
#[test]
fn an_absent_log_is_not_made_anew_in_its_place() {
    run(async {
        let mut disk = disk(&["drive/a", "b"]);
        let (drive, away) = (disk.path("drive"), disk.path("away"));
        fs::create_dir(&drive).unwrap();
        written(&mut disk, 1, false).await;
        fs::rename(&drive, &away).unwrap();
        let refused = async |disk: &mut Disk, found: &str| {
            let message = refused(disk).await;
            let place = disk.path(&disk.names.as_ref().unwrap()[0]);
            for part in ["node.logs", place.to_str().unwrap(), found, "Mount its drive", "start once without"]
            {
                assert!(message.contains(part), "{part}: {message}");
            }
        };
        refused(&mut disk, "nothing is there").await;
        assert!(!drive.exists());
        fs::create_dir(&drive).unwrap();
        refused(&mut disk, "nothing is there").await;
        assert_eq!(fs::read_dir(&drive).unwrap().count(), 0, "nothing is made under its mount point");
        fs::write(drive.join("a"), b"").unwrap();
        refused(&mut disk, "it holds nothing").await;
        assert_eq!(fs::metadata(drive.join("a")).unwrap().len(), 0, "and nothing grows there");
        fs::write(drive.join("a"), vec![0; 32 << 20]).unwrap();
        refused(&mut disk, "it holds nothing").await;
        fs::remove_dir_all(&drive).unwrap();
        // Nor under another name.
        use_logs(&mut disk, &["c", "b"]);
        refused(&mut disk, "nothing is there").await;
        assert!(!disk.path("c").exists());
        fs::rename(&away, &drive).unwrap();
        use_logs(&mut disk, &["drive/a", "b"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS, "it has missed nothing");
        // As the message says, if it is really gone.
        fs::remove_dir_all(&drive).unwrap();
        use_logs(&mut disk, &["b"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS / 2);
        use_logs(&mut disk, &["c", "b"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS / 2);
        written(&mut disk, 50, false).await;
        assert_eq!(found(&mut disk, 50).await, CHUNKS);
    });
}

#[test]
fn a_log_is_never_one_of_the_nodes_own_files() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        let id = |name: &String| name.starts_with("checkpoint-");
        let checkpoint = contents(&disk.path("")).into_keys().find(id).expect("a node that ends makes one");
        fs::create_dir(disk.path("sub")).unwrap();
        std::os::unix::fs::symlink("..", disk.path("sub/up")).unwrap();
        std::os::unix::fs::symlink("../logs.new", disk.path("sub/dangling")).unwrap();
        std::os::unix::fs::symlink("sub/dangling", disk.path("twice")).unwrap();
        fs::hard_link(disk.path("superblock"), disk.path("linked")).unwrap();
        let relative = |name: &str| {
            let here = std::env::current_dir().unwrap();
            format!(
                "{}{}",
                "../".repeat(here.components().count() - 1),
                &disk.path(name).to_str().unwrap()[1..]
            )
        };
        let spellings = ["sub/up/logs", "sub/../running.lock", "./lock", "twice", "linked"].map(String::from);
        let names =
            ["logs", "logs.new", "superblock", "superblock.new", "epochs", "epochs.new", "incarnation"];
        let names = names.into_iter().chain(["incarnation.new", "lock", "running.lock", "checkpoint-x"]);
        let names = names.chain([checkpoint.as_str()]).map(String::from).chain(spellings);
        for name in names.chain([relative("logs"), relative("logs.new")]).collect::<Vec<_>>() {
            for log_bytes in [32 << 20, 0] {
                disk.log_bytes = log_bytes;
                use_logs(&mut disk, &["a", &name]);
                let message = refused(&mut disk).await;
                assert!(message.contains("keeps for itself in node.data_dir"), "{name}: {message}");
                assert!(message.contains("another name or place"), "{name}: {message}");
            }
        }
        disk.log_bytes = 32 << 20;
        // Elsewhere, and beside them, these are names like any other.
        use_logs(&mut disk, &["a", "sub/logs", "log", "logs.old"]);
        written(&mut disk, 50, false).await;
        assert_eq!(found(&mut disk, 50).await, CHUNKS);
        // The node's own name may be a link to something else.
        fs::rename(disk.path("epochs"), disk.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", disk.path("epochs")).unwrap();
        use_logs(&mut disk, &["a", "elsewhere"]);
        let tiers = disk.tiers();
        let error = tiers
            .check_places(&disk.path(""))
            .expect_err("it must be refused before the directory is opened");
        assert!(matches!(error, TierError::OwnFile { .. }), "{error}");
    });
}

/// Of each size what can live of chunks of 4 MiB, in MiB, and the largest unit: the table of the page on nodes.
#[test]
fn a_log_keeps_as_much_as_its_page_says() {
    const TABLE: [(u64, u64, u32); 9] = [
        (128, 57, 4),
        (256, 163, 4),
        (512, 326, 4),
        (1 << 10, 717, 4),
        (2 << 10, 1_435, 8),
        (4 << 10, 2_870, 16),
        (16 << 10, 12_043, 64),
        (128 << 10, 97_403, 64),
        (1 << 20, 780_585, 64),
    ];
    const CHUNK: u32 = 4 << 20;
    run(async {
        let mut measured = Vec::new();
        for (size, _, _) in TABLE {
            let mut disk = Disk::new(16 * MIB, 0);
            // With holes, and opened as it is.
            fs::File::create(disk.path("log0")).unwrap().set_len(size << 20).unwrap();
            let store = disk.open().await;
            let open = async |unit: u32| {
                let shape =
                    Capability { stripe_unit: unit, file: format!("{unit:032x}"), ..capability(0, 1, 1) };
                store.open(&shape, 0).await.map(|(file, _)| file)
            };
            put(&open(CHUNK).await.unwrap(), 0, 0, &pattern(CHUNK as usize, 1)).await.unwrap();
            open(CHUNK).await.unwrap().flush().await.unwrap();
            let mut largest = CHUNK;
            while largest < gd2fs_store::STRIPE_UNIT_MAX && open(2 * largest).await.is_ok() {
                largest *= 2;
            }
            if largest < gd2fs_store::STRIPE_UNIT_MAX {
                let failure = open(2 * largest).await.err().unwrap();
                assert_eq!(failure.code, Code::BadRequest);
                assert!(
                    failure.message.contains("smaller stripe_unit")
                        && failure.message.contains("node.log_bytes")
                );
            }
            measured.push((size, store.tier_stats().log_capacity >> 20, largest >> 20));
            store.close(PATIENCE).await.unwrap();
        }
        assert_eq!(measured, TABLE);
    });
}

#[test]
fn a_log_without_its_data_directory_is_refused_until_that_is_back() {
    run(async {
        let (mut disk, mut other) = (disk(&["a"]), disk(&["a"]));
        written(&mut disk, 1, false).await;
        written(&mut other, 50, false).await;
        fs::rename(disk.path("a"), other.path("b")).unwrap();
        use_logs(&mut other, &["a", "b"]);
        assert!(refused(&mut other).await.contains("belongs to another data directory"));
        fs::rename(other.path("b"), disk.path("c")).unwrap();
        use_logs(&mut disk, &["c"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS);
    });
}

#[test]
fn a_log_that_was_never_used_may_have_missed_anything() {
    run(async {
        let mut disk = disk(&["a", "b"]);
        drop(disk.open().await);
        use_logs(&mut disk, &["a"]);
        written(&mut disk, 1, false).await;
        use_logs(&mut disk, &["a", "b"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS);
    });
}

#[test]
fn where_a_log_lies_and_in_which_order_says_nothing() {
    run(async {
        let mut disk = disk(&["a", "b"]);
        disk.memory_bytes = 4 * MIB;
        written(&mut disk, 1, false).await;
        // Reclaim relies on a checkpoint from here on, so that one under another name would cost everything.
        for round in 0..20 {
            written(&mut disk, 20 + round, false).await;
        }
        let checkpoints = |disk: &Disk| {
            let all = contents(&disk.path("")).into_keys().filter(|name| name.starts_with("checkpoint-"));
            all.filter(|name| !name.contains('.')).count()
        };
        assert_eq!(checkpoints(&disk), 2);
        std::os::unix::fs::symlink(".", disk.path("x")).unwrap();
        for names in [["b", "a"], ["./a", "b"], ["b", "x/a"]] {
            use_logs(&mut disk, &names);
            assert_eq!(found(&mut disk, 39).await, CHUNKS, "{names:?}");
        }
        // Each has the other's name.
        for (from, to) in [("a", "c"), ("b", "a"), ("c", "b")] {
            fs::rename(disk.path(from), disk.path(to)).unwrap();
        }
        use_logs(&mut disk, &["a", "b"]);
        assert_eq!(found(&mut disk, 39).await, CHUNKS);
        use_logs(&mut disk, &["a"]);
        drop(disk.open().await);
        assert_eq!(checkpoints(&disk), 1, "of a log that is left out nothing stays");
    });
}

#[test]
fn a_copy_beside_its_original_is_refused() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        fs::copy(disk.path("a"), disk.path("b")).unwrap();
        use_logs(&mut disk, &["a", "b"]);
        let message = refused(&mut disk).await;
        assert!(message.contains("is a copy of") && message.contains("leave one of them out"), "{message}");
        use_logs(&mut disk, &["b"]);
        assert_eq!(found(&mut disk, 1).await, CHUNKS);
    });
}

#[test]
fn a_size_that_is_not_the_logs_is_refused_and_nothing_grows() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        for asked in [64 << 20, 16 << 20] {
            disk.log_bytes = asked;
            let message = refused(&mut disk).await;
            assert!(message.contains(&format!("node.log_bytes is {asked}")), "{message}");
            assert!(message.contains("has 33554432 bytes"), "{message}");
        }
        disk.log_bytes = 32 << 20;
        let whole = fs::read(disk.path("a")).unwrap();
        for length in [31 << 20, 33 << 20] {
            let mut bytes = whole.clone();
            bytes.resize(length, 0);
            fs::write(disk.path("a"), bytes).unwrap();
            for asked in [32 << 20, length as u64, 0] {
                disk.log_bytes = asked;
                let message = refused(&mut disk).await;
                let sizes =
                    format!("{length} bytes, and had 33554432 when it was formatted (node.log_bytes)");
                assert!(message.contains(&sizes), "{message}");
            }
        }
        fs::write(disk.path("a"), whole).unwrap();
        disk.log_bytes = 0;
        assert_eq!(found(&mut disk, 1).await, CHUNKS);
    });
}

#[test]
fn what_is_not_a_log_is_refused_and_left_as_it_is() {
    run(async {
        let mut disk = disk(&["new", "a"]);
        let foreign = |at: usize, length: usize| {
            let mut bytes = vec![0; length];
            bytes[at..at + 4].copy_from_slice(b"mine");
            bytes
        };
        let whole = 32 << 20;
        drop(disk.data_dir().await.unwrap());
        for bytes in [
            foreign(0, 10_000),
            foreign(0, whole),
            foreign(64 << 10, whole),
            foreign(MIB - 4, whole),
            foreign(whole - MIB, whole),
            foreign(whole - 4, whole),
        ] {
            fs::write(disk.path("a"), &bytes).unwrap();
            let message = refused(&mut disk).await;
            assert!(message.contains("not a GD2FS log") && message.contains("remove the file"), "{message}");
            assert!(!disk.path("new").exists(), "nor is anything made beside it");
        }
        fs::write(disk.path("a"), vec![0; whole]).unwrap();
        written(&mut disk, 1, false).await;
        assert_eq!(found(&mut disk, 1).await, CHUNKS, "zeros alone are nobody's");
    });
}

#[test]
fn a_log_whose_first_mib_was_wiped_begins_anew() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        use std::os::unix::fs::FileExt;
        let file = fs::OpenOptions::new().write(true).open(disk.path("a")).unwrap();
        file.write_all_at(&[0; 4096], 0).unwrap();
        assert_eq!(found(&mut disk, 1).await, CHUNKS, "the copy at its end is enough");
        file.write_all_at(&vec![0; MIB], 0).unwrap();
        assert!(refused(&mut disk).await.contains("it holds nothing"), "it could be another one");
        use_logs(&mut disk, &[]);
        drop(disk.open().await);
        use_logs(&mut disk, &["a"]);
        assert_eq!(found(&mut disk, 1).await, 0);
        written(&mut disk, 50, false).await;
        assert_eq!(found(&mut disk, 50).await, CHUNKS);
    });
}

#[test]
fn a_damaged_list_of_logs_is_refused() {
    run(async {
        let mut disk = disk(&["a"]);
        written(&mut disk, 1, false).await;
        let good = fs::read(disk.path("logs")).unwrap();
        let mut bad = good.clone();
        bad[9] ^= 1;
        fs::write(disk.path("logs"), bad).unwrap();
        let error = disk.data_dir().await.err().expect("it must be refused").to_string();
        assert!(error.contains("nobody knows which logs are the last word"), "{error}");
        fs::write(disk.path("logs"), good).unwrap();
        assert_eq!(found(&mut disk, 1).await, CHUNKS);
        fs::remove_file(disk.path("logs")).unwrap();
        let error = disk.try_open().await.err().expect("nothing says that the log is the last word");
        assert!(matches!(error, TierError::Stranger { .. }), "{error}");
    });
}

#[test]
fn what_moves_to_a_log_that_fails_stays_where_it_was() {
    run(async {
        let mut disk = disk(&["log0"]);
        let store = disk.open().await;
        let file = column(&store, 0).await;
        put_all(&file, 1).await;
        file.flush().await.unwrap();
        store.close(PATIENCE).await.unwrap();
        drop((file, store));
        // Half of the chunks belong to another log now, and move there when they are written.
        use_logs(&mut disk, &["log0", "log1"]);
        disk.flush_delay = Duration::ZERO;
        let faults = Faults::new(1);
        (disk.faults, disk.faulty) = (Some(faults.clone()), Some("log1"));
        let store = disk.open().await;
        let file = column(&store, 0).await;
        faults.add(Rule::new(Effect::Error(libc::EIO)).on(&[Kind::Sync]));
        let mut failed = 0;
        for chunk in 0..CHUNKS {
            let again = put(&file, 0, chunk * u64::from(UNIT), &pattern(10_000, 100 + chunk as u8)).await;
            failed += u64::from(again.is_err());
        }
        assert!(failed >= CHUNKS / 2, "the others' log has failed");
        // Whatever the first log does meanwhile, checkpoints included.
        let other = store.open(&super::tiers::file(9), 0).await.unwrap().0;
        let (mut written, mut refused) = (0, 0);
        while refused < 4 && written < 300 {
            for chunk in 0..2 {
                match put(&other, 0, chunk * u64::from(UNIT), &pattern(UNIT as usize, 7)).await {
                    Ok(()) => written += 1,
                    Err(_) => refused += u32::from(chunk == 1),
                }
            }
        }
        drop((file, other));
        // It cannot end cleanly; nothing waits for what cannot come.
        assert!(store.close(Duration::from_secs(1)).await.is_err());
        drop(store);
        use_logs(&mut disk, &["log0"]);
        (disk.faults, disk.faulty) = (None, None);
        let store = disk.open().await;
        let file = column(&store, 0).await;
        for chunk in 0..CHUNKS {
            // What was not acknowledged is there, or what it was to replace, which was flushed.
            let found = get(&file, chunk * u64::from(UNIT), 10_000).await.unwrap();
            let either = [1, 100].map(|seed| pattern(10_000, seed + chunk as u8));
            assert!(either.contains(&found), "chunk {chunk}");
        }
    });
}
