//! One connection: HELLO, then one request after the other. The socket is the queue.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_store::{Ahead, ReadView};
use gd2fs_transport::{Batch, Frame, FrameError, Receiver, Remote, Stream};
use gd2fs_wire::{Clock, Code, Failure, Header, Opcode, Token};
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use crate::fences::Membership;
use crate::hello;
use crate::open::Handle;
use crate::read::memory_of;
use crate::server::{Running, Shared};
use crate::stats::Stats;

/// Header, ext and sums of a frame that has begun are at most 72 KiB.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// For requests that name no deadline.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(30);
/// A connection is blocked by a slow peer for this long at most, whatever deadline it names.
const DEADLINE_MAX: Duration = Duration::from_secs(120);
/// A reply that is ready gets at least this long, however little its deadline has left.
const SEND_TIME_MIN: Duration = Duration::from_secs(1);

pub(crate) struct Connection<'a> {
    pub shared: &'a Shared,
    pub receiver: Receiver,
    pub stream: Arc<Stream>,
    pub shutdown: &'a watch::Receiver<Option<Instant>>,
    pub token: Token,
    pub membership: Membership,
    pub handles: HashMap<u32, Arc<Handle>>,
    pub last_handle: u32,
    /// The client's memory for one-sided transfers; None where the stream leads to nobody who could share any.
    pub remote: Option<Box<dyn Remote>>,
    /// Payload bytes of the current request that are still in the connection.
    pub unread: u64,
    /// What is lifted for READs that are here already, oldest first.
    pub ahead: VecDeque<Ahead>,
    /// Replies that wait for those of the requests that are here already.
    batch: Batch,
    waiting: Vec<Waiting<'a>>,
}

/// What a reply needs until it is sent.
struct Waiting<'a> {
    header: Header,
    arrived: Instant,
    deadline: Instant,
    served: bool,
    /// Large ones fill a batch soon, so a peer that does not read keeps few frames.
    _bytes: Option<ReadView>,
    _running: Running<'a>,
}

/// When a request came, until when its answer may wait for the peer, and that it is under way.
struct Answering<'a> {
    arrived: Instant,
    deadline: Instant,
    running: Running<'a>,
}

pub(crate) enum Reply {
    Bare(Frame),
    Json(Frame, Vec<u8>),
    Data(Frame, ReadView),
}

/// Why a request has no reply of its own.
pub(crate) enum Stop {
    /// Refused; the connection goes on.
    Refused(Failure),
    /// Answered if possible, then the connection is closed: what follows in it cannot be trusted.
    Malformed(Failure),
    Gone(io::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Refused(failure)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Gone(error)
    }
}

impl From<FrameError> for Stop {
    fn from(error: FrameError) -> Stop {
        match error {
            FrameError::Io(error) => Stop::Gone(error),
            other => Stop::Malformed(other.into_failure()),
        }
    }
}

/// Serves one connection to its end, which is never an error of the node.
pub(crate) async fn serve(
    stream: Stream,
    remote: Option<Box<dyn Remote>>,
    shared: &Shared,
    shutdown: &watch::Receiver<Option<Instant>>,
) {
    let stream = Arc::new(stream);
    let mut receiver = Receiver::new(stream.clone());
    let Some((token, membership)) = hello::greet(&mut receiver, &stream, shared).await else {
        return;
    };
    let mut connection = Connection {
        shared,
        receiver,
        stream,
        shutdown,
        token,
        membership,
        handles: HashMap::new(),
        last_handle: 0,
        remote,
        unread: 0,
        ahead: VecDeque::new(),
        batch: Batch::default(),
        waiting: Vec::new(),
    };
    if let Err(error) = connection.requests().await {
        tracing::debug!(%error, "a connection was closed");
    }
}

impl<'a> Connection<'a> {
    /// Takes one request after the other and answers it. Ok: the peer closed, or somebody has replaced it.
    async fn requests(&mut self) -> Result<(), FrameError> {
        loop {
            if self.batch.is_full() || !self.receiver.holds_frame() {
                self.flush().await?;
            }
            if self.receiver.is_empty() {
                // No frame is here that one could belong to.
                self.stream.drop_descriptors();
                self.ahead.clear();
            }
            tokio::select! {
                // An idle connection that was replaced is of no use to anybody.
                () = self.membership.fenced() => return Ok(()),
                next = self.receiver.has_next() => if !next? { return Ok(()) },
            }
            self.request().await?;
        }
    }

