use gd2fs_transport::Frame;
use gd2fs_wire::header::{FLAG_RAW, Header};
use gd2fs_wire::messages::OpenReply;
use gd2fs_wire::{Code, Opcode, Role};
use std::io::Write;

use super::*;

#[test]
fn what_is_written_is_read_by_everybody() {
    let bench = Bench::start();
    let (mut writer, mut reader) = (bench.peer(), bench.peer());
    let (w, r) = (writer.open(&capability()), reader.open(&capability()));
    let bytes = pattern(100_000, 1);
    let answer = writer.write(w, 12_345, &bytes);
    assert_eq!((answer.code(), answer.header.length), (Code::Ok, 100_000));
    assert_eq!(reader.read(r, 12_345, 100_000).payload, bytes);
    assert_eq!(reader.read(r, 50_000, 7).payload, bytes[50_000 - 12_345..][..7]);
    let short = reader.read(r, 100_000, 1 << 20);
    assert_eq!((short.code(), short.payload.len()), (Code::Ok, 12_345));
    assert_eq!(reader.read(r, 2 << 20, 10).payload, b"");
    assert_eq!(reader.read(r, 0, 20_000).code(), Code::Hole);
    let opened: OpenReply = serde_json::from_slice(&reader.try_open(&capability()).ext).unwrap();
    assert_eq!((opened.length, opened.lost), (112_345, false));
    let stats = bench.stats();
    assert_eq!((&stats["bytes_written"], &stats["writes"]), (&100_000.into(), &1.into()));
    assert_eq!((&stats["bytes_read"], &stats["read_latency"]["count"]), (&112_352.into(), &4.into()));
    assert_eq!((&stats["connections"], &stats["files"]), (&2.into(), &1.into()));
}

#[test]
fn whole_stripe_units_and_raw_frames() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let bytes = pattern(UNIT as usize, 3);
    assert_eq!(peer.write(handle, u64::from(UNIT), &bytes).code(), Code::Ok);
    assert_eq!(peer.read(handle, u64::from(UNIT), UNIT).payload, bytes);
    let mut raw = peer.write_frame(handle, 10, &bytes[..70_000]);
    raw.header.flags = FLAG_RAW;
    raw.sums.clear();
    assert_eq!(peer.ask(raw, &bytes[..70_000]).code(), Code::Ok);
    let mut raw = peer.read_frame(handle, 10, 70_000);
    raw.header.flags = FLAG_RAW;
    let answer = peer.ask(raw, &[]);
    assert_eq!((answer.header.sums_bytes, answer.payload), (0, bytes[..70_000].to_vec()));
    assert_eq!(peer.read(handle, 11, 60_000).payload, bytes[1..60_001], "the node summed it itself");
}

#[test]
fn impossible_requests_are_refused_and_the_connection_goes_on() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    assert_eq!(peer.read(handle, u64::from(UNIT) - 1, 2).code(), Code::BadRequest);
    assert_eq!(peer.write(handle, u64::from(UNIT) - 1, b"ab").code(), Code::BadRequest);
    assert_eq!(peer.write(handle, 0, b"").code(), Code::BadRequest);
    assert_eq!(peer.read(handle + 1, 0, 1).code(), Code::BadRequest);
    let unknown = Header { opcode: 99, length: 5, ..peer.header(Opcode::Ping) };
    assert_eq!(peer.ask(Frame::new(unknown), b"12345").code(), Code::UnknownOpcode);
    let ping = Header { length: 5, ..peer.header(Opcode::Ping) };
    assert_eq!(peer.ask(Frame::new(ping), b"12345").code(), Code::BadRequest);
    let stale = Header { incarnation: 9, ..peer.read_frame(handle, 0, 1).header };
    assert_eq!(peer.ask(Frame::new(stale), &[]).code(), Code::StaleIncarnation);
    let old = Header { epoch: 2, ..peer.read_frame(handle, 0, 1).header };
    assert_eq!(peer.ask(Frame::new(old), &[]).code(), Code::StaleLayout);
    let close = Header { handle, ..peer.header(Opcode::Close) };
    assert_eq!(peer.ask(Frame::new(close), &[]).code(), Code::Ok);
    assert_eq!(peer.read(handle, 0, 1).code(), Code::BadRequest, "closed");
    assert_eq!(peer.ping().code(), Code::Ok);
}

