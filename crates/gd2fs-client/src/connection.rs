//! One connection to a node: many requests under way, each with its own memory.
//!
//! The rule that everything here serves: a call returns only when nothing can touch its memory any more. The reader takes
//! a request out of the table before it completes it; a call that gives up takes its own request out, and if the reader
//! is receiving into its memory just then, it shuts the connection down and waits for the reader's end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gd2fs_transport::{Frame, FrameError, Memory, Receiver, Sender};
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{CONTROL_BYTES_MAX, Header, Opcode};
use gd2fs_wire::sums;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};

use crate::dial::Dialed;
use crate::handles::Handles;
use crate::stop::Stop;
use crate::trouble::Trouble;

/// A request that timed out after this long, and nothing at all was heard meanwhile: the connection is not worth keeping.
const SILENCE_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Connection {
    pub generation: u64,
    pub incarnation: u32,
    pub handles: Handles,
    sender: tokio::sync::Mutex<Sender>,
    table: Mutex<Table>,
    closing: watch::Sender<bool>,
    ended: watch::Sender<bool>,
    /// Highest generation of this slot that ended with a write unanswered; shared with the slot.
    doubted: Arc<AtomicU64>,
}

/// What goes out after the header.
pub(crate) enum Outgoing {
    Nothing,
    Json(Vec<u8>),
    Data(Memory),
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub frame: Frame,
    /// Of operations whose payload is JSON.
    pub json: Vec<u8>,
}

#[derive(Default)]
struct Table {
    next: u64,
    pending: HashMap<u64, Pending>,
    /// Set once: nothing is sent or received any more.
    end: Option<Failure>,
    frames_heard: u64,
}

struct Pending {
    asked: Header,
    landing: Option<Memory>,
    /// Taken by the reader while it receives into `landing`.
    reply: Option<oneshot::Sender<Result<Reply, Trouble>>>,
    since: Instant,
    frames_heard: u64,
}

impl Connection {
    /// Must run inside the client's runtime: the reader is spawned there.
    pub fn start(dialed: Dialed, doubted: Arc<AtomicU64>) -> Arc<Connection> {
        let Dialed { stream, receiver, generation, incarnation } = dialed;
        let connection = Arc::new(Connection {
            generation,
            incarnation,
            handles: Handles::default(),
            sender: tokio::sync::Mutex::new(Sender::new(stream.clone())),
            // Number 0 was HELLO's.
            table: Mutex::new(Table { next: 1, ..Table::default() }),
            closing: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            doubted,
        });
        tokio::spawn(connection.clone().read_replies(stream, receiver));
        connection
    }

    pub fn is_usable(&self) -> bool {
        !*self.closing.borrow() && self.table.lock().end.is_none()
    }

    /// Shuts the connection down; requests under way end with DISCONNECTED.
    pub fn shut(&self) {
        self.closing.send_replace(true);
    }

