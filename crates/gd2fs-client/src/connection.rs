//! One connection to a node: many requests under way, each with its own memory.
//!
//! The rule that everything here serves: a call returns only when nothing can touch its memory any more. The reader marks a
//! request in the table while it receives into its memory; a call that gives up takes its own request out, and if its memory
//! is in use just then, it shuts the connection down and waits for the connection's end.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gd2fs_transport::{Batch, Frame, FrameError, Memory, Receiver, Stream};
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{CONTROL_BYTES_MAX, Header, Opcode};
use gd2fs_wire::messages::{Map, Unmap};
use gd2fs_wire::sums::PieceSums;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OnceCell, oneshot, watch};
use tokio::time::timeout;

use crate::call::{Call, Outgoing, Reply, bad_reply, check_reply, sums_of, verify};
use crate::completion::Completions;
use crate::dial::Dialed;
use crate::handles::{Handles, deadline_ms};
use crate::left::Left;
use crate::one_sided::Held;
use crate::pending::{Done, Pending, Queued, Table, finish};
use crate::stop::{Stop, Stopper};
use crate::trouble::Trouble;

/// A request that timed out after this long, and nothing at all was heard meanwhile: the connection is not worth keeping.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// A node that works answers a request that was given up within this time.
const ANSWER_TIME: Duration = Duration::from_millis(250);
/// And closes its end of a connection that has ended within this; beyond it memory is taken from the node.
const END_TIME: Duration = Duration::from_millis(500);
const UNMAP_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct Connection {
    pub generation: u64,
    pub incarnation: u32,
    pub handles: Handles,
    stream: Arc<Stream>,
    /// For what has to be waited for on behalf of threads that are not its own.
    runtime: Handle,
    /// Regions that the node has mapped for this connection, or is mapping.
    mapped: Mutex<HashMap<u32, Arc<OnceCell<()>>>>,
    table: Mutex<Table>,
    /// The last request whose frame the system has taken: of it and those before it the sender uses no memory any more.
    handed_over: AtomicU64,
    /// Something was put into the outbox.
    queued: Notify,
    closing: watch::Sender<bool>,
    ended: watch::Sender<bool>,
    /// Highest generation of this slot that ended with a write unanswered; shared with the slot.
    doubted: Arc<AtomicU64>,
    /// Told when everything that has arrived is completed.
    completions: Option<Arc<Completions>>,
}

impl Connection {
    /// Must run inside the client's runtime: what sends and receives is spawned there.
    pub fn start(dialed: Dialed, doubted: Arc<AtomicU64>) -> Arc<Connection> {
        let Dialed { stream, receiver, generation, incarnation, completions } = dialed;
        let connection = Arc::new(Connection {
            generation,
            incarnation,
            handles: Handles::default(),
            stream,
            runtime: Handle::current(),
            mapped: Mutex::default(),
            table: Mutex::new(Table::new()),
            handed_over: AtomicU64::new(0),
            queued: Notify::new(),
            closing: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            doubted,
            completions,
        });
        let running = tokio::spawn(connection.clone().run(receiver));
        let watched = connection.clone();
        tokio::spawn(async move {
            if running.await.is_err() {
                // A fault in this library, reported by the panic itself. Nothing receives or sends any more.
                watched.shut();
                watched.finish_undoubted("a transfer on it ended badly").sever(None).await;
                watched.announce();
                watched.ended.send_replace(true);
            }
        });
        connection
    }

    pub fn is_usable(&self) -> bool {
        !*self.closing.borrow() && self.table.lock().end.is_none()
    }

    /// Whether the node shares this host's memory, and moves bytes itself.
    pub fn is_local(&self) -> bool {
        self.stream.is_local()
    }

    /// Shuts the connection down; requests under way end with DISCONNECTED. From here on the node publishes nothing that it
    /// takes from our memory.
    pub fn shut(&self) {
        self.closing.send_replace(true);
        self.stream.end();
    }

