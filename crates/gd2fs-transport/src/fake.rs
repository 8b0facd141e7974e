//! A stream and a client's memory that fail on purpose: what the contracts of both families are tested against.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

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

/// A client's memory without a client.
pub struct RemoteMemory {
    regions: Vec<Mutex<Vec<u8>>>,
    damage_at: Mutex<Option<usize>>,
}

/// `RemoteMemory` as a node holds it.
pub struct Shared(pub Arc<RemoteMemory>);

impl RemoteMemory {
    /// Zeros.
    pub fn new(count: usize, bytes: usize) -> RemoteMemory {
        RemoteMemory {
            regions: (0..count).map(|_| Mutex::new(vec![0; bytes])).collect(),
            damage_at: Mutex::default(),
        }
    }

    pub fn bytes(&self, region: u32, start: usize, length: usize) -> Vec<u8> {
        self.regions[region as usize].lock()[start..start + length].to_vec()
    }

    pub fn set(&self, region: u32, start: usize, bytes: &[u8]) {
        self.regions[region as usize].lock()[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// The next move turns a bit of its byte at `position`.
    pub fn damage_next(&self, position: usize) {
        *self.damage_at.lock() = Some(position);
    }

    /// Where the segment lies; refused if that is nowhere.
    fn place(&self, segment: &Segment) -> Result<(usize, std::ops::Range<usize>), Failure> {
        let refuse =
            |why: &str| Failure::new(Code::BadRequest, format!("region {}: {why}", segment.region()));
        let region = segment.region() as usize;
        let length = self.regions.get(region).ok_or_else(|| refuse("not registered"))?.lock().len() as u64;
        let end = segment.offset().checked_add(u64::from(segment.length()));
        match end {
            Some(end) if end <= length => Ok((region, segment.offset() as usize..end as usize)),
            _ => Err(refuse("the segment lies outside")),
        }
    }

    fn damaged(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        if let Some(position) = self.damage_at.lock().take() {
            bytes[position] ^= 1;
        }
        bytes
    }
}

impl Remote for Shared {
    unsafe fn put<'a>(&'a self, offset: u64, from: &'a Memory, to: &'a [Segment], summed: bool) -> Moved<'a> {
        Box::pin(async move {
            let places = to.iter().map(|segment| self.0.place(segment)).collect::<Result<Vec<_>, _>>()?;
            // SAFETY: the caller's promise.
            let bytes = from.slices().iter().flat_map(|slice| unsafe { slice.bytes() }.to_vec()).collect();
            let bytes = self.0.damaged(bytes);
            let mut rest = bytes.as_slice();
            for (region, range) in places {
                let (now, later) = rest.split_at(range.len());
                self.0.regions[region].lock()[range].copy_from_slice(now);
                rest = later;
            }
            Ok(if summed { piece_sums(offset, &bytes) } else { Vec::new() })
        })
    }

    unsafe fn get<'a>(&'a self, offset: u64, from: &'a [Segment], into: &'a Memory) -> Moved<'a> {
        Box::pin(async move {
            let mut bytes = Vec::new();
            for segment in from {
                let (region, range) = self.0.place(segment)?;
                bytes.extend_from_slice(&self.0.regions[region].lock()[range]);
            }
            let bytes = self.0.damaged(bytes);
            let mut rest = bytes.as_slice();
            for slice in into.slices() {
                let (now, later) = rest.split_at(slice.len());
                // SAFETY: the caller's promise.
                unsafe { slice.fill_from(now) };
                rest = later;
            }
            Ok(piece_sums(offset, &bytes))
        })
    }
}
