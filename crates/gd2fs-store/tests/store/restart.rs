use super::*;

#[test]
fn what_was_lost_is_reported_and_can_be_written_again() {
    let bench = Bench::new(64 << 20);
    write(&bench.open(0), 0, 0, b"abc").unwrap();
    let bench = bench.restart();
    let (column, opened) = now(bench.store.open(&capability(0, 1, 1), 0)).unwrap();
    assert!(opened.lost);
    assert_eq!(code(read(&column, 0, 3)), Code::Lost);
    assert_eq!(code(read(&column, 1 << 30, 3)), Code::Lost, "nobody knows where it ended");
    assert_eq!(code(now(bench.store.seal(&seal(0, 3)))), Code::Lost);
    assert_eq!(code(now(bench.store.seal(&seal(5, 3)))), Code::Lost, "the grant is lost with the rest");
    write(&column, 0, 0, b"new").unwrap();
    assert_eq!(read(&column, 0, 3).unwrap(), b"new");
    assert_eq!(code(read(&column, 0, 4)), Code::Lost);
}

#[test]
fn a_column_that_was_placed_anew_is_not_lost() {
    let bench = Bench::new(64 << 20).restart();
    let (column, opened) = now(bench.store.open(&capability(0, 2, 2), 0)).unwrap();
    assert!(!opened.lost);
    assert_eq!(now(column.read(2, 0, 3, true)).unwrap().bytes(), b"");
}

#[test]
fn old_epochs_stay_refused() {
    let bench = Bench::new(64 << 20);
    now(bench.store.open(&capability(0, 3, 1), 0)).unwrap();
    let bench = bench.restart();
    assert_eq!(code(now(bench.store.open(&capability(0, 2, 1), 0))), Code::StaleLayout);
    assert_eq!(code(now(bench.store.open(&capability(0, 1, 1), 0))), Code::StaleLayout);
    now(bench.store.open(&capability(0, 3, 1), 0)).unwrap();
}
