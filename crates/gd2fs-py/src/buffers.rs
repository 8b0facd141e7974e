//! Python objects as memory for transfers: the only place where addresses come from.

use gd2fs_client::{Direction, Memory, Slice};
use gd2fs_wire::code::{Code, Failure};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::iomem::{Hold, IOMEM};
use crate::raise;

/// What is held for a transfer, and the memory that it makes up in order.
pub struct Held {
    pub keepers: Keepers,
    pub memory: Memory,
}

/// Whatever keeps a transfer's memory alive.
#[derive(Default)]
pub struct Keepers {
    _buffers: Vec<PyUntypedBuffer>,
    _iomem: Option<Hold>,
}

/// Takes hold of every object in `objects`; the holds end when the result is dropped, with the interpreter attached.
pub fn hold(objects: &Bound<'_, PyList>, direction: Direction) -> PyResult<Held> {
    let mut buffers = Vec::with_capacity(objects.len());
    let mut slices = Vec::with_capacity(objects.len());
    for (index, object) in objects.iter().enumerate() {
        let buffer = contiguous(&object, &|| format!("buffers[{index}]"))?;
        if direction == Direction::Read && buffer.readonly() {
            return Err(refuse(
                &object,
                &format!("buffers[{index}]"),
                "is read-only; read into a writable buffer",
            ));
        }
        // SAFETY: the buffer stays exported until the request has completed; that nobody else uses its bytes meanwhile is
        // what the Python interface asks of its callers.
        slices.push(unsafe { Slice::new(buffer.buf_ptr().cast(), buffer.len_bytes()) });
        buffers.push(buffer);
    }
    Ok(Held { keepers: Keepers { _buffers: buffers, _iomem: None }, memory: Memory::new(slices) })
}

/// Memory that is given as arrays of addresses and lengths. They lie in `iomem`, which is held; without it nothing is, and
/// keeping them alive is the caller's.
pub fn fragments(
    addresses: &Bound<'_, PyAny>,
    lengths: &Bound<'_, PyAny>,
    iomem: Option<&Bound<'_, IOMEM>>,
) -> PyResult<Held> {
    let memory = raw(addresses, lengths)?;
    let hold = iomem.map(|iomem| iomem.get().hold(addresses.py(), &memory)).transpose()?;
    Ok(Held { keepers: Keepers { _buffers: Vec::new(), _iomem: hold }, memory })
}

/// As `fragments`, held by nobody.
pub fn raw(addresses: &Bound<'_, PyAny>, lengths: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let starts = numbers(addresses, "addresses")?;
    let sizes = numbers(lengths, "lengths")?;
    if starts.len() != sizes.len() {
        let why = format!("has {} entries where addresses has {}", sizes.len(), starts.len());
        return Err(refuse(lengths, "lengths", &why));
    }
    let mut slices = Vec::with_capacity(starts.len());
    for (index, (start, size)) in starts.into_iter().zip(sizes).enumerate() {
        if size > 0 && (start == 0 || start.checked_add(size).is_none_or(|end| end > isize::MAX as u64)) {
            let why = format!("[{index}]: {size} bytes at address {start:#x} can't be memory");
            return Err(refuse(addresses, "addresses", &why));
        }
        // SAFETY: the caller of *_at promises that the fragments stay mapped until the request has completed.
        slices.push(unsafe { Slice::new(start as *mut u8, size as usize) });
    }
    Ok(Memory::new(slices))
}

fn numbers(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    let buffer = contiguous(object, &|| name.into())?;
    let format = buffer.format().to_bytes();
    let unsigned = matches!(
        format
            .strip_prefix(b"@")
            .or(format.strip_prefix(b"="))
            .or(format.strip_prefix(b"<"))
            .unwrap_or(format),
        b"Q" | b"L" | b"N"
    );
    if buffer.item_size() != 8 || !unsigned {
        return Err(refuse(
            object,
            name,
            "is not an array of 64-bit unsigned integers (numpy.uint64, array 'Q')",
        ));
    }
    let base = buffer.buf_ptr().cast::<u64>();
    // SAFETY: the buffer is contiguous and holds item_count items of 8 bytes, aligned or not.
    Ok((0..buffer.item_count()).map(|index| unsafe { base.add(index).read_unaligned() }).collect())
}

/// The bytes of `object`, which must lie in one piece, in C order.
pub fn contiguous(object: &Bound<'_, PyAny>, name: &dyn Fn() -> String) -> PyResult<PyUntypedBuffer> {
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return Err(refuse(
            object,
            &name(),
            "does not offer the buffer protocol; pass bytes, an array or a memoryview",
        ));
    };
    if !buffer.is_c_contiguous() {
        return Err(refuse(
            object,
            &name(),
            "is not contiguous; pass a contiguous copy or its contiguous parts",
        ));
    }
    Ok(buffer)
}

fn refuse(object: &Bound<'_, PyAny>, name: &str, why: &str) -> PyErr {
    let class = object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string());
    raise::failure(object.py(), &Failure::new(Code::BadRequest, format!("{name} ({class}) {why}")))
}