#[test]
fn handles_belong_to_their_connection() {
    let bench = Bench::start();
    let (mut first, mut second) = (bench.peer(), bench.peer());
    let handle = first.open(&capability());
    assert_eq!(second.read(handle, 0, 1).code(), Code::BadRequest);
    assert_eq!(second.write(handle, 0, b"x").code(), Code::BadRequest);
}

#[test]
fn no_space_is_answered_and_the_connection_goes_on() {
    let bench = Bench::start_with(|config| config.memory_bytes = 4 << 20);
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let bytes = pattern(UNIT as usize, 1);
    assert_eq!(peer.write(handle, 0, &bytes).code(), Code::Ok);
    let answer = peer.write(handle, u64::from(UNIT), &bytes);
    assert_eq!(answer.code(), Code::NoSpace);
    assert!(answer.message().contains("memory_bytes"), "{}", answer.message());
    assert_eq!(peer.read(handle, 0, UNIT).payload, bytes);
}

#[test]
fn a_damaged_payload_publishes_nothing() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(100_000, 1));
    let bytes = pattern(100_000, 2);
    let frame = peer.write_frame(handle, 0, &bytes);
    let mut damaged = bytes.clone();
    damaged[70_000] ^= 1;
    assert_eq!(peer.ask(frame, &damaged).code(), Code::Checksum);
    assert_eq!(peer.read(handle, 0, 100_000).payload, pattern(100_000, 1));
    assert_eq!(peer.write(handle, 0, &bytes).code(), Code::Ok);
    assert_eq!(peer.read(handle, 0, 100_000).payload, bytes);
    assert_eq!(bench.stats()["checksum_failures"], 1);
}

#[test]
fn a_bit_that_flips_in_the_arena_is_never_data() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(100_000, 1));
    let file = capability().file_id().unwrap();
    bench.node.store().get(file, 0).unwrap().flip_bit(40_000);
    let part = peer.read(handle, 39_999, 10);
    assert_eq!((part.code(), part.payload.len()), (Code::Corrupt, 0));
    // A whole piece goes out with the writer's own sum: the reader's check is the one that counts.
    assert_eq!(peer.read(handle, 32_768, 32_768).code(), Code::Checksum);
    assert_eq!(peer.read(handle, 0, 32_768).payload, pattern(100_000, 1)[..32_768]);
}

#[test]
fn capabilities_are_the_limit() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let mut refused = |change: &dyn Fn(&mut Capability)| {
        let mut wanted = capability();
        change(&mut wanted);
        peer.try_open(&wanted).code()
    };
    assert_eq!(refused(&|c| c.tenant = "other".into()), Code::Forbidden);
    assert_eq!(refused(&|c| c.expiry = in_seconds(-1)), Code::Expired);
    assert_eq!(refused(&|c| c.class = Class::Durable), Code::Unsupported, "never silently weaker");
    assert_eq!(refused(&|c| c.stripe_unit = 1000), Code::BadRequest);
    assert_eq!(refused(&|c| c.columns = vec![]), Code::BadRequest);
    assert_eq!(refused(&|c| c.columns = vec![(1, 2)]), Code::StaleIncarnation);
    assert_eq!(refused(&|c| c.file = "ab".into()), Code::BadRequest);
    assert_eq!(refused(&|c| (c.tenant, c.bearer) = ("other".into(), true)), Code::Ok);
    let text = keys().sign(&capability());
    assert_eq!(peer.open_text(format!("{text}A")).code(), Code::BadSignature);
    assert_eq!(peer.open_text(Keys::development().sign(&capability())).code(), Code::BadSignature);
    let mut admin = Peer::connect(&bench.node).greeted(&hello("somebody", Role::Admin));
    admin.open(&capability());
}

#[test]
fn rights_ranges_and_expiry_hold_for_every_request() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let all = peer.open(&capability());
    peer.write(all, 0, &pattern(1000, 1));
    let reader =
        peer.open(&Capability { rights: vec![Right::Read], ranges: vec![(100, 200)], ..capability() });
    assert_eq!(peer.read(reader, 100, 100).payload, pattern(1000, 1)[100..200]);
    assert_eq!(peer.read(reader, 99, 2).code(), Code::Forbidden);
    assert_eq!(peer.read(reader, 199, 2).code(), Code::Forbidden);
    assert_eq!(peer.write(reader, 100, b"x").code(), Code::Forbidden);
    let writer =
        peer.open(&Capability { rights: vec![Right::Write], ranges: vec![(500, -1)], ..capability() });
    assert_eq!(peer.write(writer, 499, b"xx").code(), Code::Forbidden);
    assert_eq!(peer.read(writer, 500, 1).code(), Code::Forbidden);
    assert_eq!(peer.write(writer, 500, b"x").code(), Code::Ok);
    let brief = peer.open(&Capability { expiry: in_seconds(1), ..capability() });
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(peer.read(brief, 0, 1).code(), Code::Expired);
    assert_eq!(peer.write(brief, 0, b"x").code(), Code::Expired);
}

