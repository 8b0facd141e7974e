use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gd2fs_node::Node;
use gd2fs_transport::one_sided::{self, Segment};
use gd2fs_transport::{Address, Frame};
use gd2fs_wire::header::{FLAG_ONE_SIDED, HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, Map, Open, OpenReply, Refusal, Unmap};
use gd2fs_wire::{Capability, Code, Opcode, Role, sums};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{keys, token};

/// Nothing in a test takes longer; a hang becomes a failure.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct Peer {
    pub stream: Socket,
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
        let stream = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
        stream.connect_timeout(&address.into(), PATIENCE).unwrap();
        stream.set_tcp_nodelay(true).unwrap();
        Peer::over(stream)
    }

    /// Through the node's local socket.
    pub fn connect_locally(node: &Node) -> Peer {
        let parsed = node.addresses().into_iter().map(|text| Address::parse(&text).unwrap());
        let mut names = parsed.filter_map(|address| match address {
            Address::Shm { name, .. } => Some(name),
            Address::Tcp(_) => None,
        });
        let stream = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        stream.connect(&SockAddr::unix(names.next().unwrap().replace('@', "\0")).unwrap()).unwrap();
        Peer::over(stream)
    }

    fn over(stream: Socket) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Peer { stream, request: 0 }
    }

    pub fn greeted(mut self, hello: &Hello) -> Peer {
        assert_eq!(self.greet(hello).code(), Code::Ok);
        self
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

    /// Sends a message with descriptors beside its first byte.
    pub fn send_with(&self, bytes: &[u8], descriptors: &[&OwnedFd]) -> io::Result<()> {
        let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, bytes.len(), "a socket that blocks takes all");
        Ok(())
    }

    pub fn map_frame(&mut self, region: u32, length: u64) -> Frame {
        let header = self.header(Opcode::Map);
        Frame::with_message(header, &Map { region, length }).unwrap()
    }

    pub fn map(&mut self, region: u32, length: u64, descriptor: &OwnedFd) -> Answer {
        let frame = self.map_frame(region, length);
        self.send_with(&Peer::bytes(frame, &[]), &[descriptor]).unwrap();
        self.answer()
    }

    pub fn unmap(&mut self, region: u32) -> Answer {
        let header = self.header(Opcode::Unmap);
        self.ask(Frame::with_message(header, &Unmap { region }).unwrap(), &[])
    }

    /// READ or WRITE of the bytes at `offset` of the file, from or into registered memory.
    pub fn one_sided(&mut self, opcode: Opcode, handle: u32, offset: u64, segments: &[Segment]) -> Frame {
        let length = segments.iter().map(Segment::length).sum();
        let header = self.header(opcode);
        let header = Header { handle, epoch: 1, offset, length, flags: FLAG_ONE_SIDED, ..header };
        Frame { header, ext: one_sided::encode(segments), sums: vec![] }
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

    /// A request about an open column with a message (FLUSH has none).
    pub fn ask_of(&mut self, opcode: Opcode, handle: u32, message: &serde_json::Value) -> Answer {
        let header = Header { handle, epoch: 1, ..self.header(opcode) };
        let ext = if message.is_null() { vec![] } else { serde_json::to_vec(message).unwrap() };
        self.ask(Frame { header, ext, sums: vec![] }, &[])
    }

    pub fn control(&mut self, opcode: Opcode, items: serde_json::Value) -> Answer {
        self.control_payload(opcode, &serde_json::json!({ "items": items }))
    }

    pub fn control_payload(&mut self, opcode: Opcode, payload: &serde_json::Value) -> Answer {
        let payload = serde_json::to_vec(payload).unwrap();
        let header = Header { length: payload.len() as u32, ..self.header(opcode) };
        self.ask(Frame::new(header), &payload)
    }
}
