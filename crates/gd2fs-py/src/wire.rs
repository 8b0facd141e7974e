//! The wire format for tests and tools written in Python.

use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{HEADER_BYTES, Header};
use gd2fs_wire::sums;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{buffers, raise};

#[pyfunction]
pub fn error_table() -> Vec<(u32, &'static str, i32, bool, bool)> {
    let row =
        |code: &Code| (*code as u32, code.name(), code.errno(), code.retryable(), code.may_have_changed());
    Code::ALL.iter().map(row).collect()
}

#[pyfunction]
#[pyo3(signature = (data, initial = 0))]
pub fn crc32c(data: &Bound<'_, PyAny>, initial: u32) -> PyResult<u32> {
    let buffer = buffers::contiguous(data, &|| "data".into())?;
    // SAFETY: the buffer is contiguous and exported for the whole call, and with the interpreter held nobody writes it.
    let bytes = unsafe { gd2fs_client::Slice::new(buffer.buf_ptr().cast(), buffer.len_bytes()).bytes() };
    Ok(sums::combine(initial, sums::crc32c(bytes), bytes.len() as u64))
}

#[pyfunction]
pub fn crc32c_combine(a: u32, b: u32, length_b: u64) -> u32 {
    sums::combine(a, b, length_b)
}

/// One place for the names of the fields: encoding and decoding go through the same list.
macro_rules! fields {
    ($($name:ident),+) => {
        #[pyfunction]
        #[pyo3(signature = (**fields))]
        pub fn header_encode(py: Python<'_>, fields: Option<&Bound<'_, PyDict>>) -> PyResult<[u8; HEADER_BYTES]> {
            let mut header = Header::default();
            for (key, value) in fields.into_iter().flatten() {
                match key.extract::<&str>()? {
                    $(stringify!($name) => header.$name = value.extract()?,)+
                    other => {
                        let why = format!("{other} is not a field of the header");
                        return Err(raise::failure(py, &Failure::new(Code::Invalid, why)));
                    }
                }
            }
            Ok(header.encode())
        }

        #[pyfunction]
        pub fn header_decode<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyDict>> {
            let bytes = data.try_into().map_err(|_| {
                Failure::new(Code::BadFrame, format!("a header has {HEADER_BYTES} bytes, not {}", data.len()))
            });
            let header = bytes.and_then(Header::decode).map_err(|failure| raise::failure(py, &failure))?;
            let fields = PyDict::new(py);
            $(fields.set_item(stringify!($name), header.$name)?;)+
            Ok(fields)
        }
    };
}

fields!(
    opcode,
    flags,
    request,
    handle,
    epoch,
    offset,
    length,
    sums_bytes,
    incarnation,
    status,
    deadline_ms,
    payload_crc,
    ext_bytes,
    priority
);
