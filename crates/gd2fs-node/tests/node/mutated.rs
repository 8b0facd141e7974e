//! Conversations that are right but for one thing: a field, a byte, an end that comes too early.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gd2fs_transport::Frame;
use gd2fs_transport::one_sided::{Segment, encode as encode_segments};
use gd2fs_transport::shm::Region;
use gd2fs_wire::capability::Right;
use gd2fs_wire::header::{FLAG_ONE_SIDED, FLAG_RAW, HEADER_BYTES, Header};
use gd2fs_wire::messages::{Map, Open, Unmap};
use gd2fs_wire::{Code, Opcode, sums};
use proptest::prelude::*;

use super::*;

/// What a good peer of another file wrote; nothing that others send may change it.
const KEPT: usize = 100_000;
/// Where the numbers of a header's fields lie: first byte and size. The sum over the header is made anew.
const FIELDS: [(usize, usize); 17] = [
    (0, 4),
    (4, 1),
    (5, 1),
    (6, 2),
    (8, 8),
    (16, 4),
    (20, 4),
    (24, 8),
    (32, 4),
    (36, 4),
    (40, 4),
    (44, 4),
    (48, 4),
    (52, 4),
    (56, 2),
    (58, 1),
    (59, 1),
];

#[derive(Clone, Debug)]
enum Step {
    Open { column: u32, rights: bool },
    Read { handle: u32, offset: u64, length: u32 },
    Write { handle: u32, offset: u64, length: usize },
    OneSided { opcode: Opcode, raw: bool, handle: u32, offset: u64, segments: Vec<(u32, u64, u32)> },
    Map { region: u32, length: u64, beside: Beside },
    Unmap { region: u32 },
    Close { handle: u32 },
    Asked { opcode: Opcode, handle: u32, json: String },
    Ping,
    Control { opcode: Opcode, json: String },
}

/// Descriptors that come with a frame, where the stream carries any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Memory,
    Other,
    Both,
}

/// Of the memory that is offered.
const REGION_BYTES: u64 = 128 << 10;

#[derive(Clone, Debug)]
enum Spoil {
    /// A field of the header of one frame; the frame is intact otherwise.
    Field {
        frame: usize,
        field: usize,
        value: u64,
    },
    /// A byte of the whole conversation.
    Flip {
        at: usize,
        mask: u8,
    },
    /// The conversation ends there.
    Cut {
        at: usize,
    },
    /// A frame is sent again, as it was.
    Again {
        frame: usize,
    },
    /// Descriptors come with a frame that should have others.
    Descriptors {
        frame: usize,
        beside: Beside,
    },
    /// Bytes between two frames.
    Insert {
        frame: usize,
        bytes: Vec<u8>,
    },
    Nothing,
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..6, any::<u64>(), (0u32..64).prop_map(|bits| u64::MAX >> bits)]
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..100_000, Just(u64::from(UNIT) - 1), any::<u64>()]
}

fn beside() -> impl Strategy<Value = Beside> {
    prop_oneof![Just(Beside::Nothing), Just(Beside::Memory), Just(Beside::Other), Just(Beside::Both)]
}

