//! Memory that a client of this host offers, as it should be and as it should not.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use gd2fs_transport::Frame;
use gd2fs_transport::one_sided::Segment;
use gd2fs_transport::shm::Region;
use gd2fs_wire::header::Header;
use gd2fs_wire::{Code, Opcode, sums};

use super::*;

const PAGES: u64 = 16 * 4096;
const SIZE_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A memfd of `length` bytes, populated and sealed unless said otherwise.
fn memfd(length: u64, flags: u32, populated: bool, seals: i32) -> OwnedFd {
    // SAFETY: plain system calls; the descriptor is new and ours.
    unsafe {
        let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        let memory = OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::ftruncate(fd, length as i64), 0);
        if populated {
            assert_eq!(libc::fallocate(fd, 0, 0, length as i64), 0);
        }
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        memory
    }
}

fn good(length: u64) -> OwnedFd {
    memfd(length, 0, true, SIZE_SEALS)
}

fn refused(peer: &mut Peer, length: u64, descriptor: &OwnedFd, why: &str) {
    let answer = peer.map(1, length, descriptor);
    assert_eq!(answer.code(), Code::BadRequest, "{why}");
    assert!(answer.message().contains(why), "{:?} does not say {why:?}", answer.message());
}

#[test]
fn only_a_populated_memfd_of_a_sealed_size_is_mapped() {
    let bench = Bench::start();
    let mut peer = bench.local_peer();
    let reopened = |memory: &OwnedFd, flags| -> OwnedFd {
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap()
    };
    let sealed = "whose size is sealed";
    refused(&mut peer, PAGES, &memfd(PAGES, 0, true, 0), sealed);
    refused(&mut peer, PAGES, &memfd(PAGES, 0, true, libc::F_SEAL_GROW), sealed);
    refused(&mut peer, PAGES, &memfd(PAGES, 0, true, libc::F_SEAL_SHRINK), sealed);
    refused(&mut peer, PAGES, &memfd(PAGES, 0, false, SIZE_SEALS), "not populated");
    refused(&mut peer, PAGES + 4096, &good(PAGES), "another length");
    refused(&mut peer, PAGES - 4096, &good(PAGES), "another length");
    refused(&mut peer, 0, &good(PAGES), "a length of 0");
    refused(&mut peer, u64::MAX, &good(PAGES), "more than 16 TiB");
    refused(&mut peer, PAGES, &reopened(&good(PAGES), rustix::fs::OFlags::RDONLY), "reading and writing");
    refused(&mut peer, PAGES, &reopened(&good(PAGES), rustix::fs::OFlags::PATH), sealed);
    // A huge page more is never there to be had; the file itself can be made where none is reserved, too.
    let huge = memfd(2 << 20, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, false, SIZE_SEALS);
    refused(&mut peer, 2 << 20, &huge, "ordinary pages");

    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGES).unwrap();
    refused(&mut peer, PAGES, &file.into(), sealed);
    for path in ["/dev/zero", "/dev/null", "/proc/self/mem", "/"] {
        let flags = rustix::fs::OFlags::RDONLY;
        refused(&mut peer, PAGES, &rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap(), sealed);
    }
    let (pipe, _other) = std::io::pipe().unwrap();
    refused(&mut peer, PAGES, &pipe.into(), sealed);
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    refused(&mut peer, PAGES, &socket.into(), sealed);

    assert_eq!(peer.map(1, PAGES, &good(PAGES)).code(), Code::Ok, "the connection serves on");
}

/// Memory whose every byte is `byte`, with the view of its client.
fn filled(byte: u8) -> (Region, OwnedFd) {
    let region = Region::create(PAGES as usize).unwrap();
    // SAFETY: ours alone so far.
    unsafe { region.address().write_bytes(byte, region.len()) };
    let descriptor = region.descriptor().unwrap();
    (region, descriptor)
}

