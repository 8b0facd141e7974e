use std::time::{Duration, Instant};

use gd2fs_wire::messages::{
    ColumnName, EXTENTS_MAX, List, PIN_TTL_MS_MAX, PinItem, Scrub, ScrubState, Tier, UnpinItem, Warmth,
};

use super::*;

const U: u64 = UNIT as u64;

fn pin(start: u64, end: u64) -> PinItem {
    PinItem { pin: "a".repeat(32), file: FILE.into(), column: 0, epoch: 1, start, end, ttl_ms: 60_000 }
}

fn list(store: &Store, after: Option<ColumnName>, limit: usize) -> (Vec<(String, u32)>, Option<ColumnName>) {
    let page = store.list(&List { after, limit }).unwrap();
    (page.items.into_iter().map(|item| (item.file, item.column)).collect(), page.next)
}

/// Starts a scrub and waits for its end.
fn scrubbed(store: &Store) -> ScrubState {
    let begun = Instant::now();
    let before = store.scrub(&Scrub { start: false }).rounds;
    assert!(store.scrub(&Scrub { start: true }).rounds <= before + 1);
    loop {
        let state = store.scrub(&Scrub { start: false });
        if !state.running {
            assert_eq!(state.rounds, before + 1);
            return state;
        }
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_node_without_a_log_makes_nothing_durable() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let failure = now(column.flush()).unwrap_err();
    assert_eq!(failure.code, Code::Unsupported);
    assert!(failure.message.contains("node.logs"), "{}", failure.message);
}

#[test]
fn warm_and_where_tell_what_is_there() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 100, &pattern(1000, 1)).unwrap();
    write(&column, 0, U - 10, &pattern(10, 2)).unwrap();
    write(&column, 0, U, &pattern(70_000, 3)).unwrap();
    write(&column, 0, 3 * U + 5, &pattern(5, 4)).unwrap();
    let (dram, hole) = (Tier::Dram, Tier::Hole);
    let all = column.whereabouts(0, 4 * U).unwrap();
    assert_eq!(
        all.extents,
        [
            (0, 100, hole),
            (100, 1100, dram),
            (1100, U - 10, hole),
            (U - 10, U + 70_000, dram),
            (U + 70_000, 3 * U + 5, hole),
            (3 * U + 5, 3 * U + 10, dram),
        ],
        "neighbours are one extent, across chunks too"
    );
    assert_eq!((all.next, all.rest), (None, Some((3 * U + 10, hole))));
    assert_eq!(column.whereabouts(500, 501).unwrap().extents, [(500, 501, dram)]);
    let warm = |start, end| column.warm(start, end).unwrap();
    assert_eq!(warm(0, 4 * U), Warmth { dram: 71_015, nvme: 0, missing: 4 * U - 71_015, unreadable: 0 });
    assert_eq!(warm(1099, U + 1), Warmth { dram: 12, nvme: 0, missing: U + 1 - 1099 - 12, unreadable: 0 });
    assert_eq!(
        warm(0, u64::MAX),
        Warmth { dram: 71_015, nvme: 0, missing: u64::MAX - 71_015, unreadable: 0 }
    );
    for (start, end) in [(5, 5), (6, 5), (u64::MAX, 0)] {
        assert_eq!(code(column.warm(start, end)), Code::BadRequest);
        assert_eq!(code(column.whereabouts(start, end)), Code::BadRequest);
    }
    bench.store.delete(&[(column.file(), 0)]).unwrap();
    assert_eq!(code(column.warm(0, 1)), Code::Deleted);
    assert_eq!(code(column.whereabouts(0, 1)), Code::Deleted);
}

#[test]
fn only_the_chunks_of_the_column_count() {
    let bench = Bench::new(64 << 20);
    let capability = Capability {
        width: 2,
        columns: vec![(1, 1), (1, 1)],
        nodes: vec![vec!["n1".into()], vec!["n1".into()]],
        ..capability(0, 1, 1)
    };
    let column = now(bench.store.open(&capability, 1)).unwrap().0;
    write(&column, 0, U, &pattern(UNIT as usize, 1)).unwrap();
    let found = column.whereabouts(10, 5 * U).unwrap();
    assert_eq!((found.extents, found.rest), (vec![(U, 2 * U, Tier::Dram)], Some((2 * U, Tier::Hole))));
    write(&column, 0, 5 * U, &[1]).unwrap();
    let found = column.whereabouts(10, 5 * U).unwrap();
    assert_eq!(found.extents, [(U, 2 * U, Tier::Dram), (3 * U, 4 * U, Tier::Hole)], "a hole before the end");
    assert_eq!((found.next, found.rest), (None, None));
    assert_eq!(column.warm(10, 5 * U).unwrap(), Warmth { dram: U, nvme: 0, missing: U, unreadable: 0 });
    assert_eq!(column.warm(0, U).unwrap(), Warmth::default());
    assert_eq!(column.whereabouts(0, U).unwrap().extents, []);
    let pinned = bench.store.pin(&PinItem { column: 1, ..pin(0, 3 * U) });
    assert_eq!((pinned.status, pinned.valid), (0, None));
    assert_eq!(bench.store.pin(&PinItem { column: 1, ..pin(0, 3 * U + 1) }).valid, Some(3 * U));
}

