//! One connection: HELLO, then one request after the other. The socket is the queue.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use gd2fs_store::ReadView;
use gd2fs_transport::{Frame, FrameError, Memory, Receiver, Sender, Slice};
use gd2fs_wire::{Code, Failure, Header, Opcode, Token};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use crate::fences::Membership;
use crate::hello;
use crate::open::Handle;
use crate::server::Shared;

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
    pub sender: Sender,
    pub shutdown: &'a watch::Receiver<Option<Instant>>,
    pub token: Token,
    pub membership: Membership,
    pub handles: HashMap<u32, Arc<Handle>>,
    pub last_handle: u32,
    /// Payload bytes of the current request that are still in the connection.
    pub unread: u64,
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
pub(crate) async fn serve(stream: TcpStream, shared: &Shared, shutdown: &watch::Receiver<Option<Instant>>) {
    let stream = Arc::new(stream);
    let (mut receiver, sender) = (Receiver::new(stream.clone()), Sender::new(stream));
    let Some((token, membership)) = hello::greet(&mut receiver, &sender, shared).await else {
        return;
    };
    let (handles, last_handle, unread) = (HashMap::new(), 0, 0);
    let mut connection =
        Connection { shared, receiver, sender, shutdown, token, membership, handles, last_handle, unread };
    loop {
        tokio::select! {
            // An idle connection that was replaced is of no use to anybody.
            () = connection.membership.fenced() => return,
            next = connection.receiver.has_next() => if !matches!(next, Ok(true)) { return },
        }
        let _running = shared.begin_request();
        if let Err(error) = connection.request().await {
            tracing::debug!(%error, "a connection was closed");
            return;
        }
    }
}

impl Connection<'_> {
    /// Takes one request and answers it. Err: the connection is at its end.
    async fn request(&mut self) -> Result<(), FrameError> {
        let arrived = Instant::now();
        let head = timeout(HEAD_TIME, async {
            let header = self.receiver.header().await.map_err(|error| (None, error))?;
            self.receiver.rest(header).await.map_err(|error| (Some(header), error))
        });
        let frame = match head.await.map_err(|_| FrameError::Io(io::ErrorKind::TimedOut.into()))? {
            Ok(frame) => frame,
            Err((header, error)) => return Err(self.answer_malformed(header, error).await),
        };
        let header = frame.header;
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
        let send_by = |now: Instant| deadline.max(now + SEND_TIME_MIN);
        match outcome.await {
            Ok(Ok(Ok(reply))) => {
                self.send(reply, send_by(Instant::now())).await?;
                self.count(&header, arrived.elapsed());
                Ok(())
            }
            Ok(Ok(Err(failure))) => self.refuse(&header, &failure, send_by(Instant::now())).await,
            Ok(Err(Stop::Gone(error))) => Err(error.into()),
            Ok(Err(Stop::Refused(failure) | Stop::Malformed(failure))) => {
                self.refuse(&header, &failure, send_by(Instant::now())).await?;
                Err(failure.into())
            }
            Err(_) => {
                let allowed = time_allowed(header.deadline_ms).as_millis();
                let failure = Failure::new(
                    Code::Timeout,
                    format!("not finished within {allowed} ms; nothing was changed"),
                );
                self.refuse(&header, &failure, send_by(Instant::now())).await?;
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
            Opcode::Open => Ok(self.open(frame)?),
            Opcode::Close => Ok(self.close(header)?),
            Opcode::Read => Ok(self.read(header)?),
            Opcode::Write => self.write(frame).await,
            Opcode::Seal | Opcode::Delete | Opcode::Stat => self.control(frame, opcode).await,
        }
    }

    async fn send(&self, reply: Reply, by: Instant) -> Result<(), FrameError> {
        let sent = async {
            match reply {
                Reply::Bare(frame) => self.sender.bare(frame).await,
                Reply::Json(frame, payload) => self.sender.json(frame, &payload).await,
                Reply::Data(frame, view) => {
                    let bytes = view.bytes();
                    // SAFETY: the view keeps the range alive and unchanged, and outlives the call. The cast loses only `const`:
                    // sending reads.
                    let memory =
                        Memory::new(vec![unsafe { Slice::new(bytes.as_ptr().cast_mut(), bytes.len()) }]);
                    // SAFETY: as above; one task sends, so nothing reads the range after this future is dropped.
                    unsafe { self.sender.data(frame, &memory) }.await
                }
            }
        };
        match timeout_at(by.into(), sent).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(FrameError::Io(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read"))),
        }
    }

    async fn refuse(&self, header: &Header, failure: &Failure, by: Instant) -> Result<(), FrameError> {
        self.shared.stats.refused(failure);
        let frame = Frame::refusal(header, self.shared.store.incarnation(), failure);
        self.send(Reply::Bare(frame), by).await
    }

    /// Answers a frame that is not well-formed where its request is known; the connection ends in any case.
    async fn answer_malformed(&self, header: Option<Header>, error: FrameError) -> FrameError {
        let (header, failure) = match (header, &error) {
            (Some(header), FrameError::Malformed(failure)) => (header, failure),
            (None, FrameError::Refused { header, failure }) => (*header, failure),
            _ => return error,
        };
        let by = Instant::now() + SEND_TIME_MIN;
        self.refuse(&header, failure, by).await.err().unwrap_or(error)
    }

    fn count(&self, header: &Header, taken: Duration) {
        let stats = &self.shared.stats;
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

    pub(crate) fn reply(&self, header: &Header) -> Header {
        header.reply(self.shared.store.incarnation(), Code::Ok)
    }
}

fn time_allowed(deadline_ms: u32) -> Duration {
    match deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    }
}

pub(crate) fn check_expiry(expiry: u64, what: &str) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    if now >= expiry {
        return Err(Failure::new(
            Code::Expired,
            format!("the {what} expired {} s ago; get a new one", now - expiry),
        ));
    }
    Ok(())
}
