//! The request code over a transport that is not shared memory: its moves take many polls, and stop where a test wants them to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_store::{DataDir, Store};
use gd2fs_transport::fake::{self, Faults, RemoteMemory};
use gd2fs_transport::one_sided::encode;
use gd2fs_transport::{Batch, Frame, Receiver, Segment, Stream};
use gd2fs_wire::capability::{Capability, Class, Right, parse_file_id};
use gd2fs_wire::header::FLAG_ONE_SIDED;
use gd2fs_wire::messages::{Hello, Map, Open, Unmap};
use gd2fs_wire::sums::piece_sums;
use gd2fs_wire::{Code, Header, Opcode};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::config::Config;
use crate::connection;
use crate::server::Shared;

const FILE: &str = "00112233445566778899aabbccddeeff";
const BYTES: usize = 100_000;
/// Short, since moves that never end wait that long; the other moves take a few milliseconds.
const DEADLINE_MS: u32 = 400;

/// A client whose memory the node reaches by way of a NIC that is not there.
struct Client {
    shared: Arc<Shared>,
    memory: Arc<RemoteMemory>,
    serving: tokio::task::JoinHandle<()>,
    stream: Arc<Stream>,
    receiver: Receiver,
    request: u64,
    /// The node stops when it goes.
    _stopping: watch::Sender<Option<Instant>>,
    _directory: tempfile::TempDir,
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|i| (i as u8).wrapping_mul(37).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(20), test).await.expect("nothing hangs") });
}

impl Client {
    /// Greeted, with the regions 1 and 2 registered and the file open under handle 1.
    async fn start() -> Client {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            r#"{{"cluster": "c", "node": "n", "incarnation": 1, "listen": [], "memory_bytes": 0, "data_dir": {:?}}}"#,
            directory.path()
        );
        let config = Config::from_json(&text).unwrap();
        let data = DataDir::open(directory.path(), "c", "n", 1).unwrap();
        let keys = gd2fs_wire::Keys::development();
        let shared = Arc::new(Shared::new(config, keys, Store::new(16 << 20, data).unwrap()));
        let (near, far) = fake::pair(Faults::default(), Faults::default());
        let memory = Arc::new(RemoteMemory::new(0, 0));
        let (stopping, shutdown) = watch::channel(None);
        let (serving_shared, remote) = (shared.clone(), fake::Shared(memory.clone()));
        let serving = tokio::spawn(async move {
            connection::serve(far, Some(Box::new(remote)), &serving_shared, &shutdown).await;
        });
        let stream = Arc::new(near);
        let receiver = Receiver::new(stream.clone());
        let mut client = Client {
            shared,
            memory,
            serving,
            stream,
            receiver,
            request: 0,
            _stopping: stopping,
            _directory: directory,
        };
        client.greet().await;
        client
    }

    async fn greet(&mut self) {
        let hello = Hello {
            versions: (1, 1),
            features: 0,
            cluster: "c".into(),
            token: String::new(),
            client: "1".repeat(32),
            slot: 0,
            generation: 1,
        };
        let capability = Capability {
            tenant: "default".into(),
            file: FILE.into(),
            class: Class::Cache,
            stripe_unit: 1 << 20,
            width: 1,
            rights: vec![Right::Read, Right::Write],
            ranges: vec![],
            grant: 0,
            columns: vec![(1, 1)],
            nodes: vec![vec!["n".into()]],
            expiry: u64::MAX,
            bearer: false,
            priority: 0,
        };
        let open = Open { column: 0, capability: self.shared.keys.sign(&capability) };
        for (opcode, ext) in [
            (Opcode::Hello, serde_json::to_vec(&hello).unwrap()),
            (Opcode::Open, serde_json::to_vec(&open).unwrap()),
            (Opcode::Map, serde_json::to_vec(&Map { region: 1, length: BYTES as u64 }).unwrap()),
            (Opcode::Map, serde_json::to_vec(&Map { region: 2, length: BYTES as u64 }).unwrap()),
        ] {
            let answer = self.ask(Frame { ext, ..Frame::new(Header::request(opcode, 0)) }).await;
            assert_eq!(
                answer.header.code(),
                Code::Ok,
                "{opcode:?} {:?}",
                String::from_utf8_lossy(&answer.ext)
            );
        }
    }

    async fn ask(&mut self, mut frame: Frame) -> Frame {
        self.request += 1;
        frame.header.request = self.request;
        let mut batch = Batch::default();
        batch.push(frame);
        // SAFETY: there is no payload.
        unsafe { batch.send(&self.stream) }.await.unwrap();
        let answer = self.receiver.frame().await.unwrap();
        assert_eq!(answer.header.request, self.request);
        answer
    }

    /// READ or WRITE of the first `BYTES` of the file, in two parts that lie the other way round in the region.
    async fn one_sided(&mut self, opcode: Opcode, region: u32, sums: Vec<u32>) -> Frame {
        let (half, whole) = (BYTES as u64 / 2, BYTES as u32);
        let segments = [Segment::new(region, half, whole / 2), Segment::new(region, 0, whole / 2)];
        let header = Header {
            handle: 1,
            epoch: 1,
            length: whole,
            flags: FLAG_ONE_SIDED,
            deadline_ms: DEADLINE_MS,
            ..Header::request(opcode, 0)
        };
        self.ask(Frame { header, ext: encode(&segments), sums }).await
    }

    /// What the region holds, as `one_sided` takes it.
    fn region(&self, number: u32) -> Vec<u8> {
        let half = BYTES / 2;
        [self.memory.bytes(number, half, half), self.memory.bytes(number, 0, half)].concat()
    }

    fn fill(&self, number: u32, bytes: &[u8]) {
        let half = BYTES / 2;
        self.memory.set(number, half, &bytes[..half]);
        self.memory.set(number, 0, &bytes[half..]);
    }

    /// What the node has stored, of all that was asked for.
    async fn stored(&self) -> Vec<u8> {
        let column = self.shared.store.get(file(), 0).unwrap();
        let view = column.read(1, 0, BYTES as u32, true).await.unwrap();
        assert_eq!(view.sums, piece_sums(0, view.bytes()));
        view.bytes().to_vec()
    }

    /// The connection ends, and with the file gone no memory is in use.
    async fn ends_with_all_memory_free(mut self) {
        assert!(!self.receiver.has_next().await.unwrap(), "nothing more comes");
        self.serving.await.unwrap();
        self.shared.store.delete(&[(file(), 0)]).unwrap();
        assert_eq!(self.shared.store.arena().used(), 0);
    }
}

