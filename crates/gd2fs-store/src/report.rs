//! Which columns control must hear of: all that a restart found, and those of which something went.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

use crate::columns::Name;

/// Each column once, at its latest change; so it is bounded by the columns.
#[derive(Default)]
pub(crate) struct Reports(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    last: u64,
    by_sequence: BTreeMap<u64, Name>,
    by_name: HashMap<Name, u64>,
}

impl Reports {
    pub fn add(&self, name: Name) {
        let mut queue = self.0.lock();
        queue.last += 1;
        let sequence = queue.last;
        if let Some(former) = queue.by_name.insert(name, sequence) {
            queue.by_sequence.remove(&former);
        }
        queue.by_sequence.insert(sequence, name);
    }

    /// The oldest, and the sequence that answers for them.
    pub fn first(&self, limit: usize) -> (u64, Vec<Name>) {
        let queue = self.0.lock();
        let first: Vec<_> = queue.by_sequence.iter().take(limit).map(|(at, name)| (*at, *name)).collect();
        (first.last().map_or(0, |(at, _)| *at), first.into_iter().map(|(_, name)| name).collect())
    }

    /// Everything up to this sequence was heard, unless it has changed since.
    pub fn heard(&self, sequence: u64) {
        let mut queue = self.0.lock();
        let later = queue.by_sequence.split_off(&(sequence + 1));
        let heard = std::mem::replace(&mut queue.by_sequence, later);
        for name in heard.values() {
            queue.by_name.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_during_the_report_is_reported_again() {
        let reports = Reports::default();
        (1..=3).for_each(|file| reports.add((file, 0)));
        let (sequence, names) = reports.first(2);
        assert_eq!(names, [(1, 0), (2, 0)]);
        reports.add((1, 0));
        reports.heard(sequence);
        assert_eq!(reports.first(9).1, [(3, 0), (1, 0)]);
        reports.heard(reports.first(9).0);
        assert_eq!(reports.first(9).1, []);
    }
}
