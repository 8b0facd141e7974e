use gd2fs_transport::Frame;
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::messages::{Hello, HelloReply};
use gd2fs_wire::{Code, Opcode, Role};
use std::io::Write;

use super::*;

fn refused(bench: &Bench, change: impl FnOnce(&mut Hello)) -> Code {
    let mut greeting = hello("t", Role::Client);
    change(&mut greeting);
    let mut peer = Peer::connect(&bench.node);
    let answer = peer.greet(&greeting);
    assert!(peer.is_closed(), "a refused HELLO ends the connection");
    answer.code()
}

#[test]
fn a_good_hello_is_answered_with_what_the_node_is() {
    let bench = Bench::start();
    let mut peer = Peer::connect(&bench.node);
    let answer = peer.greet(&Hello { versions: (1, 9), features: 7, ..hello("t", Role::Client) });
    let reply: HelloReply = serde_json::from_slice(&answer.ext).unwrap();
    assert_eq!((answer.code(), answer.header.incarnation), (Code::Ok, 1));
    assert_eq!((reply.version, reply.features, reply.incarnation), (1, 0, 1));
    assert_eq!((reply.node.as_str(), reply.cluster.as_str()), ("n1", "test"));
    assert_eq!(peer.ping().code(), Code::Ok);
    assert_eq!(peer.greet(&hello("t", Role::Client)).code(), Code::BadRequest, "once is enough");
    assert_eq!(peer.ping().code(), Code::Ok);
}

#[test]
fn strangers_are_refused() {
    let bench = Bench::start();
    assert_eq!(refused(&bench, |h| h.versions = (2, 3)), Code::Version);
    assert_eq!(refused(&bench, |h| h.cluster = "other".into()), Code::WrongCluster);
    assert_eq!(refused(&bench, |h| h.token = String::new()), Code::Unauthenticated);
    assert_eq!(refused(&bench, |h| h.token.truncate(30)), Code::BadSignature);
    assert_eq!(refused(&bench, |h| h.token = token("t", Role::Client, -5)), Code::Expired);
    assert_eq!(refused(&bench, |h| h.token = keys().sign(&capability())), Code::BadSignature, "not a token");
    assert_eq!(refused(&bench, |h| h.client = "me".into()), Code::BadRequest);
    let forged = Keys::parse("1:ffffffffffffffffffffffffffffffff").unwrap();
    let forged = forged.sign(&Token { tenant: "t".into(), role: Role::Admin, expiry: in_seconds(60) });
    assert_eq!(refused(&bench, |h| h.token = forged), Code::BadSignature);
    assert_eq!(bench.stats()["errors"]["BAD_SIGNATURE"], 3);
}

#[test]
fn anything_but_hello_first_is_closed() {
    let bench = Bench::start();
    let mut peer = Peer::connect(&bench.node);
    peer.stream.write_all(&Peer::bytes(Frame::new(Header::request(Opcode::Ping, 1)), &[])).unwrap();
    assert!(peer.is_closed());
}

#[test]
fn a_newer_protocol_is_answered_by_name() {
    let bench = Bench::start();
    let mut peer = Peer::connect(&bench.node);
    let mut head: [u8; HEADER_BYTES] = Header::request(Opcode::Hello, 77).encode();
    head[4] = 2;
    let sum = gd2fs_wire::sums::crc32c(&head[..60]).to_le_bytes();
    head[60..].copy_from_slice(&sum);
    peer.stream.write_all(&head).unwrap();
    let answer = peer.answer();
    assert_eq!((answer.code(), answer.header.request), (Code::Version, 77));
    assert!(peer.is_closed());
}

#[test]
fn the_development_key_needs_no_token() {
    let bench = Bench::start_with(|config| config.keys = String::new());
    let mut peer = Peer::connect(&bench.node);
    assert_eq!(peer.greet(&Hello { token: String::new(), ..hello("", Role::Client) }).code(), Code::Ok);
    let mine = Capability { tenant: "default".into(), ..capability() };
    assert_eq!(peer.open_text(Keys::development().sign(&mine)).code(), Code::Ok);
    assert_eq!(peer.open_text(Keys::development().sign(&capability())).code(), Code::Forbidden);
    assert_eq!(peer.control(Opcode::Stat, serde_json::json!([])).code(), Code::Forbidden);
}
