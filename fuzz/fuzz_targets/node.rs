//! The bytes of one connection into a node in this process, and the descriptors beside them. Whatever they are, the node ends
//! the connection in time and serves the next one, which finds its file and its memory as they were.

#![no_main]

use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use gd2fs_node::{Config, Node};
use gd2fs_transport::one_sided::{self, Segment};
use gd2fs_transport::shm::Region;
use gd2fs_transport::{Address, Frame};
use gd2fs_wire::capability::{Capability, Class, Right};
use gd2fs_wire::header::{FLAG_ONE_SIDED, FLAG_RAW, HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, Map, Open, Unmap};
use gd2fs_wire::{Keys, Opcode, Role, Token, sums};
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::{Domain, SockAddr, Socket, Type};

/// A connection whose peer has said its last byte ends well within this, or something hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// The well-behaved connection comes after so many others; it costs as much as one of them.
const CHECK_EVERY: u64 = 64;
const KEPT: &[u8] = &[0x5a; 50_000];
const FUZZED_FILE: &str = "00112233445566778899aabbccddeeff";
const KEPT_FILE: &str = "ffeeddccbbaa99887766554433221100";
const UNIT: u32 = 1 << 20;
/// Of the memory that is offered.
const REGION_BYTES: u64 = 64 << 10;

#[derive(Arbitrary, Debug)]
struct Conversation {
    local: bool,
    greeting: Greeting,
    frames: Vec<Piece>,
}

#[derive(Arbitrary, Debug)]
enum Greeting {
    /// The connection begins with the frames.
    None,
    Client {
        opened: bool,
        mapped: bool,
    },
    Control,
}

#[derive(Arbitrary, Debug)]
enum Piece {
    /// A frame with right sums, whatever its fields say; `length` is that of the payload unless another is given.
    Sealed {
        fields: Fields,
        ext: Vec<u8>,
        payload: Vec<u8>,
        length: Option<u32>,
    },
    /// A request that a client may send.
    Usual {
        opcode: u8,
        handle: u8,
        offset: u32,
        payload: Vec<u8>,
        length: u16,
    },
    OneSided {
        write: bool,
        raw: bool,
        offset: u32,
        segments: Vec<(u8, u32, u16)>,
    },
    Map {
        region: u8,
        length: Option<u64>,
        beside: Beside,
    },
    Unmap {
        region: u8,
    },
    /// Whatever it says, with these descriptors beside its first byte.
    With(Beside, Box<Piece>),
    Raw(Vec<u8>),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Beside {
    Nothing,
    Memory,
    Other,
    Both,
}

#[derive(Arbitrary, Debug)]
struct Fields {
    opcode: u8,
    flags: u16,
    request: u64,
    handle: u32,
    epoch: u32,
    offset: u64,
    incarnation: u32,
    status: u32,
    deadline_ms: u8,
    priority: u8,
}

type Message = (Vec<u8>, Beside);

fuzz_target!(|conversation: Conversation| {
    let node = node();
    let local = conversation.local;
    let mut stream = if local { connect_locally(node) } else { connect(node) };
    let mut messages: Vec<Message> = Vec::new();
    match conversation.greeting {
        Greeting::None => {}
        Greeting::Client { opened, mapped } => {
            messages.push((greeting(Role::Client), Beside::Nothing));
            if opened {
                messages.push((open(FUZZED_FILE), Beside::Nothing));
            }
            if mapped {
                messages.push((map(1, REGION_BYTES), Beside::Memory));
            }
        }
        Greeting::Control => messages.push((greeting(Role::Control), Beside::Nothing)),
    }
    messages.extend(conversation.frames.iter().map(|piece| (piece.bytes(), piece.beside())));
    let sender = stream.try_clone().expect("a descriptor");
    // The node answers while it is asked: what it says is read meanwhile, so that neither waits for the other.
    let sending = std::thread::spawn(move || {
        send(&sender, &messages, local, offered());
        let _ = sender.shutdown(Shutdown::Write);
    });
    drain(&mut stream);
    sending.join().expect("sending does not panic");
    static RUNS: AtomicU64 = AtomicU64::new(0);
    if RUNS.fetch_add(1, Ordering::Relaxed) % CHECK_EVERY == 0 {
        check_kept(node);
    }
});

/// Until the node has closed the connection.
fn send(stream: &Socket, messages: &[Message], local: bool, memory: &Region) {
    let memory = memory.descriptor().expect("a descriptor");
    let other: OwnedFd = std::io::pipe().expect("a pipe").0.into();
    for (bytes, beside) in messages {
        let descriptors: &[&OwnedFd] = match beside {
            _ if !local || bytes.is_empty() => &[],
            Beside::Nothing => &[],
            Beside::Memory => &[&memory],
            Beside::Other => &[&other],
            Beside::Both => &[&other, &memory],
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        // Nobody ignores SIGPIPE in a fuzz target.
        match sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == bytes.len() => {}
            _ => return,
        }
    }
}

/// The memory that all conversations offer.
fn offered() -> &'static Region {
    static OFFERED: OnceLock<Region> = OnceLock::new();
    OFFERED.get_or_init(|| Region::create(REGION_BYTES as usize).expect("memory"))
}

