//! What the layers above a system call make of its failures, on both engines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_device::fault::{Effect, Faults, Rule, SECTOR};
use gd2fs_device::{BLOCK, Buffer, Device, EngineKind, Error, Kind, Op, Options};
use tempfile::TempDir;

use crate::{LIMIT, MIB, against_a_model, device, filled, on_disk, read, told, works};

/// A device on either engine, one after the other, whose faults are at hand.
fn both(plain: Options, test: impl Fn(TempDir, Device, Faults)) {
    for engine in [EngineKind::Uring, EngineKind::Pool] {
        if works(engine) {
            let faults = Faults::new(12);
            let options = Options { engine, faults: Some(faults.clone()), ..plain.clone() };
            let (home, device) = device(8 * MIB, &options);
            test(home, device, faults);
        }
    }
}

#[test]
fn short_transfers_are_continued() {
    both(Options::default(), |_home, device, faults| {
        let rule = faults.add(Rule::new(Effect::Short).chance(0.7));
        against_a_model(&device, 3);
        assert!(faults.hits(rule) > 100);
    });
}

#[test]
fn interruptions_are_retried_but_not_for_ever() {
    both(Options::default(), |_home, device, faults| {
        let some = faults.add(Rule::new(Effect::Error(libc::EINTR)).times(30));
        faults.add(Rule::new(Effect::Error(libc::EAGAIN)).times(30));
        device.write_at(0, &filled(BLOCK, 1)).unwrap();
        assert_eq!(faults.hits(some), 30);
        let all = faults.add(Rule::new(Effect::Error(libc::EINTR)));
        let error = device.write_at(0, &filled(BLOCK, 2)).unwrap_err();
        assert_eq!((error.os_code(), faults.hits(all)), (Some(libc::EINTR), 100));
    });
}

#[test]
fn an_error_names_its_place() {
    both(Options::default(), |home, device, faults| {
        let part = MIB as u64;
        let eio = faults.add(Rule::new(Effect::Error(libc::EIO)).within(part..part + 1));
        let error = device.write_at(0, &filled(3 * MIB, 4)).unwrap_err();
        assert_eq!((error.os_code(), faults.hits(eio)), (Some(libc::EIO), 1));
        let expected = format!("{}/log: write of 1048576 bytes at 1048576: Input", home.path().display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert!(!error.is_retryable() && !error.has_no_side_effects());
        assert!(device.read_at(part, &mut Buffer::new(BLOCK)).unwrap_err().has_no_side_effects());
        faults.clear();
        let bytes = read(&device, 0, 3 * MIB);
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if at / MIB == 1 { 0 } else { 4 }));
    });
}

#[test]
fn a_full_disk_and_a_failed_sync_are_told() {
    both(Options::default(), |_home, device, faults| {
        faults.add(Rule::new(Effect::Error(libc::ENOSPC)).on(&[Kind::WriteSync]));
        faults.add(Rule::new(Effect::Error(libc::EIO)).on(&[Kind::Sync]));
        let buffer = Buffer::new(BLOCK);
        // SAFETY: the operation keeps the buffer.
        let op = Op::write_sync(0, unsafe { buffer.slice() }, buffer);
        let error = device.perform_blocking(op).unwrap_err();
        assert_eq!(error.os_code(), Some(libc::ENOSPC));
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::StorageFull);
        assert_eq!(device.sync().unwrap_err().os_code(), Some(libc::EIO));
        device.write_at(0, &filled(BLOCK, 1)).unwrap();
    });
}

