//! Golden bytes that Python reads too: what was released must stay readable.

use std::path::PathBuf;

use gd2fs_wire::header::Header;
use gd2fs_wire::{Capability, Code, Keys, PlanToken, Signed, Token};
use serde_json::Value;

fn vectors(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

#[test]
fn headers() {
    let vectors = vectors("header.json");
    let vectors = vectors.as_array().unwrap();
    assert!(vectors.len() >= 6);
    for vector in vectors {
        let field =
            |name: &str| vector["fields"][name].as_u64().unwrap_or_else(|| panic!("{vector}: {name}"));
        let header = Header {
            opcode: field("opcode") as u8,
            flags: field("flags") as u16,
            request: field("request"),
            handle: field("handle") as u32,
            epoch: field("epoch") as u32,
            offset: field("offset"),
            length: field("length") as u32,
            sums_bytes: field("sums_bytes") as u32,
            incarnation: field("incarnation") as u32,
            status: field("status") as u32,
            deadline_ms: field("deadline_ms") as u32,
            payload_crc: field("payload_crc") as u32,
            ext_bytes: field("ext_bytes") as u16,
            priority: field("priority") as u8,
        };
        let hex: String = header.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, vector["hex"].as_str().unwrap(), "{}", vector["name"]);
        assert_eq!(Header::decode(&header.encode()).unwrap(), header, "{}", vector["name"]);
    }
}

fn check_signed<T: Signed>(vector: &Value) {
    let keys = Keys::parse(vector["keys"].as_str().unwrap()).unwrap();
    let text = vector["text"].as_str().unwrap();
    let payload: T = keys.verify(text).unwrap_or_else(|error| panic!("{}: {error}", vector["name"]));
    assert_eq!(serde_json::to_value(&payload).unwrap(), vector["payload"], "{}", vector["name"]);
    assert_eq!(keys.sign(&payload), text, "{}", vector["name"]);
}

#[test]
fn signed_texts() {
    let vectors = vectors("signing.json");
    let list = |name: &str| {
        let list = vectors[name].as_array().unwrap();
        assert!(!list.is_empty(), "{name}");
        list
    };
    for vector in list("valid") {
        match vector["typ"].as_str().unwrap() {
            "token" => check_signed::<Token>(vector),
            "cap" => check_signed::<Capability>(vector),
            "plan" => check_signed::<PlanToken>(vector),
            other => panic!("{other} is no kind of signed text"),
        }
    }
    for vector in list("invalid") {
        let keys = Keys::parse(vector["keys"].as_str().unwrap()).unwrap();
        let text = vector["text"].as_str().unwrap();
        let result = match vector["typ"].as_str().unwrap() {
            "token" => keys.verify::<Token>(text).map(drop),
            "cap" => keys.verify::<Capability>(text).map(drop),
            _ => keys.verify::<PlanToken>(text).map(drop),
        };
        assert_eq!(result.expect_err(&vector.to_string()).code, Code::BadSignature, "{vector}");
    }
    for text in list("bad_keys") {
        assert!(Keys::parse(text.as_str().unwrap()).is_err(), "{text}");
    }
}
