//! An engine around another that spoils some of its system calls.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use gd2fs_transport::Memory;
use parking_lot::Mutex;

use super::{Dice, SECTOR};
use crate::workers::Workers;
use crate::{Attempt, BLOCK, Buffer, Engine, Kind};

/// What befalls a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A read or write of several blocks moves only some, and perhaps a part of the next; the rest of a read's memory is
    /// spoilt.
    Short,
    /// It begins so much later.
    Slow(Duration),
    /// It fails with this error number and has done nothing.
    Error(i32),
    /// Of a write a prefix or any subset of the sectors reaches the device; then it fails with this error number or, with
    /// none, claims success.
    Torn(Option<i32>),
    /// A bit of what is read or written turns.
    Flip,
    /// A write claims success and does nothing.
    Lost,
    /// The disk lies about durability: a sync claims success and does nothing, a durable write is only an ordinary one.
    Unsynced,
}

/// Which system calls an effect befalls: unless narrowed, all that it can, every time.
#[derive(Clone, Debug)]
pub struct Rule {
    effect: Effect,
    kinds: Vec<Kind>,
    range: Range<u64>,
    chance: f64,
    times: u32,
    hits: u32,
}

impl Rule {
    /// `effect` on every call.
    pub fn new(effect: Effect) -> Rule {
        let kinds = match effect {
            Effect::Torn(_) | Effect::Lost => vec![Kind::Write, Kind::WriteSync],
            Effect::Unsynced => vec![Kind::Sync, Kind::WriteSync],
            Effect::Short | Effect::Flip => vec![Kind::Read, Kind::Write, Kind::WriteSync],
            Effect::Slow(_) | Effect::Error(_) => vec![Kind::Read, Kind::Write, Kind::Sync, Kind::WriteSync],
        };
        Rule { effect, kinds, range: 0..u64::MAX, chance: 1.0, times: u32::MAX, hits: 0 }
    }

    /// Only calls of these kinds.
    pub fn on(mut self, kinds: &[Kind]) -> Rule {
        self.kinds.retain(|kind| kinds.contains(kind));
        self
    }

    /// Only calls that touch these bytes of the device; a sync is at 0 and touches none but counts as a byte.
    pub fn within(mut self, range: Range<u64>) -> Rule {
        self.range = range;
        self
    }

    /// Only with this probability, 0 to 1.
    pub fn chance(mut self, chance: f64) -> Rule {
        self.chance = chance;
        self
    }

    /// Only so many times.
    pub fn times(mut self, times: u32) -> Rule {
        self.times = times;
        self
    }

    fn befalls(&mut self, attempt: &Attempt, dice: &mut Dice) -> bool {
        let end = attempt.offset + attempt.memory.len().max(1) as u64;
        let hit = self.hits < self.times
            && self.kinds.contains(&attempt.kind)
            && attempt.offset < self.range.end
            && self.range.start < end
            && dice.falls(self.chance);
        self.hits += hit as u32;
        hit
    }
}

/// The faults of the devices that are opened with them; rules may be added and taken away at any time.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    dice: Dice,
    rules: Vec<Rule>,
    under_way: usize,
    under_way_max: usize,
}

impl Faults {
    /// None yet.
    pub fn new(seed: u64) -> Faults {
        let state = State { dice: Dice(seed), rules: Vec::new(), under_way: 0, under_way_max: 0 };
        Faults(Arc::new(Mutex::new(state)))
    }

    /// Adds `rule` behind the others (the first that befalls a call is the only one) and answers its number for `hits`.
    pub fn add(&self, rule: Rule) -> usize {
        let rules = &mut self.0.lock().rules;
        rules.push(rule);
        rules.len() - 1
    }

    /// Takes all rules away.
    pub fn clear(&self) {
        self.0.lock().rules.clear();
    }

    /// How many calls the rule of this number has befallen.
    pub fn hits(&self, rule: usize) -> u32 {
        self.0.lock().rules[rule].hits
    }

    /// How many calls each rule has befallen, in the order of their numbers.
    pub fn all_hits(&self) -> Vec<u32> {
        self.0.lock().rules.iter().map(|rule| rule.hits).collect()
    }

    /// The most system calls that were under way at once.
    pub fn under_way_max(&self) -> usize {
        self.0.lock().under_way_max
    }

    pub(crate) fn around(&self, inner: Box<dyn Engine>, depth: u32) -> Box<dyn Engine> {
        let workers = Workers::new("gd2fs-faults", depth).expect("threads for a test");
        Box::new(Faulty { inner: inner.into(), workers, faults: self.clone() })
    }

    /// Counts `attempt` and says what befalls it.
    fn begin(&self, attempt: &Attempt) -> Option<(Effect, Dice)> {
        let State { dice, rules, under_way, under_way_max } = &mut *self.0.lock();
        *under_way += 1;
        *under_way_max = (*under_way).max(*under_way_max);
        let rule = rules.iter_mut().find_map(|rule| rule.befalls(attempt, dice).then_some(rule.effect))?;
        Some((rule, Dice(dice.next())))
    }
}

struct Faulty {
    inner: Arc<dyn Engine>,
    /// As many as the depth, so that slow calls are slow beside one another.
    workers: Workers,
    faults: Faults,
}

