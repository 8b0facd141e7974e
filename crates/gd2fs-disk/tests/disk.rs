//! The disk as a node uses it: mounted, opened with direct I/O and io_uring, its power cut.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gd2fs_device::fault::SECTOR;
use gd2fs_device::{BLOCK, Buffer, Device, Op, Options};
use serde_json::{Value, json};

const BYTES: usize = 4 << 20;

/// One running disk; its directory outlives it, so that another can be started there.
struct Running {
    child: Child,
    home: PathBuf,
}

impl Running {
    fn start(home: &Path, seed: u64) -> Running {
        std::fs::create_dir_all(home.join("mount")).ok();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gd2fs-disk"));
        command.arg("--backing").arg(home.join("backing")).arg("--bytes").arg(BYTES.to_string());
        command.arg("--mount").arg(home.join("mount")).arg("--socket").arg(home.join("socket"));
        command.arg("--seed").arg(seed.to_string()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the disk's program");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.contains("disk"), "it said {ready:?}");
        Running { child, home: home.to_path_buf() }
    }

    fn path(&self) -> PathBuf {
        self.home.join("mount/disk")
    }

    fn ask(&self, command: Value) -> Value {
        let mut stream = UnixStream::connect(self.home.join("socket")).unwrap();
        stream.write_all(format!("{command}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn terminate(mut self) {
        // SAFETY: a signal to a child that was not waited for.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(5), "SIGTERM did not end it");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let directory = std::ffi::CString::new(self.home.join("mount").to_str().unwrap()).unwrap();
        // SAFETY: a string that lives. After SIGTERM nothing is mounted there, which is an error that does not matter.
        unsafe { libc::umount2(directory.as_ptr(), libc::MNT_DETACH) };
    }
}

/// A home for disks, or none where FUSE can't be used.
fn home() -> Option<tempfile::TempDir> {
    let usable = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if let Err(error) = usable {
        // Written past the test harness, which would swallow it.
        let _ = writeln!(std::io::stderr(), "SKIPPED: /dev/fuse cannot be used: {error}");
        return None;
    }
    Some(tempfile::tempdir().unwrap())
}

fn options() -> Options {
    Options { depth: 32, ..Options::default() }
}

fn filled(blocks: usize, byte: u8) -> Buffer {
    let mut buffer = Buffer::new(blocks * BLOCK);
    buffer.fill(byte);
    buffer
}

fn read(device: &Device, offset: usize, blocks: usize) -> Vec<u8> {
    let mut buffer = Buffer::new(blocks * BLOCK);
    device.read_at(offset as u64, &mut buffer).unwrap();
    buffer.to_vec()
}

/// The system calls of a node's data directory, through the kernel, which must not remember what a cut took back.
#[test]
fn a_cut_takes_names_and_bytes_that_were_not_synced() {
    let Some(home) = home() else { return };
    let disk = Running::start(home.path(), 1);
    let data = home.path().join("mount/data");
    std::fs::create_dir_all(&data).unwrap();
    let sync = || std::fs::File::open(&data).unwrap().sync_all().unwrap();
    let mut kept = std::fs::File::create(data.join("kept.new")).unwrap();
    kept.write_all(b"kept").unwrap();
    kept.sync_all().unwrap();
    std::fs::rename(data.join("kept.new"), data.join("kept")).unwrap();
    sync();
    let mut lost = 0;
    for _ in 0..40 {
        std::fs::copy(data.join("kept"), data.join("copy")).unwrap();
        let mut journal = std::fs::File::options().append(true).open(data.join("kept")).unwrap();
        journal.write_all(b", more").unwrap();
        journal.write_all(b", and more").unwrap();
        assert_eq!(std::fs::read(data.join("kept")).unwrap(), b"kept, more, and more");
        let cut = disk.ask(json!({ "cut": true }));
        assert_eq!(std::fs::read(data.join("kept")).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(journal.sync_data().unwrap_err().raw_os_error(), Some(libc::EIO));
        disk.ask(json!({ "restore": true }));
        assert_eq!(data.join("copy").exists(), cut["changes_lost"] == 0, "{cut}");
        let found = std::fs::read(data.join("kept")).unwrap();
        assert!(found.starts_with(b"kept") && found.len() <= 20, "{found:?}");
        lost += usize::from(!data.join("copy").exists() && found == b"kept");
        // In the place of what is left, whatever it is.
        let mut kept = std::fs::File::create(data.join("kept")).unwrap();
        kept.write_all(b"kept").unwrap();
        kept.sync_all().unwrap();
        let names: Vec<_> =
            std::fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.contains(&"kept".into()), "{names:?}");
        let _ = std::fs::remove_file(data.join("copy"));
        sync();
    }
    assert!(lost > 0, "no cut took anything back");
    disk.ask(json!({ "rule": { "effect": "error", "on": ["sync"] } }));
    assert_eq!(std::fs::File::open(&data).unwrap().sync_all().unwrap_err().raw_os_error(), Some(libc::EIO));
    let refused = std::fs::rename(data.join("kept"), home.path().join("mount/kept")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM), "names are given in data alone");
    disk.terminate();
}

#[test]
fn a_cut_spares_what_was_synced() {
    let Some(home) = home() else { return };
    let disk = Running::start(home.path(), 3);
    let device = Device::open(&disk.path(), &options()).unwrap();
    assert_eq!((device.bytes(), device.is_direct()), (BYTES as u64, true));
    device.write_at(0, &filled(256, 1)).unwrap();
    device.sync().unwrap();
    let durable = filled(4, 2);
    // SAFETY: the operation keeps the buffer.
    device.perform_blocking(Op::write_sync(1 << 20, unsafe { durable.slice() }, durable)).unwrap();
    device.write_at(2 << 20, &filled(256, 3)).unwrap();
    assert!(read(&device, 2 << 20, 256) == vec![3; 1 << 20], "reads see the cache");
    let stats = disk.ask(json!({ "stats": true }));
    assert_eq!(stats["durable_writes"], 1, "the kernel tells which writes are durable: {stats}");
    assert_eq!(stats["sectors_unsynced"], (1 << 20) / SECTOR);

    let cut = disk.ask(json!({ "cut": true }));
    assert_eq!(cut["sectors"], (1 << 20) / SECTOR);
    let mut block = Buffer::new(BLOCK);
    assert_eq!(device.read_at(0, &mut block).unwrap_err().os_code(), Some(libc::EIO));
    assert_eq!(device.write_at(0, &block).unwrap_err().os_code(), Some(libc::EIO));
    assert_eq!(device.sync().unwrap_err().os_code(), Some(libc::EIO));
    disk.ask(json!({ "restore": true }));
    assert!(read(&device, 0, 256) == vec![1; 1 << 20]);
    assert!(read(&device, 1 << 20, 4) == vec![2; 4 * BLOCK]);
    let left = read(&device, 2 << 20, 256);
    let lost = left.chunks(SECTOR).filter(|sector| **sector == [0; SECTOR]).count();
    let kept = left.chunks(SECTOR).filter(|sector| **sector == [3; SECTOR]).count();
    assert_eq!((lost, kept), (cut["sectors_lost"].as_u64().unwrap() as usize, 2048 - lost));
    drop(device);
    disk.terminate();
}

#[test]
fn rules_reach_the_user_of_the_file() {
    let Some(home) = home() else { return };
    let disk = Running::start(home.path(), 1);
    let device = Device::open(&disk.path(), &options()).unwrap();
    device.write_at(0, &filled(2, 8)).unwrap();
    disk.ask(json!({ "flip": { "offset": 5000, "bit": 0 } }));
    assert_eq!(read(&device, 0, 2)[5000], 9);

    disk.ask(json!({ "rule": { "effect": "error", "on": ["sync"], "times": 1 } }));
    assert_eq!(device.sync().unwrap_err().os_code(), Some(libc::EIO));
    device.sync().unwrap();
    assert_eq!(disk.ask(json!({ "stats": true }))["hits"], json!([1]));
    disk.ask(json!({ "clear": true }));

    // Eight reads that are slow, beside one another.
    disk.ask(json!({ "rule": { "effect": "slow", "ms": 200, "on": ["read"] } }));
    let begun = Instant::now();
    std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| read(&device, 0, 1)))));
    let passed = begun.elapsed();
    assert!(passed >= Duration::from_millis(200) && passed < Duration::from_millis(1200), "{passed:?}");

    assert!(disk.ask(json!({ "rule": { "effect": "slow" } }))["error"].as_str().unwrap().contains("rule.ms"));
    assert!(disk.ask(json!({ "cut": 3 }))["error"].is_string());
}

