//! The engine that works everywhere: threads, each in one blocking system call at a time.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use gd2fs_transport::{Memory, iovecs};
use libc::c_int;

use crate::workers::Workers;
use crate::{Attempt, Engine, Kind};

pub(crate) struct Pool {
    file: Arc<File>,
    workers: Workers,
}

impl Pool {
    pub fn new(file: Arc<File>, threads: u32) -> io::Result<Pool> {
        Ok(Pool { file, workers: Workers::new("gd2fs-pool", threads)? })
    }
}

impl Engine for Pool {
    fn name(&self) -> &'static str {
        "pool"
    }

    fn start(&self, attempt: Attempt) {
        let file = Arc::clone(&self.file);
        self.workers.run(move || {
            let Attempt { kind, offset, memory, done } = attempt;
            let moved = call(&file, kind, offset, &memory);
            // The last reference to the file must not outlive the device because of this thread.
            drop(file);
            done(moved);
        });
    }

    fn stop(&self) {
        self.workers.stop();
    }
}

/// Makes one system call and blocks until it is over; answers the bytes moved.
pub(crate) fn call(file: &File, kind: Kind, offset: u64, memory: &Memory) -> io::Result<usize> {
    let fd = file.as_raw_fd();
    let vectors = iovecs(memory.slices());
    let (start, count) = (vectors.as_ptr(), vectors.len() as c_int);
    let offset = offset as libc::off_t;
    // SAFETY: `vectors` names memory that stays mapped and is used by nobody else meanwhile (the promise of `Slice::new`).
    let moved = unsafe {
        match kind {
            Kind::Read => libc::preadv(fd, start, count, offset),
            Kind::Write => libc::pwritev(fd, start, count, offset),
            Kind::WriteSync => libc::pwritev2(fd, start, count, offset, libc::RWF_DSYNC),
            Kind::Sync => libc::fdatasync(fd) as isize,
        }
    };
    if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
}
