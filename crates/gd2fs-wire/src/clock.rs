//! What time it is for everything that expires.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use crate::guard::{Guard, stands};

/// The cluster's time: what control said last, and what has passed since then.
///
/// The machine's own clock is looked at once, for the time before control has said anything. If it is set while a node runs, or
/// is wrong from the start, no capability expires early and none that has expired is good again.
#[derive(Debug)]
pub struct Clock {
    origin: Instant,
    /// The cluster's time at `origin`, in unix milliseconds.
    at_origin_ms: AtomicI64,
    /// What control said last, in unix seconds; 0: nothing yet.
    heard_s: AtomicU64,
}

impl Default for Clock {
    fn default() -> Clock {
        let now_ms = machine().as_millis() as i64;
        Clock { origin: Instant::now(), at_origin_ms: now_ms.into(), heard_s: 0.into() }
    }
}

impl Clock {
    /// Control says that it is `now_s`, in unix seconds.
    pub fn hear(&self, now_s: f64) {
        // A cast saturates; what is not a time at all is none.
        let now_ms = (now_s.max(0.0) * 1e3) as i64;
        let passed_ms = self.origin.elapsed().as_millis() as i64;
        self.at_origin_ms.store(now_ms.saturating_sub(passed_ms), Relaxed);
        self.heard_s.store((now_ms / 1000) as u64, Relaxed);
    }

    /// Unix seconds. Goes on while control is away, and may go back a little when it has returned.
    pub fn now(&self) -> u64 {
        if !stands(Guard::Clock) {
            return machine().as_secs();
        }
        let passed_ms = self.origin.elapsed().as_millis() as i64;
        self.at_origin_ms.load(Relaxed).saturating_add(passed_ms).max(0) as u64 / 1000
    }

    /// The time that has passed for control, too, whose time never goes back: what was over then stays over. Unix seconds. With
    /// nobody to hear from it is `now`.
    pub fn certain(&self) -> u64 {
        match self.heard_s.load(Relaxed) {
            0 => self.now(),
            heard => heard,
        }
    }
}

fn machine() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    jumped(now)
}

#[cfg(not(any(test, feature = "fault-hooks")))]
#[inline(always)]
const fn jumped(now: Duration) -> Duration {
    now
}

/// Only in a build for tests: the machine's clock as if it had been set by the seconds that stand in the file `GD2FS_CLOCK_FILE`,
/// which may change at any time.
///
/// # Panics
/// If it holds no whole number: a mistyped one would prove nothing.
#[cfg(all(feature = "fault-hooks", not(test)))]
fn jumped(now: Duration) -> Duration {
    static FILE: std::sync::OnceLock<Option<std::ffi::OsString>> = std::sync::OnceLock::new();
    let Some(file) = FILE.get_or_init(|| std::env::var_os("GD2FS_CLOCK_FILE")) else { return now };
    let text = std::fs::read_to_string(file).expect("GD2FS_CLOCK_FILE must be readable");
    let seconds: i64 = text.trim().parse().expect("GD2FS_CLOCK_FILE must hold whole seconds");
    by(now, seconds)
}

#[cfg(test)]
fn jumped(now: Duration) -> Duration {
    by(now, tests::JUMP_S.get())
}

#[cfg(any(test, feature = "fault-hooks"))]
fn by(now: Duration, seconds: i64) -> Duration {
    let far = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { now.saturating_sub(far) } else { now + far }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const DAY_S: i64 = 86_400;

    thread_local! {
        pub(super) static JUMP_S: Cell<i64> = const { Cell::new(0) };
    }

    #[test]
    fn a_clock_that_is_set_moves_nothing() {
        let clock = Clock::default();
        let before = clock.now();
        for jump in [3600, -3600, -DAY_S, DAY_S] {
            JUMP_S.set(jump);
            assert!((before..before + 60).contains(&clock.now()), "{jump}");
        }
    }

    #[test]
    fn control_says_what_time_it_is() {
        for jump in [0, -DAY_S, DAY_S] {
            JUMP_S.set(jump);
            let clock = Clock::default();
            assert!(machine().as_secs().abs_diff(clock.certain()) < 60, "nobody said anything");
            clock.hear(1_800_000_000.9);
            assert!((1_800_000_000..1_800_000_060).contains(&clock.now()));
            assert_eq!(clock.certain(), 1_800_000_000);
            clock.hear(1_800_003_600.0);
            assert!((1_800_003_600..1_800_003_660).contains(&clock.now()), "{jump}");
        }
    }

    #[test]
    fn only_what_control_said_is_certain() {
        let clock = Clock { origin: Instant::now() - Duration::from_secs(7200), ..Clock::default() };
        clock.hear(1_800_000_000.0);
        let later = Clock { origin: clock.origin - Duration::from_secs(7200), ..clock };
        assert!((1_800_007_200..1_800_007_260).contains(&later.now()));
        assert_eq!(later.certain(), 1_800_000_000);
        for nonsense in [f64::NAN, f64::NEG_INFINITY, -1.0, f64::INFINITY] {
            later.hear(nonsense);
            later.now();
        }
    }
}
