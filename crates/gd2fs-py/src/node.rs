//! The storage node, as the Python agent sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_node::{Config, StartError};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::{client, exit, raise};

/// `wait` looks at signals this often, so that Ctrl-C works in it.
const SLICE: Duration = Duration::from_millis(50);

#[pyclass(frozen, module = "gd2fs._native")]
pub struct Node {
    /// None once it was stopped: its memory and its data directory are free again then.
    running: Mutex<Option<Arc<gd2fs_node::Node>>>,
    addresses: Vec<String>,
    /// The counters at the end.
    last_stats: Mutex<String>,
    process: u32,
}

#[pymethods]
impl Node {
    #[new]
    fn new(py: Python<'_>, config_json: &str) -> PyResult<Node> {
        let start = || -> Result<gd2fs_node::Node, StartError> {
            gd2fs_node::Node::start(Config::from_json(config_json)?)
        };
        let inside = exit::enter(py);
        let node = exit::detach(py, &inside, start).map_err(|error| raise::failure(py, &error.failure()))?;
        Ok(Node {
            addresses: node.addresses(),
            last_stats: Mutex::default(),
            running: Mutex::new(Some(Arc::new(node))),
            process: std::process::id(),
        })
    }

    #[staticmethod]
    fn check(py: Python<'_>, config_json: &str) -> PyResult<()> {
        let checked = Config::from_json(config_json).and_then(|config| config.validate());
        checked.map_err(|error| raise::failure(py, &error.failure()))
    }

    fn addresses(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.running(py)?;
        Ok(self.addresses.clone())
    }

    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let inside = exit::enter(py);
        Ok(match self.running(py)? {
            Some(node) => exit::detach(py, &inside, || node.stats()),
            None => self.last_stats.lock().clone(),
        })
    }

    fn report(&self, py: Python<'_>, limit: usize) -> PyResult<String> {
        let inside = exit::enter(py);
        Ok(match self.running(py)? {
            Some(node) => exit::detach(py, &inside, || node.report(limit)),
            None => r#"{"sequence":0,"items":[]}"#.into(),
        })
    }

    fn reported(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        if let Some(node) = self.running(py)? {
            node.reported(sequence);
        }
        Ok(())
    }

    fn hear_time(&self, py: Python<'_>, now: f64) -> PyResult<()> {
        if let Some(node) = self.running(py)? {
            node.hear_time(now);
        }
        Ok(())
    }

    fn stop(&self, py: Python<'_>, grace_ms: i64) -> PyResult<()> {
        let inside = exit::enter(py);
        let grace = client::timeout(py, grace_ms)?;
        let Some(node) = self.running(py)? else { return Ok(()) };
        let stop = || {
            let kept = node.stop(grace);
            *self.last_stats.lock() = node.stats();
            *self.running.lock() = None;
            drop(node);
            kept
        };
        exit::detach(py, &inside, stop).map_err(|failure| raise::failure(py, &failure))
    }

    fn wait(&self, py: Python<'_>, timeout_ms: i64) -> PyResult<bool> {
        let inside = exit::enter(py);
        let until = Instant::now() + client::timeout(py, timeout_ms)?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Held for one slice only, so that a stopped node is really gone.
            let Some(node) = self.running(py)? else { return Ok(true) };
            if exit::detach(py, &inside, move || node.wait(left.min(SLICE))) {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }
}

impl Node {
    fn running(&self, py: Python<'_>) -> PyResult<Option<Arc<gd2fs_node::Node>>> {
        if self.is_forked() {
            return Err(raise::forked(py));
        }
        Ok(self.running.lock().clone())
    }

    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.is_forked() {
            // The threads that a stop waits for are the parent's.
            std::mem::forget(self.running.get_mut().take());
        }
    }
}
