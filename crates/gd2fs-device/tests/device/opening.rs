//! What may be a device, and what a refusal says.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use gd2fs_device::{BLOCK, Device, EngineKind, Error, Options, probe};

use crate::{MIB, device, filled, on, read};

fn message(result: Result<Device, Error>) -> String {
    let error = result.unwrap_err();
    assert!(error.has_no_side_effects() && !error.is_retryable());
    error.to_string()
}

#[test]
fn a_file_is_allocated_once_and_what_holds_data_is_left_as_it_is() {
    let options = Options::default();
    let (home, first) = device(MIB, &options);
    let path = home.path().join("log");
    first.write_at(0, &filled(BLOCK, 1)).unwrap();
    assert_eq!((first.bytes(), first.path()), (MIB as u64, path.as_path()));
    assert!(fs::metadata(&path).unwrap().blocks() * 512 >= MIB as u64);
    assert!(matches!(Device::create(&path, MIB as u64, &options), Err(Error::Locked { .. })));
    drop(first);
    let resize =
        |bytes| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes as u64).unwrap();
    for asked in [3 * MIB, MIB, MIB / 2] {
        let device = Device::create(&path, asked as u64, &options).unwrap();
        assert_eq!(device.bytes(), MIB as u64, "what holds data is neither grown nor cut");
        assert_eq!(read(&device, 0, BLOCK), [1; BLOCK]);
    }
    resize(3 * MIB + 77);
    let device = Device::open(&path, &options).unwrap();
    assert_eq!((device.bytes(), device.is_block()), (3 * MIB as u64, false));
    assert!(fs::metadata(&path).unwrap().blocks() * 512 < 2 * MIB as u64);
    device.allocate().unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 3 * MIB as u64, "without holes");
    assert_eq!(fs::metadata(&path).unwrap().len(), 3 * MIB as u64 + 77);
    drop(device);
    assert!(!Device::open(&path, &Options { direct: false, ..options }).unwrap().is_direct());
}

#[test]
fn a_file_without_data_is_as_good_as_none() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("log");
    assert!(Device::is_vacant(&path).unwrap());
    for holes in [0, 100, MIB, 3 * MIB] {
        let file = File::create(&path).unwrap();
        file.set_len(holes as u64).unwrap();
        assert!(Device::is_vacant(&path).unwrap(), "{holes} bytes, all in holes");
        let device = Device::create(&path, MIB as u64, &Options::default()).unwrap();
        assert_eq!(device.bytes(), MIB as u64);
        assert!(fs::metadata(&path).unwrap().blocks() * 512 >= MIB as u64);
    }
    fs::write(&path, "x").unwrap();
    assert!(!Device::is_vacant(&path).unwrap());
    let message = message(Device::create(&path, MIB as u64, &Options::default()));
    assert!(message.contains("it has 1 bytes and a device has at least 4096"), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"x", "a refusal changes nothing");
    assert!(Device::is_vacant(home.path()).is_err());
}

#[test]
fn direct_io_is_used_where_the_file_system_has_it() {
    use std::os::unix::fs::OpenOptionsExt;
    let (home, device) = device(MIB, &Options::default());
    let plain = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(home.path().join("log"));
    assert_eq!(device.is_direct(), plain.is_ok());
}

#[test]
fn a_device_that_is_just_let_go_of_is_waited_for() {
    let (home, device) = device(MIB, &Options::default());
    let begun = Instant::now();
    let hold = Duration::from_millis(200);
    let holder = thread::spawn(move || {
        thread::sleep(hold);
        drop(device);
    });
    Device::open(&home.path().join("log"), &Options::default()).unwrap();
    assert!(begun.elapsed() >= hold);
    holder.join().unwrap();
}

/// A block device over a file; let go of when dropped.
struct Loop(String);

