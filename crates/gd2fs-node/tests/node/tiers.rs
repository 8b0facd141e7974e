//! Where bytes are, and that they stay there: FLUSH, WARM, WHERE of clients, PIN, UNPIN, LIST, SCRUB of control.

use std::io::Write;
use std::time::{Duration, Instant};

use gd2fs_wire::{Code, Opcode, Role};
use serde_json::{Value, json};

use super::*;

const DATA: [Opcode; 3] = [Opcode::Flush, Opcode::Warm, Opcode::Where];

fn said(answer: &Answer) -> Value {
    assert_eq!(answer.code(), Code::Ok, "{}", String::from_utf8_lossy(&answer.ext));
    let bytes = if answer.payload.is_empty() { &answer.ext } else { &answer.payload };
    serde_json::from_slice(bytes).unwrap()
}

fn span(start: u64, end: u64) -> Value {
    json!({ "start": start, "end": end })
}

fn message(opcode: Opcode) -> Value {
    if opcode == Opcode::Flush { Value::Null } else { span(0, 10) }
}

fn pin(start: u64, end: u64) -> Value {
    json!({ "pin": "a".repeat(32), "file": FILE, "column": 0, "epoch": 1, "start": start, "end": end, "ttl_ms": 60_000 })
}

#[test]
fn clients_learn_where_bytes_are() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 100, &pattern(50_000, 1));
    let found = said(&peer.ask_of(Opcode::Where, handle, &span(0, 60_000)));
    assert_eq!(
        found,
        json!({
            "extents": [[0, 100, "hole"], [100, 50_100, "dram"]], "next": null, "rest": [50_100, "hole"]
        })
    );
    let warmth = said(&peer.ask_of(Opcode::Warm, handle, &span(50_000, 60_000)));
    assert_eq!(warmth, json!({ "dram": 100, "nvme": 0, "missing": 9900, "unreadable": 0 }));
    let flush = peer.ask_of(Opcode::Flush, handle, &Value::Null);
    assert_eq!(flush.code(), Code::Unsupported);
    assert!(flush.message().contains("node.logs"), "{}", flush.message());
    assert_eq!(peer.ping().code(), Code::Ok, "a refusal leaves the connection");
}

#[test]
fn a_long_answer_comes_in_pages() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    for index in 0..600 {
        peer.write(handle, index * 200, &[1; 100]);
    }
    let first = said(&peer.ask_of(Opcode::Where, handle, &span(0, 120_000)));
    assert_eq!((first["extents"].as_array().unwrap().len(), &first["next"]), (1024, &json!(102_400)));
    let rest = said(&peer.ask_of(Opcode::Where, handle, &span(102_400, 120_000)));
    assert_eq!((rest["extents"].as_array().unwrap().len(), &rest["next"]), (175, &Value::Null));
    assert_eq!(rest["rest"], json!([119_900, "hole"]));
}

#[test]
fn they_need_an_open_handle_of_a_capability_that_counts() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    for opcode in DATA {
        let answer = peer.ask_of(opcode, 7, &message(opcode));
        assert_eq!(answer.code(), Code::BadRequest);
        assert!(answer.message().contains("handle 7"), "{}", answer.message());
    }
    let short = peer.open(&Capability { expiry: in_seconds(1), ..capability() });
    std::thread::sleep(Duration::from_millis(1100));
    for opcode in DATA {
        assert_eq!(peer.ask_of(opcode, short, &message(opcode)).code(), Code::Expired);
    }
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let handle = peer.open(&capability());
    control.control(Opcode::Delete, json!([{ "file": FILE, "column": 0 }]));
    for opcode in DATA {
        assert_eq!(peer.ask_of(opcode, handle, &message(opcode)).code(), Code::Deleted);
    }
}

#[test]
fn reading_rights_and_ranges_count() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let writer = peer.open(&Capability { rights: vec![Right::Write], ..capability() });
    let reader = peer.open(&Capability { rights: vec![Right::Read], ..capability() });
    let part = peer.open(&Capability { ranges: vec![(100, 200)], ..capability() });
    for opcode in [Opcode::Warm, Opcode::Where] {
        let mut code = |handle, start, end| peer.ask_of(opcode, handle, &span(start, end)).code();
        assert_eq!(code(writer, 0, 10), Code::Forbidden);
        assert_eq!(code(reader, 0, u64::MAX), Code::Ok);
        assert_eq!((code(part, 100, 200), code(part, 99, 200)), (Code::Ok, Code::Forbidden));
        assert_eq!((code(part, 100, 201), code(part, 0, u64::MAX)), (Code::Forbidden, Code::Forbidden));
    }
    for handle in [writer, reader, part] {
        // Past the rights, at the node that has no log.
        assert_eq!(peer.ask_of(Opcode::Flush, handle, &Value::Null).code(), Code::Unsupported);
    }
}

