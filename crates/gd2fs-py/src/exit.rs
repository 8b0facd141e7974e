//! Threads inside native calls when the interpreter ends.
//!
//! Until Python 3.14 a daemon thread that wants back to an interpreter that is ending is ended there and then, by unwinding its
//! stack; Rust frames on it turn that into an abort of the process. So as the last of the handlers at exit we let every
//! thread leave its native call, and keep those that would wait longer, or come again, from ever returning.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Native calls that return soon: a waiting one looks up every 50 ms. In a forked child the count may be the parent's.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The thread that ends the interpreter, once it does.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

/// A native call that waits, or runs Python code. Drop it last.
pub struct Inside(());

pub fn enter(py: Python<'_>) -> Inside {
    INSIDE.fetch_add(1, SeqCst);
    if must_stay() {
        py.detach(stay);
    }
    Inside(())
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, SeqCst);
    }
}

/// `py.detach` for calls that entered.
pub fn detach<T: Send>(py: Python<'_>, _inside: &Inside, work: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let result = work();
        if must_stay() {
            stay();
        }
        result
    })
}

fn must_stay() -> bool {
    ENDING.get().is_some_and(|ending| *ending != thread::current().id())
}

fn stay() {
    INSIDE.fetch_sub(1, SeqCst);
    loop {
        thread::park();
    }
}

#[pyfunction]
fn let_threads_leave(py: Python<'_>) {
    let _ = ENDING.set(thread::current().id());
    let until = Instant::now() + LEAVE_TIMEOUT;
    py.detach(|| {
        while INSIDE.load(SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Handlers run in the opposite order of their registration: what is registered with this module runs after its users' own.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let handler = wrap_pyfunction!(let_threads_leave, module)?;
    module.py().import("atexit")?.call_method1("register", (handler,))?;
    Ok(())
}
