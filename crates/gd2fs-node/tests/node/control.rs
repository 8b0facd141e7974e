use gd2fs_wire::{Code, Opcode, Role};
use serde_json::{Value, json};

use super::*;

fn items(answer: &Answer) -> Value {
    assert_eq!(answer.code(), Code::Ok, "{}", String::from_utf8_lossy(&answer.ext));
    serde_json::from_slice::<Value>(&answer.payload).unwrap()["items"].clone()
}

fn seal(grant: u64, length: u64) -> Value {
    json!({ "file": FILE, "column": 0, "epoch": 1, "born": 1, "grant": grant, "stripe_unit": UNIT, "width": 1, "length": length })
}

#[test]
fn only_control_controls() {
    let bench = Bench::start();
    for role in [Role::Client, Role::Node, Role::Admin] {
        let mut peer = Peer::connect(&bench.node).greeted(&hello("t", role));
        for opcode in Opcode::ALL.iter().copied().filter(|opcode| opcode.is_control()) {
            assert_eq!(peer.control(opcode, json!([])).code(), Code::Forbidden);
        }
    }
}

#[test]
fn seal_stat_delete() {
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let mut writer = bench.peer();
    let handle = writer.open(&Capability { grant: 3, ..capability() });
    writer.write(handle, 0, &pattern(40_000, 1));
    let name = json!({ "file": FILE, "column": 0 });
    let other = json!({ "file": "ff".repeat(16), "column": 0 });
    let stat = items(&control.control(Opcode::Stat, json!([name, other])));
    assert_eq!(
        stat,
        json!([
            { "length": 40_000, "sealed": 0, "grant": 3, "epoch": 1, "bytes": 65_536, "end_lost": false },
            null
        ])
    );

    let sealed = items(
        &control.control(Opcode::Seal, json!([seal(3, 40_001), seal(2, 10), seal(3, 30_000), seal(3, 5)])),
    );
    let of = |i: usize| (sealed[i]["status"].as_u64().unwrap() as u32, sealed[i]["sealed"].as_u64().unwrap());
    assert_eq!(of(0), (Code::Hole as u32, 0));
    assert_eq!(of(1), (Code::StaleWriter as u32, 0));
    assert_eq!((of(2), of(3)), ((0, 30_000), (0, 30_000)));
    assert_eq!(writer.write(handle, 29_999, b"xx").code(), Code::Sealed);
    assert_eq!(writer.write(handle, 40_000, b"xx").code(), Code::Ok);

    let used = bench.node.store().arena().used();
    assert!(used > 0);
    assert_eq!(
        items(&control.control(Opcode::Delete, json!([name, other]))),
        json!([{ "freed": used }, { "freed": 0 }])
    );
    assert_eq!(bench.node.store().arena().used(), 0);
    assert_eq!(writer.write(handle, 30_000, b"late").code(), Code::Deleted);
    assert_eq!(writer.read(handle, 0, 10).code(), Code::Deleted);
    assert_eq!(writer.try_open(&capability()).code(), Code::Deleted);
    assert_eq!(items(&control.control(Opcode::Delete, json!([name]))), json!([{ "freed": 0 }]), "idempotent");
}

#[test]
fn what_is_not_understood_is_refused() {
    let bench = Bench::start();
    let mut control = Peer::connect(&bench.node).greeted(&hello("", Role::Control));
    let many: Vec<Value> = (0..4097).map(|i| json!({ "file": format!("{i:032x}"), "column": 0 })).collect();
    assert_eq!(control.control(Opcode::Stat, json!(many)).code(), Code::BadRequest);
    assert_eq!(items(&control.control(Opcode::Stat, json!(many[1..]))), json!(vec![Value::Null; 4096]));
    assert_eq!(
        control.control(Opcode::Stat, json!([{ "file": "xy", "column": 0 }])).code(),
        Code::BadRequest
    );
    assert_eq!(
        control.control(Opcode::Delete, json!([{ "file": FILE, "column": 0, "only_if": 1 }])).code(),
        Code::BadRequest
    );
    assert_eq!(control.control(Opcode::Stat, json!(5)).code(), Code::BadRequest);
}
