//! What goes when room is wanted, and what stays.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use gd2fs_store::Tiers;
use gd2fs_wire::messages::{List, PinItem, UnpinItem};

use super::tiers::{Disk, MIB, PATIENCE, get, put, run};
use super::*;

const U: u64 = UNIT as u64;
/// After it nothing counts as just used.
const SETTLED: Duration = Duration::from_millis(260);

fn of(tenant: &str, number: u8, priority: u8) -> Capability {
    let file = format!("{number:02x}").repeat(16);
    Capability { tenant: tenant.into(), file, priority, ..capability(0, 1, 1) }
}

/// A store without a log.
fn memory(units: usize, tenant_share: f64) -> (Store, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::open(directory.path(), "c", "n", 1).unwrap();
    let tiers = Tiers {
        cluster: "c".into(),
        node: "n".into(),
        logs: vec![],
        flush_delay: Duration::ZERO,
        dirty_bytes_max: 0,
        tenant_share,
    };
    (now(Store::with_logs(units * UNIT as usize, data, tiers)).unwrap(), directory)
}

fn open(store: &Store, capability: &Capability) -> Arc<Column> {
    now(store.open(capability, 0)).unwrap().0
}

fn fill_units(column: &Arc<Column>, mut units: std::ops::Range<u64>) -> Result<(), Failure> {
    units.try_for_each(|unit| write(column, 0, unit * U, &pattern(UNIT as usize, unit as u8)))
}

/// How many whole units of each column are there; asks in a way that is no use of it.
fn units<const N: usize>(columns: &[Arc<Column>; N]) -> [u64; N] {
    columns.each_ref().map(|column| {
        let extents = column.whereabouts(0, 64 * U).unwrap().extents;
        let there = extents.iter().filter(|(.., tier)| *tier == gd2fs_wire::messages::Tier::Dram);
        there.map(|(start, end, _)| end - start).sum::<u64>() / U
    })
}

fn pin(pin: char, file: u8, start: u64, end: u64) -> PinItem {
    let file = format!("{file:02x}").repeat(16);
    PinItem { pin: pin.to_string().repeat(32), file, column: 0, epoch: 1, start, end, ttl_ms: 60_000 }
}

fn unpin(store: &Store, pin: char) -> u64 {
    store.unpin(&UnpinItem { pin: pin.to_string().repeat(32) }).unwrap().ranges
}

#[test]
fn the_lowest_priority_goes_first_and_then_what_was_used_least_recently() {
    let (store, _directory) = memory(8, 1.0);
    let wanted = [(1, 7), (2, 0), (3, 3), (4, 0)];
    let columns = wanted.map(|(number, priority)| open(&store, &of("t", number, priority)));
    for column in &columns {
        fill_units(column, 0..2).unwrap();
    }
    std::thread::sleep(SETTLED);
    let new = open(&store, &of("t", 5, 0));
    let order =
        [[2, 1, 2, 2], [2, 0, 2, 2], [2, 0, 2, 1], [2, 0, 2, 0], [2, 0, 1, 0], [2, 0, 0, 0], [1, 0, 0, 0]];
    for (written, expected) in (0..).zip(order) {
        fill_units(&new, written..written + 1).unwrap();
        assert_eq!(units(&columns), expected);
    }
    assert_eq!(read(&columns[0], 0, UNIT).unwrap(), pattern(UNIT as usize, 0), "a tail goes before its head");
    let told: HashSet<(String, Option<u64>)> =
        store.report(9).items.into_iter().map(|item| (item.file, item.valid)).collect();
    let file = |number: u8| format!("{number:02x}").repeat(16);
    let expected = [(1, Some(U)), (2, Some(0)), (3, Some(0)), (4, Some(0))];
    assert_eq!(
        told,
        expected.map(|(number, valid)| (file(number), valid)).into(),
        "control hears of all that went"
    );
}

#[test]
fn a_use_and_a_higher_priority_save_a_column() {
    let (store, _directory) = memory(4, 1.0);
    let columns = [1, 2, 3, 4].map(|number| open(&store, &of("t", number, 0)));
    for column in &columns {
        fill_units(column, 0..1).unwrap();
    }
    std::thread::sleep(SETTLED);
    read(&columns[0], 0, 10).unwrap();
    open(&store, &of("t", 2, 1));
    let new = open(&store, &of("t", 5, 0));
    fill_units(&new, 0..1).unwrap();
    assert_eq!(units(&columns), [1, 1, 0, 1]);
    fill_units(&new, 1..2).unwrap();
    assert_eq!(units(&columns), [1, 1, 0, 0]);
    assert_eq!(code(fill_units(&new, 2..3)), Code::NoSpace, "all that is left was just used");
    std::thread::sleep(SETTLED);
    open(&store, &of("t", 2, 0));
    fill_units(&open(&store, &of("t", 6, 0)), 0..2).unwrap();
    assert_eq!(units(&columns), [0, 1, 0, 0], "the read was before the last open");
}

