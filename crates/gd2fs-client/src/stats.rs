//! What a client has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Debug, Default)]
        pub struct Stats { $($(#[$doc])* pub(crate) $name: AtomicU64),+ }

        impl Stats {
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed))),+]
            }
        }
    };
}

counters! {
    bytes_read,
    bytes_written,
    /// Of both: what nodes moved straight to or from library memory.
    bytes_direct,
    /// Of both: what went through a staging ring.
    bytes_staged,
    requests,
    /// Requests that ended with another code than OK.
    failures,
    /// Parts that were tried again.
    retries,
    /// Parts whose bytes did not match their sums.
    checksum_failures,
    connections_opened,
    layouts_refreshed,
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
