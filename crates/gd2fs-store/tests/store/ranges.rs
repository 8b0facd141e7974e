use proptest::prelude::*;

use super::*;

#[test]
fn holes_short_reads_and_overwrites() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    assert_eq!(read(&column, 0, 100).unwrap(), b"", "nothing exists: the column ends at 0");
    write(&column, 0, 1000, &pattern(5000, 1)).unwrap();
    assert_eq!(read(&column, 1000, 9000).unwrap(), pattern(5000, 1), "short at the end");
    assert_eq!(read(&column, 6000, 1).unwrap(), b"");
    assert_eq!(code(read(&column, 999, 2)), Code::Hole);
    assert_eq!(code(read(&column, 0, 1000)), Code::Hole);
    write(&column, 0, 2 * u64::from(UNIT), b"x").unwrap();
    assert_eq!(code(read(&column, 1000, 9000)), Code::Hole, "the column ends later now");
    assert_eq!(column.stat().length, 2 * u64::from(UNIT) + 1);
    write(&column, 0, 2000, &pattern(10, 9)).unwrap();
    let mut expected = pattern(5000, 1);
    expected[1000..1010].copy_from_slice(&pattern(10, 9));
    assert_eq!(read(&column, 1000, 5000).unwrap(), expected);
}

#[test]
fn a_small_overwrite_moves_only_its_own_bytes_unless_somebody_reads() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let mut expected = pattern(UNIT as usize, 1);
    write(&column, 0, 0, &expected).unwrap();
    let address = || now(column.read(1, 0, 1, true)).unwrap().bytes().as_ptr();
    let first = address();
    let mut overwrite = |start: usize, seed: u8| {
        let bytes = pattern(5000, seed);
        write(&column, 0, start as u64, &bytes).unwrap();
        expected[start..start + 5000].copy_from_slice(&bytes);
        assert!(read(&column, 0, UNIT).unwrap() == expected);
    };
    overwrite(30_000, 2);
    assert_eq!(address(), first, "the rest of the chunk was not copied");

    let view = now(column.read(1, 0, UNIT, true)).unwrap();
    let seen = view.bytes().to_vec();
    overwrite(31_000, 3);
    assert!(view.bytes() == seen, "bytes changed under a reader");
    assert_ne!(address(), first);
    drop(view);

    let second = address();
    let held = now(column.begin_write(1, 0, u64::from(UNIT), 10)).unwrap();
    overwrite(60_000, 4);
    assert_eq!(address(), second, "a write to another chunk holds nothing of this one");
    drop(held);
    write(&column, 0, 0, &pattern(UNIT as usize, 5)).unwrap();
    assert_ne!(address(), second, "what replaces all of a chunk is not copied");
    assert_eq!(bench.store.arena().used(), UNIT as usize);
}

#[test]
fn requests_that_no_chunk_holds_are_refused() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    assert_eq!(code(now(column.read(1, u64::from(UNIT) - 1, 2, true))), Code::BadRequest);
    assert_eq!(code(now(column.begin_write(1, 0, u64::from(UNIT) - 1, 2))), Code::BadRequest);
    assert_eq!(code(now(column.begin_write(1, 0, 0, 0))), Code::BadRequest);
    assert_eq!(code(now(column.read(1, u64::MAX - 4, 5, true))), Code::BadRequest);
}

#[test]
fn damage_is_noticed_and_never_spreads() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(65536, 3)).unwrap();
    column.flip_bit(40_000);
    assert_eq!(code(read(&column, 39_000, 10)), Code::Corrupt, "a part: the node verifies");
    assert_eq!(code(read(&column, 32768, 32768)), Code::Checksum, "a whole piece: the reader verifies");
    assert_eq!(read(&column, 0, 32768).unwrap(), pattern(65536, 3)[..32768], "the other piece is fine");
    assert_eq!(
        code(write(&column, 0, 50_000, &[1; 10])),
        Code::Corrupt,
        "the rest of the piece would get a good sum"
    );
    write(&column, 0, 32768, &pattern(32768, 4)).unwrap();
    assert_eq!(read(&column, 32768, 32768).unwrap(), pattern(32768, 4), "replacing all of it heals");
}

