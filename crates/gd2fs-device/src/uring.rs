//! The engine for Linux as it should be: one io_uring and one thread a device.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use gd2fs_transport::iovecs;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use parking_lot::Mutex;

use crate::workers::spawn;
use crate::{Attempt, Engine, Kind};

/// Marks the completion of the wake-up; attempts are marked with their place.
const WAKE: u64 = u64::MAX;

/// Whether io_uring works here, for `doctor`: a ring is made, its operations are looked up, and one makes a round.
/// The error says what forbids it and what to change.
pub fn probe() -> Result<(), String> {
    let round = || -> io::Result<()> {
        let mut ring = ring(4)?;
        // SAFETY: a no-op names no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        Ok(())
    };
    round().map_err(|error| explain(&error))
}

/// What an error of setting up means to whoever runs the node.
pub(crate) fn explain(error: &io::Error) -> String {
    let why = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "a seccomp profile or the sysctl kernel.io_uring_disabled forbids it"
        }
        Some(libc::ENOSYS) => "the kernel lacks it or a seccomp profile hides it",
        Some(libc::ENOMEM) => "the limit on locked memory (ulimit -l) is too low for this kernel",
        _ => "it could not be set up",
    };
    format!("io_uring does not work here: {why} ({error})")
}

/// A ring that this thread alone uses, with every operation that the engine needs.
fn ring(entries: u32) -> io::Result<IoUring> {
    let modern = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    let ring = match modern {
        // Linux before 6.1 knows neither flag.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries)?,
        other => other?,
    };
    let mut known = Probe::new();
    ring.submitter().register_probe(&mut known)?;
    for code in [
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::Write::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
    ] {
        if !known.is_supported(code) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"));
        }
    }
    Ok(ring)
}

pub(crate) struct Uring {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Between those who start attempts and the ring's thread.
struct Shared {
    /// Bounded by the depth, which the caller of `start` observes.
    incoming: Mutex<VecDeque<Attempt>>,
    /// The thread waits in the kernel, or is about to; whoever clears it writes to `wake`.
    asleep: AtomicBool,
    stopping: AtomicBool,
    wake: OwnedFd,
}

impl Uring {
    pub fn new(file: Arc<File>, depth: u32) -> io::Result<Uring> {
        let shared = Arc::new(Shared {
            incoming: Mutex::default(),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?,
        });
        let (ready, made) = mpsc::sync_channel(1);
        let theirs = Arc::clone(&shared);
        // Made on the thread that uses it: the kernel holds a single issuer to that.
        let thread = spawn("gd2fs-uring", move || match Ring::new(theirs, file, depth) {
            Ok(ring) => {
                let _ = ready.send(Ok(()));
                ring.run();
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        })?;
        made.recv().map_err(io::Error::other)??;
        Ok(Uring { shared, thread: Mutex::new(Some(thread)) })
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn start(&self, attempt: Attempt) {
        self.shared.incoming.lock().push_back(attempt);
        if self.shared.asleep.swap(false, SeqCst) {
            self.shared.wake();
        }
    }

    fn stop(&self) {
        self.shared.stop();
        if let Some(thread) = self.thread.lock().take() {
            // The thread aborts the process rather than panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Uring {
    /// Lets the thread end by itself: this may be it.
    fn drop(&mut self) {
        self.shared.stop();
    }
}

impl Shared {
    fn wake(&self) {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&self.wake, &1u64.to_ne_bytes()));
        debug_assert!(written.is_ok(), "an eventfd takes 2^64 - 2 before it is full");
    }

    fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.wake();
    }
}

/// An attempt in the kernel's hands, and its vectors, which the kernel may read until it is over.
struct Place {
    attempt: Attempt,
    _vectors: Vec<libc::iovec>,
}

struct Ring {
    shared: Arc<Shared>,
    /// Kept open for the ring, which knows it as file 0.
    _file: Arc<File>,
    ring: IoUring,
    places: Vec<Option<Place>>,
    free: Vec<usize>,
    /// Filled by the read of `wake`; on the heap, so that its address stays.
    counter: Box<u64>,
    wake_armed: bool,
}

/// The kernel writes into memory of attempts under way: unwinding would free it beneath.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Ring {
    fn new(shared: Arc<Shared>, file: Arc<File>, depth: u32) -> io::Result<Ring> {
        // One entry more for the wake-up.
        let ring = ring(depth + 1)?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let depth = depth as usize;
        let (places, free) = ((0..depth).map(|_| None).collect(), (0..depth).collect());
        Ok(Ring { shared, _file: file, ring, places, free, counter: Box::new(0), wake_armed: false })
    }

