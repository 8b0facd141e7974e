//! What a power cut may leave, and what it must.

use std::collections::BTreeSet;

use gd2fs_device::fault::{Cut, Effect, Faults, PowerCut, Rule, SECTOR};
use gd2fs_device::{BLOCK, Buffer, Device, Op, Options};

use crate::{MIB, device, filled, on_disk, read};

fn powered(power: &PowerCut) -> Options {
    Options { power_cut: Some(power.clone()), ..Options::default() }
}

fn write_sync(device: &Device, offset: usize, bytes: Buffer) {
    // SAFETY: the operation keeps the buffer.
    device.perform_blocking(Op::write_sync(offset as u64, unsafe { bytes.slice() }, bytes)).unwrap();
}

/// Ranges: 0 synced as 1; then 1 again written as 2 and 3; 2 never synced; 3 written, then durably over it; a durable write
/// alone. Each of 4 blocks.
fn cut(seed: u64) -> (Cut, Vec<u8>) {
    let power = PowerCut::new(seed);
    let (home, device) = device(MIB, &powered(&power));
    let range = 4 * BLOCK;
    device.write_at(0, &filled(2 * range, 1)).unwrap();
    device.sync().unwrap();
    for version in [2, 3] {
        device.write_at(range as u64, &filled(range, version)).unwrap();
    }
    device.write_at(2 * range as u64, &filled(2 * range, 4)).unwrap();
    write_sync(&device, 3 * range, filled(range, 5));
    write_sync(&device, 4 * range, filled(range, 6));
    let before = [1, 3, 4, 5, 6].iter().flat_map(|byte| vec![*byte; range]);
    assert!(read(&device, 0, 5 * range).into_iter().eq(before), "reads see what is cached");
    let cut = power.cut().unwrap();
    assert_eq!(device.sync().unwrap_err().os_code(), Some(libc::EIO));
    assert_eq!(device.read_at(0, &mut Buffer::new(BLOCK)).unwrap_err().os_code(), Some(libc::EIO));
    drop(device);
    let path = home.path().join("log");
    let again = Device::open(&path, &Options::default()).unwrap();
    let left = read(&again, 0, 5 * range);
    assert!(on_disk(&path)[..5 * range] == left);
    (cut, left)
}

#[test]
fn a_cut_leaves_what_was_synced_and_anything_of_the_rest() {
    let (range, count) = (4 * BLOCK, 4 * BLOCK / SECTOR);
    let (mut whole, mut lost, mut torn, mut versions) = (0, 0, 0, BTreeSet::new());
    for seed in 0..60 {
        let (cut, left) = cut(seed);
        let sectors: Vec<&[u8]> = left.chunks(SECTOR).collect();
        assert!(
            sectors.iter().all(|sector| sector.iter().all(|byte| *byte == sector[0])),
            "sectors are never torn"
        );
        let seen = |index: usize| &sectors[index * count..][..count];
        assert!(left[..range].iter().all(|byte| *byte == 1), "synced");
        assert!(left[3 * range..4 * range].iter().all(|byte| *byte == 5), "durably overwritten");
        assert!(left[4 * range..].iter().all(|byte| *byte == 6), "durably written");
        versions.extend(seen(1).iter().map(|sector| sector[0]));
        let new = seen(2).iter().filter(|sector| sector[0] == 4).count();
        assert!(seen(2).iter().all(|sector| matches!(sector[0], 0 | 4)));
        match new {
            0 => lost += 1,
            all if all == count => whole += 1,
            _ => torn += 1,
        }
        let old = seen(1).iter().filter(|sector| sector[0] == 1).count();
        assert_eq!((cut.writes, cut.sectors, cut.sectors_lost), (3, 2 * count, old + count - new));
    }
    assert_eq!(versions, BTreeSet::from([1, 2, 3]));
    assert!(whole > 5 && lost > 5 && torn > 5, "{whole} whole, {lost} lost, {torn} torn");
}

#[test]
fn a_seed_repeats_its_cut() {
    assert!(cut(5) == cut(5));
    assert!((6..12).any(|seed| cut(seed).1 != cut(5).1));
}

#[test]
fn one_cut_takes_all_devices_of_a_node() {
    let power = PowerCut::new(1);
    let devices = [device(MIB, &powered(&power)), device(MIB, &powered(&power))];
    for (_, device) in &devices {
        device.write_at(0, &filled(BLOCK, 1)).unwrap();
    }
    assert_eq!(power.cut().unwrap().writes, 2);
    assert!(devices.iter().all(|(_, device)| device.sync().is_err()));
}

#[test]
fn a_cache_that_is_full_is_written_back() {
    let power = PowerCut::new(3);
    let (_home, device) = device(80 * MIB, &powered(&power));
    device.write_at(0, &filled(80 * MIB, 7)).unwrap();
    let sectors = power.cut().unwrap().sectors;
    assert!(sectors > 0 && sectors <= 64 * MIB / SECTOR, "{sectors}");
}

#[test]
fn a_disk_that_lies_about_durability_loses_what_was_synced() {
    let (mut lost_synced, mut lost_durable) = (0, 0);
    for seed in 0..20 {
        let (power, faults) = (PowerCut::new(seed), Faults::new(seed));
        let options = Options { faults: Some(faults.clone()), ..powered(&power) };
        let (_home, device) = device(MIB, &options);
        let rule = faults.add(Rule::new(Effect::Unsynced));
        device.write_at(0, &filled(BLOCK, 1)).unwrap();
        device.sync().unwrap();
        write_sync(&device, BLOCK, filled(BLOCK, 2));
        assert_eq!(faults.hits(rule), 2);
        power.cut().unwrap();
        power.restore();
        let left = read(&device, 0, 2 * BLOCK);
        lost_synced += left[..BLOCK].contains(&0) as usize;
        lost_durable += left[BLOCK..].contains(&0) as usize;
    }
    assert!(lost_synced > 5 && lost_durable > 5, "{lost_synced} and {lost_durable} of 20");
}

#[test]
fn the_sectors_that_a_torn_write_spares_are_the_cached_ones() {
    let (power, faults) = (PowerCut::new(1), Faults::new(1));
    let (_home, device) = device(MIB, &Options { faults: Some(faults.clone()), ..powered(&power) });
    device.write_at(0, &filled(4 * BLOCK, 1)).unwrap();
    faults.add(Rule::new(Effect::Torn(Some(libc::EIO))));
    for _ in 0..10 {
        device.write_at(0, &filled(4 * BLOCK, 2)).unwrap_err();
    }
    let left = read(&device, 0, 4 * BLOCK);
    assert!(left.iter().all(|byte| matches!(byte, 1 | 2)) && left.contains(&2));
}

#[test]
fn stored_bits_rot_whether_or_not_they_were_synced() {
    let power = PowerCut::new(1);
    let (_home, device) = device(MIB, &powered(&power));
    device.write_at(0, &filled(2 * BLOCK, 8)).unwrap();
    device.sync().unwrap();
    device.write_at(0, &filled(BLOCK, 4)).unwrap();
    assert_eq!(power.sectors_unsynced(), BLOCK / SECTOR);
    power.rot(7, 0).unwrap();
    power.rot(BLOCK as u64 + 1000, 7).unwrap();
    let expected = |device: &Device| {
        let mut bytes = [vec![4; BLOCK], vec![8; BLOCK]].concat();
        (bytes[7], bytes[BLOCK + 1000]) = (5, 0x88);
        assert!(read(device, 0, 2 * BLOCK) == bytes);
    };
    expected(&device);
    device.sync().unwrap();
    expected(&device);
}
