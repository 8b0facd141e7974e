//! Devices that are not this node's are refused by name, and left as they are.

use gd2fs_log::{LogError, Options, SuperblockError};
use gd2fs_wire::sums::crc32c;

use crate::{Disk, run};

fn superblock_error(disk: &Disk, options: Options) -> SuperblockError {
    match run(disk.refused(options)) {
        LogError::Superblock { error, .. } => error,
        other => panic!("{other}"),
    }
}

fn formatted() -> Disk {
    let disk = Disk::new(8, 256 << 10, 64 << 10);
    run(async { drop(disk.open(disk.device(None, None)).await) });
    disk
}

/// Changes the first superblock and makes its sum right again.
fn resealed(disk: &Disk, change: impl FnOnce(&mut [u8])) {
    disk.change(0, 4096, |block| {
        change(block);
        let sum = crc32c(&block[..4092]).to_le_bytes();
        block[4092..].copy_from_slice(&sum);
    });
}

#[test]
fn everything_foreign_is_refused_by_name() {
    let disk = formatted();
    let options = disk.options();
    let other =
        |cluster: &str, node: &str| Options { cluster: cluster.into(), node: node.into(), ..options.clone() };
    assert!(matches!(superblock_error(&disk, other("else", "node")), SuperblockError::ForeignCluster { .. }));
    assert!(matches!(superblock_error(&disk, other("cluster", "n2")), SuperblockError::ForeignNode { .. }));
    assert!(matches!(
        superblock_error(&disk, other("", "node")),
        SuperblockError::Name { field: "cluster", .. }
    ));
    resealed(&disk, |block| block[10] = 9);
    run(async { drop(disk.open(disk.device(None, None)).await) });
    resealed(&disk, |block| block[16] = 4);
    assert_eq!(superblock_error(&disk, options.clone()), SuperblockError::Features(4));
    resealed(&disk, |block| block[8] = 2);
    assert_eq!(superblock_error(&disk, options.clone()), SuperblockError::Version { major: 2, minor: 9 });
    let file = std::fs::read(disk.path()).unwrap();
    std::fs::write(
        disk.path(),
        [b"not ours".repeat(512), file[4096..file.len() - 4096].to_vec(), vec![0; 4096]].concat(),
    )
    .unwrap();
    let before = std::fs::read(disk.path()).unwrap();
    assert_eq!(superblock_error(&disk, options), SuperblockError::NotOurs);
    assert!(std::fs::read(disk.path()).unwrap() == before, "a refused device is left as it is");
}

fn resize(disk: &Disk, bytes: u64) {
    std::fs::OpenOptions::new().write(true).open(disk.path()).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_device_of_another_size_is_refused() {
    let disk = formatted();
    for bytes in [disk.bytes + 4096, disk.bytes - 4096] {
        resize(&disk, bytes);
        let error = superblock_error(&disk, disk.options());
        assert_eq!(error, SuperblockError::Size { found: bytes, expected: disk.bytes });
        assert_eq!(std::fs::metadata(disk.path()).unwrap().len(), bytes, "a refused device is left as it is");
    }
}

#[test]
fn what_an_interrupted_format_leaves_behind_is_formatted_again() {
    let disk = formatted();
    let whole = std::fs::read(disk.path()).unwrap();
    let last = whole.len() - 4096;
    // The copy alone, torn; the copy alone; the copy, and a torn first block.
    for (first_bytes, copy_bytes, kept) in [(0, 512, false), (0, 4096, false), (512, 4096, true)] {
        let mut bytes = vec![0; whole.len()];
        bytes[..first_bytes].copy_from_slice(&whole[..first_bytes]);
        bytes[last..last + copy_bytes].copy_from_slice(&whole[last..last + copy_bytes]);
        std::fs::write(disk.path(), bytes).unwrap();
        let (before, after) = run(async {
            let device = disk.device(None, None);
            let before = gd2fs_log::identify(&device, &disk.options()).await.unwrap();
            drop(disk.open(device.clone()).await);
            (before, gd2fs_log::identify(&device, &disk.options()).await.unwrap().unwrap())
        });
        assert_eq!(before.is_some(), kept, "{first_bytes} and {copy_bytes} bytes");
        assert!(!after.used && before.is_none_or(|before| before == after));
    }
}

#[test]
fn a_log_says_who_it_is_and_whether_anything_was_written() {
    run(async {
        let disk = Disk::new(8, 256 << 10, 64 << 10);
        let options = disk.options();
        let device = disk.device(None, None);
        assert_eq!(gd2fs_log::identify(&device, &options).await.unwrap(), None);
        let id = gd2fs_log::format(&device, &options).await.unwrap();
        let fresh = gd2fs_log::Identity { id, used: false };
        assert_eq!(gd2fs_log::identify(&device, &options).await.unwrap(), Some(fresh));
        let again = gd2fs_log::format(&device, &options).await.unwrap_err();
        assert!(matches!(again, LogError::Superblock { error: SuperblockError::NotBlank, .. }), "{again}");
        let (log, _shelf, _) = disk.shelf(device.clone()).await;
        log.note(gd2fs_log::Note::Delete { file: 1, column: 0, version: 1 }).await.unwrap();
        let used = gd2fs_log::Identity { id, used: true };
        assert_eq!(gd2fs_log::identify(&device, &options).await.unwrap(), Some(used));
    });
}

#[test]
fn a_device_with_data_in_its_first_or_last_mib_is_not_formatted() {
    let disk = Disk::new(24, 256 << 10, 64 << 10);
    let (bytes, mib) = (disk.bytes as usize, 1 << 20);
    for at in [4096, 65_536, mib - 1, bytes - mib, bytes - 8192, bytes - 1] {
        let mut content = vec![0; bytes];
        content[at] = 1;
        std::fs::write(disk.path(), &content).unwrap();
        assert_eq!(superblock_error(&disk, disk.options()), SuperblockError::NotOurs, "byte {at}");
        assert!(std::fs::read(disk.path()).unwrap() == content);
    }
}

#[test]
fn impossible_options_are_refused_before_anything_is_written() {
    let disk = Disk::new(3, 256 << 10, 64 << 10);
    let refused = |options: Options| match run(disk.refused(options)) {
        LogError::Refused { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(refused(disk.options()), "device");
    assert_eq!(refused(Options { payload_bytes_max: 5000, ..disk.options() }), "payload_bytes_max");
    assert_eq!(refused(Options { segment_bytes: Some((3 << 20) + 512), ..disk.options() }), "segment_bytes");
    assert_eq!(
        refused(Options { checkpoint_records: 0, ..disk.options() }),
        "checkpoint_bytes, checkpoint_records"
    );
    assert!(std::fs::read(disk.path()).unwrap().iter().all(|byte| *byte == 0));
}
