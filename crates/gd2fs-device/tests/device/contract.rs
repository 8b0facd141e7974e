//! What every engine keeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::Instant;

use gd2fs_device::fault::{Faults, PowerCut};
use gd2fs_device::{BLOCK, Buffer, Device, EngineKind, Error, Op, Options};
use gd2fs_transport::Slice;

use crate::{LIMIT, MIB, against_a_model, device, filled, gathered, on, on_disk, read, told, works};

macro_rules! contract {
    ($($name:ident: $options:expr;)*) => {$(
        mod $name {
            use super::*;
            contract!(each $options; keeps_the_bytes, splits_in_order, refuses_bad_operations, syncs_what_completed,
                goes_on_from_callbacks, is_dropped_in_a_callback, ends_with_operations_under_way,
                keeps_memory_of_dropped_futures, survives_a_panicking_callback, reports_a_truncated_file, locks,
                obeys_its_depth_of_one);
        }
    )*};
    (each $options:expr; $($test:ident),*) => {$(
        #[test]
        fn $test() {
            let options: Options = $options;
            if works(options.engine) {
                super::$test(options);
            }
        }
    )*};
}

contract! {
    uring: on(EngineKind::Uring);
    pool: on(EngineKind::Pool);
    uring_with_faults: Options { faults: Some(Faults::new(1)), ..on(EngineKind::Uring) };
    pool_with_faults: Options { faults: Some(Faults::new(1)), ..on(EngineKind::Pool) };
    uring_buffered: Options { direct: false, ..on(EngineKind::Uring) };
    power_kept: Options { power_cut: Some(PowerCut::new(1)), ..on(EngineKind::Pool) };
}

fn keeps_the_bytes(options: Options) {
    let (home, device) = device(16 * MIB, &options);
    against_a_model(&device, 7);
    let seen = read(&device, 0, 16 * MIB);
    drop(device);
    assert!(on_disk(&home.path().join("log")) == seen, "the file holds what the device showed");
}

fn splits_in_order(options: Options) {
    let (_home, device) = device(8 * MIB, &options);
    let mut bytes = Buffer::new(3 * MIB + BLOCK);
    for (index, block) in bytes.chunks_mut(BLOCK).enumerate() {
        block.fill(index as u8);
    }
    device.write_at(BLOCK as u64, &bytes).unwrap();
    assert!(read(&device, BLOCK, bytes.len()) == bytes[..]);
    // Slices that straddle the parts' ends, and an empty one.
    let back = Buffer::new(bytes.len());
    // SAFETY: `back` outlives the read.
    let whole = unsafe { back.slice() };
    let mut slices = vec![whole.part(0, 0)];
    let mut start = 0;
    while start < whole.len() {
        let length = (3 * BLOCK).min(whole.len() - start);
        slices.push(whole.part(start, length));
        start += length;
    }
    let memory = gd2fs_transport::Memory::new(slices);
    device.perform_blocking(Op::read(BLOCK as u64, memory.clone(), ())).unwrap();
    assert!(gathered(&memory) == bytes[..]);
}

fn refuses_bad_operations(options: Options) {
    let (_home, device) = device(MIB, &options);
    let buffer = filled(2 * BLOCK, 9);
    // SAFETY: `buffer` outlives the operations.
    let slice = unsafe { buffer.slice() };
    let refused = |op: Op, field: &str| {
        let error = device.perform_blocking(op).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.has_no_side_effects(), "{error}");
        assert!(error.to_string().contains(&format!("log: {field}")), "{error}");
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::InvalidInput);
    };
    refused(Op::write(512, slice, ()), "offset: 512");
    refused(Op::write(0, slice.part(0, 100), ()), "memory: 100 bytes");
    refused(Op::write(0, slice.part(512, BLOCK), ()), "memory: 4096 bytes at address");
    refused(Op::write(0, slice.part(0, 0), ()), "memory: a write moves");
    refused(Op::read((MIB - BLOCK) as u64, slice, ()), "offset: 8192 bytes at 1044480");
    refused(Op::read(u64::MAX - BLOCK as u64 + 1, slice, ()), "offset: 8192 bytes at");
    refused(Op { memory: slice.into(), ..Op::sync() }, "memory and offset");
    assert!(read(&device, 0, MIB).iter().all(|byte| *byte == 0));
}

fn syncs_what_completed(options: Options) {
    let (home, device) = device(4 * MIB, &options);
    for round in 1..=5u8 {
        let bytes = Arc::new(filled(2 * MIB, round));
        let written = (0..2u64).map(|half| {
            // SAFETY: each operation keeps `bytes`.
            device.perform(Op::write(half * 2 * MIB as u64, unsafe { bytes.slice() }, Arc::clone(&bytes)))
        });
        let written: Vec<_> = written.collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for write in written {
                write.await.unwrap();
            }
            device.perform(Op::sync()).await.unwrap();
        });
        assert_eq!(Arc::strong_count(&bytes), 1, "a future that is ready has let go of the memory");
        assert!(on_disk(&home.path().join("log")).iter().all(|byte| *byte == round));
    }
}

fn goes_on_from_callbacks(options: Options) {
    let (_home, device) = device(MIB, &options);
    let device = Arc::new(device);
    let (end, ended) = mpsc::channel();
    fn turn(device: Arc<Device>, left: u64, end: mpsc::Sender<Result<(), Error>>) {
        let buffer = filled(BLOCK, left as u8);
        // SAFETY: the operation keeps the buffer.
        let slice = unsafe { buffer.slice() };
        let next = Arc::clone(&device);
        let done = Box::new(move |result: Result<(), Error>| {
            // Waiting here would never end, so it is refused.
            assert!(matches!(next.sync(), Err(Error::Invalid { .. })));
            if left == 0 || result.is_err() { end.send(result).unwrap() } else { turn(next, left - 1, end) }
        });
        device.submit(Op::write(left * BLOCK as u64, slice, buffer), done);
    }
    turn(Arc::clone(&device), 200, end);
    ended.recv_timeout(LIMIT).unwrap().unwrap();
    let bytes = read(&device, 0, 201 * BLOCK);
    assert!(bytes.chunks(BLOCK).enumerate().all(|(index, block)| block == [index as u8; BLOCK]));
}

