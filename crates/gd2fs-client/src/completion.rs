//! Results on their way to the caller.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gd2fs_wire::code::{Code, Failure};
use parking_lot::{Condvar, Mutex};

/// How a request ended. From here on nothing touches its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    pub request: u64,
    pub code: Code,
    /// Bytes moved; 0 unless the code is OK.
    pub bytes: u64,
    pub message: String,
}

impl Completion {
    pub fn new(request: u64, result: Result<u64, Failure>) -> Completion {
        match result {
            Ok(bytes) => Completion { request, code: Code::Ok, bytes, message: String::new() },
            Err(failure) => Completion { request, code: failure.code, bytes: 0, message: failure.message },
        }
    }
}

/// A queue with an eventfd that is readable exactly while something waits. Bounded by the number of requests a client admits.
pub struct Completions {
    queue: Mutex<VecDeque<Completion>>,
    arrived: Condvar,
    event: OwnedFd,
    /// Somebody polls the descriptor: a system call for it now and then is not in vain.
    polled: AtomicBool,
    /// Something was added, and nobody was told.
    unannounced: AtomicBool,
}

impl Completions {
    pub fn new() -> io::Result<Completions> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let (polled, unannounced) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Completions { queue: Mutex::default(), arrived: Condvar::new(), event, polled, unannounced })
    }

    pub fn fileno(&self) -> RawFd {
        let queue = self.queue.lock();
        if !self.polled.swap(true, Ordering::Relaxed) && !queue.is_empty() {
            self.signal(1);
        }
        self.event.as_raw_fd()
    }

    pub fn len(&self) -> usize {
        self.queue.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&self, completion: Completion) {
        self.add(completion);
        self.announce();
    }

    /// As `push`, but whoever waits sleeps on until `announce`: waking it once for many costs less.
    pub fn add(&self, completion: Completion) {
        self.queue.lock().push_back(completion);
        self.unannounced.store(true, Ordering::Release);
    }

    /// Wakes whoever waits, if something came since the last time.
    pub fn announce(&self) {
        if !self.unannounced.load(Ordering::Acquire) {
            return;
        }
        let queue = self.queue.lock();
        self.unannounced.store(false, Ordering::Release);
        if !queue.is_empty() {
            self.signal(1);
        }
        self.arrived.notify_all();
    }

    /// Up to `max` completions; waits for the first at most `timeout`.
    pub fn reap(&self, max: usize, timeout: Duration) -> Vec<Completion> {
        let until = Instant::now() + timeout;
        let mut queue = self.queue.lock();
        while queue.is_empty() && !self.arrived.wait_until(&mut queue, until).timed_out() {}
        let take = max.min(queue.len());
        let taken: Vec<Completion> = queue.drain(..take).collect();
        if !taken.is_empty() && queue.is_empty() {
            self.signal(0);
        }
        taken
    }

    /// Makes the eventfd readable (1) or not (0). Called under the queue's lock, so that both always agree.
    fn signal(&self, value: u64) {
        if !self.polled.load(Ordering::Relaxed) {
            return;
        }
        let mut bytes = value.to_ne_bytes();
        let fd = self.event.as_raw_fd();
        // SAFETY: the buffer holds the 8 bytes that an eventfd moves; it does not block, and a failure (already so) is fine.
        unsafe {
            if value > 0 {
                libc::write(fd, bytes.as_ptr().cast(), bytes.len());
            } else {
                libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(completions: &Completions) -> bool {
        let mut poll = libc::pollfd { fd: completions.fileno(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    #[test]
    fn the_descriptor_is_readable_exactly_while_something_waits() {
        let completions = Completions::new().unwrap();
        assert!(!readable(&completions));
        for request in 0..3 {
            completions.push(Completion::new(request, Ok(request)));
        }
        assert_eq!(completions.reap(2, Duration::ZERO).len(), 2);
        assert!(readable(&completions));
        assert_eq!(completions.reap(2, Duration::ZERO), [Completion::new(2, Ok(2))]);
        assert!(!readable(&completions));
        assert!(completions.reap(1, Duration::from_millis(1)).is_empty());
    }

    #[test]
    fn reap_wakes_when_one_arrives() {
        let completions = Completions::new().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| completions.reap(9, Duration::from_secs(5)));
            std::thread::sleep(Duration::from_millis(10));
            completions.push(Completion::new(1, Err(Failure::new(Code::Hole, "h"))));
            assert_eq!(waiter.join().unwrap()[0].code, Code::Hole);
        });
    }
}