impl Engine for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn start(&self, attempt: Attempt) {
        let befallen = self.faults.begin(&attempt);
        let faults = self.faults.clone();
        let attempt = then(attempt, move |_, moved| {
            faults.0.lock().under_way -= 1;
            moved
        });
        let Some((effect, dice)) = befallen else { return self.inner.start(attempt) };
        let inner = Arc::clone(&self.inner);
        self.workers.run(move || inject(inner, attempt, effect, dice));
    }

    fn stop(&self) {
        self.workers.stop();
        self.inner.stop();
    }
}

/// `attempt` whose result passes through `change` on its way up.
fn then(
    attempt: Attempt,
    change: impl FnOnce(&Memory, io::Result<usize>) -> io::Result<usize> + Send + 'static,
) -> Attempt {
    let Attempt { kind, offset, memory, done } = attempt;
    let seen = memory.clone();
    Attempt { kind, offset, memory, done: Box::new(move |moved| done(change(&seen, moved))) }
}

fn inject(inner: Arc<dyn Engine>, mut attempt: Attempt, effect: Effect, mut dice: Dice) {
    let length = attempt.memory.len();
    match effect {
        Effect::Slow(time) => {
            sleep(time);
            inner.start(attempt);
        }
        Effect::Error(code) => (attempt.done)(Err(io::Error::from_raw_os_error(code))),
        Effect::Lost => (attempt.done)(Ok(length)),
        Effect::Short if length > BLOCK => {
            let asked = attempt.memory.clone();
            attempt.memory = asked.prefix(BLOCK * (1 + dice.below(length / BLOCK - 1)));
            let reading = attempt.kind == Kind::Read;
            inner.start(then(attempt, move |_, moved| {
                let moved = moved?;
                let told = moved - dice.below(moved.min(BLOCK));
                if reading {
                    spoil(&asked, told);
                }
                Ok(told)
            }));
        }
        Effect::Short => inner.start(attempt),
        Effect::Torn(code) => tear(inner, attempt, dice.tear(length / SECTOR), code),
        Effect::Unsynced if attempt.kind == Kind::Sync => (attempt.done)(Ok(0)),
        Effect::Unsynced => inner.start(Attempt { kind: Kind::Write, ..attempt }),
        Effect::Flip => {
            let (byte, bit) = (dice.below(length), 1u8 << dice.below(8));
            if attempt.kind == Kind::Read {
                inner.start(then(attempt, move |memory, moved| {
                    flip(memory, byte, bit);
                    moved
                }));
            } else {
                let mut copied = copy(&attempt.memory);
                copied[byte] ^= bit;
                replace(&*inner, attempt, copied, |moved| moved);
            }
        }
    }
}

/// Starts a write of other bytes in the place of `attempt`'s.
fn replace(
    inner: &dyn Engine,
    attempt: Attempt,
    bytes: Buffer,
    change: impl FnOnce(io::Result<usize>) -> io::Result<usize> + Send + 'static,
) {
    // SAFETY: `done` owns the buffer and is called, then dropped, when nothing reads it any more.
    let memory = unsafe { bytes.slice() }.into();
    let Attempt { kind, offset, done, .. } = attempt;
    let done = Box::new(move |moved| {
        drop(bytes);
        done(change(moved));
    });
    inner.start(Attempt { kind, offset, memory, done });
}

fn copy(memory: &Memory) -> Buffer {
    let mut bytes = Buffer::new(memory.len());
    let mut filled = 0;
    for slice in memory.slices() {
        // SAFETY: memory of a write under way, which nobody writes meanwhile.
        bytes[filled..filled + slice.len()].copy_from_slice(unsafe { slice.bytes() });
        filled += slice.len();
    }
    bytes
}

/// Lets those of a write's sectors through that `reaching` names. The others keep what they hold for a reader, so they are
/// read through `inner`, which may have a cache; then the write fails with `code` or, with none, claims success.
fn tear(inner: Arc<dyn Engine>, attempt: Attempt, reaching: Vec<bool>, code: Option<i32>) {
    let (offset, length) = (attempt.offset, attempt.memory.len());
    let mut mixed = Buffer::new(length);
    // SAFETY: `done` owns the buffer and uses it only when the read is over.
    let memory = unsafe { mixed.slice() }.into();
    let below = Arc::clone(&inner);
    let done = Box::new(move |read: io::Result<usize>| {
        let whole = read
            .and_then(|read| if read == length { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) });
        if let Err(error) = whole {
            return (attempt.done)(Err(error));
        }
        let new = copy(&attempt.memory);
        let sectors = mixed.chunks_exact_mut(SECTOR).zip(new.chunks_exact(SECTOR)).zip(reaching);
        for ((old, new), _) in sectors.filter(|(_, reaches)| *reaches) {
            old.copy_from_slice(new);
        }
        replace(&*below, attempt, mixed, move |moved| match code {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => moved,
        });
    });
    inner.start(Attempt { kind: Kind::Read, offset, memory, done });
}

/// Overwrites what lies behind the first `start` bytes of a read's memory.
fn spoil(memory: &Memory, start: usize) {
    for slice in memory.split([start, memory.len() - start])[1].slices() {
        // SAFETY: memory of a read that is not over: nobody else uses it.
        unsafe { slice.fill_from(&vec![0xdb; slice.len()]) };
    }
}

/// Turns `bit` of one byte of a read's memory.
fn flip(memory: &Memory, byte: usize, bit: u8) {
    let one = memory.split([byte, 1]).remove(1).slices()[0];
    // SAFETY: memory of a read that is not over: nobody else uses it.
    unsafe { one.fill_from(&[one.bytes()[0] ^ bit]) };
}
