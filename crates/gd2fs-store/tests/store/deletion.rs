use super::*;

#[test]
fn deletion_frees_memory_and_outlives_late_writers() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(UNIT as usize, 1)).unwrap();
    let late = now(column.begin_write(1, 0, 10, 100)).unwrap();
    let name = (column.file(), 0);
    assert_eq!(bench.store.delete(&[name, name]).unwrap(), [u64::from(UNIT), 0]);
    fill(&late, &[7; 100]);
    // SAFETY: filled.
    assert_eq!(code(unsafe { publish(late, None, || false) }), Code::Deleted);
    assert_eq!(bench.store.arena().used(), 0, "also what the late writer held");
    assert_eq!(code(read(&column, 0, 1)), Code::Deleted);
    assert_eq!(code(now(bench.store.open(&capability(0, 1, 1), 0))), Code::Deleted);
    assert_eq!(code(now(bench.store.seal(&seal(0, 0)))), Code::Deleted);
    assert!(bench.store.stat(column.file(), 0).unwrap().deleted);
    assert!(bench.store.stat(column.file(), 1).is_none(), "of which it has never heard");
    assert_eq!(bench.store.columns(), 0);
}

#[test]
fn a_file_that_was_never_seen_cannot_appear_after_its_deletion() {
    let bench = Bench::new(64 << 20);
    let file = capability(0, 1, 1).file_id().unwrap();
    assert_eq!(bench.store.delete(&[(file, 0)]).unwrap(), [0]);
    assert_eq!(code(now(bench.store.open(&capability(0, 1, 1), 0))), Code::Deleted);
    let bench = bench.restart();
    assert_eq!(
        code(now(bench.store.open(&capability(0, 1, 1), 0))),
        Code::Deleted,
        "not even after a restart"
    );
}

/// The machine's clock may have been set meanwhile, by a day or a decade: only what control said counts.
#[test]
fn a_deleted_file_stays_deleted_until_control_says_that_its_time_is_over() {
    const DELETED_AT: f64 = 1_000_000_000.0;
    let life = TOMBSTONE_LIFE.as_secs_f64();
    let mut bench = Bench::new(64 << 20);
    let name = (capability(0, 1, 1).file_id().unwrap(), 0);
    bench.store.clock().hear(DELETED_AT);
    bench.store.delete(&[name]).unwrap();
    for passed in [-86_400.0, 1.0, life - 1.0] {
        bench = bench.restart();
        let opened = |bench: &Bench| code(now(bench.store.open(&capability(0, 1, 1), 0)));
        bench.store.clock().hear(DELETED_AT + passed);
        // Deletions are when tombstones go.
        bench.store.delete(&[(7, 0)]).unwrap();
        assert_eq!(opened(&bench), Code::Deleted, "{passed} s later");
    }
    bench.store.clock().hear(DELETED_AT + life);
    bench.store.delete(&[(8, 0)]).unwrap();
    assert!(now(bench.store.open(&capability(0, 1, 1), 0)).is_ok(), "what nobody may open takes no room");
}
