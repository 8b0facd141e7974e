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

#[test]
fn a_device_of_another_size_is_refused() {
    let mut disk = formatted();
    disk.bytes += 4096;
    assert!(matches!(superblock_error(&disk, disk.options()), SuperblockError::Size { .. }));
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