fn file() -> u128 {
    parse_file_id(FILE).unwrap()
}

#[test]
fn bytes_cross_by_moves_of_many_polls() {
    run(async {
        let mut client = Client::start().await;
        client.fill(1, &pattern(1));
        let answer = client.one_sided(Opcode::Write, 1, piece_sums(0, &pattern(1))).await;
        assert_eq!((answer.header.code(), answer.header.length), (Code::Ok, BYTES as u32));
        assert!(client.stored().await == pattern(1));
        let answer = client.one_sided(Opcode::Read, 2, vec![]).await;
        assert_eq!((answer.header.code(), answer.header.length), (Code::Ok, BYTES as u32));
        assert_eq!(answer.sums, piece_sums(0, &pattern(1)));
        assert!(client.region(2) == pattern(1));
        let unmap = serde_json::to_vec(&Unmap { region: 2 }).unwrap();
        let answer = client.ask(Frame { ext: unmap, ..Frame::new(Header::request(Opcode::Unmap, 0)) }).await;
        assert_eq!(answer.header.code(), Code::Ok);
        let answer = client.one_sided(Opcode::Read, 2, vec![]).await;
        assert_eq!(answer.header.code(), Code::BadRequest);
        assert!(answer.failure().message.contains("region 2"));
    });
}

#[test]
fn a_move_that_damages_bytes_is_noticed() {
    run(async {
        let mut client = Client::start().await;
        client.fill(1, &pattern(1));
        client.memory.damage_next(70_000);
        let sums = piece_sums(0, &pattern(1));
        assert_eq!(client.one_sided(Opcode::Write, 1, sums.clone()).await.header.code(), Code::Checksum);
        assert_eq!(client.one_sided(Opcode::Write, 1, sums).await.header.code(), Code::Ok);
        client.memory.damage_next(70_000);
        assert_eq!(client.one_sided(Opcode::Read, 2, vec![]).await.header.code(), Code::Corrupt);
        assert_eq!(client.one_sided(Opcode::Read, 2, vec![]).await.header.code(), Code::Ok);
    });
}

#[test]
fn a_move_that_its_deadline_cuts_off_is_over_before_the_answer_is_sent() {
    for opcode in [Opcode::Read, Opcode::Write] {
        run(async {
            let mut client = Client::start().await;
            client.fill(1, &pattern(1));
            assert_eq!(client.one_sided(Opcode::Write, 1, vec![]).await.header.code(), Code::Ok);
            client.fill(2, &pattern(2));
            client.memory.stall_at(Some(50_000));
            let answer = client.one_sided(opcode, 2, vec![]).await;
            // The client may use its memory for other things from here on.
            assert_eq!(client.memory.moving(), 0, "{opcode:?}: something moves behind the answer");
            assert_eq!(answer.header.code(), Code::Timeout);
            let before = client.region(2);
            client.memory.stall_at(None);
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(client.region(2) == before);
            assert!(client.stored().await == pattern(1), "{opcode:?}: half a write was published");
            client.ends_with_all_memory_free().await;
        });
    }
}

#[test]
fn a_connection_that_is_dropped_in_the_middle_of_a_move_ends_it() {
    run(async {
        let mut client = Client::start().await;
        client.fill(1, &pattern(1));
        client.memory.stall_at(Some(50_000));
        let memory = client.memory.clone();
        let serving = client.serving.abort_handle();
        let asked = timeout(
            Duration::from_millis(100),
            client.one_sided(Opcode::Write, 1, piece_sums(0, &pattern(1))),
        );
        assert!(asked.await.is_err());
        assert_eq!(memory.moving(), 1);
        serving.abort();
        assert!(client.serving.await.unwrap_err().is_cancelled());
        assert_eq!((memory.moving(), client.shared.store.arena().used()), (0, 0));
    });
}
