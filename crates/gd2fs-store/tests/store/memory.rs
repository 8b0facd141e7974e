use super::*;

#[test]
fn no_space_is_told_at_the_reservation() {
    let bench = Bench::new(2 * UNIT as usize);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(UNIT as usize, 1)).unwrap();
    let waiting = now(column.begin_write(1, 0, u64::from(UNIT), UNIT)).unwrap();
    assert_eq!(code(now(column.begin_write(1, 0, 2 * u64::from(UNIT), 1))), Code::NoSpace);
    drop(waiting);
    assert_eq!(bench.store.arena().used(), UNIT as usize, "an abandoned reservation leaves nothing behind");
    write(&column, 0, 2 * u64::from(UNIT), b"x").unwrap();
    assert_eq!(code(write(&column, 0, 10, &[1; 10])), Code::NoSpace, "an overwrite needs a second frame");
    assert_eq!(read(&column, 0, UNIT).unwrap(), pattern(UNIT as usize, 1));
}

#[test]
fn frames_grow_with_what_is_written() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let bytes = pattern(UNIT as usize, 5);
    for (i, part) in bytes.chunks(5000).enumerate() {
        write(&column, 0, 5000 * i as u64, part).unwrap();
        let end = 5000 * i + part.len();
        assert_eq!(column.stat().bytes as usize, end.next_power_of_two().max(32 << 10));
    }
    assert_eq!(read(&column, 0, UNIT).unwrap(), bytes);
}

#[test]
fn writers_of_one_chunk_share_its_frame() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let quarter = UNIT / 4;
    let tickets: Vec<_> = (0..4)
        .rev()
        .map(|i| (i, now(column.begin_write(1, 0, u64::from(i * quarter), quarter)).unwrap()))
        .collect();
    assert_eq!(bench.store.arena().used(), UNIT as usize);
    for (i, ticket) in tickets {
        fill(&ticket, &pattern(quarter as usize, i as u8));
        // SAFETY: filled.
        unsafe { publish(ticket, None, || false) }.unwrap();
    }
    let expected: Vec<u8> = (0..4).flat_map(|i| pattern(quarter as usize, i)).collect();
    assert_eq!(read(&column, 0, UNIT).unwrap(), expected);
}
