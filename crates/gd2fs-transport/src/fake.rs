//! A stream and a client's memory that fail on purpose: what the contracts of both families are tested against.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use gd2fs_wire::messages::Map;
use gd2fs_wire::sums::piece_sums;
use gd2fs_wire::{Code, Failure};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::memory::{Memory, Slice};
use crate::one_sided::{Moved, Remote, Segment};
use crate::stream::Stream;

/// As a small socket buffer.
const CAPACITY: usize = 64 << 10;

/// What goes wrong on the way from one end to the other. Positions count the bytes of that direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// No call moves more than this; 0 is no limit.
    pub bytes_per_call_max: usize,
    /// The connection ends before this byte.
    pub cut_at: Option<u64>,
    /// A bit of this byte arrives turned.
    pub flip_at: Option<u64>,
}

pub struct End {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

struct Pipe {
    faults: Faults,
    state: Mutex<State>,
    filled: Notify,
    drained: Notify,
}

#[derive(Default)]
struct State {
    bytes: VecDeque<u8>,
    sent: u64,
    closed: bool,
}

/// Two ends of a connection; `there` befalls what the first sends, `back` what the second sends.
pub fn pair(there: Faults, back: Faults) -> (Stream, Stream) {
    let pipe = |faults| {
        Arc::new(Pipe { faults, state: Mutex::default(), filled: Notify::new(), drained: Notify::new() })
    };
    let (there, back) = (pipe(there), pipe(back));
    let first = End { incoming: back.clone(), outgoing: there.clone() };
    (Stream::Fake(first), Stream::Fake(End { incoming: there, outgoing: back }))
}

impl End {
    pub(crate) async fn readable(&self) -> io::Result<()> {
        let pipe = &self.incoming;
        wait(&pipe.filled, || {
            let state = pipe.state.lock();
            !state.bytes.is_empty() || state.closed
        })
        .await;
        Ok(())
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        let pipe = &self.outgoing;
        wait(&pipe.drained, || {
            let state = pipe.state.lock();
            state.bytes.len() < CAPACITY || state.closed
        })
        .await;
        Ok(())
    }

    /// # Safety
    /// As for `Stream::try_receive`.
    pub(crate) unsafe fn try_receive(&self, slices: &[Slice]) -> io::Result<usize> {
        let mut state = self.incoming.state.lock();
        if state.bytes.is_empty() {
            return if state.closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let mut left = self.incoming.faults.at_once(state.bytes.len());
        let mut moved = 0;
        for slice in slices {
            let take = slice.len().min(left);
            let bytes: Vec<u8> = state.bytes.drain(..take).collect();
            // SAFETY: the caller's promise.
            unsafe { slice.part(0, take).fill_from(&bytes) };
            (left, moved) = (left - take, moved + take);
        }
        self.incoming.drained.notify_waiters();
        Ok(moved)
    }

    pub(crate) fn try_send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Pipe { faults, state, filled, .. } = &*self.outgoing;
        let mut state = state.lock();
        if state.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if state.bytes.len() >= CAPACITY {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let room = faults.at_once(CAPACITY - state.bytes.len());
        let mut moved = 0;
        for byte in slices.iter().flat_map(|slice| slice.iter()).take(room) {
            if faults.cut_at == Some(state.sent) {
                state.closed = true;
                break;
            }
            let flipped = faults.flip_at == Some(state.sent);
            state.bytes.push_back(byte ^ u8::from(flipped));
            (state.sent, moved) = (state.sent + 1, moved + 1);
        }
        filled.notify_waiters();
        if moved == 0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(moved) }
    }

    pub(crate) fn shut(&self) {
        for pipe in [&self.incoming, &self.outgoing] {
            pipe.state.lock().closed = true;
            pipe.filled.notify_waiters();
            pipe.drained.notify_waiters();
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.shut();
    }
}

impl Faults {
    fn at_once(&self, bytes: usize) -> usize {
        if self.bytes_per_call_max == 0 { bytes } else { bytes.min(self.bytes_per_call_max) }
    }
}

async fn wait(changed: &Notify, done: impl Fn() -> bool) {
    loop {
        let notified = changed.notified();
        tokio::pin!(notified);
        // Registered before the look, so that no change in between is missed.
        notified.as_mut().enable();
        if done() {
            return;
        }
        notified.await;
    }
}

/// A client's memory without a client. Moves go in steps, between which others run, as a NIC's would.
pub struct RemoteMemory {
    regions: Mutex<HashMap<u32, Vec<u8>>>,
    damage_at: Mutex<Option<usize>>,
    stall_at: Mutex<Option<usize>>,
    resumed: Notify,
    moving: AtomicUsize,
}

/// `RemoteMemory` as a node holds it.
pub struct Shared(pub Arc<RemoteMemory>);

/// No move goes further between two polls.
const STEP: usize = 4096;

impl RemoteMemory {
    /// Zeros, in regions that are registered under 0 to `count` - 1.
    pub fn new(count: u32, bytes: usize) -> RemoteMemory {
        RemoteMemory {
            regions: Mutex::new((0..count).map(|number| (number, vec![0; bytes])).collect()),
            damage_at: Mutex::default(),
            stall_at: Mutex::default(),
            resumed: Notify::new(),
            moving: AtomicUsize::new(0),
        }
    }

