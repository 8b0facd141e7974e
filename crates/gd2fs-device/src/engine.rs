//! Who makes the system calls, and how one is chosen.

use std::fs::File;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use gd2fs_transport::Memory;

use crate::pool::Pool;
use crate::uring::{Uring, explain};
use crate::{Error, Kind, Result};

/// One system call on a device: it may move fewer bytes than asked for.
pub struct Attempt {
    /// What to do.
    pub kind: Kind,
    /// Bytes from the device's start.
    pub offset: u64,
    /// The memory to fill or to write; kept alive by `done`.
    pub memory: Memory,
    /// Told the bytes moved (0 for a sync) when the call is over and nothing touches the memory any more.
    pub done: Box<dyn FnOnce(io::Result<usize>) + Send>,
}

/// Makes system calls on one device, on threads of its own.
pub trait Engine: Send + Sync {
    /// Its name in configuration and diagnosis.
    fn name(&self) -> &'static str;

    /// Begins `attempt` without blocking. `attempt.done` is called on a thread of the engine, never before this returns on
    /// the caller's. At most [`Options::depth`] attempts are under way at once: the caller sees to it.
    fn start(&self, attempt: Attempt);

    /// Ends the engine's threads once what was started is over, and waits for them. Nothing is started afterwards, except by
    /// an attempt's `done`.
    fn stop(&self);
}

/// Which engine a device gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring, or threads (with a warning) where it does not work.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads.
    Pool,
}

impl FromStr for EngineKind {
    type Err = String;

    /// From configuration: `auto`, `uring` or `pool`.
    fn from_str(name: &str) -> Result<EngineKind, String> {
        match name {
            "auto" => Ok(EngineKind::Auto),
            "uring" => Ok(EngineKind::Uring),
            "pool" => Ok(EngineKind::Pool),
            other => Err(format!("{other:?} is no engine; choose auto, uring or pool")),
        }
    }
}

/// How a device is opened. The defaults suit an NVMe disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Who makes the system calls.
    pub engine: EngineKind,
    /// System calls under way at once, 1 to 1,024. 64 keeps an NVMe disk busy; more only adds latency.
    pub depth: u32,
    /// Operations that may wait for one of those places, at least 1; more are refused.
    pub waiting_max: usize,
    /// Threads of the pool engine, 1 to 1,024; no more than `depth` are made. Each carries one system call at a time.
    pub threads: u32,
    /// Ask for direct I/O. Without it, or where the file system has none, bytes pass through the page cache.
    pub direct: bool,
    /// Faults to inject, for tests.
    #[cfg(feature = "fault")]
    pub faults: Option<crate::fault::Faults>,
    /// A disk that forgets what was not synced when its power is cut, for tests. It replaces the engine.
    #[cfg(feature = "fault")]
    pub power_cut: Option<crate::fault::PowerCut>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            engine: EngineKind::Auto,
            depth: 64,
            waiting_max: 4096,
            threads: 32,
            direct: true,
            #[cfg(feature = "fault")]
            faults: None,
            #[cfg(feature = "fault")]
            power_cut: None,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), String> {
        let bounded = |name: &str, value: u32| match value {
            1..=1024 => Ok(()),
            _ => Err(format!("{name}: {value} is not between 1 and 1024")),
        };
        bounded("depth", self.depth)?;
        bounded("threads", self.threads)?;
        if self.waiting_max == 0 {
            return Err("waiting_max: at least one operation must be able to wait".into());
        }
        Ok(())
    }
}

/// The engine that `options` ask for, on `file`.
pub(crate) fn build(file: &Arc<File>, path: &std::path::Path, options: &Options) -> Result<Box<dyn Engine>> {
    #[cfg(feature = "fault")]
    let engine = match &options.power_cut {
        Some(power_cut) => power_cut.engine(Arc::clone(file)),
        None => base(file, path, options)?,
    };
    #[cfg(feature = "fault")]
    let engine = match &options.faults {
        Some(faults) => faults.around(engine, options.depth),
        None => engine,
    };
    #[cfg(not(feature = "fault"))]
    let engine = base(file, path, options)?;
    Ok(engine)
}

fn base(file: &Arc<File>, path: &std::path::Path, options: &Options) -> Result<Box<dyn Engine>> {
    let failed = |reason: String, remedy, source| {
        let path = path.to_path_buf();
        Error::Unusable { path, reason, remedy, source: Some(source) }
    };
    if options.engine != EngineKind::Pool {
        match Uring::new(Arc::clone(file), options.depth) {
            Ok(uring) => return Ok(Box::new(uring)),
            Err(error) if options.engine == EngineKind::Uring => {
                return Err(failed(
                    explain(&error),
                    "allow io_uring or choose the engine auto or pool",
                    error,
                ));
            }
            Err(error) => tracing::warn!("{}: {}; threads are used instead", path.display(), explain(&error)),
        }
    }
    let pool = Pool::new(Arc::clone(file), options.threads.min(options.depth));
    let pool =
        pool.map_err(|error| failed(format!("no threads: {error}"), "raise the limit on threads", error))?;
    Ok(Box::new(pool))
}
