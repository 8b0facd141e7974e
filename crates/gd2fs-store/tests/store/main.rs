//! The rules of the store, without a network.

mod ahead;
mod asks;
mod closing;
mod deletion;
mod ends;
mod evict;
mod grants;
mod histories;
mod lag;
mod lives;
mod log_set;
mod log_set_lives;
mod memory;
mod outages;
mod ranges;
mod restart;
mod threads;
mod tiers;
mod unreadable;

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use gd2fs_store::{Column, DataDir, Store, TOMBSTONE_LIFE};
use gd2fs_wire::capability::{Capability, Class, Right};
use gd2fs_wire::messages::SealItem;
use gd2fs_wire::{Code, Failure, sums};

pub const UNIT: u32 = 256 << 10;
const FILE: &str = "000102030405060708090a0b0c0d0e0f";

/// A store in a directory of its own, at incarnation 1 unless it was restarted.
pub struct Bench {
    pub store: Store,
    directory: tempfile::TempDir,
}

impl Bench {
    pub fn new(memory_bytes: usize) -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::open(directory.path(), "c", "n", 1).unwrap();
        Bench { store: Store::new(memory_bytes, data).unwrap(), directory }
    }

    /// The same node after its memory was lost.
    pub fn restart(self) -> Bench {
        let Bench { store, directory } = self;
        let incarnation = store.incarnation() + 1;
        drop(store);
        let data = DataDir::open(directory.path(), "c", "n", incarnation).unwrap();
        Bench { store: Store::new(64 << 20, data).unwrap(), directory }
    }

    pub fn open(&self, grant: u64) -> Arc<Column> {
        now(self.store.open(&capability(grant, 1, 1), 0)).unwrap().0
    }
}

pub fn capability(grant: u64, epoch: u32, born: u32) -> Capability {
    Capability {
        tenant: "t".into(),
        file: FILE.into(),
        class: Class::Cache,
        stripe_unit: UNIT,
        width: 1,
        rights: vec![Right::Read, Right::Write],
        ranges: vec![],
        grant,
        columns: vec![(epoch, born)],
        nodes: vec![vec!["n1".into()]],
        expiry: 0,
        bearer: false,
        priority: 0,
    }
}

pub fn seal(grant: u64, length: u64) -> SealItem {
    SealItem { file: FILE.into(), column: 0, epoch: 1, born: 1, grant, stripe_unit: UNIT, width: 1, length }
}

pub fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(37).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// What a receiver does between reservation and publication.
pub fn fill(ticket: &gd2fs_store::WriteTicket, bytes: &[u8]) {
    let (address, length) = ticket.target();
    assert_eq!(length, bytes.len());
    // SAFETY: the target belongs to the ticket, which is alive.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, length) };
}

/// Sums what lies in the target and publishes it.
///
/// # Safety
/// Nobody writes into the target any more.
pub unsafe fn publish(
    ticket: gd2fs_store::WriteTicket,
    expected: Option<&[u32]>,
    fenced: impl Fn() -> bool,
) -> Result<(), Failure> {
    let (address, length) = ticket.target();
    // SAFETY: the target belongs to the ticket, which is alive.
    let actual = sums::piece_sums(ticket.offset(), unsafe { std::slice::from_raw_parts(address, length) });
    // SAFETY: the caller's promise.
    now(unsafe { ticket.publish(&actual, expected, fenced) })
}

pub fn write(column: &Arc<Column>, grant: u64, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
    let ticket = now(column.begin_write(1, grant, offset, bytes.len() as u32))?;
    fill(&ticket, bytes);
    // SAFETY: `fill` is over.
    unsafe { publish(ticket, Some(&sums::piece_sums(offset, bytes)), || false) }
}

/// Reads and verifies as a client does: the sums must be those of the bytes.
pub fn read(column: &Arc<Column>, offset: u64, length: u32) -> Result<Vec<u8>, Failure> {
    let view = now(column.read(1, offset, length, true))?;
    let bytes = view.bytes().to_vec();
    if sums::piece_sums(offset, &bytes) != view.sums {
        return Err(Failure::new(Code::Checksum, "the reader's own check"));
    }
    Ok(bytes)
}

/// Without a log nothing waits for anything.
pub fn now<T>(operation: impl Future<Output = T>) -> T {
    match std::pin::pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("it waits"),
    }
}

pub fn code<T>(result: Result<T, Failure>) -> Code {
    result.err().expect("refused").code
}
