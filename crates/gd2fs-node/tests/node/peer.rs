use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gd2fs_node::Node;
use gd2fs_transport::Frame;
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, Open, OpenReply, Refusal};
use gd2fs_wire::{Capability, Code, Opcode, Role, sums};

use super::{keys, token};

/// Nothing in a test takes longer; a hang becomes a failure.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct Peer {
    pub stream: TcpStream,
    pub request: u64,
}

#[derive(Debug)]
pub struct Answer {
    pub header: Header,
    pub ext: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Answer {
    pub fn code(&self) -> Code {
        self.header.code()
    }

    pub fn message(&self) -> String {
        serde_json::from_slice::<Refusal>(&self.ext).unwrap().message
    }
}

pub fn hello(tenant: &str, role: Role) -> Hello {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    Hello {
        versions: (1, 1),
        features: 0,
        cluster: "test".into(),
        token: token(tenant, role, 60),
        client: format!("{:032x}", CLIENTS.fetch_add(1, Ordering::Relaxed)),
        slot: 0,
        generation: 1,
    }
}

impl Peer {
    pub fn connect(node: &Node) -> Peer {
        let address: SocketAddr = node.addresses()[0].strip_prefix("tcp://").unwrap().parse().unwrap();
        let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Peer { stream, request: 0 }
    }

    pub fn greeted(node: &Node, hello: &Hello) -> Peer {
        let mut peer = Peer::connect(node);
        assert_eq!(peer.greet(hello).code(), Code::Ok);
        peer
    }

    pub fn greet(&mut self, hello: &Hello) -> Answer {
        let header = self.header(Opcode::Hello);
        self.ask(Frame::with_message(header, hello).unwrap(), &[])
    }

    pub fn header(&mut self, opcode: Opcode) -> Header {
        self.request += 1;
        Header::request(opcode, self.request)
    }

    /// Head and payload of a frame as they go out.
    pub fn bytes(mut frame: Frame, payload: &[u8]) -> Vec<u8> {
        let file_data = frame.header.carries_file_data();
        let mut bytes = frame.encode(if file_data { &[] } else { payload });
        bytes.extend_from_slice(payload);
        bytes
    }

    pub fn ask(&mut self, frame: Frame, payload: &[u8]) -> Answer {
        self.stream.write_all(&Peer::bytes(frame, payload)).unwrap();
        self.answer()
    }

    pub fn answer(&mut self) -> Answer {
        self.try_answer().expect("an answer")
    }

    pub fn try_answer(&mut self) -> io::Result<Answer> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        let header = Header::decode(&head).expect("a good header");
        let mut take = |length: usize| {
            let mut bytes = vec![0; length];
            self.stream.read_exact(&mut bytes).map(|()| bytes)
        };
        let ext = take(usize::from(header.ext_bytes))?;
        let mut sums = vec![0; header.sums_bytes as usize / 4];
        sums::bytes_of_sums(&mut sums).copy_from_slice(&take(header.sums_bytes as usize)?);
        let payload = take(header.payload_bytes() as usize)?;
        let frame = Frame { header, ext: ext.clone(), sums: sums.clone() };
        frame.check(if header.carries_file_data() { &[] } else { &payload }).expect("a good payload_crc");
        if header.carries_file_data() && !header.is_raw() && sums::piece_sums(header.offset, &payload) != sums
        {
            // What a client does with file data that does not match its sums.
            return Ok(Answer {
                header: Header { status: Code::Checksum as u32, ..header },
                ext,
                payload: vec![],
            });
        }
        Ok(Answer { header, ext, payload })
    }

    /// Nothing more comes: the node closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
            || self.stream.take_error().ok().flatten().is_some()
            || self.stream.shutdown(Shutdown::Write).is_err()
    }

    pub fn try_open(&mut self, capability: &Capability) -> Answer {
        self.open_text(keys().sign(capability))
    }

    pub fn open_text(&mut self, capability: String) -> Answer {
        let header = self.header(Opcode::Open);
        self.ask(Frame::with_message(header, &Open { column: 0, capability }).unwrap(), &[])
    }

    pub fn open(&mut self, capability: &Capability) -> u32 {
        let answer = self.try_open(capability);
        assert_eq!(answer.code(), Code::Ok, "{:?}", String::from_utf8_lossy(&answer.ext));
        let reply: OpenReply = serde_json::from_slice(&answer.ext).unwrap();
        assert_eq!(reply.handle, answer.header.handle);
        reply.handle
    }

    pub fn read_frame(&mut self, handle: u32, offset: u64, length: u32) -> Frame {
        let header = self.header(Opcode::Read);
        Frame::new(Header { handle, epoch: 1, offset, length, ..header })
    }

    pub fn write_frame(&mut self, handle: u32, offset: u64, bytes: &[u8]) -> Frame {
        let header = self.header(Opcode::Write);
        let header = Header { handle, epoch: 1, offset, length: bytes.len() as u32, ..header };
        Frame { header, ext: vec![], sums: sums::piece_sums(offset, bytes) }
    }

    pub fn read(&mut self, handle: u32, offset: u64, length: u32) -> Answer {
        let frame = self.read_frame(handle, offset, length);
        self.ask(frame, &[])
    }

    pub fn write(&mut self, handle: u32, offset: u64, bytes: &[u8]) -> Answer {
        let frame = self.write_frame(handle, offset, bytes);
        self.ask(frame, bytes)
    }

    pub fn ping(&mut self) -> Answer {
        let header = self.header(Opcode::Ping);
        self.ask(Frame::new(header), &[])
    }

    pub fn control(&mut self, opcode: Opcode, items: serde_json::Value) -> Answer {
        let payload = serde_json::to_vec(&serde_json::json!({ "items": items })).unwrap();
        let header = Header { length: payload.len() as u32, ..self.header(opcode) };
        self.ask(Frame::new(header), &payload)
    }
}
