//! Threads that begin at the same moment, and the time between the first start and the last end.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Runs each of `works` in a thread of its own. The threads exist before the clock starts: what is measured is the work.
pub fn together<T: Send>(works: Vec<impl FnOnce() -> T + Send>) -> (Duration, Vec<T>) {
    let barrier = Barrier::new(works.len());
    let timed = |work: Box<dyn FnOnce() -> T + Send + '_>| {
        barrier.wait();
        let start = Instant::now();
        let result = work();
        (start, Instant::now(), result)
    };
    let timed = &timed;
    let done: Vec<(Instant, Instant, T)> = thread::scope(|scope| {
        let threads: Vec<_> = works
            .into_iter()
            .map(|work| {
                let work: Box<dyn FnOnce() -> T + Send> = Box::new(work);
                scope.spawn(move || timed(work))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    // Each thread reads the clock itself: the caller may be woken long after the work began.
    let start = done.iter().map(|(start, _, _)| *start).min();
    let end = done.iter().map(|(_, end, _)| *end).max();
    let seconds = end.zip(start).map_or(Duration::ZERO, |(end, start)| end - start);
    (seconds, done.into_iter().map(|(_, _, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_from_the_first_start_to_the_last_end() {
        let works: Vec<_> = [1u64, 30, 5]
            .into_iter()
            .map(|ms| {
                move || {
                    thread::sleep(Duration::from_millis(ms));
                    ms
                }
            })
            .collect();
        let (time, results) = together(works);
        assert_eq!(results, [1, 30, 5]);
        assert!(time >= Duration::from_millis(30));
    }
}