impl Piece {
    fn beside(&self) -> Beside {
        match self {
            Piece::Map { beside, .. } | Piece::With(beside, _) => *beside,
            _ => Beside::Nothing,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Piece::Raw(bytes) => bytes.clone(),
            Piece::With(_, piece) => piece.bytes(),
            Piece::Map { region, length, .. } => map(u32::from(*region) % 4, length.unwrap_or(REGION_BYTES)),
            Piece::Unmap { region } => {
                let unmap = Unmap { region: u32::from(*region) % 4 };
                Frame::with_message(Header::request(Opcode::Unmap, 6), &unmap).expect("it fits").encode(&[])
            }
            Piece::OneSided { write, raw, offset, segments } => {
                let segments: Vec<Segment> = segments
                    .iter()
                    .take(one_sided::SEGMENTS_MAX)
                    .map(|(region, offset, length)| {
                        let offset = u64::from(*offset) % (REGION_BYTES + REGION_BYTES / 8);
                        Segment::new(u32::from(*region) % 4, offset, u32::from(*length))
                    })
                    .collect();
                let header = Header {
                    handle: 1,
                    epoch: 1,
                    offset: u64::from(*offset) % (u64::from(UNIT) * 4),
                    length: segments.iter().map(Segment::length).sum(),
                    flags: FLAG_ONE_SIDED | if *raw { FLAG_RAW } else { 0 },
                    deadline_ms: 100,
                    ..Header::request(if *write { Opcode::Write } else { Opcode::Read }, 5)
                };
                Frame { header, ext: one_sided::encode(&segments), sums: Vec::new() }.encode(&[])
            }
            Piece::Sealed { fields, ext, payload, length } => {
                let header = Header {
                    opcode: fields.opcode % 24,
                    flags: fields.flags & 7,
                    request: fields.request,
                    handle: fields.handle,
                    epoch: fields.epoch,
                    offset: fields.offset,
                    length: length.unwrap_or(payload.len() as u32),
                    incarnation: fields.incarnation,
                    status: fields.status,
                    // Short, since a frame that is not finished is waited for that long.
                    deadline_ms: 1 + u32::from(fields.deadline_ms),
                    priority: fields.priority,
                    ..Header::default()
                };
                let ext = ext[..ext.len().min(usize::from(u16::MAX))].to_vec();
                frame(header, ext, payload)
            }
            Piece::Usual { opcode, handle, offset, payload, length } => {
                let opcode = Opcode::ALL[usize::from(*opcode) % Opcode::ALL.len()];
                let length = if opcode == Opcode::Read { u32::from(*length) } else { payload.len() as u32 };
                let header = Header {
                    handle: u32::from(*handle) % 3,
                    epoch: 1,
                    offset: u64::from(*offset) % (u64::from(UNIT) * 4),
                    length,
                    deadline_ms: 100,
                    ..Header::request(opcode, 5)
                };
                frame(header, Vec::new(), if opcode == Opcode::Read { &[] } else { payload })
            }
        }
    }
}

fn frame(header: Header, ext: Vec<u8>, payload: &[u8]) -> Vec<u8> {
    let data = header.carries_file_data();
    let summed = data && !header.is_raw() && header.offset.checked_add(payload.len() as u64).is_some();
    let sums = if summed { sums::piece_sums(header.offset, payload) } else { Vec::new() };
    let mut frame = Frame { header, ext, sums };
    let mut bytes = frame.encode(if data { &[] } else { payload });
    bytes.extend_from_slice(payload);
    bytes
}

static NODE: OnceLock<Node> = OnceLock::new();
static DIRECTORY: Mutex<Option<tempfile::TempDir>> = Mutex::new(None);

fn node() -> &'static Node {
    NODE.get_or_init(|| {
        // A thread of the node that panics would only look like a closed connection.
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            usual(info);
            std::process::abort();
        }));
        let directory = tempfile::tempdir().expect("a directory");
        let config = Config {
            cluster: "fuzz".into(),
            node: "n1".into(),
            incarnation: 1,
            keys: String::new(),
            listen: vec!["tcp://127.0.0.1:0".into()],
            memory_bytes: 128 << 20,
            data_dir: directory.path().into(),
            connections_max: 64,
            shm: "auto".into(),
            io_threads: 0,
            memory_threads: 0,
        };
        *DIRECTORY.lock().expect("no panic before") = Some(directory);
        let node = Node::start(config).expect("the node starts");
        // SAFETY: the function lives as long as the process and does not unwind: what panics in it aborts.
        assert_eq!(unsafe { libc::atexit(stop) }, 0);
        let mut stream = connect(&node);
        let write =
            Header { handle: 1, epoch: 1, length: KEPT.len() as u32, ..Header::request(Opcode::Write, 3) };
        let say = [greeting(Role::Client), open(KEPT_FILE), frame(write, Vec::new(), KEPT)];
        send(&stream, &say.map(|bytes| (bytes, Beside::Nothing)), false, offered());
        for _ in 0..3 {
            reply(&mut stream);
        }
        node
    })
}

