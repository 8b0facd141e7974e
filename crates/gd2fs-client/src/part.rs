//! One part of a request: an exchange with one node, tried again where that is safe and can help.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_transport::Memory;
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{FLAG_RAW, Header, Opcode};

use crate::call::Call;
use crate::connection::Connection;
use crate::dial::CONNECT_TIMEOUT;
use crate::handles::deadline_ms;
use crate::layout::{Layout, Part, Replica};
use crate::layouts::LayoutCell;
use crate::link::Link;
use crate::request::{Direction, Shared};
use crate::stats::add;
use crate::stop::Stop;
use crate::trouble::Trouble;

const RETRIES_MAX: u32 = 4;
/// Wrong bytes once are an accident of the way; twice, the way is broken.
const CHECKSUM_RETRIES_MAX: u32 = 1;
const BACKOFF_FIRST: Duration = Duration::from_millis(20);

/// How often what was tried again.
struct Tries {
    began: Instant,
    retries: u32,
    checksums: u32,
}

/// Moves one part; the bytes moved, fewer only for a read that reaches the end of its column. `first` is what the first try, made
/// elsewhere, met with.
pub(crate) async fn transfer(
    shared: &Arc<Shared>,
    cell: &Arc<LayoutCell>,
    direction: Direction,
    part: Part,
    memory: Memory,
    mut first: Option<Trouble>,
    mut stop: Stop,
) -> Result<u64, Failure> {
    let mut tries = Tries { began: Instant::now(), retries: 0, checksums: 0 };
    loop {
        let layout = cell.current(direction);
        let trouble = match first.take() {
            Some(trouble) => trouble,
            None => {
                match attempt(shared, &layout, direction, part, &memory, tries.retries, &mut stop).await {
                    Ok(moved) => return Ok(moved),
                    Err(trouble) => trouble,
                }
            }
        };
        if trouble.is_checksum() {
            add(&shared.stats.checksum_failures, 1);
        }
        let end = part.offset + part.length;
        let named = |failure: Failure| {
            Failure::new(
                failure.code,
                format!("{} [{}, {end}): {}", layout.path, part.offset, failure.message),
            )
        };
        let again = tries.again(&trouble, &layout);
        let failure = trouble.into_failure();
        if !again {
            return Err(named(failure));
        }
        add(&shared.stats.retries, 1);
        let wait = async {
            if needs_layout(failure.code) {
                let timeout = CONNECT_TIMEOUT * 2;
                cell.refresh(&layout, direction, &shared.control, timeout).await?;
            }
            tokio::time::sleep(tries.backoff()).await;
            Ok::<(), Failure>(())
        };
        match stop.race(wait).await {
            Ok(Ok(())) => {}
            Ok(Err(refresh)) => {
                let why = format!("{}; no newer layout: {}", failure.message, refresh.message);
                return Err(named(Failure::new(failure.code, why)));
            }
            Err(stopped) => {
                let why = format!("{} (before that, {})", stopped.message, failure);
                return Err(named(Failure::new(stopped.code, why)));
            }
        }
    }
}

impl Tries {
    fn again(&mut self, trouble: &Trouble, layout: &Layout) -> bool {
        self.retries += 1;
        self.retries <= RETRIES_MAX
            && match trouble {
                Trouble::Stopped(_) => false,
                Trouble::Lost(_) => true,
                // An absent node costs its caller one connect timeout, not one per retry.
                Trouble::Unreachable(_) => self.began.elapsed() < CONNECT_TIMEOUT,
                Trouble::Refused(failure) => match failure.code {
                    Code::Overloaded | Code::ShuttingDown => true,
                    Code::Checksum => {
                        self.checksums += 1;
                        self.checksums <= CHECKSUM_RETRIES_MAX
                    }
                    code => needs_layout(code) && layout.refresh,
                },
            }
    }

    fn backoff(&self) -> Duration {
        let full = BACKOFF_FIRST * 2u32.pow(self.retries.min(RETRIES_MAX));
        // Half of it is random, so that a crowd that failed together does not return together.
        full / 2 + full.mul_f64(random_fraction() / 2.0)
    }
}

fn needs_layout(code: Code) -> bool {
    matches!(
        code,
        Code::StaleLayout | Code::StaleIncarnation | Code::WrongNode | Code::NotHere | Code::Expired
    )
}

/// In [0, 1); good enough to spread retries.
fn random_fraction() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as f64 / (u64::MAX as f64 + 1.0)
}

/// What asks for a part, but for the time that it may take.
pub(crate) fn header_for(
    shared: &Shared,
    layout: &Layout,
    direction: Direction,
    part: Part,
    handle: u32,
    replica: &Replica,
) -> Header {
    let opcode = match direction {
        Direction::Read => Opcode::Read,
        Direction::Write => Opcode::Write,
    };
    Header {
        opcode: opcode as u8,
        handle,
        epoch: layout.columns[part.column].epoch,
        incarnation: replica.incarnation,
        offset: part.offset,
        length: part.length as u32,
        flags: if shared.verify { 0 } else { FLAG_RAW },
        ..Header::default()
    }
}

async fn attempt(
    shared: &Arc<Shared>,
    layout: &Layout,
    direction: Direction,
    part: Part,
    memory: &Memory,
    turn: u32,
    stop: &mut Stop,
) -> Result<u64, Trouble> {
    let column = &layout.columns[part.column];
    // Any replica may be read; a write enters at the first one.
    let replica = match direction {
        Direction::Read => &column.replicas[turn as usize % column.replicas.len()],
        Direction::Write => &column.replicas[0],
    };
    let link = shared.link(replica).map_err(Trouble::Refused)?;
    if direction == Direction::Write {
        link.settle(stop).await?;
    }
    let lane = link.lane(part.length as usize);
    let connection = lane.connection(stop).await?;
    let (handle, _open) = connection.handle(&layout.capability, part.column as u32, stop).await?;
    let mut header = header_for(shared, layout, direction, part, handle, replica);
    header.deadline_ms = deadline_ms(stop);
    let exchange = Exchange { shared, link: &link, connection: &connection, header, direction, memory };
    let moved = exchange.run(stop).await?;
    lane.arrived();
    add(direction.counter(&shared.stats), moved);
    Ok(moved)
}

/// One try of one part with one node.
pub(crate) struct Exchange<'a> {
    pub shared: &'a Shared,
    pub link: &'a Link,
    pub connection: &'a Arc<Connection>,
    /// What is wanted, by the stream's way.
    pub header: Header,
    pub direction: Direction,
    pub memory: &'a Memory,
}

impl Exchange<'_> {
    /// Bytes moved, by whichever way this connection and this memory allow.
    async fn run(&self, stop: &mut Stop) -> Result<u64, Trouble> {
        if self.connection.is_local()
            && let Some(moved) = self.one_sided(stop).await?
        {
            return Ok(moved);
        }
        let call = Call::streamed(self.header, self.direction, self.memory);
        Ok(u64::from(self.connection.call(call, stop).await?.frame.header.length))
    }
}