    /// Shuts the connection down and waits until nothing can touch any memory through it.
    pub async fn end(&self) {
        self.shut();
        // Only an error if the sender, a part of self, were gone.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Sends one request and waits for its reply. Returns only when nothing can touch the memory that it names.
    pub async fn call(self: &Arc<Self>, call: Call, stop: &mut Stop) -> Result<Reply, Trouble> {
        let (sender, mut receiver) = oneshot::channel();
        // A caller that is gone needs no reply.
        let number = self.submit(call, Box::new(|reply| drop(sender.send(reply))));
        match stop.race(&mut receiver).await {
            Ok(reply) => return reply.unwrap_or_else(|_| Err(self.lost())),
            Err(failure) => {
                if let Some(number) = number {
                    self.give_up(number, failure);
                }
            }
        }
        receiver.await.unwrap_or_else(|_| Err(self.lost()))
    }

    /// Has the node map a region, once for all who need it.
    pub async fn map(
        self: &Arc<Self>,
        region: u32,
        length: usize,
        descriptor: impl FnOnce() -> io::Result<OwnedFd>,
        stop: &mut Stop,
    ) -> Result<(), Trouble> {
        let cell = self.mapped.lock().entry(region).or_default().clone();
        // As for an OPEN: nobody waits longer than its own time.
        let mut waiting = stop.clone();
        let map = async || {
            let descriptor = descriptor().map_err(|error| {
                Trouble::Refused(Failure::new(Code::Overloaded, format!("no descriptor is left: {error}")))
            })?;
            let message = Map { region, length: length as u64 };
            let mut header = Header::request(Opcode::Map, 0);
            header.deadline_ms = deadline_ms(stop);
            let out = Outgoing::Descriptor(Arc::new(descriptor));
            self.call(Call::with_message(header, &message, out), stop).await.map(drop)
        };
        waiting.race(cell.get_or_try_init(map)).await.map_err(Trouble::Stopped)?.copied()
    }

    pub fn has_mapped(&self, region: u32) -> bool {
        self.mapped.lock().get(&region).is_some_and(|cell| cell.initialized())
    }

    /// Has the node forget a region that is gone.
    pub fn unmap(self: &Arc<Self>, region: u32) {
        // Also where nobody waited for the answer to MAP: the node may have mapped it all the same.
        if self.mapped.lock().remove(&region).is_none() {
            return;
        }
        let connection = self.clone();
        tokio::spawn(async move {
            let call =
                Call::with_message(Header::request(Opcode::Unmap, 0), &Unmap { region }, Outgoing::Nothing);
            // Nobody waits for it, and a mapping ends with its connection at the latest.
            if let Err(trouble) = connection.call(call, &mut Stopper::new(UNMAP_TIMEOUT).stop()).await {
                tracing::debug!(region, error = %trouble.into_failure(), "UNMAP failed");
            }
        });
    }

    /// Queues a request; its number, or None if it has ended already.
    pub fn submit(&self, call: Call, done: Done) -> Option<u64> {
        let Call { header, ext, sums, out, landing, held } = call;
        let sums = if sums.is_empty() { sums_of(&header, &out) } else { sums };
        let mut frame = Frame { header, ext, sums };
        let since = Instant::now();
        let mut table = self.table.lock();
        if let Some(end) = table.end.clone() {
            drop(table);
            done(Err(Trouble::Lost(end)));
            return None;
        }
        let number = table.next();
        frame.header.request = number;
        let (asked, frames_heard) = (frame.header, table.frames_heard);
        let (receiving, outcome) = (false, None);
        table.pending.push_back(Some(Pending {
            asked,
            landing,
            held,
            done,
            receiving,
            outcome,
            since,
            frames_heard,
        }));
        let first = table.outbox.is_empty();
        table.outbox.push_back(Queued { frame, out });
        drop(table);
        if first {
            self.queued.notify_one();
        }
        Some(number)
    }

    /// Gives a request up: it ends as `failure` as soon as nothing touches its memory any more, or with its reply if that is
    /// being received.
    pub fn give_up(self: &Arc<Self>, number: u64, failure: Failure) {
        let mut table = self.table.lock();
        let unsent = table.unsent;
        let Some(Some(pending)) = table.pending(number) else { return };
        if number >= unsent {
            // It was never sent: nobody but us has heard of it.
            let index = table.outbox.iter().position(|queued| queued.frame.header.request == number);
            index.and_then(|index| table.outbox.remove(index));
            return finish(table, number, failure);
        }
        let write = pending.is_write();
        let (staged, heard, since) = (pending.held.is_staged(), pending.frames_heard, pending.since);
        pending.outcome = Some(Trouble::Stopped(failure.clone()));
        if pending.receiving || (write && !self.is_handed_over(number)) {
            // Its memory is in use here, until the connection's end.
            drop(table);
            return self.shut();
        }
        if pending.held.is_in_doubt(&pending.asked) {
            // The node may be at its memory. Mostly it answers soon.
            drop(table);
            return self.expect_answer(number, ANSWER_TIME);
        }
        let silent = heard == table.frames_heard && since.elapsed() >= SILENCE_MAX;
        if write {
            // The node may still apply it. The slot sends no write before a newer HELLO has fenced this connection.
            self.doubted.fetch_max(self.generation, Ordering::SeqCst);
        }
        if write || silent {
            self.shut();
        } else if staged {
            // Its slots are nobody's until then, and the ring has few.
            self.expect_answer(number, SILENCE_MAX);
        }
        finish(table, number, failure);
    }

    /// Shuts the connection down if a request that was given up is not answered in time.
    fn expect_answer(self: &Arc<Self>, number: u64, within: Duration) {
        let connection = self.clone();
        self.runtime.spawn(async move {
            tokio::time::sleep(within).await;
            if connection.is_pending(number) {
                connection.shut();
            }
        });
    }

    fn is_pending(&self, number: u64) -> bool {
        matches!(self.table.lock().pending(number), Some(Some(_)))
    }

    fn lost(&self) -> Trouble {
        let end = self.table.lock().end.clone();
        Trouble::Lost(end.unwrap_or_else(|| Failure::new(Code::Disconnected, "the connection was closed")))
    }

    /// Sends and receives until the end. One task does both, so that with its end nobody touches any memory any more.
    async fn run(self: Arc<Self>, mut receiver: Receiver) {
        let mut closing = self.closing.subscribe();
        let error = tokio::select! {
            error = self.receive_all(&mut receiver) => error,
            error = self.send_all() => error,
            _ = closing.wait_for(|closing| *closing) => {
                Failure::new(Code::Disconnected, "the connection was given up after a transfer on it had failed")
            }
        };
        self.shut();
        let left = self.finish_undoubted(&error.message);
        self.announce();
        // A node that has closed its end moves nothing any more.
        if left.is_empty() || timeout(END_TIME, receiver.drain()).await.is_ok() {
            left.free();
        } else {
            left.sever(Some(&mut receiver)).await;
        }
        self.stream.shut();
        self.announce();
        self.ended.send_replace(true);
    }

    /// For a client that closes: takes the memory of all requests that are left from a node that has not answered. The connection's
    /// task is gone, or will never run again.
    pub fn abandon(&self) {
        // Before anybody is told that its memory is free: a node must publish nothing that it takes from there later.
        self.shut();
        drop(self.finish_undoubted("the client was closed"));
    }

    /// Ends all requests but those whose memory the node may still be writing to. Nothing is sent or received any more.
    fn finish_undoubted(&self, why: &str) -> Left {
        let (first, unsent, pending) = {
            let mut table = self.table.lock();
            // Whatever was malformed, a caller can only know that the connection broke with its request under way.
            table.end = Some(Failure::new(Code::Disconnected, why));
            table.outbox.clear();
            (table.first, table.unsent, std::mem::take(&mut table.pending))
        };
        let sent = |number: u64| number < unsent;
        let written = |pending: &Option<Pending>| pending.as_ref().is_some_and(Pending::is_write);
        if (first..).zip(&pending).any(|(number, pending)| sent(number) && written(pending)) {
            self.doubted.fetch_max(self.generation, Ordering::SeqCst);
        }
        let mut left = Left::default();
        for (number, pending) in (first..).zip(pending) {
            let Some(mut pending) = pending else { continue };
            pending.outcome.get_or_insert_with(|| Trouble::Lost(Failure::new(Code::Disconnected, why)));
            if sent(number) && pending.held.is_in_doubt(&pending.asked) {
                left.doubtful.push(pending);
                continue;
            }
            if sent(number) && pending.held.is_staged() {
                left.slots.push(std::mem::replace(&mut pending.held, Held::Nothing));
            }
            pending.finish();
        }
        left
    }

    /// Sends what is in the outbox, and what comes into it. Returns why that can't go on.
    async fn send_all(&self) -> Failure {
        let mut batch = Batch::default();
        loop {
            batch.clear();
            let refused = {
                let mut table = self.table.lock();
                // Of the batch before, which is sent now.
                let refused = table.take_refused();
                while !batch.is_full()
                    && let Some(Queued { frame, out }) = table.outbox.pop_front()
                {
                    match out {
                        Outgoing::Nothing => batch.push(frame),
                        Outgoing::Json(payload) => batch.push_json(frame, &payload),
                        // SAFETY: the memory is the caller's until its request completes, which `call` sees to.
                        Outgoing::Data(memory) => drop(unsafe { batch.push_data(frame, memory) }),
                        Outgoing::Descriptor(_) if !batch.is_empty() => {
                            // It goes out with the first byte of a batch.
                            table.outbox.push_front(Queued { frame, out });
                            break;
                        }
                        Outgoing::Descriptor(descriptor) => {
                            batch.push(frame);
                            batch.attach(descriptor);
                            break;
                        }
                    }
                }
                table.unsent =
                    table.outbox.front().map_or(table.next(), |queued| queued.frame.header.request);
                refused
            };
            if !refused.is_empty() {
                refused.into_iter().for_each(Pending::finish);
                self.announce();
            }
            if batch.is_empty() {
                self.queued.notified().await;
                continue;
            }
            // SAFETY: the memory is the caller's until its request completes, which `call` sees to.
            if let Err(error) = unsafe { batch.send_counted(&self.stream, &self.handed_over) }.await {
                return FrameError::Io(error).into_failure();
            }
        }
    }

    async fn receive_all(&self, receiver: &mut Receiver) -> Failure {
        loop {
            if !receiver.holds_frame() {
                self.announce();
            }
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

    fn announce(&self) {
        if let Some(completions) = &self.completions {
            completions.announce();
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
        let Some((landing, asked_raw)) = taken else {
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
            let mut sums = (!asked_raw).then(|| PieceSums::new(header.offset));
            // SAFETY: the memory is the request's until its reply is sent or dropped below.
            unsafe { receiver.scatter(&memory, sums.as_mut()) }.await?;
            result = sums.map_or(Ok(()), |sums| verify(&frame, &sums.finish()));
        } else if header.payload_bytes() > 0 {
            json = receiver.json(&frame).await?;
        }
        if header.code() != Code::Ok {
            result = Err(frame.failure());
        }
        let trouble = |failure: Failure| match failure.code {
            // What we sent was damaged on its way, or nonsense; the node has closed the connection, and changed nothing.
            Code::BadFrame => Trouble::Lost(failure),
            _ => Trouble::Refused(failure),
        };
        let mut table = self.table.lock();
        if !self.is_handed_over(header.request)
            && let Err(failure) = result
        {
            table.refuse_early(header.request, trouble(failure));
            return Ok(());
        }
        let Some(pending) = table.remove(header.request) else { return Ok(()) };
        drop(table);
        let reply = result.map(|()| Reply { frame, json, _held: pending.held });
        (pending.done)(reply.map_err(trouble));
        Ok(())
    }

    fn is_handed_over(&self, number: u64) -> bool {
        number <= self.handed_over.load(Ordering::Acquire)
    }

    /// Checks a reply against what was asked, and takes the memory for its data; None if nobody waits any more. The entry stays
    /// in the table, so that whoever gives the request up sees that the reader is at it.
    fn take(&self, header: &Header) -> Result<Option<(Option<Memory>, bool)>, Failure> {
        let mut table = self.table.lock();
        table.frames_heard += 1;
        if !header.is_response() || header.incarnation != self.incarnation {
            return Err(bad_reply("neither a reply nor of this incarnation".into()));
        }
        if header.request == 0 || header.request >= table.unsent {
            return Err(bad_reply(format!("request {} was never sent", header.request)));
        }
        let Some(Some(pending)) = table.pending(header.request) else { return Ok(None) };
        check_reply(&pending.asked, header)?;
        if header.code() == Code::Ok && !self.is_handed_over(header.request) {
            return Err(bad_reply(format!("request {} was done before it was sent", header.request)));
        }
        pending.receiving = true;
        Ok(Some((pending.landing.take(), pending.asked.is_raw())))
    }
}