/// Statics are never dropped: without this the leak check would find the threads of a running node.
extern "C" fn stop() {
    if let Some(node) = NODE.get() {
        node.stop(Duration::ZERO);
    }
    drop(DIRECTORY.lock().map(|mut directory| directory.take()));
}

fn connect(node: &Node) -> Socket {
    let address: SocketAddr = node.addresses()[0].trim_start_matches("tcp://").parse().expect("an address");
    connected(Domain::for_address(address), &address.into())
}

fn connect_locally(node: &Node) -> Socket {
    let Ok(Address::Shm { name, .. }) = Address::parse(&node.addresses()[1]) else {
        panic!("the second address is that of the local socket")
    };
    connected(Domain::UNIX, &SockAddr::unix(name.replace('@', "\0")).expect("an address"))
}

fn connected(domain: Domain, address: &SockAddr) -> Socket {
    let stream = Socket::new(domain, Type::STREAM, None).expect("a socket");
    stream.connect(address).expect("the node accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

fn map(region: u32, length: u64) -> Vec<u8> {
    let map = Map { region, length };
    Frame::with_message(Header::request(Opcode::Map, 4), &map).expect("it fits").encode(&[])
}

fn greeting(role: Role) -> Vec<u8> {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    let hello = Hello {
        versions: (1, 1),
        features: 0,
        cluster: "fuzz".into(),
        token: Keys::development().sign(&Token { tenant: "t".into(), role, expiry: u64::MAX >> 1 }),
        client: format!("{:032x}", CLIENTS.fetch_add(1, Ordering::Relaxed)),
        slot: 0,
        generation: 1,
    };
    Frame::with_message(Header::request(Opcode::Hello, 1), &hello).expect("it fits").encode(&[])
}

fn open(file: &str) -> Vec<u8> {
    let capability = Capability {
        tenant: "t".into(),
        file: file.into(),
        class: Class::Cache,
        stripe_unit: UNIT,
        width: 1,
        rights: vec![Right::Read, Right::Write],
        ranges: vec![],
        grant: 0,
        columns: vec![(1, 1)],
        nodes: vec![vec!["n1".into()]],
        expiry: u64::MAX >> 1,
        bearer: false,
        priority: 0,
    };
    let open = Open { column: 0, capability: Keys::development().sign(&capability) };
    Frame::with_message(Header::request(Opcode::Open, 2), &open).expect("it fits").encode(&[])
}

fn reply(stream: &mut Socket) -> Header {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).expect("a reply");
    let header = Header::decode(&head).expect("a good header");
    let rest = usize::from(header.ext_bytes) + header.sums_bytes as usize;
    stream.read_exact(&mut vec![0; rest + header.payload_bytes() as usize]).expect("all of the reply");
    header
}

/// Reads to the end of the connection, which must come.
fn drain(stream: &mut Socket) {
    let mut buffer = [0; 64 << 10];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the node holds the connection")
            }
            Err(_) => return,
        }
    }
}

/// A well-behaved connection reads what was written before all the others, through its own memory.
fn check_kept(node: &Node) {
    static OWN: OnceLock<Region> = OnceLock::new();
    let own = OWN.get_or_init(|| Region::create(KEPT.len()).expect("memory"));
    // SAFETY: ours, and no move is under way.
    unsafe { own.address().write_bytes(0, own.len()) };
    let mut stream = connect_locally(node);
    let segments = [Segment::new(1, 0, KEPT.len() as u32)];
    let header = Header {
        handle: 1,
        epoch: 1,
        length: KEPT.len() as u32,
        flags: FLAG_ONE_SIDED,
        ..Header::request(Opcode::Read, 3)
    };
    let read = Frame { header, ext: one_sided::encode(&segments), sums: Vec::new() }.encode(&[]);
    let ask = [
        (greeting(Role::Client), Beside::Nothing),
        (open(KEPT_FILE), Beside::Nothing),
        (map(1, own.len() as u64), Beside::Memory),
        (read, Beside::Nothing),
    ];
    send(&stream, &ask, true, own);
    for _ in 0..4 {
        assert_eq!(reply(&mut stream).status, 0);
    }
    // SAFETY: the node has answered all that it was asked for.
    let bytes = unsafe { std::slice::from_raw_parts(own.address(), KEPT.len()) };
    assert_eq!(bytes, KEPT, "another file was changed");
}