    /// Takes one request. Err: the connection is at its end.
    async fn request(&mut self) -> Result<(), FrameError> {
        let running = self.shared.begin_request();
        let arrived = Instant::now();
        let here = self.receiver.holds_frame();
        let head = async {
            let header = self.receiver.header().await.map_err(|error| (None, error))?;
            self.receiver.rest(header).await.map_err(|error| (Some(header), error))
        };
        // What is here already is waited for by nobody: no clock need be asked.
        let head = if here { Ok(head.await) } else { timeout(HEAD_TIME, head).await };
        let frame = match head.map_err(|_| FrameError::Io(io::ErrorKind::TimedOut.into()))? {
            Ok(frame) => frame,
            Err((header, error)) => return Err(self.answer_malformed(header, error, running).await),
        };
        let header = frame.header;
        if header.payload_bytes() > 0 || header.opcode == Opcode::Flush as u8 {
            // What is ready must not wait for bytes that are still under way, nor for a disk.
            self.flush().await?;
        }
        let deadline = arrived + time_allowed(header.deadline_ms);
        self.unread = u64::from(header.payload_bytes());
        let outcome = timeout_at(deadline.into(), async {
            match self.execute(&frame).await {
                Err(Stop::Refused(failure)) => {
                    // The payload of a refused request is still under way; the next frame begins behind it.
                    self.receiver.discard(std::mem::take(&mut self.unread)).await?;
                    Ok(Err(failure))
                }
                Err(stop) => Err(stop),
                Ok(reply) => Ok(Ok(reply)),
            }
        });
        let outcome = outcome.await;
        let (reply, ends) = match outcome {
            Ok(Ok(Ok(reply))) => (Ok(reply), None),
            Ok(Ok(Err(failure))) => (Err(failure), None),
            Ok(Err(Stop::Gone(error))) => return Err(error.into()),
            Ok(Err(Stop::Refused(failure) | Stop::Malformed(failure))) => {
                (Err(failure.clone()), Some(failure))
            }
            Err(_) => {
                let allowed = time_allowed(header.deadline_ms).as_millis();
                let failure = Failure::new(
                    Code::Timeout,
                    format!("not finished within {allowed} ms; whether anything was changed is not known"),
                );
                (Err(failure.clone()), Some(failure))
            }
        };
        self.answer(&header, reply, Answering { arrived, deadline, running });
        match ends {
            None => Ok(()),
            Some(failure) => {
                self.flush().await?;
                Err(failure.into())
            }
        }
    }

    async fn execute(&mut self, frame: &Frame) -> Result<Reply, Stop> {
        let header = &frame.header;
        if header.is_response() {
            return Err(Stop::Malformed(Failure::new(
                Code::BadFrame,
                "a node takes requests, not responses",
            )));
        }
        let opcode = header.opcode()?;
        // Taken whatever follows: that of a MAP which is refused must not pass for that of the next one.
        let descriptor = if opcode == Opcode::Map { self.stream.take_descriptor() } else { None };
        if self.shutdown.borrow().is_some() {
            return Err(
                Failure::new(Code::ShuttingDown, "this node is stopping; ask control for another").into()
            );
        }
        let incarnation = self.shared.store.incarnation();
        if header.incarnation != 0 && header.incarnation != incarnation {
            let asked = header.incarnation;
            let message =
                format!("this node is at incarnation {incarnation}, not {asked}; fetch the layout again");
            return Err(Failure::new(Code::StaleIncarnation, message).into());
        }
        if self.unread > 0 && opcode != Opcode::Write && !opcode.is_control() {
            return Err(Failure::new(Code::BadRequest, format!("{opcode:?} takes no payload")).into());
        }
        match opcode {
            Opcode::Hello => Err(Failure::new(Code::BadRequest, "HELLO was said already").into()),
            Opcode::Ping => Ok(Reply::Bare(Frame::new(header.reply(incarnation, Code::Ok)))),
            Opcode::Open => Ok(self.open(frame).await?),
            Opcode::Close => Ok(self.close(header)?),
            Opcode::Map => Ok(self.map(frame, descriptor)?),
            Opcode::Unmap => Ok(self.unmap(frame)?),
            Opcode::Read if header.is_one_sided() => Ok(self.put(frame).await?),
            Opcode::Write if header.is_one_sided() => Ok(self.get(frame).await?),
            Opcode::Read => Ok(self.read(header).await?),
            Opcode::Write => self.write(frame).await,
            Opcode::Flush => Ok(self.flush_column(header).await?),
            Opcode::Warm => Ok(self.warm(frame)?),
            Opcode::Where => Ok(self.whereabouts(frame)?),
            Opcode::Seal
            | Opcode::Delete
            | Opcode::Stat
            | Opcode::Pin
            | Opcode::Unpin
            | Opcode::List
            | Opcode::Scrub => self.control(frame, opcode).await,
        }
    }