#[test]
fn no_space_is_told_only_when_what_is_left_is_pinned() {
    let (store, _directory) = memory(4, 1.0);
    let columns = [1, 2].map(|number| open(&store, &of("t", number, 0)));
    for column in &columns {
        fill_units(column, 0..2).unwrap();
    }
    assert_eq!(store.pin(&pin('a', 1, 0, 1)).status, 0);
    assert_eq!(store.pin(&pin('b', 2, U, U + 1)).status, 0);
    std::thread::sleep(SETTLED);
    let new = open(&store, &of("t", 3, 0));
    fill_units(&new, 0..1).unwrap();
    assert_eq!(units(&columns), [1, 2], "the head is pinned, the tail behind it is not");
    let used = store.arena().used();
    assert_eq!(code(now(new.begin_write(1, 0, U, UNIT))), Code::NoSpace, "at the reservation");
    assert_eq!(store.arena().used(), used);
    assert_eq!(unpin(&store, 'b'), 1);
    assert_eq!(code(now(new.begin_write(1, 0, U, UNIT))), Code::NoSpace, "the end of a plan is a use");
    std::thread::sleep(SETTLED);
    fill_units(&new, 1..3).unwrap();
    assert_eq!(units(&columns), [1, 0]);
}

#[test]
fn of_what_a_plan_has_used_the_later_tokens_go_first() {
    let (store, _directory) = memory(8, 1.0);
    let columns = [1, 2, 3, 4].map(|number| open(&store, &of("t", number, 0)));
    for column in &columns {
        fill_units(column, 0..2).unwrap();
    }
    // One segment in each of three files, in an order that is not that of their names; the last file is what the turn writes.
    for (file, start) in [(3, 0), (1, 0), (2, 0), (1, U)] {
        assert_eq!(store.pin(&pin('a', file, start, start + U)).status, 0);
    }
    for file in [3, 1, 2] {
        read(&columns[file - 1], 0, UNIT).unwrap();
    }
    read(&columns[3], 0, 10).unwrap();
    assert_eq!(unpin(&store, 'a'), 4);
    std::thread::sleep(SETTLED);
    let new = open(&store, &of("t", 9, 0));
    for (written, expected) in (0..).zip([[2, 2, 2, 0], [2, 0, 2, 0], [0, 0, 2, 0], [0, 0, 0, 0]]) {
        fill_units(&new, 2 * written..2 * written + 2).unwrap();
        assert_eq!(units(&columns), expected);
    }
}

#[test]
fn a_log_keeps_the_higher_priority() {
    run(async {
        let mut disk = Disk::new(4 * MIB, 31 << 20);
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let kept = stored(&store, &of("t", 200, 1), 8).await;
        let plain = stored(&store, &of("t", 201, 0), 8).await;
        for number in 0..12 {
            // What was just used is exempt: a flood within that time would leave nothing else to take.
            if number % 4 == 0 {
                tokio::time::sleep(SETTLED).await;
            }
            stored(&store, &of("t", number, 0), 8).await;
        }
        for unit in 0..8 {
            assert!(get(&kept, unit * U, UNIT).await.unwrap() == pattern(UNIT as usize, unit as u8));
        }
        assert_eq!(code(get(&plain, 7 * U, UNIT).await), Code::Lost, "of the same age");
        assert!(store.report(99).items.iter().any(|item| item.file == "c9".repeat(16)));
    });
}