#[test]
fn a_killed_disk_loses_its_cache_and_blocks_no_other() {
    let Some(home) = home() else { return };
    let mut disk = Running::start(home.path(), 1);
    let device = Device::open(&disk.path(), &options()).unwrap();
    device.write_at(0, &filled(1, 1)).unwrap();
    device.sync().unwrap();
    device.write_at(0, &filled(1, 2)).unwrap();
    disk.child.kill().unwrap();
    assert_eq!(disk.child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(device.sync().is_err());
    let next = Running::start(home.path(), 2);
    let again = Device::open(&next.path(), &options()).unwrap();
    assert!(read(&again, 0, 1) == vec![1; BLOCK]);
    // With the power on, a clean end leaves everything; also under a node that still has the file open.
    again.write_at(0, &filled(1, 3)).unwrap();
    next.terminate();
    assert!(std::fs::read(home.path().join("backing")).unwrap()[..BLOCK] == vec![3; BLOCK]);
    assert!(!home.path().join("mount/disk").exists(), "unmounted");
}

#[test]
fn it_ends_with_the_process_that_started_it() {
    let Some(home) = home() else { return };
    std::fs::create_dir(home.path().join("mount")).unwrap();
    let script = "\"$1\" --backing \"$2/backing\" --bytes 1048576 --mount \"$2/mount\" --socket \"$2/socket\" & sleep 60";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_gd2fs-disk")]).arg(home.path());
    let mut parent = shell.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(parent.stdout.take().unwrap());
    output.read_line(&mut String::new()).unwrap();
    assert!(home.path().join("mount/disk").exists());
    parent.kill().unwrap();
    parent.wait().unwrap();
    let begun = Instant::now();
    while home.path().join("mount/disk").exists() {
        assert!(begun.elapsed() < Duration::from_secs(5), "still mounted");
        std::thread::sleep(Duration::from_millis(5));
    }
}
