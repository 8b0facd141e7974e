use std::sync::Arc;

use gd2fs_transport::fake;
use gd2fs_transport::one_sided::{self, Remote, SEGMENTS_MAX, Segment};
use gd2fs_transport::shm::{Mappings, Region, Regions};
use gd2fs_wire::messages::Map;
use gd2fs_wire::sums::piece_sums;
use gd2fs_wire::{Code, Failure};
use proptest::prelude::*;

use crate::{list, pattern};

const BYTES: usize = 256 << 10;

type See = dyn Fn(u32, usize, usize) -> Vec<u8>;
type Set = dyn Fn(u32, usize, &[u8]);

/// A client's two regions, as the node reaches them and as the client sees them.
struct Peer {
    remote: Box<dyn Remote>,
    see: Box<See>,
    set: Box<Set>,
}

fn offer(region: u32, length: u64) -> Map {
    Map { region, length }
}

fn peers() -> Vec<(&'static str, Peer)> {
    let regions = Arc::new([Region::create(BYTES).unwrap(), Region::create(BYTES).unwrap()]);
    let shared = Regions::new(Arc::new(Mappings::default()), false);
    for (number, region) in regions.iter().enumerate() {
        shared.register(&offer(number as u32, BYTES as u64), Some(region.descriptor().unwrap())).unwrap();
    }
    let (seen, set) = (regions.clone(), regions);
    let shm = Peer {
        remote: Box::new(shared),
        see: Box::new(move |region, start, length| {
            // SAFETY: inside the region; the node's moves are over when a test looks.
            unsafe { std::slice::from_raw_parts(seen[region as usize].address().add(start), length) }.to_vec()
        }),
        set: Box::new(move |region, start, bytes| {
            // SAFETY: inside the region, and nobody moves at the moment.
            unsafe { set[region as usize].address().add(start).copy_from(bytes.as_ptr(), bytes.len()) }
        }),
    };
    let memory = Arc::new(fake::RemoteMemory::new(2, BYTES));
    let (seen, set) = (memory.clone(), memory.clone());
    let fake = Peer {
        remote: Box::new(fake::Shared(memory)),
        see: Box::new(move |region, start, length| seen.bytes(region, start, length)),
        set: Box::new(move |region, start, bytes| set.set(region, start, bytes)),
    };
    vec![("shm", shm), ("fake", fake)]
}

fn run<T>(moved: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(moved)
}

fn put(
    peer: &Peer,
    offset: u64,
    data: &mut [u8],
    cuts: &[usize],
    to: &[Segment],
) -> Result<Vec<u32>, Failure> {
    let from = list(data, cuts);
    // SAFETY: `data` is borrowed for the whole of the call.
    run(unsafe { peer.remote.put(offset, &from, to, true) })
}

fn get(
    peer: &Peer,
    offset: u64,
    from: &[Segment],
    data: &mut [u8],
    cuts: &[usize],
) -> Result<Vec<u32>, Failure> {
    let into = list(data, cuts);
    // SAFETY: as in `put`.
    run(unsafe { peer.remote.get(offset, from, &into) })
}