fn is_dropped_in_a_callback(options: Options) {
    let (home, device) = device(MIB, &options);
    let device = Arc::new(device);
    let theirs = Arc::clone(&device);
    let (go, gone) = mpsc::channel::<()>();
    let (dropped, told) = mpsc::channel();
    let done = Box::new(move |result: Result<(), Error>| {
        // The last owner is this thread of the engine.
        let _ = gone.recv();
        drop(theirs);
        dropped.send(result).unwrap();
    });
    let buffer = Buffer::new(BLOCK);
    // SAFETY: the operation keeps the buffer.
    let slice = unsafe { buffer.slice() };
    device.submit(Op::read(0, slice, buffer), done);
    drop(device);
    go.send(()).unwrap();
    told.recv_timeout(LIMIT).unwrap().unwrap();
    let started = Instant::now();
    let plain = Options { power_cut: None, faults: None, ..options };
    while let Err(error) = Device::open(&home.path().join("log"), &plain) {
        assert!(matches!(error, Error::Locked { .. }) && started.elapsed() < LIMIT, "{error}");
        std::thread::yield_now();
    }
}

/// Sets a flag when it is dropped.
struct Guard(Arc<AtomicBool>, #[expect(dead_code, reason = "kept alive")] Buffer);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn guarded(length: usize) -> (Guard, Slice, Arc<AtomicBool>) {
    let buffer = Buffer::new(length);
    // SAFETY: the guard owns the buffer and goes to the operation's keep.
    let slice = unsafe { buffer.slice() };
    let flag = Arc::new(AtomicBool::new(false));
    (Guard(Arc::clone(&flag), buffer), slice, flag)
}

fn ends_with_operations_under_way(options: Options) {
    let (home, device) = device(16 * MIB, &Options { depth: 4, ..options.clone() });
    let (ended, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let prepared: Vec<_> = (0..100).map(|_| guarded(MIB)).collect();
    let mut flags = Vec::new();
    for (index, (guard, slice, flag)) in prepared.into_iter().enumerate() {
        flags.push(flag);
        let (ended, refused) = (Arc::clone(&ended), Arc::clone(&refused));
        let done = Box::new(move |result| {
            ended.fetch_add(1, SeqCst);
            match result {
                Ok(()) => {}
                Err(Error::Closed { .. }) => drop(refused.fetch_add(1, SeqCst)),
                Err(error) => panic!("{error}"),
            }
        });
        device.submit(Op::read((index % 16 * MIB) as u64, slice, guard), done);
    }
    drop(device);
    assert_eq!(ended.load(SeqCst), 100, "each is told once, before the device is gone");
    assert!(refused.load(SeqCst) > 0, "100 MiB were not read before the drop");
    assert!(flags.iter().all(|flag| flag.load(SeqCst)), "all memory is let go of");
    let plain = Options { power_cut: None, faults: None, ..options };
    Device::open(&home.path().join("log"), &plain).expect("unlocked at once");
}

fn keeps_memory_of_dropped_futures(options: Options) {
    let (_home, device) = device(16 * MIB, &options);
    let mut flags = Vec::new();
    for index in 0..16u64 {
        let (guard, slice, flag) = guarded(MIB);
        flags.push(flag);
        drop(device.perform(Op::write(index * MIB as u64, slice, guard)));
    }
    device.sync().unwrap();
    drop(device);
    assert!(flags.iter().all(|flag| flag.load(SeqCst)));
}

fn survives_a_panicking_callback(options: Options) {
    let (_home, device) = device(MIB, &options);
    for _ in 0..40 {
        device.submit(Op::sync(), Box::new(|_| std::panic::resume_unwind(Box::new("on purpose"))));
    }
    device.write_at(0, &filled(BLOCK, 3)).unwrap();
    assert_eq!(read(&device, 0, BLOCK), [3; BLOCK]);
}

fn reports_a_truncated_file(options: Options) {
    let (home, device) = device(2 * MIB, &options);
    let file = std::fs::OpenOptions::new().write(true).open(home.path().join("log")).unwrap();
    for length in [MIB as u64, MIB as u64 + 1000] {
        file.set_len(length).unwrap();
        let error = device.read_at((MIB - BLOCK) as u64, &mut Buffer::new(2 * BLOCK)).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("log: read of 4096 bytes at 1048576: it ends"), "{message}");
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::UnexpectedEof);
    }
}

fn locks(options: Options) {
    let (home, device) = device(MIB, &options);
    let path = home.path().join("log");
    let plain = Options { power_cut: None, faults: None, ..options };
    let error = Device::open(&path, &plain).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }) && error.to_string().contains("another node"), "{error}");
    drop(device);
    Device::open(&path, &plain).unwrap();
}

fn obeys_its_depth_of_one(options: Options) {
    let (_home, device) = device(8 * MIB, &Options { depth: 1, ..options });
    let (done, told) = told();
    let buffer = filled(4 * MIB, 5);
    // SAFETY: the operation keeps the buffer.
    let slice = unsafe { buffer.slice() };
    device.submit(Op::write(0, slice, buffer), done);
    assert!(device.load().under_way <= 1);
    told.recv_timeout(LIMIT).unwrap().unwrap();
    assert!(read(&device, 0, 4 * MIB).iter().all(|byte| *byte == 5));
}
