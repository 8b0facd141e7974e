use gd2fs_wire::messages::Hello;
use gd2fs_wire::{Code, Role};
use std::io::Write;

use super::*;

/// Sends a write but for its last byte; `finish` sends that.
fn half_sent(peer: &mut Peer, handle: u32, offset: u64, bytes: &[u8]) -> u8 {
    let frame = peer.write_frame(handle, offset, bytes);
    let all = Peer::bytes(frame, bytes);
    peer.stream.write_all(&all[..all.len() - 1]).unwrap();
    // Until the node has reserved the frame, the write has not begun there.
    all[all.len() - 1]
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..500 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{what} did not happen");
}

#[test]
fn a_grant_takeover_wins_over_a_half_sent_write() {
    let bench = Bench::start();
    let (mut old, mut new) = (bench.peer(), bench.peer());
    let of = |grant| Capability { grant, ..capability() };
    let old_handle = old.open(&of(1));
    old.write(old_handle, 0, &pattern(1000, 9));
    let last = half_sent(&mut old, old_handle, 100_000, &pattern(50_000, 1));
    wait_until("the reservation", || bench.node.store().arena().used() > 100_000);
    let new_handle = new.open(&of(2));
    assert_eq!(new.read(new_handle, 0, 1).payload, b"", "nothing was sealed, so nothing is left");
    assert_eq!(new.write(new_handle, 100_000, &pattern(50_000, 2)).code(), Code::Ok);
    old.stream.write_all(&[last]).unwrap();
    assert_eq!(old.answer().code(), Code::StaleWriter);
    assert_eq!(new.read(new_handle, 100_000, 50_000).payload, pattern(50_000, 2));
    assert_eq!(old.write(old_handle, 0, b"x").code(), Code::StaleWriter);
    assert_eq!(old.try_open(&of(1)).code(), Code::StaleWriter);
    assert_eq!(old.try_open(&of(0)).code(), Code::StaleWriter);
    assert_eq!(bench.stats()["stale_refused"], 4);
}

#[test]
fn a_retry_is_never_overtaken_by_its_late_copy() {
    let bench = Bench::start();
    let first = hello("t", Role::Client);
    let mut old = Peer::connect(&bench.node).greeted(&first);
    let handle = old.open(&capability());
    let last = half_sent(&mut old, handle, 0, &pattern(50_000, 1));
    wait_until("the reservation", || bench.node.store().arena().used() > 0);
    let mut new = Peer::connect(&bench.node).greeted(&Hello { generation: 2, ..first.clone() });
    let new_handle = new.open(&capability());
    assert_eq!(new.write(new_handle, 0, &pattern(50_000, 1)).code(), Code::Ok);
    assert_eq!(new.write(new_handle, 0, &pattern(50_000, 2)).code(), Code::Ok, "the client went on");
    old.stream.write_all(&[last]).unwrap();
    assert_eq!(old.answer().code(), Code::StaleWriter);
    assert_eq!(new.read(new_handle, 0, 50_000).payload, pattern(50_000, 2));
    assert!(old.is_closed(), "a fenced connection is of no use");
    assert_eq!(Peer::connect(&bench.node).greet(&first).code(), Code::StaleWriter);
    let same = Hello { generation: 2, ..first.clone() };
    assert_eq!(Peer::connect(&bench.node).greet(&same).code(), Code::StaleWriter);
    assert_eq!(new.ping().code(), Code::Ok);
    Peer::connect(&bench.node).greeted(&Hello { slot: 1, ..first });
}

#[test]
fn a_writer_that_vanishes_leaves_nothing_behind() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    half_sent(&mut peer, handle, 0, &pattern(50_000, 1));
    wait_until("the reservation", || bench.node.store().arena().used() > 0);
    drop(peer);
    wait_until("the release", || bench.node.store().arena().used() == 0);
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    assert_eq!(peer.read(handle, 0, 10).payload, b"");
}
