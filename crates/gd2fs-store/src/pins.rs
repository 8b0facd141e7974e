//! Ranges that are not evicted because a plan counts on them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Instant;

use parking_lot::Mutex;

use crate::columns::Name;
use crate::ledger::Held;

/// Ranges pinned at once: far more than the plans of one node under way together have; 16 MiB of table.
pub(crate) const RANGES_MAX: usize = 65_536;

/// What is pinned, and until when. Every method takes the time, so that whoever looks at many chunks asks the clock once.
#[derive(Default)]
pub(crate) struct Pins(Mutex<Table>);

/// A range of one column under one pin: the same one again only prolongs it, so that PIN may be repeated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: Name,
    pin: u128,
    /// Chunks, the last one excluded.
    first: u64,
    end: u64,
}

#[derive(Default)]
struct Table {
    /// Each with what it counts for its tenant.
    until: BTreeMap<Key, (Instant, Held)>,
    /// Each with the number of its pinning.
    by_pin: BTreeMap<(u128, Key), u64>,
    pinned: u64,
    by_end: BTreeSet<(Instant, Key)>,
}

impl Pins {
    /// Pins `chunks` of a column until then, which counts as `held`; false, and nothing is pinned: there are `RANGES_MAX` already.
    pub fn pin(
        &self,
        held: Held,
        pin: u128,
        name: Name,
        chunks: Range<u64>,
        until: Instant,
        now: Instant,
    ) -> bool {
        let key = Key { name, pin, first: chunks.start, end: chunks.end };
        let mut table = self.0.lock();
        table.expire(now);
        let (until, held) = match table.until.remove(&key) {
            Some((former, held)) => {
                table.by_end.remove(&(former, key));
                (former.max(until), held)
            }
            None if table.until.len() >= RANGES_MAX => return false,
            None => (until, held),
        };
        table.until.insert(key, (until, held));
        table.pinned += 1;
        let number = table.pinned;
        table.by_pin.entry((pin, key)).or_insert(number);
        table.by_end.insert((until, key));
        true
    }

    /// Lets go what was pinned under `pin`; of each range its column, in the order in which they were pinned.
    pub fn unpin(&self, pin: u128, now: Instant) -> Vec<Name> {
        let mut table = self.0.lock();
        table.expire(now);
        let first = Key { name: (0, 0), pin, first: 0, end: 0 };
        let under = table.by_pin.range((pin, first)..).take_while(|((other, _), _)| *other == pin);
        let mut keys: Vec<(u64, Key)> = under.map(|((_, key), number)| (*number, *key)).collect();
        keys.sort_unstable();
        keys.iter().for_each(|(_, key)| table.remove(*key));
        keys.into_iter().map(|(_, key)| key.name).collect()
    }

    /// Whether any of `chunks` of a column is pinned.
    pub fn is_pinned(&self, file: u128, column: u32, chunks: Range<u64>, now: Instant) -> bool {
        let name = (file, column);
        let table = self.0.lock();
        let from = Key { name, pin: 0, first: 0, end: 0 };
        let mut of_column = table.until.range(from..).take_while(|(key, _)| key.name == name);
        of_column.any(|(key, (until, _))| *until > now && key.first < chunks.end && chunks.start < key.end)
    }

    /// Forgets what is over; how many ranges are left. Pinning and unpinning forget too: this is for whoever counts.
    pub fn expire(&self, now: Instant) -> usize {
        let mut table = self.0.lock();
        table.expire(now);
        table.until.len()
    }
}

impl Table {
    fn expire(&mut self, now: Instant) {
        while let Some((_, key)) = self.by_end.first().filter(|(until, _)| *until <= now).copied() {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: Key) {
        if let Some((until, _)) = self.until.remove(&key) {
            self.by_end.remove(&(until, key));
            self.by_pin.remove(&(key.pin, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    use std::sync::Arc;

    use crate::ledger::Ledger;

    const FILE: u128 = 7;
    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn what_is_pinned_stays_until_it_is_let_go_or_over() {
        let (pins, now) = (Pins::default(), Instant::now());
        let tenant = Arc::new(Ledger::new(u64::MAX));
        assert!(pins.pin(tenant.hold(1), 1, (FILE, 0), 2..5, now + TTL, now));
        assert!(pins.pin(tenant.hold(1), 1, (FILE, 1), 0..1, now + TTL, now));
        assert!(pins.pin(tenant.hold(1), 2, (FILE, 0), 4..9, now + 2 * TTL, now));
        let pinned = |column, chunks, at| pins.is_pinned(FILE, column, chunks, at);
        for (column, chunks, expected) in
            [(0, 1..2, false), (0, 1..3, true), (0, 8..9, true), (0, 9..12, false)].into_iter().chain([
                (1, 0..9, true),
                (1, 1..9, false),
                (2, 0..9, false),
            ])
        {
            assert_eq!(pinned(column, chunks.clone(), now), expected, "{column} {chunks:?}");
        }
        assert!(!pins.is_pinned(FILE + 1, 0, 0..9, now));
        assert_eq!(pins.unpin(1, now), [(FILE, 0), (FILE, 1)]);
        assert!(pins.unpin(1, now).is_empty() && pins.unpin(9, now).is_empty());
        assert!(!pinned(0, 2..4, now) && pinned(0, 4..5, now));
        assert!(!pinned(0, 4..5, now + 2 * TTL), "over, also before anybody has forgotten it");
        assert_eq!(pins.expire(now + 2 * TTL), 0);
    }

    #[test]
    fn the_same_range_again_only_prolongs_it() {
        let (pins, now) = (Pins::default(), Instant::now());
        let tenant = Arc::new(Ledger::new(u64::MAX));
        for until in [now + TTL, now + 3 * TTL, now + 2 * TTL] {
            assert!(pins.pin(tenant.hold(1), 1, (FILE, 0), 0..1, until, now));
        }
        assert_eq!((pins.expire(now), tenant.held()), (1, 1));
        assert_eq!(pins.expire(now + 2 * TTL), 1, "the longest counts");
        assert_eq!((pins.expire(now + 3 * TTL), tenant.held()), (0, 0));
    }

    #[test]
    fn their_number_is_bounded_and_what_is_over_makes_room() {
        let (pins, now) = (Pins::default(), Instant::now());
        let tenant = Arc::new(Ledger::new(u64::MAX));
        for index in 0..RANGES_MAX as u64 {
            assert!(pins.pin(
                tenant.hold(1),
                u128::from(index % 3),
                (FILE, 0),
                index..index + 1,
                now + TTL,
                now
            ));
        }
        assert!(!pins.pin(tenant.hold(1), 9, (FILE, 1), 0..1, now + TTL, now));
        assert!(!pins.is_pinned(FILE, 1, 0..1, now), "nothing is pinned then");
        assert!(
            pins.pin(tenant.hold(1), 0, (FILE, 0), 0..1, now + TTL, now),
            "a range that is pinned already needs no room"
        );
        assert_eq!(pins.unpin(2, now).len(), RANGES_MAX / 3);
        assert!(pins.pin(tenant.hold(1), 9, (FILE, 1), 0..1, now + 2 * TTL, now));
        assert!(pins.pin(tenant.hold(1), 9, (FILE, 1), 1..2, now + 2 * TTL, now + TTL));
        assert_eq!(pins.expire(now + TTL), 2);
    }
}
