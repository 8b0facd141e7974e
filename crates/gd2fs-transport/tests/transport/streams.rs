use std::sync::Arc;
use std::time::Duration;

use gd2fs_transport::fake::{self, Faults};
use gd2fs_transport::{Batch, Frame, FrameError, Receiver, Stream};
use gd2fs_wire::sums::{self, PieceSums};
use gd2fs_wire::{Code, Header, Opcode};
use proptest::prelude::*;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::timeout;

use crate::{list, pattern};

const CARRIERS: [&str; 4] = ["tcp", "local", "fake", "fake in bits"];

async fn pair(carrier: &str) -> (Stream, Stream) {
    match carrier {
        "tcp" => {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (one, other) =
                tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
            (one.unwrap().into(), other.unwrap().0.into())
        }
        "local" => {
            let (one, other) = UnixStream::pair().unwrap();
            (one.into(), other.into())
        }
        "fake" => fake::pair(Faults::default(), Faults::default()),
        _ => fake::pair(Faults { bytes_per_call_max: 7, ..Faults::default() }, Faults::default()),
    }
}

fn write(number: u64, offset: u64, data: &[u8]) -> Frame {
    let header = Header { offset, ..Header::request(Opcode::Write, number) };
    Frame { header, ext: Vec::new(), sums: sums::piece_sums(offset, data) }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(20), work).await.expect("nothing hangs") })
}

/// Sends WRITEs of these payloads in one batch; what arrives, and how it ended.
async fn carry(
    (from, to): (Stream, Stream),
    payloads: &mut [Vec<u8>],
    offset: u64,
    cuts: &[usize],
    landing: &[usize],
) -> Result<Vec<Vec<u8>>, FrameError> {
    let count = payloads.len();
    let (from, to) = (Arc::new(from), Arc::new(to));
    let sender = {
        let mut batch = Batch::default();
        for (number, payload) in payloads.iter_mut().enumerate() {
            let frame = write(number as u64, offset, payload);
            // SAFETY: as below.
            unsafe { batch.push_data(frame, list(payload, cuts)) };
        }
        let from = from.clone();
        // SAFETY: the payloads outlive the task, which is joined below, and are not written.
        async move { unsafe { batch.send(&from) }.await }
    };
    let receiver = async {
        let mut receiver = Receiver::new(to);
        let mut arrived = Vec::new();
        for number in 0..count {
            if !receiver.has_next().await? {
                break;
            }
            let frame = receiver.frame().await?;
            assert_eq!(frame.header.request, number as u64);
            let mut data = vec![0; frame.header.length as usize];
            let mut actual = PieceSums::new(frame.header.offset);
            let into = list(&mut data, landing);
            // SAFETY: nobody else uses the buffer.
            unsafe { receiver.scatter(&into, Some(&mut actual)) }.await?;
            let actual = actual.finish();
            assert_eq!(actual, sums::piece_sums(offset, &data), "what is summed is what arrived");
            if actual != frame.sums {
                return Err(FrameError::Malformed(gd2fs_wire::Failure::new(Code::Checksum, "sums")));
            }
            arrived.push(data);
        }
        Ok(arrived)
    };
    let (sent, received) = tokio::join!(sender, receiver);
    // A stream that was cut shows at one end or at both.
    if received.is_ok() { sent.map(|()| received.unwrap()).map_err(FrameError::Io) } else { received }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn frames_arrive_as_they_were_sent(
        carrier in 0usize..4,
        sizes in proptest::collection::vec(prop_oneof![1usize..200, Just(32 << 10), Just(300_001)], 1..12),
        offset in prop_oneof![Just(0u64), 1u64..100_000],
        cuts in proptest::collection::vec(1usize..70_000, 1..4),
        landing in proptest::collection::vec(1usize..70_000, 1..4),
    ) {
        let mut payloads: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, size)| pattern(*size, i as u8)).collect();
        let sent = payloads.clone();
        let arrived = run(async {
            carry(pair(CARRIERS[carrier]).await, &mut payloads, offset, &cuts, &landing).await
        });
        prop_assert_eq!(arrived.unwrap(), sent);
    }
}

