//! Where the messages of the Rust parts go. Nowhere, unless the process asks for them: a library in somebody else's program
//! does not write to that program's standard error.

use gd2fs_wire::code::{Code, Failure};
use pyo3::prelude::*;
use tracing::level_filters::LevelFilter;

use crate::raise;

/// Once for the process: what is installed first stays, with its level.
#[pyfunction]
pub fn show_messages(py: Python<'_>, level: &str) -> PyResult<bool> {
    let level: LevelFilter = level.parse().map_err(|_| {
        let reason = format!("level: {level:?} is none of error, warn, info, debug and trace");
        raise::failure(py, &Failure::new(Code::Invalid, reason))
    })?;
    let format = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).finish();
    Ok(tracing::subscriber::set_global_default(format).is_ok())
}
