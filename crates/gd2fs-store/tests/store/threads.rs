use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::*;

/// Every write fills its whole range with one byte, so a mixture is a torn write.
const PART: u32 = 40_000;

fn is_whole(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == bytes[0])
}

#[test]
fn overlapping_writers_and_readers_see_whole_writes_only() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 1000, &vec![0; PART as usize]).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (1u8..=3)
            .map(|seed| {
                let column = &column;
                scope.spawn(move || {
                    for round in 0..300u32 {
                        let byte = seed.wrapping_mul(80).wrapping_add(round as u8);
                        write(column, 0, 1000, &vec![byte; PART as usize]).unwrap();
                        // Neighbours on both sides, so that runs are cut and merged all the time.
                        write(column, 0, u64::from(round % 900), &[byte; 64]).unwrap();
                        write(column, 0, u64::from(1000 + PART + round * 64), &[byte; 64]).unwrap();
                    }
                })
            })
            .collect();
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(is_whole(&read(&column, 1000, PART).unwrap()));
                    assert!(is_whole(&read(&column, 1010, 9).unwrap()));
                }
            });
        }
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    bench.store.delete(&[(column.file(), 0)]).unwrap();
    assert_eq!(bench.store.arena().used(), 0);
}

#[test]
fn small_overwrites_are_seen_whole_and_never_under_a_view() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    write(&column, 0, 0, &vec![0; UNIT as usize]).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..3u32)
            .map(|writer| {
                let column = &column;
                scope.spawn(move || {
                    for round in 0..2000u32 {
                        // Two writers share a place, the third has its own in the same piece.
                        write(column, 0, u64::from(writer / 2 * 4096 + 100), &[round as u8; 4096]).unwrap();
                    }
                })
            })
            .collect();
        for place in [100, 4196] {
            let (column, stop) = (&column, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    assert!(is_whole(&read(column, place, 4096).unwrap()));
                    let view = now(column.read(1, place, 4096, true)).unwrap();
                    let before = view.bytes().to_vec();
                    thread::yield_now();
                    assert!(view.bytes() == before, "bytes changed under a reader");
                }
            });
        }
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
}

#[test]
fn takeovers_beside_writers_and_readers() {
    // Grant g writes the byte g everywhere beyond what is sealed; whoever holds the current grant sees only its own bytes.
    let bench = Bench::new(64 << 20);
    let first = bench.open(1);
    write(&first, 1, 0, &[0; 777]).unwrap();
    now(bench.store.seal(&seal(1, 777))).unwrap();
    let current = AtomicU64::new(1);
    thread::scope(|scope| {
        for worker in 0..3u64 {
            let (bench, current, column) = (&bench, &current, first.clone());
            scope.spawn(move || {
                for round in 0..200u64 {
                    let grant = if round % 8 == worker {
                        let grant = current.fetch_add(1, Ordering::SeqCst) + 1;
                        match now(bench.store.open(&capability(grant, 1, 1), 0)) {
                            Ok(_) => grant,
                            Err(failure) => {
                                assert_eq!(failure.code, Code::StaleWriter);
                                continue;
                            }
                        }
                    } else {
                        current.load(Ordering::SeqCst)
                    };
                    let byte = grant as u8;
                    let offset = 777 + (round % 7) * 5000;
                    match write(&column, grant, offset, &[byte; 9000]) {
                        Ok(()) => {}
                        Err(failure) => assert_eq!(failure.code, Code::StaleWriter),
                    }
                    assert_eq!(read(&column, 0, 777).unwrap(), [0; 777], "sealed bytes never change");
                    match read(&column, 777, 40_000) {
                        Ok(bytes) => assert!(bytes.is_empty() || is_whole(&bytes), "bytes of two grants"),
                        Err(failure) => assert_eq!(failure.code, Code::Hole),
                    }
                }
            });
        }
    });
    let (_, opened) = now(bench.store.open(&capability(1 << 32, 1, 1), 0)).unwrap();
    assert_eq!((opened.length, opened.sealed), (777, 777));
}

#[test]
fn deletion_beside_writers() {
    let bench = Bench::new(64 << 20);
    let column = bench.open(0);
    thread::scope(|scope| {
        for worker in 0..3u64 {
            let column = &column;
            scope.spawn(move || {
                let begun = std::time::Instant::now();
                for round in 0.. {
                    assert!(begun.elapsed().as_secs() < 10, "the deletion went unnoticed");
                    let chunk = (round % 20) * u64::from(UNIT);
                    if let Err(failure) = write(column, 0, chunk + worker * 100, &[1; 5000]) {
                        assert_eq!(failure.code, Code::Deleted);
                        break;
                    }
                }
            });
        }
        thread::sleep(std::time::Duration::from_millis(50));
        bench.store.delete(&[(column.file(), 0)]).unwrap();
    });
    assert_eq!(bench.store.arena().used(), 0);
}
