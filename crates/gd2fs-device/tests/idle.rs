//! An idle device costs no processor time. Alone in its process, so that its threads are the only ones of their name.

use std::fs;
use std::time::Duration;

use gd2fs_device::{BLOCK, Buffer, Device, EngineKind, Options, probe};

/// Nanoseconds on a processor of all threads whose name begins so.
fn processor_ns(name: &str) -> u64 {
    let mut sum = 0;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        if fs::read_to_string(task.join("comm")).unwrap_or_default().starts_with(name) {
            let times = fs::read_to_string(task.join("schedstat")).unwrap();
            sum += times.split(' ').next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

#[test]
fn idle_threads_do_not_spin() {
    let home = tempfile::tempdir().unwrap();
    for (engine, threads) in [(EngineKind::Uring, "gd2fs-uring"), (EngineKind::Pool, "gd2fs-pool")] {
        if let (EngineKind::Uring, Err(reason)) = (engine, probe()) {
            eprintln!("SKIPPED: {reason}");
            continue;
        }
        let options = Options { engine, ..Options::default() };
        let device = Device::create(&home.path().join(threads), 1 << 20, &options).unwrap();
        for _ in 0..20 {
            device.read_at(0, &mut Buffer::new(BLOCK)).unwrap();
        }
        let before = processor_ns(threads);
        assert!(before > 0, "the threads have worked");
        std::thread::sleep(Duration::from_millis(500));
        let spent = processor_ns(threads) - before;
        assert!(spent < 5_000_000, "{threads}: {spent} ns of 500 ms");
    }
}