/// A column with so many units in the log, however long that takes while the log is full.
async fn stored(store: &Store, capability: &Capability, units: u64) -> Arc<Column> {
    let column = store.open(capability, 0).await.unwrap().0;
    let begun = Instant::now();
    for unit in 0..units {
        while let Err(full) = put(&column, 0, unit * U, &pattern(UNIT as usize, unit as u8)).await {
            assert!(full.code == Code::NoSpace && begun.elapsed() < PATIENCE / 2, "{full}");
        }
    }
    while let Err(full) = column.flush().await {
        assert!(full.code == Code::NoSpace && begun.elapsed() < PATIENCE / 2, "{full}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    column
}

#[test]
fn memory_beyond_a_share_is_lent_and_taken_back() {
    let (store, _directory) = memory(16, 0.5);
    let held = |tenant| store.held_by(tenant).0 / U;
    let first = open(&store, &of("a", 1, 9));
    fill_units(&first, 0..15).unwrap();
    assert_eq!(code(fill_units(&first, 15..16)), Code::NoSpace, "the last sixteenth is for the others");
    let other = open(&store, &of("b", 2, 0));
    fill_units(&other, 0..1).unwrap();
    assert_eq!(code(fill_units(&other, 1..2)), Code::NoSpace, "all was just used");
    std::thread::sleep(SETTLED);
    fill_units(&other, 1..8).unwrap();
    assert_eq!((held("a"), held("b")), (8, 8), "whatever the priority");
    assert_eq!(code(fill_units(&other, 8..9)), Code::NoSpace, "what is left is the other's share");
    std::thread::sleep(SETTLED);
    let more = open(&store, &of("b", 3, 0));
    fill_units(&more, 0..2).unwrap();
    assert_eq!(units(&[first.clone(), other, more]), [8, 6, 2], "its own goes first, though it is younger");
    let refused = now(open(&store, &of("c", 4, 0)).begin_write(1, 0, 0, UNIT));
    drop(refused.expect("a third one within its share takes by priority"));
    assert_eq!((held("a"), held("b"), held("c")), (8, 7, 0));
}

#[test]
fn what_others_have_within_their_shares_is_not_taken_for_one_beyond() {
    let (store, _directory) = memory(16, 0.5);
    let (first, other) = (open(&store, &of("a", 1, 0)), open(&store, &of("b", 2, 0)));
    fill_units(&first, 0..8).unwrap();
    fill_units(&other, 0..8).unwrap();
    store.pin(&pin('b', 2, 0, 8 * U));
    std::thread::sleep(SETTLED);
    let more = open(&store, &of("b", 3, 0));
    let failure = now(more.begin_write(1, 0, 0, UNIT)).err().unwrap();
    assert_eq!(failure.code, Code::NoSpace);
    assert!(failure.message.contains("node.tenant_share") && failure.message.contains("\"b\""), "{failure}");
    fill_units(&open(&store, &of("a", 4, 0)), 0..1).unwrap();
    assert_eq!(units(&[first, other]), [7, 8]);
}

#[test]
fn nothing_counts_for_a_tenant_that_has_nothing() {
    run(async {
        let mut disk = Disk::new(4 * MIB, 32 << 20);
        disk.logs = 2;
        disk.flush_delay = Duration::ZERO;
        let store = disk.open().await;
        let column = stored(&store, &of("a", 1, 0), 3).await;
        put(&column, 0, 0, &pattern(1000, 7)).await.unwrap();
        column.flush().await.unwrap();
        let records = || {
            let page = store.list(&List { after: None, limit: 9 }).unwrap();
            page.items.iter().map(|item| item.nvme_bytes).sum::<u64>()
        };
        let (dram, log) = store.held_by("a");
        assert_eq!((dram, log), (store.arena().used() as u64, records()));
        assert!(dram == 3 * U && log >= 3 * U, "{dram} {log}");
        drop(column);
        store.close(PATIENCE).await.unwrap();
        drop(store);
        let store = disk.open().await;
        assert_eq!(store.held_by("a"), (0, 0), "nobody knows whose it is");
        let column = store.open(&of("a", 1, 0), 0).await.unwrap().0;
        assert_eq!(store.held_by("a"), (0, log));
        get(&column, 0, UNIT).await.unwrap();
        assert_eq!(store.held_by("a"), (U, log));
        store.delete(&[(column.file(), 0)]).unwrap();
        assert_eq!(store.held_by("a"), (0, 0));
    });
}

#[test]
fn two_tenants_that_write_at_once_stay_within_their_shares() {
    run(async {
        let mut disk = Disk::new(8 * MIB, 256 << 20);
        disk.flush_delay = Duration::ZERO;
        disk.tenant_share = 0.5;
        let store = Arc::new(disk.open().await);
        for (number, tenant) in [(0, "a"), (1, "b")] {
            stored(&store, &of(tenant, number, 0), 16).await;
        }
        assert_eq!(store.arena().used(), store.arena().capacity());
        let most = ["a", "b"].map(|tenant| (tenant, AtomicU64::new(0)));
        let over = AtomicBool::new(false);
        let writer = |tenant: &'static str, first: u8| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for number in first..first + 12 {
                    let column = store.open(&of(tenant, number, 0), 0).await.unwrap().0;
                    for unit in 0..8 {
                        put(&column, 0, unit * U, &pattern(UNIT as usize, number)).await.unwrap();
                    }
                }
            })
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    for (tenant, most) in &most {
                        most.fetch_max(store.held_by(tenant).0, SeqCst);
                    }
                }
            });
            tokio::task::block_in_place(|| {
                let both = async { tokio::join!(writer("a", 10), writer("b", 50)) };
                let (a, b) = tokio::runtime::Handle::current().block_on(both);
                over.store(true, SeqCst);
                a.unwrap();
                b.unwrap();
            });
        });
        let bound = store.arena().capacity() as u64 / 2;
        for (tenant, most) in most {
            assert_eq!(most.into_inner(), bound, "{tenant}");
        }
        for (tenant, number) in [("a", 10), ("b", 61)] {
            let column = store.open(&of(tenant, number, 0), 0).await.unwrap().0;
            assert!(get(&column, 7 * U, UNIT).await.unwrap() == pattern(UNIT as usize, number));
        }
    });
}