fn one_sided() -> impl Strategy<Value = Step> {
    let place = prop_oneof![4 => 0u64..REGION_BYTES, 1 => Just(REGION_BYTES - 1), 1 => any::<u64>()];
    let segment = (0u32..3, place, prop_oneof![8 => 0u32..40_000, 1 => any::<u32>()]);
    let segments = proptest::collection::vec(segment, 0..4);
    let opcode = prop_oneof![Just(Opcode::Read), Just(Opcode::Write)];
    (opcode, any::<bool>(), 0u32..3, offset(), segments).prop_map(
        |(opcode, raw, handle, offset, segments)| Step::OneSided { opcode, raw, handle, offset, segments },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let json = prop_oneof![
        Just(r#"{"items": []}"#.to_owned()),
        Just(format!(r#"{{"items": [{{"file": "{FILE}", "column": 0}}]}}"#)),
        Just(format!(
            r#"{{"items": [{{"pin": "{FILE}", "file": "{FILE}", "column": 0, "epoch": 1, "start": 0, "end": 9, "ttl_ms": 5}}]}}"#
        )),
        Just(r#"{"after": null, "limit": 9}"#.to_owned()),
        any::<bool>().prop_map(|start| format!(r#"{{"start": {start}}}"#)),
        "[ -~]{0,60}",
    ];
    let control: Vec<Opcode> = Opcode::ALL.iter().copied().filter(|opcode| opcode.is_control()).collect();
    let control = proptest::sample::select(control);
    let asked = prop_oneof![Just(Opcode::Flush), Just(Opcode::Warm), Just(Opcode::Where)];
    let span = prop_oneof![
        4 => (offset(), offset()).prop_map(|(start, end)| format!(r#"{{"start": {start}, "end": {end}}}"#)),
        1 => "[ -~]{0,60}",
    ];
    prop_oneof![
        2 => (0u32..3, any::<bool>()).prop_map(|(column, rights)| Step::Open { column, rights }),
        3 => (0u32..4, offset(), 0u32..70_000)
            .prop_map(|(handle, offset, length)| Step::Read { handle, offset, length }),
        3 => (0u32..4, offset(), 0usize..70_000)
            .prop_map(|(handle, offset, length)| Step::Write { handle, offset, length }),
        4 => one_sided(),
        2 => (0u32..3, prop_oneof![3 => Just(REGION_BYTES), 1 => number()], beside())
            .prop_map(|(region, length, beside)| Step::Map { region, length, beside }),
        1 => (0u32..3).prop_map(|region| Step::Unmap { region }),
        1 => (0u32..4).prop_map(|handle| Step::Close { handle }),
        2 => (asked, 0u32..4, span).prop_map(|(opcode, handle, json)| Step::Asked { opcode, handle, json }),
        1 => Just(Step::Ping),
        1 => (control, json).prop_map(|(opcode, json)| Step::Control { opcode, json }),
    ]
}

fn spoil() -> impl Strategy<Value = Spoil> {
    prop_oneof![
        4 => (any::<usize>(), 0..FIELDS.len(), number())
            .prop_map(|(frame, field, value)| Spoil::Field { frame, field, value }),
        2 => (any::<usize>(), 1u8..).prop_map(|(at, mask)| Spoil::Flip { at, mask }),
        2 => any::<usize>().prop_map(|at| Spoil::Cut { at }),
        1 => any::<usize>().prop_map(|frame| Spoil::Again { frame }),
        1 => (any::<usize>(), beside()).prop_map(|(frame, beside)| Spoil::Descriptors { frame, beside }),
        1 => (any::<usize>(), proptest::collection::vec(any::<u8>(), 1..200))
            .prop_map(|(frame, bytes)| Spoil::Insert { frame, bytes }),
        1 => Just(Spoil::Nothing),
    ]
}

fn encode(step: &Step, request: u64) -> Vec<u8> {
    let header = |opcode| Header { epoch: 1, deadline_ms: 500, ..Header::request(opcode, request) };
    match step {
        Step::Open { column, rights } => {
            let mut capability = capability();
            if !rights {
                capability.rights = vec![Right::Read];
            }
            let open = Open { column: *column, capability: keys().sign(&capability) };
            Peer::bytes(Frame::with_message(header(Opcode::Open), &open).unwrap(), &[])
        }
        Step::Read { handle, offset, length } => {
            let length = (*length).min(u32::try_from(u64::MAX - offset).unwrap_or(u32::MAX));
            Peer::bytes(
                Frame::new(Header { handle: *handle, offset: *offset, length, ..header(Opcode::Read) }),
                &[],
            )
        }
        Step::Write { handle, offset, length } => {
            let length = (*length).min(usize::try_from(u64::MAX - offset).unwrap_or(usize::MAX));
            let payload = pattern(length, 3);
            let header = header(Opcode::Write);
            let header = Header { handle: *handle, offset: *offset, length: length as u32, ..header };
            let sums = sums::piece_sums(*offset, &payload);
            Peer::bytes(Frame { header, ext: vec![], sums }, &payload)
        }
        Step::OneSided { opcode, raw, handle, offset, segments } => {
            let flags = FLAG_ONE_SIDED | if *raw { FLAG_RAW } else { 0 };
            let listed: Vec<Segment> = segments
                .iter()
                .map(|(region, offset, length)| Segment::new(*region, *offset, *length))
                .collect();
            let length = listed.iter().fold(0u32, |sum, segment| sum.wrapping_add(segment.length()));
            let header = Header { handle: *handle, offset: *offset, length, flags, ..header(*opcode) };
            Peer::bytes(Frame { header, ext: encode_segments(&listed), sums: vec![] }, &[])
        }
        Step::Map { region, length, .. } => {
            let map = Map { region: *region, length: *length };
            Peer::bytes(Frame::with_message(header(Opcode::Map), &map).unwrap(), &[])
        }
        Step::Unmap { region } => {
            let unmap = Unmap { region: *region };
            Peer::bytes(Frame::with_message(header(Opcode::Unmap), &unmap).unwrap(), &[])
        }
        Step::Close { handle } => {
            Peer::bytes(Frame::new(Header { handle: *handle, ..header(Opcode::Close) }), &[])
        }
        Step::Asked { opcode, handle, json } => {
            let header = Header { handle: *handle, ..header(*opcode) };
            Peer::bytes(Frame { header, ext: json.clone().into_bytes(), sums: vec![] }, &[])
        }
        Step::Ping => Peer::bytes(Frame::new(header(Opcode::Ping)), &[]),
        Step::Control { opcode, json } => {
            let header = Header { length: json.len() as u32, ..header(*opcode) };
            Peer::bytes(Frame::new(header), json.as_bytes())
        }
    }
}

/// The messages of a conversation behind HELLO, spoilt.
fn conversation(steps: &[Step], spoil: &Spoil) -> Vec<(Vec<u8>, Beside)> {
    let message = |(index, step): (usize, &Step)| {
        let beside = if let Step::Map { beside, .. } = step { *beside } else { Beside::Nothing };
        (encode(step, 2 + index as u64), beside)
    };
    let mut frames: Vec<(Vec<u8>, Beside)> = steps.iter().enumerate().map(message).collect();
    let count = frames.len();
    let total: usize = frames.iter().map(|(bytes, _)| bytes.len()).sum();
    match spoil {
        Spoil::Field { frame, field, value } => {
            let bytes = &mut frames[frame % count].0;
            let (start, size) = FIELDS[*field];
            bytes[start..start + size].copy_from_slice(&value.to_le_bytes()[..size]);
            let sum = sums::crc32c(&bytes[..HEADER_BYTES - 4]).to_le_bytes();
            bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&sum);
        }
        Spoil::Again { frame } => frames.insert(frame % count, frames[frame % count].clone()),
        Spoil::Insert { frame, bytes } => frames.insert(frame % count, (bytes.clone(), Beside::Nothing)),
        Spoil::Descriptors { frame, beside } => frames[frame % count].1 = *beside,
        Spoil::Flip { at, mask } => {
            let mut all = frames.iter_mut().flat_map(|(bytes, _)| bytes.iter_mut());
            *all.nth(at % total).expect("inside") ^= mask;
        }
        Spoil::Cut { at } => {
            let mut left = at % total;
            for (bytes, _) in &mut frames {
                bytes.truncate(left);
                left -= bytes.len();
            }
            frames.retain(|(bytes, _)| !bytes.is_empty());
        }
        Spoil::Nothing => {}
    }
    frames
}

/// Sends what can be sent: the node may have closed the connection before the end.
fn send(peer: &mut Peer, conversation: &[(Vec<u8>, Beside)], local: bool, memory: &OwnedFd) {
    let other: OwnedFd = std::io::pipe().unwrap().0.into();
    for (bytes, beside) in conversation {
        let descriptors: &[&OwnedFd] = match beside {
            _ if !local => &[],
            Beside::Nothing => &[],
            Beside::Memory => &[memory],
            Beside::Other => &[&other],
            Beside::Both => &[&other, memory],
        };
        let sent = if descriptors.is_empty() {
            peer.stream.write_all(bytes)
        } else {
            peer.send_with(bytes, descriptors)
        };
        if sent.is_err() {
            break;
        }
    }
    let _ = peer.stream.shutdown(std::net::Shutdown::Write);
}

/// Another file, of the same tenant.
fn kept_file() -> Capability {
    Capability { file: "f".repeat(32), ..capability() }
}

/// Panics of the node's own threads so far. A connection that ends by one looks like any other from outside.
fn node_panics() -> usize {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current().name() == Some("gd2fs-node") {
                COUNT.fetch_add(1, Ordering::SeqCst);
            }
            usual(info);
        }));
    });
    COUNT.load(Ordering::SeqCst)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn what_a_peer_gets_wrong_harms_nobody_else(
        steps in proptest::collection::vec(step(), 1..8), spoil in spoil(), role in any::<bool>(),
        local in any::<bool>(),
    ) {
        let panics = node_panics();
        let bench = Bench::start();
        let mut good = bench.local_peer();
        let kept = good.open(&kept_file());
        let bytes = pattern(KEPT, 9);
        let (own, offered) = (Region::create(KEPT).unwrap(), Region::create(REGION_BYTES as usize).unwrap());
        let (own_length, own_memory) = (own.len() as u64, own.descriptor().unwrap());
        prop_assert_eq!(good.map(1, own_length, &own_memory).code(), Code::Ok);
        // SAFETY: the region holds so many bytes, and no move is under way.
        unsafe { own.address().copy_from(bytes.as_ptr(), KEPT) };
        let whole = [Segment::new(1, 0, KEPT as u32)];
        let frame = good.one_sided(Opcode::Write, kept, 5, &whole);
        prop_assert_eq!(good.ask(frame, &[]).code(), Code::Ok);
        let role = if role { Role::Client } else { Role::Control };
        let bad = if local { Peer::connect_locally(&bench.node) } else { Peer::connect(&bench.node) };
        let mut bad = bad.greeted(&hello("t", role));
        // The first frames are most often OPEN and MAP, so that what follows has something to work on.
        let mut steps = steps;
        steps.insert(0, Step::Open { column: 0, rights: true });
        steps.insert(1, Step::Map { region: 1, length: REGION_BYTES, beside: Beside::Memory });
        send(&mut bad, &conversation(&steps, &spoil), local, &offered.descriptor().unwrap());
        // Every reply has a right sum; the end comes within the deadline of a request, or `try_answer` fails by its patience.
        let begun = Instant::now();
        while bad.try_answer().is_ok() {}
        prop_assert!(begun.elapsed() < Duration::from_secs(5), "the connection hung for {:?}", begun.elapsed());
        let back = good.read(kept, 5, KEPT as u32);
        prop_assert_eq!(back.code(), Code::Ok);
        prop_assert_eq!(&back.payload, &bytes, "another file was changed");
        // SAFETY: no move is under way.
        let own_bytes = unsafe { std::slice::from_raw_parts(own.address(), KEPT) };
        prop_assert!(own_bytes == bytes, "another client's memory was changed");
        let frame = good.one_sided(Opcode::Read, kept, 5, &whole);
        prop_assert_eq!(good.ask(frame, &[]).code(), Code::Ok);
        prop_assert_eq!(bench.peer().ping().code(), Code::Ok);
        drop(bad);
        while bench.stats()["connections"] != 1 {
            prop_assert!(begun.elapsed() < Duration::from_secs(5), "the connection is still held");
            std::thread::sleep(Duration::from_millis(2));
        }
        prop_assert_eq!(node_panics(), panics, "a thread of the node panicked");
    }
}
