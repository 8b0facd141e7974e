use super::tiers::{Disk, MIB, PATIENCE, get, put, run};
use super::*;

#[test]
fn a_higher_grant_drops_what_was_not_sealed() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, &pattern(UNIT as usize, 1)).unwrap();
    write(&column, 1, u64::from(UNIT), &pattern(1000, 2)).unwrap();
    assert_eq!(now(bench.store.seal(&seal(1, 50_000))).unwrap(), 50_000);
    let (_, opened) = now(bench.store.open(&capability(2, 1, 1), 0)).unwrap();
    assert_eq!((opened.length, opened.sealed, opened.grant), (50_000, 50_000, 2));
    assert_eq!(read(&column, 0, UNIT).unwrap(), pattern(UNIT as usize, 1)[..50_000]);
    assert_eq!(code(write(&column, 1, 60_000, b"x")), Code::StaleWriter);
    assert_eq!(code(write(&column, 0, 60_000, b"x")), Code::StaleWriter);
    assert_eq!(code(now(bench.store.open(&capability(1, 1, 1), 0))), Code::StaleWriter);
    assert_eq!(code(now(bench.store.open(&capability(0, 1, 1), 0))), Code::StaleWriter);
    write(&column, 2, 50_000, &pattern(10, 3)).unwrap();
    assert_eq!(read(&column, 49_999, 11).unwrap()[1..], pattern(10, 3));
}

#[test]
fn readers_never_change_a_grant() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, b"abc").unwrap();
    let reader = Capability { rights: vec![Right::Read], ..capability(9, 1, 1) };
    assert_eq!(now(bench.store.open(&reader, 0)).unwrap().1.grant, 1);
    let old_reader = Capability { rights: vec![Right::Read], ..capability(0, 1, 1) };
    now(bench.store.open(&old_reader, 0)).unwrap();
    assert_eq!(read(&column, 0, 3).unwrap(), b"abc");
}

#[test]
fn a_takeover_while_a_write_is_received_wins() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    let late = now(column.begin_write(1, 1, 0, 1000)).unwrap();
    fill(&late, &pattern(500, 1).repeat(2));
    bench.open(2);
    write(&column, 2, 0, &pattern(1000, 2)).unwrap();
    fill(&late, &pattern(1000, 7));
    // SAFETY: filled.
    assert_eq!(code(unsafe { publish(late, None, || false) }), Code::StaleWriter);
    assert_eq!(read(&column, 0, 1000).unwrap(), pattern(1000, 2));
}

#[test]
fn a_fenced_connection_publishes_nothing() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let late = now(column.begin_write(1, 0, 0, 100)).unwrap();
    fill(&late, &pattern(100, 1));
    // SAFETY: filled.
    assert_eq!(code(unsafe { publish(late, None, || true) }), Code::StaleWriter);
    assert_eq!(column.stat().length, 0);
    assert_eq!(bench.store.arena().used(), 0);
}

#[test]
fn seals() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, &pattern(1000, 1)).unwrap();
    let late = now(column.begin_write(1, 1, 900, 200)).unwrap();
    assert_eq!(code(now(bench.store.seal(&seal(1, 1001)))), Code::Hole);
    assert_eq!(code(now(bench.store.seal(&seal(0, 1000)))), Code::StaleWriter);
    assert_eq!(code(now(bench.store.seal(&seal(2, 1000)))), Code::StaleWriter);
    assert_eq!(now(bench.store.seal(&seal(1, 1000))).unwrap(), 1000);
    assert_eq!(now(bench.store.seal(&seal(1, 10))).unwrap(), 1000, "a seal never sinks");
    assert_eq!(now(bench.store.seal(&seal(1, 1000))).unwrap(), 1000);
    fill(&late, &pattern(200, 9));
    // SAFETY: filled.
    assert_eq!(code(unsafe { publish(late, None, || false) }), Code::Sealed);
    assert_eq!(code(now(column.begin_write(1, 1, 999, 10))), Code::Sealed);
    write(&column, 1, 1000, b"more").unwrap();
    assert_eq!(read(&column, 0, 1004).unwrap(), [pattern(1000, 1), b"more".to_vec()].concat());
}