#[test]
fn a_payload_that_arrives_damaged_changes_nothing() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(100, 1)).unwrap();
    for offset in [0, 100] {
        let ticket = now(column.begin_write(1, 0, offset, 100)).unwrap();
        fill(&ticket, &pattern(100, 2));
        let mut sums = sums::piece_sums(offset, &pattern(100, 2));
        sums[0] ^= 1;
        // SAFETY: filled.
        assert_eq!(code(unsafe { super::publish(ticket, Some(&sums), || false) }), Code::Checksum);
    }
    assert_eq!(read(&column, 0, 200).unwrap(), pattern(100, 1));
}

#[test]
fn a_view_keeps_its_bytes_whatever_happens_to_the_file() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(1000, 1)).unwrap();
    now(bench.store.seal(&seal(0, 400))).unwrap();
    let view = now(column.read(1, 0, 1000, true)).unwrap();
    write(&column, 0, 500, &pattern(300, 2)).unwrap();
    bench.open(2);
    assert_eq!(column.stat().length, 400);
    write(&column, 2, 400, &pattern(600, 3)).unwrap();
    bench.store.delete(&[(column.file(), 0)]).unwrap();
    assert_eq!(view.bytes(), pattern(1000, 1));
}

#[test]
fn a_view_survives_a_truncation_in_its_own_frame() {
    // No overwrite in between: the frame itself goes on being used after the grant changed.
    let bench = Bench::new(64 << 20);
    let column = bench.open(1);
    write(&column, 1, 0, &pattern(1000, 1)).unwrap();
    now(bench.store.seal(&seal(1, 400))).unwrap();
    let view = now(column.read(1, 0, 1000, true)).unwrap();
    bench.open(2);
    write(&column, 2, 400, &pattern(600, 3)).unwrap();
    assert_eq!(view.bytes(), pattern(1000, 1));
    drop(view);
    let mut expected = pattern(1000, 1);
    expected[400..].copy_from_slice(&pattern(600, 3));
    assert_eq!(read(&column, 0, 1000).unwrap(), expected);
}

#[test]
fn a_late_writer_into_a_former_frame_does_not_disturb_its_readers() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &pattern(100, 1)).unwrap();
    let view = now(column.read(1, 0, 100, true)).unwrap();
    let late = now(column.begin_write(1, 0, 200, 100)).unwrap();
    // The overwrite moves the chunk to another frame; the view and the late writer stay in the former one.
    write(&column, 0, 0, &pattern(50, 2)).unwrap();
    write(&column, 0, 200, &pattern(100, 3)).unwrap();
    fill(&late, &pattern(100, 4));
    // SAFETY: filled.
    unsafe { super::publish(late, None, || false) }.unwrap();
    assert_eq!(view.bytes(), pattern(100, 1));
    assert_eq!(read(&column, 0, 100).unwrap(), [&pattern(50, 2)[..], &pattern(100, 1)[50..]].concat());
    assert_eq!(read(&column, 200, 100).unwrap(), pattern(100, 4), "the last write to be published wins");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Random writes, some of them left unpublished or published late, against a plain array of bytes.
    #[test]
    fn a_column_agrees_with_a_plain_byte_array(
        steps in proptest::collection::vec((0u32..UNIT, 1u32..90_000, any::<u8>(), 0u8..4), 1..30),
        asks in proptest::collection::vec((0u32..UNIT, 1u32..200_000), 6),
    ) {
        let bench = Bench::new(64 << 20);
        let column = bench.open(0);
        let mut model: Vec<Option<u8>> = vec![None; UNIT as usize];
        let mut waiting = Vec::new();
        for (offset, length, seed, fate) in steps {
            let length = length.min(UNIT - offset);
            let ticket = now(column.begin_write(1, 0, u64::from(offset), length)).unwrap();
            let bytes = pattern(length as usize, seed);
            fill(&ticket, &bytes);
            match fate {
                0 => drop(ticket),
                1 => waiting.push((ticket, offset, bytes)),
                _ => publish(&mut model, ticket, offset, &bytes),
            }
            if fate == 3 && !waiting.is_empty() {
                let (ticket, offset, bytes) = waiting.remove(0);
                publish(&mut model, ticket, offset, &bytes);
            }
        }
        for (offset, length) in asks {
            let end = model.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
            let length = length.min(UNIT - offset);
            let upto = end.min((offset + length) as usize).max(offset as usize);
            let expected: Option<Vec<u8>> = model[offset as usize..upto].iter().copied().collect();
            let got = read(&column, u64::from(offset), length);
            match expected {
                Some(bytes) => prop_assert_eq!(got.unwrap(), bytes),
                None => prop_assert_eq!(code(got), Code::Hole),
            }
        }
        drop(waiting);
        bench.store.delete(&[(column.file(), 0)]).unwrap();
        prop_assert_eq!(bench.store.arena().used(), 0);
    }
}

