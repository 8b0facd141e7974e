//! Control's line to the nodes, as Python sees it.

use gd2fs_wire::code::Code;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::{client, exit, raise};

#[pyclass(frozen, module = "gd2fs._native")]
pub struct NodeLink(gd2fs_client::NodeLink);

#[pymethods]
impl NodeLink {
    #[new]
    fn new(py: Python<'_>, cluster: &str, token: &str, timeout_ms: i64) -> PyResult<NodeLink> {
        let timeout = client::timeout(py, timeout_ms)?;
        let link = gd2fs_client::NodeLink::new(cluster, token, timeout);
        Ok(NodeLink(link.map_err(|failure| raise::failure(py, &failure))?))
    }

    /// Every failure is a code, whose message is then the payload; only misuse raises.
    fn call<'py>(
        &self,
        py: Python<'py>,
        address: &str,
        opcode: u8,
        payload: Vec<u8>,
    ) -> PyResult<(u32, u32, Bound<'py, PyBytes>)> {
        let inside = exit::enter(py);
        if self.0.is_forked() {
            return Err(raise::forked(py));
        }
        match client::finish(py, &inside, self.0.call(address, opcode, payload))? {
            Ok(answer) => Ok((0, answer.incarnation, PyBytes::new(py, &answer.json))),
            Err(failure) if failure.code == Code::Invalid => Err(raise::failure(py, &failure)),
            Err(failure) => Ok((failure.code as u32, 0, PyBytes::new(py, failure.message.as_bytes()))),
        }
    }
}