#[test]
fn no_more_than_the_depth_is_under_way() {
    both(Options { depth: 4, ..Options::default() }, |_home, device, faults| {
        faults.add(Rule::new(Effect::Slow(Duration::from_millis(5))));
        let writes = (0..8u64).map(|index| {
            let buffer = Buffer::new(MIB * (1 + index as usize % 2));
            // SAFETY: the operation keeps the buffer.
            device.perform(Op::write((index % 6) * MIB as u64, unsafe { buffer.slice() }, buffer))
        });
        let writes: Vec<_> = writes.collect();
        assert_eq!(device.load().under_way, 4);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let results = runtime.block_on(async {
            let mut results = Vec::new();
            for write in writes {
                results.push(write.await);
            }
            results
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert_eq!(faults.under_way_max(), 4);
    });
}

#[test]
fn beyond_the_queue_operations_are_refused() {
    both(Options { depth: 1, waiting_max: 2, ..Options::default() }, |_home, device, faults| {
        faults.add(Rule::new(Effect::Slow(Duration::from_millis(100))));
        let submitted: Vec<_> = (0..5)
            .map(|_| {
                let (done, told) = told();
                device.submit(Op::sync(), done);
                told
            })
            .collect();
        for (index, told) in submitted.iter().enumerate() {
            // Refusals are there at once; the first is under way and two wait.
            let limit = if index < 3 { LIMIT } else { Duration::ZERO };
            match told.recv_timeout(limit).unwrap() {
                Ok(()) => assert!(index < 3),
                Err(error @ Error::Overloaded { waiting_max: 2, .. }) => {
                    assert!(index >= 3 && error.is_retryable() && error.has_no_side_effects());
                }
                Err(error) => panic!("{error}"),
            }
        }
        device.sync().expect("there is room again");
    });
}

#[test]
fn slow_operations_keep_their_memory_and_delay_no_others() {
    both(Options::default(), |_home, device, faults| {
        let delay = Duration::from_millis(300);
        faults.add(Rule::new(Effect::Slow(delay)).on(&[Kind::Write]));
        let begun = Instant::now();
        let buffer = Arc::new(filled(BLOCK, 6));
        for _ in 0..8 {
            // SAFETY: the operation keeps the buffer.
            drop(device.perform(Op::write(0, unsafe { buffer.slice() }, Arc::clone(&buffer))));
        }
        read(&device, 0, BLOCK);
        if begun.elapsed() < delay {
            assert_eq!(Arc::strong_count(&buffer), 9, "no future listens, yet the memory is kept");
        }
        drop(device);
        assert!(begun.elapsed() >= delay && Arc::strong_count(&buffer) == 1);
        assert!(begun.elapsed() < delay * 8, "slow beside one another");
    });
}

#[test]
fn torn_writes_leave_old_and_new_sectors() {
    both(Options::default(), |home, device, faults| {
        let mut torn = 0;
        for (code, round) in [None, Some(libc::EIO)].into_iter().cycle().zip(1..=12u8) {
            let before = read(&device, 0, 4 * BLOCK);
            let rule = faults.add(Rule::new(Effect::Torn(code)).times(1));
            let result = device.write_at(0, &filled(4 * BLOCK, round));
            assert_eq!(result.err().and_then(|error| error.os_code()), code);
            assert_eq!(faults.hits(rule), 1);
            let after = &on_disk(&home.path().join("log"))[..4 * BLOCK];
            let sectors = || after.chunks(SECTOR).zip(before.chunks(SECTOR));
            assert!(sectors().all(|(now, old)| now == [round; SECTOR] || now == old));
            let new = sectors().filter(|(now, _)| **now == [round; SECTOR]).count();
            torn += (new > 0 && new < 4 * BLOCK / SECTOR) as usize;
        }
        assert!(torn >= 6, "{torn}");
    });
}

#[test]
fn bits_turn_and_writes_are_lost() {
    both(Options::default(), |_home, device, faults| {
        let differing = |bytes: &[u8], byte: u8| bytes.iter().map(|b| (b ^ byte).count_ones()).sum::<u32>();
        faults.add(Rule::new(Effect::Flip).on(&[Kind::Write]).times(1));
        device.write_at(0, &filled(2 * BLOCK, 8)).unwrap();
        assert_eq!(differing(&read(&device, 0, 2 * BLOCK), 8), 1);
        device.write_at(0, &filled(2 * BLOCK, 8)).unwrap();
        faults.add(Rule::new(Effect::Flip).on(&[Kind::Read]).times(1));
        assert_eq!(differing(&read(&device, 0, 2 * BLOCK), 8), 1);
        assert_eq!(differing(&read(&device, 0, 2 * BLOCK), 8), 0);
        faults.add(Rule::new(Effect::Lost));
        device.write_at(0, &filled(2 * BLOCK, 9)).unwrap();
        assert_eq!(differing(&read(&device, 0, 2 * BLOCK), 8), 0);
    });
}