#[test]
fn nonsense_is_refused_and_harms_nobody() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    for opcode in [Opcode::Warm, Opcode::Where] {
        for wrong in [
            Value::Null,
            json!(5),
            json!({}),
            span(5, 5),
            span(6, 5),
            json!({ "start": -1, "end": 5 }),
            json!({ "start": 0, "end": 1.5 }),
            json!({ "start": 0, "end": "9" }),
            json!({ "start": 0, "end": 9, "tier": "dram" }),
        ] {
            assert_eq!(peer.ask_of(opcode, handle, &wrong).code(), Code::BadRequest, "{wrong}");
        }
        let header = gd2fs_wire::Header { handle, length: 4, ..peer.header(opcode) };
        let frame = gd2fs_transport::Frame { header, ext: b"{\"start\":0,\"end\":9}".to_vec(), sums: vec![] };
        assert_eq!(peer.ask(frame, b"data").code(), Code::BadRequest, "it takes no payload");
        assert_eq!(peer.ping().code(), Code::Ok);
    }
    let begun = Instant::now();
    said(&peer.ask_of(Opcode::Where, handle, &span(0, u64::MAX)));
    said(&peer.ask_of(Opcode::Warm, handle, &span(0, u64::MAX)));
    assert!(begun.elapsed() < Duration::from_secs(1), "a range of any size costs little");
}

#[test]
fn control_pins_and_unpins() {
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(1000, 1));
    let pinned = said(&control.control(Opcode::Pin, json!([pin(0, 1000), pin(0, 1001), pin(5, 5)])));
    assert_eq!(pinned["items"][0], json!({ "status": 0, "valid": null, "message": "" }));
    assert_eq!(pinned["items"][1], json!({ "status": 0, "valid": 1000, "message": "" }));
    assert_eq!(pinned["items"][2]["status"], Code::BadRequest as u32);
    let mut other = pin(0, 10);
    other["file"] = json!("f".repeat(32));
    let mut long = pin(0, 10);
    long["file"] = json!("f".repeat(100_000));
    let refused = said(&control.control(Opcode::Pin, json!([other, long])));
    assert_eq!(
        (&refused["items"][0]["status"], &refused["items"][0]["valid"]),
        (&json!(Code::NotFound as u32), &json!(0))
    );
    assert_eq!(refused["items"][1]["message"].as_str().unwrap().len(), 200, "a reply stays small");
    let unpin = json!([{ "pin": "a".repeat(32) }]);
    assert_eq!(said(&control.control(Opcode::Unpin, unpin.clone())), json!({ "items": [{ "ranges": 1 }] }));
    assert_eq!(said(&control.control(Opcode::Unpin, unpin)), json!({ "items": [{ "ranges": 0 }] }));
    assert_eq!(control.control(Opcode::Unpin, json!([{ "pin": "a" }])).code(), Code::BadRequest);
    for opcode in [Opcode::Pin, Opcode::Unpin] {
        assert_eq!(
            control.control(opcode, json!(vec![json!({ "pin": "a".repeat(32) }); 4097])).code(),
            Code::BadRequest
        );
        assert_eq!(
            control.control(opcode, json!([{ "pin": "a".repeat(32), "only_if": 1 }])).code(),
            Code::BadRequest
        );
    }
}

