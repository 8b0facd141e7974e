//! Failures as the exceptions of `gd2fs.errors`.

use gd2fs_wire::code::Failure;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn errors(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    Ok(ERRORS.get_or_try_init(py, || py.import("gd2fs.errors").map(Bound::unbind))?.bind(py))
}

pub fn failure(py: Python<'_>, failure: &Failure) -> PyErr {
    let made = errors(py)
        .and_then(|errors| errors.call_method1("from_code", (failure.code as u32, &failure.message)));
    made.map_or_else(|error| error, PyErr::from_value)
}

pub fn forked(py: Python<'_>) -> PyErr {
    let text = "the client was made before a fork; its threads and connections live in the parent: connect again here";
    named(py, "ForkedError", text)
}

pub fn closed(py: Python<'_>) -> PyErr {
    named(py, "ClosedError", "the client is closed")
}

fn named(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let made = errors(py).and_then(|errors| errors.getattr(class)).and_then(|class| class.call1((text,)));
    made.map_or_else(|error| error, PyErr::from_value)
}
