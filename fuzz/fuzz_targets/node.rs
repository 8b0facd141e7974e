//! The bytes of one connection into a node in this process. Whatever they are, the node ends the connection in time and
//! serves the next one, which finds its file as it was.

#![no_main]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use gd2fs_node::{Config, Node};
use gd2fs_transport::Frame;
use gd2fs_wire::capability::{Capability, Class, Right};
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, Open};
use gd2fs_wire::{Keys, Opcode, Role, Token, sums};
use libfuzzer_sys::fuzz_target;

/// A connection whose peer has said its last byte ends well within this, or something hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// The well-behaved connection comes after so many others; it costs as much as one of them.
const CHECK_EVERY: u64 = 64;
const KEPT: &[u8] = &[0x5a; 50_000];
const FUZZED_FILE: &str = "00112233445566778899aabbccddeeff";
const KEPT_FILE: &str = "ffeeddccbbaa99887766554433221100";
const UNIT: u32 = 1 << 20;

#[derive(Arbitrary, Debug)]
struct Conversation {
    greeting: Greeting,
    frames: Vec<Piece>,
}

#[derive(Arbitrary, Debug)]
enum Greeting {
    /// The connection begins with the frames.
    None,
    Client {
        opened: bool,
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
    Raw(Vec<u8>),
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

fuzz_target!(|conversation: Conversation| {
    let node = node();
    let mut stream = connect(node);
    let mut bytes = Vec::new();
    match conversation.greeting {
        Greeting::None => {}
        Greeting::Client { opened } => {
            bytes.extend(greeting(Role::Client));
            if opened {
                bytes.extend(open(FUZZED_FILE));
            }
        }
        Greeting::Control => bytes.extend(greeting(Role::Control)),
    }
    conversation.frames.iter().for_each(|piece| bytes.extend(piece.bytes()));
    let mut sender = stream.try_clone().expect("a descriptor");
    // The node answers while it is asked: what it says is read meanwhile, so that neither waits for the other.
    let sending = std::thread::spawn(move || {
        let _ = sender.write_all(&bytes);
        let _ = sender.shutdown(Shutdown::Write);
    });
    drain(&mut stream);
    sending.join().expect("sending does not panic");
    static RUNS: AtomicU64 = AtomicU64::new(0);
    if RUNS.fetch_add(1, Ordering::Relaxed) % CHECK_EVERY == 0 {
        check_kept(node);
    }
});

impl Piece {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Piece::Raw(bytes) => bytes.clone(),
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
            shm: "off".into(),
            io_threads: 0,
            memory_threads: 0,
        };
        *DIRECTORY.lock().expect("no panic before") = Some(directory);
        let node = Node::start(config).expect("the node starts");
        // SAFETY: the function lives as long as the process and does not unwind: what panics in it aborts.
        assert_eq!(unsafe { libc::atexit(stop) }, 0);
        let mut stream = connect(&node);
        let mut bytes = [greeting(Role::Client), open(KEPT_FILE)].concat();
        let write =
            Header { handle: 1, epoch: 1, length: KEPT.len() as u32, ..Header::request(Opcode::Write, 3) };
        bytes.extend(frame(write, Vec::new(), KEPT));
        stream.write_all(&bytes).expect("the node listens");
        (0..3).for_each(|_| drop(reply(&mut stream)));
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

fn connect(node: &Node) -> TcpStream {
    let address: SocketAddr = node.addresses()[0].trim_start_matches("tcp://").parse().expect("an address");
    let stream = TcpStream::connect(address).expect("the node accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
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
    };
    let open = Open { column: 0, capability: Keys::development().sign(&capability) };
    Frame::with_message(Header::request(Opcode::Open, 2), &open).expect("it fits").encode(&[])
}

fn reply(stream: &mut TcpStream) -> (Header, Vec<u8>) {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).expect("a reply");
    let header = Header::decode(&head).expect("a good header");
    let rest = usize::from(header.ext_bytes) + header.sums_bytes as usize;
    let mut body = vec![0; rest + header.payload_bytes() as usize];
    stream.read_exact(&mut body).expect("all of the reply");
    (header, body.split_off(rest))
}

/// Reads to the end of the connection, which must come.
fn drain(stream: &mut TcpStream) {
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

/// A well-behaved connection reads what was written before all the others.
fn check_kept(node: &Node) {
    let mut stream = connect(node);
    let mut bytes = [greeting(Role::Client), open(KEPT_FILE)].concat();
    let read = Header { handle: 1, epoch: 1, length: KEPT.len() as u32, ..Header::request(Opcode::Read, 3) };
    bytes.extend(frame(read, Vec::new(), &[]));
    stream.write_all(&bytes).expect("the node listens");
    let (_hello, _open) = (reply(&mut stream), reply(&mut stream));
    let (header, payload) = reply(&mut stream);
    assert_eq!(header.status, 0);
    assert_eq!(payload, KEPT, "another file was changed");
}