#[test]
fn control_lists_what_a_node_keeps() {
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let mut peer = bench.peer();
    for file in ["b", "c", "a"] {
        let handle = peer.open(&Capability { file: file.repeat(32), grant: 2, ..capability() });
        peer.write(handle, 0, &pattern(1000, 1));
    }
    let mut list = |after: Value, limit: u64| {
        said(&control.control_payload(Opcode::List, &json!({ "after": after, "limit": limit })))
    };
    let first = list(Value::Null, 2);
    assert_eq!(
        first["items"][0],
        json!({ "file": "a".repeat(32), "column": 0, "epoch": 1, "sealed": 0, "grant": 2, "length": 1000,
                "valid": null, "dram_bytes": 32_768, "nvme_bytes": 0 })
    );
    assert_eq!(first["next"], json!({ "file": "b".repeat(32), "column": 0 }));
    let rest = list(first["next"].clone(), 2);
    assert_eq!((rest["items"].as_array().unwrap().len(), &rest["next"]), (1, &Value::Null));
    assert_eq!(rest["items"][0]["file"], "c".repeat(32));
    for wrong in [
        json!({ "items": [] }),
        json!({ "after": null, "limit": 0 }),
        json!({ "after": null, "limit": 4097 }),
        json!({ "after": { "file": "x", "column": 0 }, "limit": 1 }),
        json!({ "after": null, "limit": 1, "order": "size" }),
    ] {
        assert_eq!(control.control_payload(Opcode::List, &wrong).code(), Code::BadRequest, "{wrong}");
    }
}

#[test]
fn control_scrubs_and_what_is_damaged_is_reported() {
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(1000, 1));
    peer.write(handle, u64::from(UNIT), &pattern(1000, 2));
    let mut scrub = |start: bool| said(&control.control_payload(Opcode::Scrub, &json!({ "start": start })));
    let idle = scrub(false);
    assert_eq!((&idle["running"], &idle["rounds"]), (&json!(false), &json!(0)));
    let file = u128::from_str_radix(FILE, 16).unwrap();
    bench.node.store().get(file, 0).unwrap().flip_bit(u64::from(UNIT) + 500);
    let begun = Instant::now();
    scrub(true);
    let state = loop {
        let state = scrub(false);
        if state["running"] == false {
            break state;
        }
        assert!(begun.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!((&state["corrupt_chunks"], &state["rounds"]), (&json!(1), &json!(1)));
    assert_eq!((&state["bytes"], &state["bytes_total"]), (&json!(65_536), &json!(65_536)));
    assert_eq!(peer.read(handle, u64::from(UNIT), 1000).code(), Code::Lost);
    assert_eq!(peer.read(handle, 0, 1000).code(), Code::Ok);
    let report: Value = serde_json::from_str(&bench.node.report(9)).unwrap();
    assert_eq!(
        report["items"],
        json!([{ "file": FILE, "column": 0, "valid": 1000, "sealed": 0, "epoch": 1, "length": u64::from(UNIT) + 1000 }])
    );
    bench.node.reported(report["sequence"].as_u64().unwrap());
    assert_eq!(serde_json::from_str::<Value>(&bench.node.report(9)).unwrap()["items"], json!([]));
    for wrong in [json!({}), json!({ "start": 1 }), json!({ "start": true, "file": FILE })] {
        assert_eq!(control.control_payload(Opcode::Scrub, &wrong).code(), Code::BadRequest, "{wrong}");
    }
}

#[test]
fn what_was_asked_for_is_lifted_while_earlier_answers_are_sent() {
    const CHUNKS: u64 = 16;
    let mut bench = Bench::start_with(|config| {
        config.logs = vec![config.data_dir.join("kv-log")];
        config.log_bytes = 256 << 20;
    });
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    for chunk in 0..CHUNKS {
        peer.write(handle, chunk * u64::from(UNIT), &pattern(UNIT as usize, chunk as u8));
    }
    drop(peer);
    bench = bench.restart();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let frames = (0..CHUNKS).map(|chunk| peer.read_frame(handle, chunk * u64::from(UNIT), UNIT));
    let bytes: Vec<u8> = frames.flat_map(|frame| Peer::bytes(frame, &[])).collect();
    peer.stream.write_all(&bytes).unwrap();
    // Nothing is taken from the connection, which soon holds no more.
    let begun = Instant::now();
    let count = |name: &str| bench.stats()[name].as_u64().unwrap();
    while count("lifted_bytes") < (count("hits_nvme") + 3) * u64::from(UNIT) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{}", bench.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    for chunk in 0..CHUNKS {
        assert!(peer.answer().payload == pattern(UNIT as usize, chunk as u8), "chunk {chunk}");
    }
    assert_eq!((count("hits_nvme"), count("hits_dram")), (CHUNKS, 0));
}