#[test]
fn many_fragments_of_one_byte_cross_every_stream() {
    for carrier in CARRIERS {
        let mut payloads = vec![pattern(5000, 1)];
        let sent = payloads.clone();
        let arrived = run(async { carry(pair(carrier).await, &mut payloads, 3, &[1], &[1]).await });
        assert_eq!(arrived.unwrap(), sent, "{carrier}");
    }
}

#[test]
fn a_stream_that_is_cut_ends_in_an_error_wherever_it_is_cut() {
    let total = 64 + 4 + 100;
    for cut_at in 0..2 * total {
        let faults = Faults { cut_at: Some(cut_at), ..Faults::default() };
        let mut payloads = vec![pattern(100, 1), pattern(100, 2)];
        let sent = payloads.clone();
        let arrived = run(carry(fake::pair(faults, Faults::default()), &mut payloads, 0, &[100], &[64]));
        if cut_at == total {
            // In between frames the receiver sees a clean end, the sender knows better.
            assert!(arrived.is_err());
        } else {
            assert!(matches!(arrived, Err(FrameError::Io(_))), "cut at {cut_at}");
        }
        assert_eq!(payloads, sent);
    }
}

#[test]
fn no_turned_bit_passes() {
    for flip_at in 0..64 + 4 + 100 {
        let faults = Faults { flip_at: Some(flip_at), ..Faults::default() };
        let mut payloads = vec![pattern(100, 1)];
        let arrived = run(carry(fake::pair(faults, Faults::default()), &mut payloads, 0, &[100], &[100]));
        assert!(arrived.is_err(), "a bit of byte {flip_at}");
    }
}

#[test]
fn the_end_of_one_side_wakes_the_other() {
    for carrier in CARRIERS {
        run(async {
            let (one, other) = pair(carrier).await;
            let waiting = tokio::spawn(async move { Receiver::new(Arc::new(other)).has_next().await });
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert!(!one.is_ended_by_peer());
            one.end();
            assert!(matches!(waiting.await.unwrap(), Ok(false)), "{carrier}");
        });
    }
}

#[test]
fn a_peer_that_waits_for_room_wakes_when_the_stream_is_shut() {
    for carrier in ["tcp", "local"] {
        run(async {
            let (one, other) = pair(carrier).await;
            let sender = tokio::spawn(async move {
                let mut payload = vec![7; 64 << 20];
                let mut batch = Batch::default();
                let frame = write(1, 0, &payload);
                // SAFETY: the payload outlives the batch and is not written.
                unsafe {
                    batch.push_data(frame, list(&mut payload, &[64 << 20]));
                    batch.send(&one).await
                }
            });
            // Long enough to fill the buffers of both ends; the descriptor of `other` stays open.
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(!sender.is_finished());
            other.shut();
            assert!(sender.await.unwrap().is_err(), "{carrier}");
        });
    }
}

#[test]
fn a_local_peer_that_is_gone_is_noticed_without_reading() {
    run(async {
        let (one, other) = pair("local").await;
        drop(one);
        assert!(other.is_ended_by_peer());
    });
}

#[test]
fn descriptors_cross_a_local_stream_only() {
    let descriptor = Arc::new(gd2fs_transport::shm::Region::create(4096).unwrap().descriptor().unwrap());
    for carrier in CARRIERS {
        run(async {
            let (one, other) = pair(carrier).await;
            let mut batch = Batch::default();
            batch.push(Frame::new(Header::request(Opcode::Map, 1)));
            batch.attach(descriptor.clone());
            // SAFETY: there is no payload.
            let sent = unsafe { batch.send(&one) }.await;
            if carrier != "local" {
                return assert_eq!(sent.unwrap_err().kind(), std::io::ErrorKind::Unsupported);
            }
            sent.unwrap();
            let mut receiver = Receiver::new(Arc::new(other));
            assert!(receiver.stream().take_descriptor().is_none());
            assert_eq!(receiver.frame().await.unwrap().header.opcode, Opcode::Map as u8);
            assert!(receiver.stream().take_descriptor().is_some());
            assert!(receiver.stream().take_descriptor().is_none());
        });
    }
}
