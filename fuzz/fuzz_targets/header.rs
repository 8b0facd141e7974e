//! A frame out of arbitrary bytes: the header's checks, what it says of lengths, the sum behind it, the messages in its ext.

#![no_main]

use gd2fs_transport::Frame;
use gd2fs_wire::header::{CONTROL_BYTES_MAX, HEADER_BYTES, Header, PAYLOAD_BYTES_MAX, SUMS_BYTES_MAX};
use gd2fs_wire::messages::{Hello, HelloReply, Open, OpenReply, Refusal};
use gd2fs_wire::sums;
use libfuzzer_sys::fuzz_target;

/// The first byte chooses which sums are made right, so that what they guard is reached too.
const SEAL_HEADER: u8 = 1;
const SEAL_REST: u8 = 2;

fuzz_target!(|data: &[u8]| {
    let Some((&choice, data)) = data.split_first() else { return };
    let Some((head, rest)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let mut head = *head;
    if choice & SEAL_HEADER != 0 {
        seal(&mut head);
    }
    let Ok(mut header) = Header::decode(&head) else {
        // What was refused may still be named in an answer, from an intact header only.
        if let Some(named) = Header::identify(&head) {
            assert_eq!(named.opcode, head[5]);
        }
        return;
    };
    assert_eq!(header.encode(), head, "decoding loses nothing");
    check_limits(&header);

    let ext_bytes = usize::from(header.ext_bytes).min(rest.len());
    let (ext, rest) = rest.split_at(ext_bytes);
    let sums_bytes = (header.sums_bytes as usize).min(rest.len()) / 4 * 4;
    let (sum_bytes, rest) = rest.split_at(sums_bytes);
    let payload = &rest[..(header.payload_bytes() as usize).min(rest.len())];
    let json = if header.carries_file_data() { &[] } else { payload };
    if choice & SEAL_REST != 0 {
        header.payload_crc = sums::crc32c_of([ext, sum_bytes, json]);
    }
    let frame = Frame { header, ext: ext.to_vec(), sums: sums::sums_from_bytes(sum_bytes) };
    let right = header.payload_crc == sums::crc32c_of([ext, sum_bytes, json]);
    assert_eq!(frame.check(json).is_ok(), right);
    let _ = frame.failure();
    let _ = frame.message::<Hello>();
    let _ = frame.message::<HelloReply>();
    let _ = frame.message::<Open>();
    let _ = frame.message::<OpenReply>();
    let _ = frame.message::<Refusal>();
    let again = frame.clone().encode(json);
    assert_eq!(&again[HEADER_BYTES..][..ext.len()], ext);
});

fn seal(head: &mut [u8; HEADER_BYTES]) {
    head[..4].copy_from_slice(&gd2fs_wire::header::MAGIC.to_le_bytes());
    head[4] = gd2fs_wire::header::VERSION;
    let sum = sums::crc32c(&head[..HEADER_BYTES - 4]).to_le_bytes();
    head[HEADER_BYTES - 4..].copy_from_slice(&sum);
}

/// Whoever reserves memory by a checked header reserves no more than this.
fn check_limits(header: &Header) {
    assert!(header.payload_bytes() <= PAYLOAD_BYTES_MAX);
    assert!(header.sums_bytes <= SUMS_BYTES_MAX);
    assert!(header.offset.checked_add(u64::from(header.length)).is_some());
    if header.opcode().is_ok_and(|opcode| opcode.is_control()) {
        assert!(header.payload_bytes() <= CONTROL_BYTES_MAX);
    }
    if header.carries_file_data() && !header.is_raw() {
        let pieces = sums::piece_lengths(header.offset, u64::from(header.length)).into_iter().count();
        assert_eq!(header.sums_bytes as usize, pieces * 4);
    }
}