    pub fn bytes(&self, region: u32, start: usize, length: usize) -> Vec<u8> {
        self.regions.lock()[&region][start..start + length].to_vec()
    }

    pub fn set(&self, region: u32, start: usize, bytes: &[u8]) {
        let mut regions = self.regions.lock();
        regions.get_mut(&region).expect("a region")[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// The next move turns a bit of its byte at `position`.
    pub fn damage_next(&self, position: usize) {
        *self.damage_at.lock() = Some(position);
    }

    /// Moves stop behind so many bytes, until this is called with None.
    pub fn stall_at(&self, position: Option<usize>) {
        *self.stall_at.lock() = position;
        self.resumed.notify_waiters();
    }

    /// Moves that have begun and that have neither ended nor been dropped.
    pub fn moving(&self) -> usize {
        self.moving.load(SeqCst)
    }

    /// The slots of the segments, in order, byte by byte; refused if one of them is nowhere.
    fn places(&self, segments: &[Segment]) -> Result<Vec<(u32, usize)>, Failure> {
        let regions = self.regions.lock();
        let mut places = Vec::new();
        for segment in segments {
            let number = segment.region();
            let refuse = |why: &str| Failure::new(Code::BadRequest, format!("region {number}: {why}"));
            let length = regions.get(&number).ok_or_else(|| refuse("not registered"))?.len() as u64;
            let end = segment.offset().checked_add(u64::from(segment.length()));
            let end = end.filter(|end| *end <= length).ok_or_else(|| refuse("the segment lies outside"))?;
            places.extend((segment.offset()..end).map(|at| (number, at as usize)));
        }
        Ok(places)
    }

    async fn between_steps(&self, moved: usize) {
        tokio::task::yield_now().await;
        wait(&self.resumed, || self.stall_at.lock().is_none_or(|stop| moved < stop)).await;
    }

    /// Counts a move while it lives.
    fn begin_move(&self) -> impl Drop + '_ {
        struct Moving<'a>(&'a AtomicUsize);
        impl Drop for Moving<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        self.moving.fetch_add(1, SeqCst);
        Moving(&self.moving)
    }
}

impl Remote for Shared {
    fn register(&self, map: &Map, _descriptor: Option<OwnedFd>) -> Result<(), Failure> {
        self.0.regions.lock().insert(map.region, vec![0; map.length as usize]);
        Ok(())
    }

    fn unregister(&self, number: u32) -> Result<(), Failure> {
        let gone = self.0.regions.lock().remove(&number);
        gone.map(drop)
            .ok_or_else(|| Failure::new(Code::BadRequest, format!("region {number}: not registered")))
    }

    unsafe fn put<'a>(&'a self, offset: u64, from: &'a Memory, to: &'a [Segment], summed: bool) -> Moved<'a> {
        Box::pin(async move {
            let _moving = self.0.begin_move();
            let places = self.0.places(to)?;
            // SAFETY: the caller's promise.
            let mut bytes: Vec<u8> =
                from.slices().iter().flat_map(|slice| unsafe { slice.bytes() }.to_vec()).collect();
            if let Some(position) = self.0.damage_at.lock().take() {
                bytes[position] ^= 1;
            }
            for (step, part) in bytes.chunks(STEP).enumerate() {
                self.0.between_steps(step * STEP).await;
                for (byte, (region, at)) in part.iter().zip(&places[step * STEP..]) {
                    self.0.set(*region, *at, &[*byte]);
                }
            }
            Ok(if summed { piece_sums(offset, &bytes) } else { Vec::new() })
        })
    }

    unsafe fn get<'a>(&'a self, offset: u64, from: &'a [Segment], into: &'a Memory) -> Moved<'a> {
        Box::pin(async move {
            let _moving = self.0.begin_move();
            let places = self.0.places(from)?;
            let damaged = self.0.damage_at.lock().take();
            let parts = into.split(places.chunks(STEP).map(<[_]>::len));
            let mut moved = Vec::with_capacity(places.len());
            for (part, places) in parts.iter().zip(places.chunks(STEP)) {
                self.0.between_steps(moved.len()).await;
                let begin = moved.len();
                moved.extend(places.iter().flat_map(|(region, at)| self.0.bytes(*region, *at, 1)));
                if let Some(byte) =
                    damaged.and_then(|position| moved[begin..].get_mut(position.checked_sub(begin)?))
                {
                    *byte ^= 1;
                }
                let mut rest = &moved[begin..];
                for slice in part.slices() {
                    let (now, later) = rest.split_at(slice.len());
                    // SAFETY: the caller's promise.
                    unsafe { slice.fill_from(now) };
                    rest = later;
                }
            }
            Ok(piece_sums(offset, &moved))
        })
    }
}