/// The byte with which a WRITE from this region fills the file.
fn written_from(peer: &mut Peer, handle: u32, region: u32) -> u8 {
    let frame = peer.one_sided(Opcode::Write, handle, 0, &[Segment::new(region, 0, 100)]);
    assert_eq!(peer.ask(frame, &[]).code(), Code::Ok);
    let bytes = peer.read(handle, 0, 100).payload;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn a_descriptor_counts_for_the_frame_that_it_came_with() {
    let bench = Bench::start();
    let mut peer = bench.local_peer();
    let handle = peer.open(&capability());
    let regions: Vec<(Region, OwnedFd)> = (0..12).map(filled).collect();
    let fd = |index: usize| &regions[index].1;

    let frame = peer.map_frame(1, PAGES);
    assert!(peer.ask(frame, &[]).message().contains("without a descriptor"));
    // A MAP that is refused before and after its ext is looked at.
    let mut frame = peer.map_frame(1, PAGES);
    frame.header.incarnation = 7;
    peer.send_with(&Peer::bytes(frame, &[]), &[fd(1)]).unwrap();
    assert_eq!(peer.answer().code(), Code::StaleIncarnation);
    let frame = Frame { ext: b"{".to_vec(), ..Frame::new(peer.header(Opcode::Map)) };
    peer.send_with(&Peer::bytes(frame, &[]), &[fd(2)]).unwrap();
    assert!(peer.answer().message().contains("not understood"));
    let frame = peer.map_frame(1, PAGES);
    assert!(peer.ask(frame, &[]).message().contains("without a descriptor"));
    // All in one message, whose descriptor is that of the MAP which is refused.
    let mut frame = peer.map_frame(1, PAGES);
    frame.header.incarnation = 7;
    let both = [Peer::bytes(frame, &[]), Peer::bytes(peer.map_frame(1, PAGES), &[])].concat();
    peer.send_with(&both, &[fd(1)]).unwrap();
    assert_eq!(peer.answer().code(), Code::StaleIncarnation);
    assert!(peer.answer().message().contains("without a descriptor"));
    // Beside a request that takes none, and too many.
    let ping = Peer::bytes(Frame::new(peer.header(Opcode::Ping)), &[]);
    peer.send_with(&ping, &[fd(3), fd(4)]).unwrap();
    assert_eq!(peer.answer().code(), Code::Ok);
    let frame = peer.map_frame(5, PAGES);
    peer.send_with(&Peer::bytes(frame, &[]), &[fd(5), fd(6), fd(7)]).unwrap();
    assert_eq!(peer.answer().code(), Code::Ok);
    assert_eq!(peer.map(8, PAGES, fd(8)).code(), Code::Ok);
    let eight = [9, 10, 11, 9, 10, 11, 9, 10].map(fd);
    peer.send_with(&ping, &eight).unwrap();
    assert_eq!(peer.answer().code(), Code::Ok);
    assert_eq!(peer.map(11, PAGES, fd(11)).code(), Code::Ok);

    // What each number means now.
    for region in [5, 8, 11] {
        assert_eq!(u32::from(written_from(&mut peer, handle, region)), region);
    }
    assert!(peer.map(5, PAGES, fd(0)).message().contains("registered already"));
    assert_eq!(peer.map(5, PAGES, fd(5)).code(), Code::Ok, "the same once more");
    assert_eq!(peer.unmap(5).code(), Code::Ok);
    let frame = peer.one_sided(Opcode::Read, handle, 0, &[Segment::new(5, 0, 100)]);
    assert!(peer.ask(frame, &[]).message().contains("region 5 is not registered"));
    assert_eq!(peer.map(5, PAGES, fd(0)).code(), Code::Ok);
    assert_eq!(written_from(&mut peer, handle, 5), 0);
    // The node keeps none of them open: its descriptors are for connections.
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    (0..100).for_each(|_| assert_eq!(peer.map(5, PAGES, fd(0)).code(), Code::Ok));
    assert!(open() < before + 50, "descriptors of regions stay open");
}

#[test]
fn a_tcp_connection_reaches_no_memory() {
    let bench = Bench::start();
    let (mut near, mut far) = (bench.local_peer(), bench.peer());
    assert_eq!(near.map(1, PAGES, &good(PAGES)).code(), Code::Ok);
    let handle = far.open(&capability());
    far.write(handle, 0, &[1; 100]);
    let map = far.map_frame(1, PAGES);
    let read = far.one_sided(Opcode::Read, handle, 0, &[Segment::new(1, 0, 100)]);
    let write = far.one_sided(Opcode::Write, handle, 0, &[Segment::new(1, 0, 100)]);
    for frame in [map, read, write] {
        let answer = far.ask(frame, &[]);
        assert_eq!(answer.code(), Code::BadRequest);
        assert!(answer.message().contains("local socket"), "{}", answer.message());
    }
    assert_eq!(far.unmap(1).code(), Code::BadRequest);
    let other = bench.local_peer().unmap(1);
    assert_eq!(other.code(), Code::BadRequest, "regions are their connection's own");
}

#[test]
fn segments_outside_their_region_are_refused_whatever_they_name() {
    let bench = Bench::start();
    let mut peer = bench.local_peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(1000, 1));
    assert_eq!(peer.map(1, PAGES, &good(PAGES)).code(), Code::Ok);
    for segment in [
        Segment::new(1, PAGES - 99, 100),
        Segment::new(1, PAGES, 100),
        Segment::new(1, u64::MAX, 100),
        Segment::new(1, u64::MAX - 50, 100),
        Segment::new(2, 0, 100),
    ] {
        for opcode in [Opcode::Read, Opcode::Write] {
            let frame = peer.one_sided(opcode, handle, 0, &[Segment::new(1, 0, 50), segment]);
            assert_eq!(peer.ask(frame, &[]).code(), Code::BadRequest, "{opcode:?} {segment:?}");
        }
    }
    for (ext, length) in [(vec![], 100), (vec![0; 15], 0), (vec![0; 16], 100)] {
        let header = peer.one_sided(Opcode::Read, handle, 0, &[]).header;
        let frame = Frame { header: Header { length, ..header }, ext, sums: vec![] };
        assert_eq!(peer.ask(frame, &[]).code(), Code::BadRequest);
    }
    assert_eq!(peer.read(handle, 0, 1000).payload, pattern(1000, 1), "nothing was written");
}