#[test]
fn where_is_told_in_pages_that_lead_to_the_end() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    // Every other 100 bytes; more extents than one answer takes.
    for index in 0..EXTENTS_MAX as u64 {
        write(&column, 0, index * 200, &[1; 100]).unwrap();
    }
    let end = EXTENTS_MAX as u64 * 200;
    let first = column.whereabouts(0, end).unwrap();
    assert_eq!((first.extents.len(), first.next), (EXTENTS_MAX, Some(end / 2)));
    let second = column.whereabouts(end / 2, end).unwrap();
    assert_eq!((second.extents.len(), second.next), (EXTENTS_MAX - 1, None));
    assert_eq!(second.rest, Some((end - 100, Tier::Hole)));
}

#[test]
fn a_hole_of_very_many_chunks_is_told_at_once() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &[1; 10]).unwrap();
    let far = column.whereabouts(0, 1 << 62).unwrap();
    assert_eq!(far.extents, [(0, 10, Tier::Dram)]);
    assert_eq!((far.next, far.rest), (None, Some((10, Tier::Hole))));
    assert_eq!(column.whereabouts(1 << 61, 1 << 62).unwrap().rest, Some((1 << 61, Tier::Hole)));
    // Before the end too.
    write(&column, 0, 1 << 60, &[1; 10]).unwrap();
    let sparse = column.whereabouts(0, 1 << 62).unwrap();
    let expected = [(0, 10, Tier::Dram), (10, 1 << 60, Tier::Hole), (1 << 60, (1 << 60) + 10, Tier::Dram)];
    assert_eq!((sparse.extents.as_slice(), sparse.next), (expected.as_slice(), None));
}

#[test]
fn what_an_earlier_incarnation_had_is_lost_and_not_a_hole() {
    let bench = Bench::new(64 << 20);
    write(&bench.open(0), 0, 0, &[1; 10]).unwrap();
    let bench = bench.restart();
    let column = bench.open(0);
    let found = column.whereabouts(0, 10).unwrap();
    assert_eq!((found.extents, found.rest), (vec![], Some((0, Tier::Lost))));
    assert!(column.stat().end_lost);
    assert_eq!(column.warm(0, 10).unwrap(), Warmth { dram: 0, nvme: 0, missing: 10, unreadable: 0 });
}

#[test]
fn a_pin_says_how_much_of_it_is_there() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(UNIT as usize, 1)).unwrap();
    write(&column, 0, U, &pattern(50, 1)).unwrap();
    let said = |item: PinItem| {
        let reply = bench.store.pin(&item);
        (Code::from_u32(reply.status), reply.valid)
    };
    assert_eq!(said(pin(0, U + 50)), (Code::Ok, None));
    assert_eq!(said(pin(0, U + 51)), (Code::Ok, Some(U + 50)));
    assert_eq!(said(pin(U + 60, U + 70)), (Code::Ok, Some(U + 60)));
    assert_eq!(said(PinItem { epoch: 2, ..pin(0, 10) }), (Code::StaleLayout, Some(0)));
    assert_eq!(said(PinItem { column: 1, ..pin(0, 10) }), (Code::NotFound, Some(0)));
    for bad in [
        PinItem { pin: "x".into(), ..pin(7, 10) },
        PinItem { file: "x".into(), ..pin(7, 10) },
        PinItem { end: 7, ..pin(7, 10) },
        PinItem { ttl_ms: 0, ..pin(7, 10) },
        PinItem { ttl_ms: PIN_TTL_MS_MAX + 1, ..pin(7, 10) },
    ] {
        assert_eq!(said(bad), (Code::BadRequest, Some(7)));
    }
    let unpin = |pin: &str| bench.store.unpin(&UnpinItem { pin: pin.into() });
    assert_eq!(
        unpin(&"a".repeat(32)).unwrap().ranges,
        2,
        "two ranges of chunks, of which one was named twice"
    );
    assert_eq!(unpin(&"a".repeat(32)).unwrap().ranges, 0);
    assert_eq!(code(unpin("a")), Code::BadRequest);
    bench.store.delete(&[(column.file(), 0)]).unwrap();
    assert_eq!(said(pin(0, 10)), (Code::Deleted, Some(0)));
}