    /// Puts an answer where it goes out with the next flush.
    fn answer(&mut self, header: &Header, reply: Result<Reply, Failure>, answering: Answering<'a>) {
        let served = reply.is_ok();
        let mut bytes = None;
        match reply {
            Ok(Reply::Bare(frame)) => {
                let moved = if frame.header.is_one_sided() { frame.header.length } else { 0 };
                self.batch.push(frame);
                self.batch.weigh(moved as usize);
            }
            Ok(Reply::Json(frame, payload)) => self.batch.push_json(frame, &payload),
            Ok(Reply::Data(frame, view)) => {
                // SAFETY: a view's bytes do not change. Those that are not copied are kept until the batch is sent or dropped.
                if unsafe { self.batch.push_data(frame, memory_of(&view)) } {
                    bytes = Some(view);
                }
            }
            Err(failure) => {
                self.shared.stats.refused(&failure);
                self.batch.push(Frame::refusal(header, self.shared.store.incarnation(), &failure));
            }
        }
        let Answering { arrived, deadline, running } = answering;
        self.waiting.push(Waiting {
            header: *header,
            arrived,
            deadline,
            served,
            _bytes: bytes,
            _running: running,
        });
    }

    /// Sends what is ready.
    pub(crate) async fn flush(&mut self) -> Result<(), FrameError> {
        let Some(deadline) = self.waiting.iter().map(|waiting| waiting.deadline).max() else { return Ok(()) };
        let by = deadline.max(Instant::now() + SEND_TIME_MIN);
        // SAFETY: what the payloads are made of is kept in `waiting`; one task sends, so nothing reads them after this future
        // is dropped.
        let sent = timeout_at(by.into(), unsafe { self.batch.send(&self.stream) }).await;
        sent.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer does not read"))??;
        self.batch.clear();
        let now = Instant::now();
        for waiting in self.waiting.drain(..).filter(|waiting| waiting.served) {
            count(&self.shared.stats, &waiting.header, now - waiting.arrived);
        }
        Ok(())
    }

    /// Answers a frame that is not well-formed where its request is known; the connection ends in any case.
    async fn answer_malformed(
        &mut self,
        header: Option<Header>,
        error: FrameError,
        running: Running<'a>,
    ) -> FrameError {
        let (header, failure) = match (header, &error) {
            (Some(header), FrameError::Malformed(failure)) => (header, failure.clone()),
            (None, FrameError::Refused { header, failure }) => (*header, failure.clone()),
            _ => return error,
        };
        let now = Instant::now();
        self.answer(&header, Err(failure), Answering { arrived: now, deadline: now, running });
        self.flush().await.err().unwrap_or(error)
    }

    pub(crate) fn reply(&self, header: &Header) -> Header {
        header.reply(self.shared.store.incarnation(), Code::Ok)
    }
}

fn count(stats: &Stats, header: &Header, taken: Duration) {
    match Opcode::from_u8(header.opcode) {
        Some(Opcode::Read) => {
            stats.reads.fetch_add(1, Relaxed);
            stats.read_latency.record(taken);
        }
        Some(Opcode::Write) => {
            stats.writes.fetch_add(1, Relaxed);
            stats.write_latency.record(taken);
        }
        _ => {}
    }
}

fn time_allowed(deadline_ms: u32) -> Duration {
    match deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    }
}

pub(crate) fn check_expiry(clock: &Clock, expiry: u64, what: &str) -> Result<(), Failure> {
    let now = clock.now();
    if now >= expiry {
        return Err(Failure::new(
            Code::Expired,
            format!("the {what} expired {} s ago; get a new one", now - expiry),
        ));
    }
    Ok(())
}
