//! A stream in memory that fails on purpose: what the contract of streams is tested against.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::memory::Slice;
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