    /// Shuts the connection down and waits until nothing can touch any memory through it.
    pub async fn end(&self) {
        self.shut();
        // Only an error if the sender, a part of self, were gone.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Sends one request and waits for its reply. `landing` receives the data of a READ.
    pub async fn call(
        &self,
        header: Header,
        ext: Vec<u8>,
        out: &Outgoing,
        landing: Option<Memory>,
        stop: &mut Stop,
    ) -> Result<Reply, Trouble> {
        let (sender, mut receiver) = oneshot::channel();
        let mut number = None;
        let frame = Frame { header, ext, sums: sums_of(&header, out) };
        let failure = match stop.race(self.send(frame, out, landing, sender, &mut number)).await {
            Ok(Ok(())) => match stop.race(&mut receiver).await {
                Ok(reply) => return reply.unwrap_or_else(|_| Err(self.lost())),
                Err(failure) => Trouble::Stopped(failure),
            },
            Ok(Err(trouble)) => trouble,
            Err(failure) => Trouble::Stopped(failure),
        };
        let Some(number) = number else { return Err(failure) };
        if self.forget(number) {
            return Err(failure);
        }
        // The reader has it: either it is done, or it ends with the connection that `forget` has shut down.
        match receiver.await {
            Ok(Ok(reply)) => Ok(reply),
            _ => Err(failure),
        }
    }

    async fn send(
        &self,
        mut frame: Frame,
        out: &Outgoing,
        landing: Option<Memory>,
        reply: oneshot::Sender<Result<Reply, Trouble>>,
        number: &mut Option<u64>,
    ) -> Result<(), Trouble> {
        let sender = self.sender.lock().await;
        let mut header = frame.header;
        // Numbers rise in the order of sending, so they are given under the send lock.
        header.request = self.register(header, landing, reply)?;
        *number = Some(header.request);
        frame.header = header;
        // A frame that is not sent to its end makes the connection useless, also when this future is dropped.
        let unfinished = ShutOnDrop(self);
        let sent = match out {
            Outgoing::Nothing => sender.bare(frame).await,
            Outgoing::Json(payload) => sender.json(frame, payload).await,
            // SAFETY: the memory is the caller's until its request completes, which `call` sees to.
            Outgoing::Data(memory) => unsafe { sender.data(frame, memory) }.await,
        };
        sent.map_err(|error| Trouble::Lost(FrameError::Io(error).into_failure()))?;
        std::mem::forget(unfinished);
        Ok(())
    }

    fn register(
        &self,
        asked: Header,
        landing: Option<Memory>,
        reply: oneshot::Sender<Result<Reply, Trouble>>,
    ) -> Result<u64, Trouble> {
        let mut table = self.table.lock();
        if let Some(end) = &table.end {
            return Err(Trouble::Lost(end.clone()));
        }
        let number = table.next;
        table.next += 1;
        let frames_heard = table.frames_heard;
        let pending = Pending { asked, landing, reply: Some(reply), since: Instant::now(), frames_heard };
        table.pending.insert(number, pending);
        Ok(number)
    }

    /// Gives a request up. True: it was still waiting, and its memory is free. False: the reader has it, and completes it or
    /// drops it soon.
    fn forget(&self, number: u64) -> bool {
        let mut table = self.table.lock();
        let Some(pending) = table.pending.get(&number) else { return false };
        if pending.reply.is_none() {
            drop(table);
            self.shut();
            return false;
        }
        let silent = pending.frames_heard == table.frames_heard && pending.since.elapsed() >= SILENCE_MAX;
        let write = pending.asked.opcode == Opcode::Write as u8;
        table.pending.remove(&number);
        drop(table);
        if write {
            // The node may still apply it. The slot sends no write before a newer HELLO has fenced this connection.
            self.doubted.fetch_max(self.generation, Ordering::SeqCst);
        }
        if write || silent {
            self.shut();
        }
        true
    }

    fn lost(&self) -> Trouble {
        let end = self.table.lock().end.clone();
        Trouble::Lost(end.unwrap_or_else(|| Failure::new(Code::Disconnected, "the connection was closed")))
    }

    async fn read_replies(self: Arc<Self>, stream: Arc<TcpStream>, mut receiver: Receiver) {
        let mut closing = self.closing.subscribe();
        let error = tokio::select! {
            error = self.receive_all(&mut receiver) => error,
            _ = closing.wait_for(|closing| *closing) => {
                Failure::new(Code::Disconnected, "the connection was given up after a transfer on it had failed")
            }
        };
        // Here the future that received is gone, and with it the last one who could write into anybody's memory.
        let pending = {
            let mut table = self.table.lock();
            // Whatever was malformed, a caller can only know that the connection broke with its request under way.
            table.end = Some(Failure::new(Code::Disconnected, error.message));
            std::mem::take(&mut table.pending)
        };
        if pending.values().any(|pending| pending.asked.opcode == Opcode::Write as u8) {
            self.doubted.fetch_max(self.generation, Ordering::SeqCst);
        }
        drop(pending);
        self.shut();
        // A sender may hold the other end of the socket in a blocked send: this wakes it.
        shut_socket(&stream);
        self.ended.send_replace(true);
    }

    async fn receive_all(&self, receiver: &mut Receiver) -> Failure {
        loop {
            match receiver.has_next().await {
                Ok(true) => {}
                Ok(false) => return Failure::new(Code::Disconnected, "the node closed the connection"),
                Err(error) => return FrameError::Io(error).into_failure(),
            }
            if let Err(error) = self.receive_one(receiver).await {
                return error.into_failure();
            }
        }
    }

    async fn receive_one(&self, receiver: &mut Receiver) -> Result<(), FrameError> {
        let frame = receiver.frame().await?;
        let header = frame.header;
        let data = header.carries_file_data();
        if !data && header.payload_bytes() > CONTROL_BYTES_MAX {
            return Err(bad_reply(format!("a payload of {} bytes where none fits", header.length)).into());
        }
        let taken = self.take(&header)?;
        let Some((landing, asked_raw, reply)) = taken else {
            // The late reply to a request that was given up.
            if data {
                receiver.discard(u64::from(header.length)).await?;
            } else if header.payload_bytes() > 0 {
                receiver.json(&frame).await?;
            }
            return Ok(());
        };
        let mut json = Vec::new();
        let mut result = Ok(());
        if data {
            let memory = landing.unwrap_or_default().prefix(header.length as usize);
            // SAFETY: the memory is the request's until its reply is sent or dropped below.
            unsafe { receiver.scatter(&memory) }.await?;
            if !asked_raw {
                result = verify(&frame, &memory);
            }
        } else if header.payload_bytes() > 0 {
            json = receiver.json(&frame).await?;
        }
        if header.code() != Code::Ok {
            result = Err(frame.failure());
        }
        self.table.lock().pending.remove(&header.request);
        // A caller that is gone needs no reply.
        let _ = reply.send(result.map(|()| Reply { frame, json }).map_err(Trouble::Refused));
        Ok(())
    }

    /// Checks a reply against what was asked and takes memory and reply slot; None if nobody waits any more. The entry stays in
    /// the table, so that whoever gives the request up sees that the reader is at it.
    #[allow(clippy::type_complexity)]
    fn take(
        &self,
        header: &Header,
    ) -> Result<Option<(Option<Memory>, bool, oneshot::Sender<Result<Reply, Trouble>>)>, Failure> {
        let mut table = self.table.lock();
        table.frames_heard += 1;
        if !header.is_response() || header.incarnation != self.incarnation {
            return Err(bad_reply("neither a reply nor of this incarnation".into()));
        }
        if header.request == 0 || header.request >= table.next {
            return Err(bad_reply(format!("request {} was never sent", header.request)));
        }
        let Some(pending) = table.pending.get_mut(&header.request) else { return Ok(None) };
        check_reply(&pending.asked, header)?;
        let reply = pending.reply.take().expect("one reader takes each reply once");
        Ok(Some((pending.landing.take(), pending.asked.is_raw(), reply)))
    }
}

/// A reply must answer what was asked: other bytes must never pass for the wanted ones.
fn check_reply(asked: &Header, reply: &Header) -> Result<(), Failure> {
    if asked.opcode != reply.opcode {
        return Err(bad_reply(format!("opcode {} answers opcode {}", reply.opcode, asked.opcode)));
    }
    if reply.code() != Code::Ok {
        return Ok(());
    }
    match reply.opcode() {
        // Without its sums a reply would pass unverified: only whoever asked for that gets it.
        Ok(Opcode::Read)
            if reply.offset != asked.offset
                || reply.length > asked.length
                || reply.is_raw() != asked.is_raw() =>
        {
            Err(bad_reply(format!(
                "[{}, +{}) answers a READ of [{}, +{})",
                reply.offset, reply.length, asked.offset, asked.length
            )))
        }
        Ok(Opcode::Write) if reply.length != asked.length => {
            Err(bad_reply(format!("{} bytes written of {}", reply.length, asked.length)))
        }
        _ => Ok(()),
    }
}

fn bad_reply(why: String) -> Failure {
    Failure::new(Code::BadFrame, format!("the node sent a reply that makes no sense: {why}"))
}

fn verify(frame: &Frame, memory: &Memory) -> Result<(), Failure> {
    let (offset, length) = (frame.header.offset, u64::from(frame.header.length));
    // SAFETY: the reader alone uses the memory until the reply is sent.
    let actual = unsafe { memory.sums(sums::piece_lengths(offset, length)) };
    match actual.iter().zip(&frame.sums).position(|(actual, sum)| actual != sum) {
        None => Ok(()),
        Some(piece) => Err(Failure::new(
            Code::Checksum,
            format!("piece {piece} sums to {:#010x}, not {:#010x}", actual[piece], frame.sums[piece]),
        )),
    }
}

fn sums_of(header: &Header, out: &Outgoing) -> Vec<u32> {
    match out {
        Outgoing::Data(memory) if !header.is_raw() => {
            // SAFETY: the memory is the caller's until its request completes; nobody writes it meanwhile by its promise.
            unsafe { memory.sums(sums::piece_lengths(header.offset, memory.len() as u64)) }
        }
        _ => Vec::new(),
    }
}

fn shut_socket(stream: &TcpStream) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open; a socket that is not connected any more is what we want.
    unsafe { libc::shutdown(stream.as_raw_fd(), libc::SHUT_RDWR) };
}

struct ShutOnDrop<'a>(&'a Connection);

impl Drop for ShutOnDrop<'_> {
    fn drop(&mut self) {
        self.0.shut();
    }
}
