use std::io::Write;
use std::time::{Duration, Instant};

use gd2fs_transport::Frame;
use gd2fs_wire::header::{FLAG_RESPONSE, Header};
use gd2fs_wire::{Code, Opcode};
use proptest::prelude::*;

use super::*;

#[test]
fn a_damaged_header_closes_the_connection() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let mut bytes = Peer::bytes(Frame::new(peer.header(Opcode::Ping)), &[]);
    bytes[20] ^= 1;
    peer.stream.write_all(&bytes).unwrap();
    assert!(peer.is_closed());
}

#[test]
fn malformed_frames_are_answered_and_closed() {
    let bench = Bench::start();
    let check = |name: &str, code: Code, spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut peer = bench.peer();
        let handle = peer.open(&capability());
        let frame = peer.write_frame(handle, 0, &[1; 100]);
        let mut bytes = Peer::bytes(frame, &[1; 100]);
        spoil(&mut bytes);
        let sum = gd2fs_wire::sums::crc32c(&bytes[..60]).to_le_bytes();
        bytes[60..64].copy_from_slice(&sum);
        peer.stream.write_all(&bytes).unwrap();
        let answer = peer.answer();
        assert_eq!((answer.code(), answer.header.request), (code, peer.request), "{name}");
        assert!(peer.is_closed(), "{name}");
    };
    check("payload_crc", Code::BadFrame, &|b| b[52] ^= 1);
    check("sums", Code::BadFrame, &|b| b[64] ^= 1);
    check("unknown flag", Code::BadFrame, &|b| b[6] |= 8);
    check("reserved", Code::BadFrame, &|b| b[59] = 1);
    check("length", Code::TooLarge, &|b| b[35] = 0xff);
    check("sums_bytes", Code::BadFrame, &|b| b[36] = 8);
    check("version", Code::Version, &|b| b[4] = 9);
    check("response", Code::BadFrame, &|b| {
        *b =
            Peer::bytes(Frame::new(Header { flags: FLAG_RESPONSE, ..Header::request(Opcode::Ping, 2) }), &[]);
        b[8] = 3;
    });
    assert_eq!(bench.node.store().arena().used(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn garbage_harms_nobody(
        greet in any::<bool>(), bytes in proptest::collection::vec(any::<u8>(), 0..3000), opcode in 0u8..25,
        fields in any::<[u32; 5]>(), ext in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        // One node for all cases would hide which case broke it; starting one takes a few milliseconds.
        let bench = Bench::start();
        let mut peer = if greet { bench.peer() } else { Peer::connect(&bench.node) };
        // A well-formed header with arbitrary fields first, then bytes that are anything.
        let header = Header {
            opcode, handle: fields[0], epoch: fields[1], offset: u64::from(fields[2]), length: fields[3] % 5000,
            deadline_ms: 1 + fields[4] % 50, ..Header::request(Opcode::Ping, 9)
        };
        let frame = Frame { header, ext, sums: vec![] };
        let mut all = Peer::bytes(frame, &[]);
        all.extend_from_slice(&bytes);
        let _ = peer.stream.write_all(&all);
        let _ = peer.stream.shutdown(std::net::Shutdown::Write);
        while peer.try_answer().is_ok() {}
        prop_assert_eq!(bench.peer().ping().code(), Code::Ok, "the node lives");
    }
}

#[test]
fn a_frame_that_is_not_finished_in_time_is_dropped() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let mut frame = peer.write_frame(handle, 0, &[1; 1000]);
    frame.header.deadline_ms = 200;
    let bytes = Peer::bytes(frame, &[1; 1000]);
    peer.stream.write_all(&bytes[..500]).unwrap();
    let begun = Instant::now();
    assert_eq!(peer.answer().code(), Code::Timeout);
    assert!(peer.is_closed());
    assert!(begun.elapsed() < Duration::from_secs(3));
    assert_eq!(bench.node.store().arena().used(), 0);
}