#[test]
fn a_connection_has_so_many_regions_and_no_more() {
    let bench = Bench::start();
    let mut peer = bench.local_peer();
    let page = good(4096);
    for region in 0..1024 {
        assert_eq!(peer.map(region, 4096, &page).code(), Code::Ok, "{region}");
    }
    assert_eq!(peer.map(1024, 4096, &page).code(), Code::Overloaded);
    assert_eq!(peer.map(7, 4096, &page).code(), Code::Ok, "one that it has may be repeated");
    assert_eq!(bench.local_peer().map(1024, 4096, &page).code(), Code::Ok, "another connection has its own");
    assert_eq!(peer.unmap(7).code(), Code::Ok);
    assert_eq!(peer.map(1024, 4096, &page).code(), Code::Ok);
}

/// Runs `moves` while another thread makes holes in the memory and writes into it.
fn beside_a_scribbler(region: &Region, descriptor: &OwnedFd, moves: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0u64;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                let page = (round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % (PAGES / 4096);
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // SAFETY: inside our own mapping, whose bytes nobody reads as a reference; the hole is filled at the next touch.
                unsafe {
                    libc::fallocate(descriptor.as_raw_fd(), mode, (page * 4096) as i64, 4096);
                    region.address().add((page * 4096) as usize).write_volatile(round as u8);
                    let address = region.address().add((page * 4096) as usize).cast();
                    if round.is_multiple_of(3) {
                        libc::madvise(address, 4096, libc::MADV_REMOVE);
                    }
                }
            }
        });
        // Also where a check fails: the scribbler must end.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(moves));
        stop.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

#[test]
fn memory_that_changes_during_a_move_spoils_nothing_but_itself() {
    let bench = Bench::start();
    let mut peer = bench.local_peer();
    let handle = peer.open(&capability());
    let (region, descriptor) = filled(7);
    assert_eq!(peer.map(1, PAGES, &descriptor).code(), Code::Ok);
    let all = [Segment::new(1, 0, PAGES as u32)];
    let mut refusals = 0;
    beside_a_scribbler(&region, &descriptor, || {
        for round in 0..600u64 {
            // At odd places, so that writes begin and end inside pieces of others.
            let offset = round % 5 * 10_001;
            let mut frame = peer.one_sided(Opcode::Write, handle, offset, &all);
            if round % 4 == 0 {
                // The client's own sums, of bytes that are not there any more.
                frame.sums = sums::piece_sums(offset, &vec![7; PAGES as usize]);
            }
            match peer.ask(frame, &[]).code() {
                Code::Ok => {}
                Code::Checksum => refusals += 1,
                other => panic!("{other:?}"),
            }
            // `read` verifies what comes against the sums that were stored.
            assert_eq!(peer.read(handle, offset, PAGES as u32).code(), Code::Ok, "round {round}");
            let frame = peer.one_sided(Opcode::Read, handle, offset, &all);
            assert_eq!(peer.ask(frame, &[]).code(), Code::Ok, "round {round}");
        }
    });
    assert!(refusals > 0, "no write met other bytes than were summed");
    assert_eq!(bench.stats()["errors"]["CORRUPT"], serde_json::Value::Null);
    let frame = peer.one_sided(Opcode::Read, handle, 0, &all);
    assert_eq!(peer.ask(frame, &[]).code(), Code::Ok);
    // SAFETY: nobody writes any more.
    let seen = unsafe { std::slice::from_raw_parts(region.address(), region.len()) };
    assert_eq!(peer.read(handle, 0, PAGES as u32).payload, seen, "moves are right again");
}