impl Loop {
    fn over(file: &Path) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        made.status.success().then(|| Loop(String::from_utf8(made.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_taken_whole_and_alone() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("disk");
    File::create(&file).unwrap().set_len(2 * MIB as u64).unwrap();
    let Some(disk) = Loop::over(&file) else {
        eprintln!("SKIPPED: a loop device needs root and losetup");
        return;
    };
    let path = Path::new(&disk.0);
    // One after the other, with no pause for the kernel to take the last one's ring down.
    for (round, engine) in [EngineKind::Auto, EngineKind::Auto, EngineKind::Pool].into_iter().enumerate() {
        let begun = Instant::now();
        let device = Device::create(path, MIB as u64, &on(engine)).unwrap();
        assert!(begun.elapsed() < Duration::from_millis(500), "nobody holds it");
        assert_eq!((device.bytes(), device.is_direct()), (2 * MIB as u64, true));
        device.write_at(MIB as u64, &filled(BLOCK, round as u8 + 1)).unwrap();
        device.sync().unwrap();
        assert_eq!(read(&device, MIB, BLOCK), [round as u8 + 1; BLOCK]);
        if round == 0 {
            // A claim of the disk itself, as a mount makes, and another node.
            let message = message(Device::open(path, &on(engine)));
            assert!(message.contains("unmount the block device"), "{message}");
        }
    }
    let message = message(Device::create(path, 4 * MIB as u64, &Options::default()));
    assert!(
        message.contains("the block device has 2097152 bytes, not 4194304; ask for a smaller"),
        "{message}"
    );
}

#[test]
fn without_room_nothing_is_allocated() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("log");
    let error = Device::create(&path, 1 << 50, &Options::default()).unwrap_err();
    assert!(
        matches!(error, Error::NoRoom { bytes_wanted, bytes_free, .. } if bytes_free < bytes_wanted),
        "{error}"
    );
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::StorageFull);
    assert!(!path.exists(), "nothing is left behind");
}

#[test]
fn what_is_no_device_is_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let options = Options::default();
    let at = |name: &str| home.path().join(name);
    File::create(at("short")).unwrap().set_len(100).unwrap();
    std::os::unix::fs::symlink("round", at("round")).unwrap();
    for (result, expected) in [
        (
            Device::create(&at("short/log"), MIB as u64, &options),
            "Not a directory (os error 20); correct the path",
        ),
        (Device::create(&at("round"), MIB as u64, &options), "(os error 40); correct the path"),
        (Device::open(&at("missing"), &options), "missing: cannot open it: No such file"),
        (Device::create(&at("no/log"), MIB as u64, &options), "log: cannot open it: No such file"),
        (Device::open(home.path(), &options), "it is a directory; name a regular file or a block device"),
        (Device::open(Path::new("/dev/null"), &options), "/dev/null: it is neither file nor block device"),
        (
            Device::open(&at("short"), &options),
            "short: it has 100 bytes and a device has at least 4096; create",
        ),
        (Device::create(&at("odd"), 5000, &options), "odd: bytes: 5000 is no positive multiple of 4096"),
        (Device::create(&at("none"), 0, &options), "none: bytes: 0 is no"),
        (Device::open(&at("short"), &Options { depth: 0, ..options.clone() }), "depth: 0 is not between"),
        (Device::open(&at("short"), &Options { threads: 2000, ..options.clone() }), "threads: 2000 is"),
        (Device::open(&at("short"), &Options { waiting_max: 0, ..options.clone() }), "waiting_max: at least"),
    ] {
        let message = message(result);
        assert!(message.contains(expected), "{message}");
    }
    assert!(!at("odd").exists());
}

#[test]
fn missing_rights_are_told() {
    let (home, device) = device(MIB, &Options::default());
    let path = home.path().join("log");
    drop(device);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    // For root rights do not count: on a thread of its own it steps down to nobody.
    let message = thread::spawn(move || {
        // SAFETY: changes only with whose rights this thread, which ends here, uses files.
        unsafe { libc::setfsuid(65534) };
        message(Device::open(&path, &Options::default()))
    });
    let message = message.join().unwrap();
    assert!(message.contains("Permission denied") && message.contains("give the node's user"), "{message}");
}

/// Lets a seccomp filter answer EPERM to io_uring_setup on this thread and those it starts, as container runtimes do.
fn forbid_io_uring() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter outlive the calls, which copy them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

#[test]
fn where_io_uring_is_forbidden_threads_take_over() {
    let test = thread::spawn(|| {
        forbid_io_uring();
        let reason = probe().unwrap_err();
        assert!(
            reason.contains("a seccomp profile or the sysctl kernel.io_uring_disabled forbids it"),
            "{reason}"
        );
        let (home, device) = device(MIB, &on(EngineKind::Auto));
        assert_eq!(device.engine(), "pool");
        device.write_at(0, &filled(BLOCK, 2)).unwrap();
        drop(device);
        let message = message(Device::open(&home.path().join("log"), &on(EngineKind::Uring)));
        assert!(
            message.contains("io_uring does not work here") && message.contains("choose the engine"),
            "{message}"
        );
    });
    test.join().unwrap();
    if probe().is_ok() {
        assert_eq!(device(MIB, &on(EngineKind::Auto)).1.engine(), "uring");
    }
}

#[test]
fn engines_are_named_in_configuration() {
    assert_eq!("uring".parse(), Ok(EngineKind::Uring));
    assert_eq!("auto".parse(), Ok(EngineKind::Auto));
    assert_eq!("aio".parse::<EngineKind>().unwrap_err(), "\"aio\" is no engine; choose auto, uring or pool");
}