/// Whatever the machine's clock says: here control's is a day behind it, as seen from this test.
#[test]
fn what_expires_expires_by_controls_time() {
    let day = -86_400;
    let bench = Bench::start_with(|config| config.now = Some(in_seconds(day) as f64));
    let mut peer = bench.peer();
    let (short, long) = (in_seconds(day + 600), in_seconds(day + 7800));
    let handle = peer.open(&Capability { expiry: short, ..capability() });
    assert_eq!(peer.write(handle, 0, b"bytes").code(), Code::Ok);
    bench.node.hear_time(in_seconds(day + 601) as f64);
    assert_eq!(peer.read(handle, 0, 5).code(), Code::Expired);
    assert_eq!(peer.try_open(&Capability { expiry: short, ..capability() }).code(), Code::Expired);
    let handle = peer.open(&Capability { expiry: long, ..capability() });
    assert_eq!(peer.read(handle, 0, 5).payload, b"bytes");
}

#[test]
fn parallel_connections_share_a_file() {
    let bench = Bench::start();
    std::thread::scope(|scope| {
        for worker in 0..4u8 {
            let bench = &bench;
            scope.spawn(move || {
                let mut peer = bench.peer();
                let handle = peer.open(&capability());
                for round in 0..20u64 {
                    let offset = (round * 4 + u64::from(worker)) * 300_000;
                    let length = 300_000.min(u64::from(UNIT) - offset % u64::from(UNIT)) as usize;
                    assert_eq!(peer.write(handle, offset, &pattern(length, worker)).code(), Code::Ok);
                    assert_eq!(peer.read(handle, offset, length as u32).payload, pattern(length, worker));
                }
            });
        }
    });
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let mut bytes = Vec::new();
    for i in 0..50u8 {
        let frame = peer.write_frame(handle, u64::from(i) * 10, &[i; 10]);
        bytes.extend(Peer::bytes(frame, &[i; 10]));
        let frame = peer.read_frame(handle, u64::from(i) * 10, 10);
        bytes.extend(Peer::bytes(frame, &[]));
    }
    peer.stream.write_all(&bytes).unwrap();
    for i in 0..50u8 {
        assert_eq!(peer.answer().code(), Code::Ok);
        assert_eq!(peer.answer().payload, [i; 10]);
    }
}

#[test]
fn a_column_opens_only_on_the_nodes_that_control_chose() {
    let bench = Bench::start();
    let mut peer = Peer::connect(&bench.node).greeted(&hello("t", Role::Client));
    for nodes in [vec![], vec![vec![]], vec![vec!["n2".into()]], vec![vec!["n2".into()], vec!["n1".into()]]] {
        let elsewhere = Capability { nodes, ..capability() };
        assert_eq!(peer.try_open(&elsewhere).code(), Code::WrongNode);
    }
    assert_eq!(bench.stats()["files"], 0);
    peer.open(&Capability { nodes: vec![vec!["n2".into(), "n1".into()]], ..capability() });
}

#[test]
fn handles_of_a_whole_node_are_bounded() {
    let bench = Bench::start();
    let many = Capability { ranges: vec![(0, 1); 1024], ..capability() };
    let text = keys().sign(&many);
    let mut peer = Peer::connect(&bench.node).greeted(&hello("t", Role::Client));
    let mut opened = Vec::new();
    let refused = loop {
        let answer = peer.open_text(text.clone());
        if answer.code() != Code::Ok {
            break answer.code();
        }
        opened.push(answer.header.handle);
        assert!(opened.len() < 20_000, "nothing bounds them");
    };
    assert_eq!(refused, Code::Overloaded);
    assert_eq!(opened.len(), (256 << 20) / (512 + 1024 * 16));
    drop(peer);
    // What a connection held is given back with it.
    let mut peer = Peer::connect(&bench.node).greeted(&hello("t", Role::Client));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while peer.open_text(text.clone()).code() != Code::Ok {
        assert!(std::time::Instant::now() < deadline, "the handles of a closed connection stay");
    }
}
