//! READ and WRITE of 4 MiB over loopback, by one and by four connections, with a node in this process: first 1 GiB that the
//! node has never held, then the same ranges over and over.
//!
//! The peers here only move bytes: writes are summed beforehand and reads are not verified, so the figures are those of the
//! node and of the kernel's loopback. `cargo run --release --example throughput -p gd2fs-node`

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use gd2fs_node::{Config, Node};
use gd2fs_transport::Frame;
use gd2fs_wire::capability::{Class, Right};
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, Open};
use gd2fs_wire::{Capability, Code, Keys, Opcode, sums};

const UNIT: u32 = 4 << 20;
/// 1 GiB, by all connections together.
const UNITS: u64 = 256;
const TIME: Duration = Duration::from_secs(2);

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

struct Peer {
    stream: TcpStream,
    handle: u32,
    buffer: Vec<u8>,
}

impl Peer {
    fn connect(address: &str, number: usize) -> Outcome<Peer> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let mut peer = Peer { stream, handle: 0, buffer: vec![0; UNIT as usize] };
        let hello = Hello {
            versions: (1, 1),
            features: 0,
            cluster: "throughput".into(),
            token: String::new(),
            client: format!("{number:032x}"),
            slot: 0,
            generation: 1,
        };
        peer.ask(Frame::with_message(Header::request(Opcode::Hello, 1), &hello)?, &[])?;
        let capability = Keys::development().sign(&Capability {
            tenant: "default".into(),
            file: format!("{number:032x}"),
            class: Class::Cache,
            stripe_unit: UNIT,
            width: 1,
            rights: vec![Right::Read, Right::Write],
            ranges: vec![],
            grant: 0,
            columns: vec![(1, 1)],
            nodes: vec![vec!["n1".into()]],
            expiry: u64::MAX,
            bearer: false,
        });
        let open = Open { column: 0, capability };
        peer.handle = peer.ask(Frame::with_message(Header::request(Opcode::Open, 2), &open)?, &[])?.handle;
        Ok(peer)
    }

    fn ask(&mut self, mut frame: Frame, payload: &[u8]) -> Outcome<Header> {
        self.stream.write_all(&frame.encode(&[]))?;
        self.stream.write_all(payload)?;
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        let header = Header::decode(&head)?;
        let mut around = vec![0; usize::from(header.ext_bytes) + header.sums_bytes as usize];
        self.stream.read_exact(&mut around)?;
        self.stream.read_exact(&mut self.buffer[..header.payload_bytes() as usize])?;
        match header.code() {
            Code::Ok => Ok(header),
            code => Err(format!("{}: {}", code.name(), String::from_utf8_lossy(&around)).into()),
        }
    }

    fn unit(&self, opcode: Opcode, unit: u64) -> Header {
        let offset = unit * u64::from(UNIT);
        Header { handle: self.handle, epoch: 1, offset, length: UNIT, ..Header::request(opcode, unit + 3) }
    }

    /// Bytes moved: once through `units`, or as often as `TIME` allows.
    fn run(&mut self, opcode: Opcode, units: u64, once: bool) -> Outcome<u64> {
        let data: Vec<u8> = (0..UNIT).map(|i| (i ^ (i >> 8)) as u8).collect();
        let summed = sums::piece_sums(0, &data);
        let (begun, mut moved) = (Instant::now(), 0);
        while if once { moved < units } else { begun.elapsed() < TIME } {
            let header = self.unit(opcode, moved % units);
            match opcode {
                Opcode::Write => self.ask(Frame { header, ext: vec![], sums: summed.clone() }, &data)?,
                _ => self.ask(Frame::new(header), &[])?,
            };
            moved += 1;
        }
        Ok(moved * u64::from(UNIT))
    }
}

fn main() -> Outcome<()> {
    let directory = std::env::temp_dir().join(format!("gd2fs-throughput-{}", std::process::id()));
    let node = Node::start(Config {
        cluster: "throughput".into(),
        node: "n1".into(),
        incarnation: 1,
        keys: String::new(),
        listen: vec!["tcp://127.0.0.1:0".into()],
        memory_bytes: 4 << 30,
        data_dir: directory.clone(),
        connections_max: 64,
        shm: "off".into(),
        io_threads: 0,
        memory_threads: 0,
    })?;
    let address = node.addresses()[0].replace("tcp://", "");
    for connections in [1, 4] {
        let mut peers = (0..connections)
            .map(|i| Peer::connect(&address, connections * 100 + i))
            .collect::<Outcome<Vec<_>>>()?;
        for (name, opcode, once) in [
            ("write new", Opcode::Write, true),
            ("write over", Opcode::Write, false),
            ("read", Opcode::Read, false),
        ] {
            let begun = Instant::now();
            let units = UNITS / connections as u64;
            let moved: u64 = std::thread::scope(|scope| {
                let running: Vec<_> =
                    peers.iter_mut().map(|peer| scope.spawn(move || peer.run(opcode, units, once))).collect();
                running.into_iter().map(|thread| thread.join().expect("no panic")).sum::<Outcome<u64>>()
            })?;
            let rate = moved as f64 / begun.elapsed().as_secs_f64() / 1e9;
            println!("{connections} connection(s), {name}: {rate:.2} GB/s");
        }
    }
    drop(node);
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