/// A tenant stores 6 MiB in a log that may hold 18, and another 24 MiB after it, more than fits at all; how much of the first is
/// left.
async fn left_after_a_flood(share: f64) -> (u64, u64) {
    let mut disk = Disk::new(4 * MIB, 31 << 20);
    disk.flush_delay = Duration::ZERO;
    disk.tenant_share = share;
    let store = disk.open().await;
    let mut quiet = Vec::new();
    for number in 0..3 {
        quiet.push(stored(&store, &of("quiet", number, 0), 8).await);
    }
    for number in 0..12 {
        stored(&store, &of("loud", 100 + number, 9), 8).await;
    }
    let mut left = 0;
    for column in quiet {
        for unit in 0..8 {
            match get(&column, unit * U, UNIT).await {
                Ok(bytes) => {
                    assert!(bytes == pattern(UNIT as usize, unit as u8));
                    left += U;
                }
                Err(failure) => assert_eq!(failure.code, Code::Lost, "{failure}"),
            }
        }
    }
    (left, store.held_by("loud").1)
}

#[test]
fn a_share_of_the_log_is_the_tenants_own() {
    run(async {
        let (left, loud) = left_after_a_flood(0.4).await;
        assert_eq!(left, 6 << 20);
        assert!(loud <= 14 << 20, "{loud}: what is left to it and what is on its way");
        let (left, _) = left_after_a_flood(1.0).await;
        assert!(left < 6 << 20, "without a bound it would have gone");
    });
}

#[test]
fn a_tenant_pins_its_share_of_the_log_and_the_others_lose_nothing_to_it() {
    run(async {
        let mut disk = Disk::new(4 * MIB, 124 << 20);
        disk.flush_delay = Duration::ZERO;
        disk.tenant_share = 0.5;
        let store = disk.open().await;
        let quiet = stored(&store, &of("quiet", 255, 0), 120).await;
        let mut number = 0;
        loop {
            assert!(number < 250, "the log cannot hold that much beside what the others have");
            let column = store.open(&of("loud", number, 0), 0).await.unwrap().0;
            put(&column, 0, 0, &pattern(UNIT as usize, number)).await.unwrap();
            let reply = store.pin(&pin('a', number, 0, U));
            if reply.status != 0 {
                assert!(
                    reply.status == Code::Overloaded as u32 && reply.message.contains("\"loud\""),
                    "{reply:?}"
                );
                break;
            }
            column.flush().await.unwrap();
            number += 1;
        }
        // From now on it goes round what it has not pinned.
        for more in 250..253 {
            tokio::time::sleep(SETTLED).await;
            stored(&store, &of("loud", more, 0), 1).await;
        }
        for unit in 0..120 {
            get(&quiet, unit * U, UNIT).await.unwrap();
        }
        tokio::time::sleep(SETTLED).await;
        stored(&store, &of("other", 254, 0), 8).await;
        for number in 0..number {
            let column = store.open(&of("loud", number, 0), 0).await.unwrap().0;
            assert!(
                get(&column, 0, UNIT).await.unwrap() == pattern(UNIT as usize, number),
                "pinned: {number}"
            );
        }
    });
}
