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
