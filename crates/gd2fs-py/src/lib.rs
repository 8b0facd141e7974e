//! `gd2fs._native`: the Rust parts as Python sees them. The prose is in `python/gd2fs/_native.pyi`.

mod bench;
mod buffers;
mod client;
mod exit;
mod iomem;
mod messages;
mod node;
mod node_link;
mod raise;
mod wire;

use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    warn_when_slow(module.py())?;
    exit::register(module)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("WIRE_VERSION", gd2fs_wire::header::VERSION)?;
    module.add_class::<client::Client>()?;
    module.add_class::<client::File>()?;
    module.add_class::<iomem::IOMEM>()?;
    module.add_class::<node::Node>()?;
    module.add_class::<node_link::NodeLink>()?;
    module.add_class::<bench::RawTcp>()?;
    module.add_class::<bench::RedisReader>()?;
    module.add_function(wrap_pyfunction!(bench::bench_copy, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_requests, module)?)?;
    module.add_function(wrap_pyfunction!(bench::raw_tcp_serve, module)?)?;
    module.add_function(wrap_pyfunction!(messages::show_messages, module)?)?;
    module.add_function(wrap_pyfunction!(wire::error_table, module)?)?;
    module.add_function(wrap_pyfunction!(wire::crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(wire::crc32c_combine, module)?)?;
    module.add_function(wrap_pyfunction!(wire::header_encode, module)?)?;
    module.add_function(wrap_pyfunction!(wire::header_decode, module)?)
}

fn warn_when_slow(py: Python<'_>) -> PyResult<()> {
    if env!("GD2FS_OPT_LEVEL") != "0" {
        return Ok(());
    }
    let text = c"gd2fs._native was built without optimisation and is slow; build it with `maturin develop --release`";
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), text, 1)
}