#[test]
fn a_peer_that_does_not_read_is_dropped() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(UNIT as usize, 1));
    for _ in 0..16 {
        let mut frame = peer.read_frame(handle, 0, UNIT);
        frame.header.deadline_ms = 50;
        peer.stream.write_all(&Peer::bytes(frame, &[])).unwrap();
    }
    let begun = Instant::now();
    while bench.stats()["connections"] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(8), "the connection is still held");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn small_replies_that_nobody_reads_keep_no_memory_of_files() {
    assert_eq!(kept_by_replies_that_nobody_reads(1 << 10), 0);
}

#[test]
fn replies_that_nobody_reads_keep_little_memory_and_for_a_while() {
    // A batch of 256 KiB keeps 13 chunks; all replies together would keep 160 MiB.
    let kept = kept_by_replies_that_nobody_reads(20 << 10);
    assert!(kept > 0 && kept <= 13 * UNIT as usize, "{kept} bytes are kept");
}

/// What is kept of a file that is deleted while replies from it wait for their reader; it does come back.
fn kept_by_replies_that_nobody_reads(length: u32) -> usize {
    const CHUNKS: u64 = 40;
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    // A local socket holds 208 KiB: its peer does not read, so the second batch of replies waits.
    let mut peer = bench.local_peer();
    let handle = peer.open(&capability());
    for chunk in 0..CHUNKS {
        let last = (chunk + 1) * u64::from(UNIT) - u64::from(length);
        assert_eq!(peer.write(handle, last, &pattern(length as usize, chunk as u8)).code(), Code::Ok);
    }
    let arena = bench.node.store().arena();
    assert_eq!(arena.used(), CHUNKS as usize * UNIT as usize);
    let frames: Vec<u8> = (0..1000)
        .flat_map(|index| {
            let last = (index % CHUNKS + 1) * u64::from(UNIT) - u64::from(length);
            let mut frame = peer.read_frame(handle, last, length);
            frame.header.deadline_ms = 2000;
            Peer::bytes(frame, &[])
        })
        .collect();
    peer.stream.write_all(&frames).unwrap();
    let begun = Instant::now();
    let mut seen = (0, Instant::now());
    // Until it has come to a standstill.
    while seen.0 == 0 || seen.1.elapsed() < Duration::from_millis(200) {
        assert!(begun.elapsed() < Duration::from_secs(8));
        let bytes = bench.stats()["bytes_read"].as_u64().unwrap();
        if bytes != seen.0 {
            seen = (bytes, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(seen.0 < 1000 * u64::from(length), "the node goes on without a reader");
    let name = serde_json::json!([{ "file": FILE, "column": 0 }]);
    assert_eq!(control.control(Opcode::Delete, name).code(), Code::Ok);
    let kept = arena.used();
    while arena.used() > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(8),
            "the memory of a peer that does not read is never freed"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    kept
}

#[test]
fn connections_are_limited_and_come_back() {
    let bench = Bench::start_with(|config| config.connections_max = 2);
    let (first, mut second) = (bench.peer(), bench.peer());
    assert!(Peer::connect(&bench.node).is_closed());
    assert_eq!(bench.stats()["connections_refused"], 1);
    assert_eq!(second.ping().code(), Code::Ok);
    drop(first);
    let begun = Instant::now();
    while bench.stats()["connections"] != 1 {
        assert!(begun.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(bench.peer().ping().code(), Code::Ok);
}

#[test]
fn handles_are_limited() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let many = Capability { ranges: vec![(0, 1); 1025], ..capability() };
    assert_eq!(peer.try_open(&many).code(), Code::BadRequest);
    let frame = |request| {
        let open = gd2fs_wire::messages::Open { column: 0, capability: keys().sign(&capability()) };
        Peer::bytes(Frame::with_message(Header::request(Opcode::Open, request), &open).unwrap(), &[])
    };
    let mut sender = peer.stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        for request in 2..2 + 65_537 {
            sender.write_all(&frame(request)).unwrap();
        }
    });
    for _ in 0..65_536 {
        assert_eq!(peer.answer().code(), Code::Ok);
    }
    assert_eq!(peer.answer().code(), Code::Overloaded);
    writer.join().unwrap();
    peer.request = 100_000;
    let close = Header { handle: 5, ..peer.header(Opcode::Close) };
    assert_eq!(peer.ask(Frame::new(close), &[]).code(), Code::Ok);
    peer.open(&capability());
}