    fn run(mut self) {
        let _guard = AbortOnPanic;
        loop {
            self.take_in();
            if !self.wake_armed && !self.shared.stopping.load(SeqCst) {
                self.arm_wake();
            }
            // From here on `start` wakes; what it added before is seen now.
            self.shared.asleep.store(true, SeqCst);
            if !self.shared.incoming.lock().is_empty() {
                self.shared.asleep.store(false, SeqCst);
                continue;
            }
            if !self.wake_armed && self.free.len() == self.places.len() {
                // Stopping, and nothing of ours is in the kernel, not even the wake-up's counter.
                break;
            }
            self.enter();
            self.shared.asleep.store(false, SeqCst);
            self.reap();
        }
        // A ring is taken down some time after it is closed; the file, and the hold on its device, must not wait for that.
        if let Err(error) = self.ring.submitter().unregister_files() {
            tracing::warn!("an io_uring keeps its file for a while: {error}");
        }
    }

    fn take_in(&mut self) {
        // At most one for each free place, which the depth sees to.
        let incoming = std::mem::take(&mut *self.shared.incoming.lock());
        for attempt in incoming {
            let place = self.free.pop().expect("no more attempts than the depth");
            let vectors = iovecs(attempt.memory.slices());
            let entry = entry(&attempt, &vectors).user_data(place as u64);
            self.places[place] = Some(Place { attempt, _vectors: vectors });
            self.push(entry);
        }
    }

    fn arm_wake(&mut self) {
        let counter: *mut u64 = &mut *self.counter;
        let read = opcode::Read::new(types::Fd(self.shared.wake.as_raw_fd()), counter.cast(), 8);
        self.push(read.build().user_data(WAKE));
        self.wake_armed = true;
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the entry names an attempt's memory and the vectors in its place, kept until its completion is reaped, or
        // `counter`, kept until the wake-up is.
        unsafe { self.ring.submission().push(&entry) }
            .expect("an entry for each place and one for the wake-up");
    }

    /// Hands over what was pushed and sleeps until something completes.
    fn enter(&self) {
        let Err(error) = self.ring.submit_and_wait(1) else { return };
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // The kernel is short of memory or of room for completions: reaping makes room.
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => std::thread::sleep(Duration::from_millis(1)),
            // Going on would be unsound: the kernel no longer says which memory it has done with.
            _ => panic!("io_uring_enter: {error}"),
        }
    }

    fn reap(&mut self) {
        let mut over = Vec::with_capacity(self.places.len());
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            let place = completion.user_data() as usize;
            if let Some(Place { attempt, .. }) = self.places[place].take() {
                self.free.push(place);
                let moved = completion.result();
                over.push((
                    attempt,
                    usize::try_from(moved).map_err(|_| io::Error::from_raw_os_error(-moved)),
                ));
            }
        }
        for (attempt, moved) in over {
            (attempt.done)(moved);
        }
    }
}

fn entry(attempt: &Attempt, vectors: &[libc::iovec]) -> squeue::Entry {
    let file = types::Fixed(0);
    let offset = attempt.offset;
    let flags = if attempt.kind == Kind::WriteSync { libc::RWF_DSYNC } else { 0 };
    match (attempt.kind, vectors) {
        (Kind::Sync, _) => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        (Kind::Read, [one]) => {
            opcode::Read::new(file, one.iov_base.cast(), one.iov_len as u32).offset(offset).build()
        }
        (Kind::Read, many) => {
            opcode::Readv::new(file, many.as_ptr(), many.len() as u32).offset(offset).build()
        }
        (_, [one]) => {
            let write = opcode::Write::new(file, one.iov_base.cast(), one.iov_len as u32);
            write.offset(offset).rw_flags(flags).build()
        }
        (_, many) => {
            opcode::Writev::new(file, many.as_ptr(), many.len() as u32).offset(offset).rw_flags(flags).build()
        }
    }
}
