//! The bytes of format 1, as `tests/vectors/log.json` at the repository's root has them: what was written once stays readable.

use gd2fs_wire::sums::Run;
use serde_json::Value;

use crate::checkpoint::{Foot, Writer, load, publish};
use crate::entry::{ColumnEntry, ColumnState, Key, Note};
use crate::owner::Entries;
use crate::position::{Mark, Place, Position};
use crate::record::{Body, Known, SegmentHeader, Stamp};
use crate::superblock::Superblock;

const DEVICE: [u8; 16] = *b"a device's ident";
const SEGMENT: [u8; 16] = *b"a segment's iden";

fn known() -> Known {
    let (durable, floor) = (Position { generation: 2, sequence: 9 }, Position { generation: 1, sequence: 4 });
    Known { durable, floor }
}

fn key() -> Key {
    Key { file: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10, column: 3, chunk: 77 }
}

fn state() -> ColumnState {
    let (sealed, end) = (1 << 33, (1 << 33) + 5);
    let (exact, whole) = (true, false);
    ColumnState { epoch: 5, born: 6, grant: 7, sealed, stripe_unit: 4 << 20, width: 8, end, exact, whole }
}

fn runs() -> Vec<Run> {
    vec![
        Run { start: 5000, end: 32768, crc: 0x1234_5678 },
        Run { start: 32768, end: 40000, crc: 0x9abc_def0 },
    ]
}

fn checkpoint(path: &std::path::Path) {
    let mut writer = Writer::create(path, &DEVICE).unwrap();
    let Key { file, column, .. } = key();
    writer.column(&ColumnEntry { file, column, version: 40, state: state() });
    writer.chunk(key(), 41, &runs(), Place { generation: 2, offset: 1 << 20, first: 4096, bytes: 36864 });
    let position = Mark { at: Position { generation: 3, sequence: 2 }, offset: 1 << 21 };
    let durable = Position { generation: 3, sequence: 4 };
    writer.finish(&Foot { position, durable, version_max: 50 }).unwrap();
    publish(path).unwrap();
}

/// Bytes without the zeros at their end, in hexadecimal.
fn hex(bytes: &[u8]) -> String {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes[..end].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn format_1_stays_what_it_is() {
    let text = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/log.json"));
    let golden: Value = serde_json::from_str(text).unwrap();
    let at = Position { generation: 3, sequence: 1 };
    let stamp = Stamp { segment: SEGMENT, at, known: known() };
    let header = SegmentHeader {
        id: SEGMENT,
        generation: 3,
        previous: Position { generation: 2, sequence: 9 },
        known: known(),
    };
    let snapshot = Body::Snapshot { key: key(), version: 41, state: state(), runs: runs() };
    let Key { file, column, .. } = key();
    let notes = Body::Notes(vec![
        Note::Column { file, column, version: 42, state: state() },
        Note::Forget { key: key(), version: 43 },
        Note::Delete { file, column, version: 44 },
    ]);
    let superblock = Superblock {
        cluster: "cluster".into(),
        node: "node".into(),
        device: DEVICE,
        segment_bytes: 1 << 28,
        device_bytes: 1 << 36,
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoint");
    checkpoint(&path);
    let block = superblock.encode();
    let made = [
        ("superblock", hex(&block[..4092])),
        ("superblock_crc", hex(&block[4092..])),
        ("segment", hex(&header.encode(&DEVICE)[..4096])),
        ("snapshot", hex(&snapshot.encode(&stamp))),
        ("notes", hex(&notes.encode(&stamp))),
        ("checkpoint", hex(&std::fs::read(&path).unwrap())),
    ];
    for (name, bytes) in made {
        assert_eq!(golden[name].as_str(), Some(&*bytes), "{name}");
    }
    assert_eq!(SegmentHeader::decode(&header.encode(&DEVICE), &DEVICE), Some(header));
    assert_eq!(Body::decode(&snapshot.encode(&stamp)), Some((stamp, snapshot)));
    assert_eq!(Body::decode(&notes.encode(&stamp)), Some((stamp, notes)));
    assert_eq!(Superblock::read(&block, &block, "cluster", "node", 1 << 36), Ok(superblock));
    let found = load(&path, &DEVICE).unwrap().unwrap();
    assert_eq!((found.columns.len(), found.chunks.len(), found.foot.version_max), (1, 1, 50));
}