#[test]
fn a_damaged_run_under_the_seal_stops_a_takeover_and_changes_nothing() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, &pattern(1000, 1)).unwrap();
    now(bench.store.seal(&seal(1, 500))).unwrap();
    column.flip_bit(700);
    assert_eq!(code(now(bench.store.open(&capability(2, 1, 1), 0))), Code::Corrupt);
    assert_eq!((column.stat().grant, column.stat().length), (1, 1000));
}

#[test]
fn layouts_of_another_epoch_are_refused() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, b"abc").unwrap();
    let late = now(column.begin_write(1, 0, 3, 3)).unwrap();
    fill(&late, b"def");
    now(bench.store.open(&capability(0, 4, 1), 0)).unwrap();
    // SAFETY: filled.
    assert_eq!(code(unsafe { publish(late, None, || false) }), Code::StaleLayout);
    assert_eq!(code(now(column.read(1, 0, 3, true))), Code::StaleLayout);
    assert_eq!(code(now(bench.store.open(&capability(0, 3, 1), 0))), Code::StaleLayout);
    assert_eq!(now(column.read(4, 0, 9, true)).unwrap().bytes(), b"abc", "bytes stay");
    assert_eq!(code(now(bench.store.open(&capability(0, 5, 2), 0))), Code::StaleIncarnation);
}

#[test]
fn a_grant_writes_each_byte_once() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(3);
    write(&column, 3, 0, &pattern(50_000, 1)).unwrap();
    write(&column, 3, 0, &pattern(50_000, 1)).expect("a repetition of the same write is the same write");
    write(&column, 3, 0, &pattern(60_000, 1)).expect("also where it goes on");
    assert_eq!(code(write(&column, 3, 0, &pattern(50_000, 2))), Code::StaleWriter);
    assert_eq!(code(write(&column, 3, 59_999, b"??")), Code::StaleWriter, "all or nothing");
    assert_eq!(read(&column, 0, 70_000).unwrap(), pattern(60_000, 1));
    // A retry of the request takes a higher grant, which drops what is not sealed: then other bytes are welcome.
    let column = bench.open(4);
    write(&column, 4, 0, &pattern(50_000, 2)).unwrap();
    assert_eq!(read(&column, 0, 70_000).unwrap(), pattern(50_000, 2));
}

#[test]
fn a_takeover_drops_more_chunks_than_notes_can_wait() {
    const SMALL: u32 = 32 << 10;
    const CHUNKS: u64 = 5000;
    let small = |grant| Capability { stripe_unit: SMALL, ..capability(grant, 1, 1) };
    let at = |index| index * u64::from(SMALL);
    run(async {
        let mut disk = Disk::new(256 * MIB, 256 << 20);
        let store = disk.open().await;
        let file = store.open(&small(1), 0).await.unwrap().0;
        for index in 0..CHUNKS {
            put(&file, 1, at(index), &pattern(1000, 1)).await.unwrap();
        }
        file.flush().await.unwrap();
        let (_, opened) = store.open(&small(2), 0).await.unwrap();
        assert_eq!((opened.length, opened.grant), (0, 2));
        put(&file, 2, at(7), &pattern(1000, 2)).await.unwrap();
        file.flush().await.unwrap();
        store.close(PATIENCE).await.unwrap();
        drop((file, store));
        let store = disk.open().await;
        let (file, opened) = store.open(&small(2), 0).await.unwrap();
        assert_eq!(opened.length, at(7) + 1000);
        for index in (0..CHUNKS).step_by(37) {
            assert!(get(&file, at(index), 1000).await.is_err() || index == 7, "chunk {index} came back");
        }
        assert!(get(&file, at(7), 1000).await.unwrap() == pattern(1000, 2));
    });
}
