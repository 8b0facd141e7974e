//! Memory that transfers use: allocated here and shared with nodes of this host, or somebody else's and only held.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use gd2fs_client::{Memory, Region};
use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::{buffers, raise};

#[pyclass(frozen, module = "gd2fs._native")]
#[allow(clippy::upper_case_acronyms)] // as public clients call it
pub struct IOMEM {
    address: usize,
    length: usize,
    backing: Backing,
    closed: AtomicBool,
}

/// What keeps the memory where it is.
enum Backing {
    /// Until this object goes, whatever `close` says: some makers of views keep the object and not the view.
    Region(Arc<Region>),
    /// Given back by `close`.
    Buffer(Mutex<Option<Arc<PyUntypedBuffer>>>),
    /// The caller's promise.
    Caller,
}

/// Keeps registered memory alive while a request uses it. Dropped with the interpreter attached.
pub enum Hold {
    Region { _held: Arc<Region> },
    Buffer { _held: Arc<PyUntypedBuffer> },
    Nothing,
}

const FORKED: &str = "was made before a fork, and its memory is the parent's alone";

impl IOMEM {
    pub fn of_region(region: Arc<Region>, length: usize) -> IOMEM {
        IOMEM::new(region.address() as usize, length, Backing::Region(region))
    }

    fn new(address: usize, length: usize, backing: Backing) -> IOMEM {
        IOMEM { address, length, backing, closed: AtomicBool::new(false) }
    }

    /// Keeps alive what `memory` is made of, if all of it lies inside.
    pub fn hold(&self, py: Python<'_>, memory: &Memory) -> PyResult<Hold> {
        for (index, slice) in memory.slices().iter().enumerate() {
            let start = (slice.address() as usize).checked_sub(self.address);
            if !start.is_some_and(|start| start <= self.length && slice.len() <= self.length - start) {
                let (address, length) = (slice.address() as usize, slice.len());
                let why = format!(
                    "addresses[{index}]: {length} bytes at {address:#x} lie outside the IOMEM of {} bytes at {:#x}",
                    self.length, self.address
                );
                return Err(raise::failure(py, &Failure::new(Code::BadRequest, why)));
            }
        }
        let closed = || {
            raise::failure(
                py,
                &Failure::new(Code::BadRequest, "iomem: it is closed; allocate or register anew"),
            )
        };
        if self.closed.load(Acquire) {
            return Err(closed());
        }
        match &self.backing {
            Backing::Region(region) if region.is_forked() => {
                let why = format!("iomem: it {FORKED}; allocate anew in the child");
                Err(raise::failure(py, &Failure::new(Code::BadRequest, why)))
            }
            Backing::Region(region) => Ok(Hold::Region { _held: region.clone() }),
            Backing::Buffer(buffer) => {
                let held = buffer.lock().clone();
                held.map(|buffer| Hold::Buffer { _held: buffer }).ok_or_else(closed)
            }
            Backing::Caller => Ok(Hold::Nothing),
        }
    }
}

#[pymethods]
impl IOMEM {
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn length(&self) -> usize {
        self.length
    }

    #[getter]
    fn kind(&self) -> &'static str {
        if matches!(self.backing, Backing::Region(_)) { "library" } else { "foreign" }
    }

    fn __len__(&self) -> usize {
        self.length
    }

    fn __repr__(&self) -> String {
        let state = if self.closed.load(Acquire) { ", closed" } else { "" };
        format!("<IOMEM of {} bytes at {:#x}, {} memory{state}>", self.length, self.address, self.kind())
    }

    fn close(&self) {
        self.closed.store(true, Release);
        if let Backing::Buffer(buffer) = &self.backing {
            let buffer = buffer.lock().take();
            // Outside the lock: releasing a buffer may run Python code.
            drop(buffer);
        }
    }

    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let iomem = slf.get();
        let Backing::Region(region) = &iomem.backing else {
            return Err(PyBufferError::new_err(
                "this IOMEM is of foreign memory: use the buffer that it was made of",
            ));
        };
        if region.is_forked() {
            return Err(PyBufferError::new_err(format!("this IOMEM {FORKED}")));
        }
        if iomem.closed.load(Acquire) {
            return Err(PyBufferError::new_err("this IOMEM is closed"));
        }
        let length = ffi::Py_ssize_t::try_from(iomem.length).expect("memory is under isize::MAX");
        // SAFETY: the view is the interpreter's; the memory is mapped as long as this object lives, which the view holds.
        let result = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), iomem.address as *mut c_void, length, 0, flags)
        };
        if result == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Registers `object`, which must lie in one piece and be writable.
pub fn register(object: &Bound<'_, PyAny>) -> PyResult<IOMEM> {
    let buffer = buffers::contiguous(object, &|| "buffer".into())?;
    if buffer.readonly() {
        let failure = Failure::new(Code::BadRequest, "buffer is read-only; register writable memory");
        return Err(raise::failure(object.py(), &failure));
    }
    let (address, length) = (buffer.buf_ptr() as usize, buffer.len_bytes());
    Ok(IOMEM::new(address, length, Backing::Buffer(Mutex::new(Some(Arc::new(buffer))))))
}

/// Registers memory that the caller keeps alive.
pub fn register_at(py: Python<'_>, address: usize, length: usize) -> PyResult<IOMEM> {
    if address == 0 || length == 0 || address.checked_add(length).is_none_or(|end| end > isize::MAX as usize)
    {
        let why = format!("{length} bytes at address {address:#x} can't be memory");
        return Err(raise::failure(py, &Failure::new(Code::BadRequest, why)));
    }
    Ok(IOMEM::new(address, length, Backing::Caller))
}