#[test]
fn columns_are_listed_in_order_and_page_by_page() {
    let bench = Bench::new(64 << 20);
    assert_eq!(list(&bench.store, None, 10), (vec![], None));
    let mut wanted = Vec::new();
    for file in 0..50u32 {
        let file = format!("{:032x}", file.wrapping_mul(0x9e37_79b9));
        let capability = Capability {
            file: file.clone(),
            width: 2,
            columns: vec![(1, 1); 2],
            nodes: vec![vec!["n1".into()]; 2],
            ..capability(0, 1, 1)
        };
        for column in [1, 0] {
            now(bench.store.open(&capability, column)).unwrap();
            wanted.push((file.clone(), column));
        }
    }
    wanted.sort();
    for limit in [1, 7, 99, 100, 101] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let (page, next) = list(&bench.store, after, limit);
            assert!(page.len() <= limit);
            found.extend(page);
            after = next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, wanted, "{limit}");
    }
    let deleted = (u128::from_str_radix(&wanted[0].0, 16).unwrap(), wanted[0].1);
    bench.store.delete(&[deleted]).unwrap();
    assert_eq!(list(&bench.store, None, 100).0, wanted[1..]);
    for limit in [0, 4097] {
        assert_eq!(code(bench.store.list(&List { after: None, limit })), Code::BadRequest);
    }
    let nonsense = Some(ColumnName { file: "z".into(), column: 0 });
    assert_eq!(code(bench.store.list(&List { after: nonsense, limit: 1 })), Code::BadRequest);
}

#[test]
fn a_listed_column_says_how_much_of_it_is_valid() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(3);
    write(&column, 3, 0, &pattern(1000, 1)).unwrap();
    now(bench.store.seal(&seal(3, 900))).unwrap();
    let item = |store: &Store| store.list(&List { after: None, limit: 1 }).unwrap().items.remove(0);
    let one = item(&bench.store);
    assert_eq!((one.epoch, one.sealed, one.grant, one.length, one.valid), (1, 900, 3, 1000, None));
    assert_eq!((one.dram_bytes, one.nvme_bytes), (column.stat().bytes, 0));
    write(&column, 3, 2 * U, &[1]).unwrap();
    assert_eq!((item(&bench.store).length, item(&bench.store).valid), (2 * U + 1, Some(1000)));
}

#[test]
fn a_scrub_drops_what_has_changed_by_itself_and_tells_control() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    for chunk in 0..4 {
        write(&column, 0, chunk * U, &pattern(UNIT as usize, chunk as u8)).unwrap();
    }
    let clean = scrubbed(&bench.store);
    assert_eq!((clean.bytes, clean.bytes_total, clean.corrupt_chunks), (4 * U, 4 * U, 0));
    assert_eq!(bench.store.report(10).items, []);
    column.flip_bit(2 * U + 77);
    column.flip_bit(2 * U + 100_000);
    let dirty = scrubbed(&bench.store);
    assert_eq!((dirty.bytes, dirty.corrupt_chunks, dirty.rounds), (4 * U, 1, 2));
    assert_eq!(code(read(&column, 2 * U, 10)), Code::Lost);
    assert_eq!(read(&column, 3 * U, 1000).unwrap(), pattern(UNIT as usize, 3)[..1000]);
    assert_eq!(
        column.whereabouts(U, 4 * U).unwrap().extents,
        [(U, 2 * U, Tier::Dram), (2 * U, 3 * U, Tier::Lost), (3 * U, 4 * U, Tier::Dram)]
    );
    let report = bench.store.report(10);
    assert_eq!(report.items.len(), 1);
    let item = &report.items[0];
    assert_eq!((item.file.as_str(), item.column, item.valid, item.length), (FILE, 0, Some(2 * U), 4 * U));
    assert_eq!(bench.store.report(10), report, "until control has it");
    bench.store.reported(report.sequence);
    assert_eq!(bench.store.report(10).items, []);
    assert_eq!(scrubbed(&bench.store).corrupt_chunks, 0, "it is gone");
}

#[test]
fn a_new_grant_begins_without_what_was_dropped_beyond_the_seal() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, &pattern(UNIT as usize, 1)).unwrap();
    now(bench.store.seal(&seal(1, U))).unwrap();
    write(&column, 1, U, &pattern(100, 2)).unwrap();
    column.flip_bit(U + 5);
    assert_eq!(scrubbed(&bench.store).corrupt_chunks, 1);
    assert_eq!(bench.store.report(1).items[0].valid, Some(U));
    bench.open(2);
    assert_eq!(
        bench.store.report(1).items[0].valid,
        None,
        "what grant 1 wrote beyond the seal counts no more"
    );
    assert_eq!(bench.store.report(1).items[0].sealed, U);
}

#[test]
fn a_store_that_goes_takes_its_scrub_along() {
    let bench = Bench::new(256 << 20);
    let column = bench.open(0);
    let bytes = pattern(UNIT as usize, 1);
    (0..400).for_each(|chunk| write(&column, 0, chunk * U, &bytes).unwrap());
    drop(column);
    assert!(bench.store.scrub(&Scrub { start: true }).running, "100 MiB take a while");
    assert!(bench.store.scrub(&Scrub { start: true }).rounds == 0, "one at a time");
    let begun = Instant::now();
    drop(bench);
    assert!(begun.elapsed() < Duration::from_secs(2));
}