fn publish(model: &mut [Option<u8>], ticket: gd2fs_store::WriteTicket, offset: u32, bytes: &[u8]) {
    let sums = sums::piece_sums(u64::from(offset), bytes);
    // SAFETY: filled.
    unsafe { super::publish(ticket, Some(&sums), || false) }.unwrap();
    let range = &mut model[offset as usize..offset as usize + bytes.len()];
    range.iter_mut().zip(bytes).for_each(|(cell, byte)| *cell = Some(*byte));
}

#[test]
fn a_range_that_is_being_received_is_given_to_nobody_else() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let begin = |offset, length| now(column.begin_write(1, 0, offset, length)).unwrap();
    let publish = |ticket: gd2fs_store::WriteTicket, offset, bytes: &[u8]| {
        // SAFETY: nothing is received any more.
        unsafe { super::publish(ticket, Some(&sums::piece_sums(offset, bytes)), || false) }.unwrap();
    };
    // Two writers share the first frame, a third makes the chunk grow and gives up; its chunk goes with it.
    let (first, slow) = (begin(0, 1000), begin(1000, 1000));
    drop(begin(100_000, 1000));
    fill(&first, &pattern(1000, 1));
    publish(first, 0, &pattern(1000, 1));
    let quick = begin(1000, 1000);
    assert_ne!(quick.target().0, slow.target().0);
    fill(&quick, &pattern(1000, 2));
    publish(quick, 1000, &pattern(1000, 2));
    fill(&slow, &pattern(1000, 3));
    assert_eq!(read(&column, 1000, 1000).unwrap(), pattern(1000, 2));
    publish(slow, 1000, &pattern(1000, 3));
    assert_eq!(read(&column, 0, 2000).unwrap(), [pattern(1000, 1), pattern(1000, 3)].concat());
}

#[test]
fn scattered_bytes_cannot_take_more_memory_than_they_pay_for() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let refused = (0..16_384).find(|i| write(&column, 0, i * 2, b"x").is_err()).expect("a limit");
    assert_eq!(code(write(&column, 0, refused * 2, b"x")), Code::NoSpace);
    assert_eq!(refused, 1024 + 8, "one frame of 32 KiB");
    write(&column, 0, 1, b"y").expect("what joins two pieces is welcome");
    assert_eq!(read(&column, 0, 3).unwrap(), b"xyx");
    write(&column, 0, refused * 2, b"x").expect("and makes room");
}

#[test]
fn what_a_small_read_learned_is_no_excuse_for_damage_since() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    let bytes = pattern(65536, 3);
    write(&column, 0, 0, &bytes).unwrap();
    let part = |start: usize, end: usize| read(&column, start as u64, (end - start) as u32);
    for (start, end) in [(4096, 8192), (4096, 8192), (5000, 5001), (100, 40_000), (32_767, 32_769)] {
        assert_eq!(part(start, end).unwrap(), bytes[start..end]);
    }
    column.flip_bit(13_000);
    assert_eq!(part(4096, 8192).unwrap(), bytes[4096..8192], "other grains are as good as before");
    // The node sends a grain by its sum, and the reader's check finds the damage; of a part of it the node does.
    assert_eq!(code(part(12_288, 16_384)), Code::Checksum);
    assert_eq!(code(part(12_300, 12_301)), Code::Corrupt);
    write(&column, 0, 12_288, &bytes[12_288..16_384]).unwrap_err();
    write(&column, 0, 0, &bytes[..32_768]).unwrap();
    for (start, end) in [(12_288, 16_384), (12_999, 13_001), (1, 65_535)] {
        assert_eq!(part(start, end).unwrap(), bytes[start..end]);
    }
}