/// Segments that do not overlap, in both regions.
fn segments(lengths: &[u32]) -> Vec<Segment> {
    let mut ends = [0u64; 2];
    lengths
        .iter()
        .enumerate()
        .map(|(index, length)| {
            let region = index % 2;
            let start = ends[region];
            ends[region] += u64::from(*length) + 3;
            Segment::new(region as u32, start, *length)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn bytes_cross_in_both_directions(
        lengths in proptest::collection::vec(prop_oneof![1u32..100, Just(4096), Just(32768)], 1..10),
        offset in prop_oneof![Just(0u64), 1u64..100_000],
        cuts in proptest::collection::vec(1usize..40_000, 1..4),
    ) {
        let total: u32 = lengths.iter().sum();
        let listed = segments(&lengths);
        for (name, peer) in peers() {
            let mut data = pattern(total as usize, 5);
            let sums = put(&peer, offset, &mut data, &cuts, &listed).unwrap();
            prop_assert_eq!(&sums, &piece_sums(offset, &data), "{}", name);
            let arrived: Vec<u8> = listed.iter()
                .flat_map(|s| (peer.see)(s.region(), s.offset() as usize, s.length() as usize)).collect();
            prop_assert_eq!(&arrived, &data);
            // What lies in between was not touched.
            for s in &listed {
                prop_assert_eq!((peer.see)(s.region(), (s.offset() + u64::from(s.length())) as usize, 3), vec![0; 3]);
            }
            (peer.set)(listed[0].region(), listed[0].offset() as usize, &[0xee]);
            let mut back = vec![0; total as usize];
            let sums = get(&peer, offset, &listed, &mut back, &cuts).unwrap();
            data[0] = 0xee;
            prop_assert_eq!(&back, &data);
            prop_assert_eq!(sums, piece_sums(offset, &data));
        }
    }
}

#[test]
fn nothing_beyond_a_region_is_reached() {
    for (name, peer) in peers() {
        let mut data = pattern(100, 1);
        for segment in [
            Segment::new(0, BYTES as u64 - 99, 100),
            Segment::new(0, u64::MAX, 100),
            Segment::new(0, u64::MAX - 50, 100),
            Segment::new(2, 0, 100),
        ] {
            let put = put(&peer, 0, &mut data, &[100], &[segment]).unwrap_err();
            assert_eq!(put.code, Code::BadRequest, "{name} {segment:?}");
            assert!(put.message.contains("region"), "{}", put.message);
            let got = get(&peer, 0, &[segment], &mut data, &[100]).unwrap_err();
            assert_eq!(got.code, Code::BadRequest, "{name} {segment:?}");
        }
        assert!((peer.see)(0, 0, BYTES).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_damaged_move_shows_in_its_sums() {
    let memory = Arc::new(fake::RemoteMemory::new(1, BYTES));
    memory.damage_next(70);
    let remote = fake::Shared(memory);
    let mut data = pattern(100, 1);
    let (from, to) = (list(&mut data, &[100]), [Segment::new(0, 0, 100)]);
    // SAFETY: `data` outlives the call.
    let sums = run(unsafe { remote.put(0, &from, &to, true) }).unwrap();
    assert_ne!(sums, piece_sums(0, &pattern(100, 1)));
}

#[test]
fn lists_of_segments_are_checked() {
    let list = [Segment::new(1, 2, 3), Segment::new(4, 5, 6)];
    assert_eq!(one_sided::decode(&one_sided::encode(&list), 9).unwrap(), list);
    assert!(one_sided::encode(&[list[0]; SEGMENTS_MAX]).len() <= usize::from(u16::MAX));
    assert!(one_sided::decode(&one_sided::encode(&list), 10).unwrap_err().message.contains("segments"));
    assert!(one_sided::decode(&[0; 17], 0).unwrap_err().message.contains("16 bytes"));
}

#[test]
fn memory_that_could_fault_or_cost_the_node_is_refused() {
    use std::os::fd::{FromRawFd, OwnedFd};
    let memfd = |length: i64, seals: i32, touch: bool| -> OwnedFd {
        // SAFETY: plain system calls; the descriptor is new and ours.
        unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, length), 0);
            if touch {
                assert_eq!(libc::fallocate(fd, 0, 0, length), 0);
            }
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
            OwnedFd::from_raw_fd(fd)
        }
    };
    let both = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    let regions = Regions::new(Arc::new(Mappings::default()), false);
    let refused =
        |memory: OwnedFd, length: u64| regions.register(&offer(1, length), Some(memory)).unwrap_err().message;
    assert!(refused(memfd(8192, libc::F_SEAL_GROW, true), 8192).contains("sealed"));
    assert!(refused(memfd(8192, both, true), 4096).contains("length"));
    assert!(refused(memfd(8192, both, true), 0).contains("length"));
    assert!(refused(memfd(1 << 40, both, false), 1 << 40).contains("populated"));
    assert!(refused(memfd(8192, both | libc::F_SEAL_WRITE, true), 8192).contains("mapped"));
    assert!(refused(std::fs::File::open("/proc/self/exe").unwrap().into(), 8192).contains("memfd"));
    let good = memfd(8192, both, true);
    for _ in 0..2 {
        regions.register(&offer(1, 8192), Some(good.try_clone().unwrap())).unwrap();
    }
    assert!(refused(memfd(8192, both, true), 8192).contains("already"));
    regions.unregister(1).unwrap();
    assert_eq!(regions.unregister(1).unwrap_err().code, Code::BadRequest);
}

#[test]
fn severed_pages_are_out_of_reach() {
    let region = Region::create(4 * 4096).unwrap();
    let shared = Regions::new(Arc::new(Mappings::default()), false);
    shared.register(&offer(1, region.len() as u64), Some(region.descriptor().unwrap())).unwrap();
    region.sever(4096, 8192).unwrap();
    let mut data = vec![7; 4 * 4096];
    let (from, to) = (list(&mut data, &[4096]), [Segment::new(1, 0, 4 * 4096)]);
    // SAFETY: `data` outlives the call.
    run(unsafe { shared.put(0, &from, &to, true) }).unwrap();
    // SAFETY: inside the region, and the move is over.
    let seen = unsafe { std::slice::from_raw_parts(region.address(), region.len()) };
    let pages: Vec<u8> = seen.chunks(4096).map(|page| page[0]).collect();
    assert_eq!(pages, [7, 0, 0, 7]);
}

#[test]
fn the_regions_of_all_connections_together_are_limited() {
    let mappings = Arc::new(Mappings::with_limit(2));
    let memory: Vec<Region> = (0..3).map(|_| Region::create(4096).unwrap()).collect();
    let register = |connection: &Regions, index: usize| {
        connection.register(&offer(index as u32, 4096), Some(memory[index].descriptor().unwrap()))
    };
    let (one, other) = (Regions::new(mappings.clone(), false), Regions::new(mappings.clone(), false));
    register(&one, 0).unwrap();
    register(&one, 1).unwrap();
    register(&other, 1).unwrap();
    let failure = register(&other, 2).unwrap_err();
    assert_eq!(failure.code, Code::Overloaded);
    assert!(failure.message.contains("2 regions"), "{}", failure.message);
    one.unregister(1).unwrap();
    assert_eq!(register(&other, 2).unwrap_err().code, Code::Overloaded, "the other connection has it still");
    drop(one);
    register(&other, 2).unwrap();
}
