//! The columns that control has to hear of, in the order in which they changed.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

use crate::columns::Name;

/// One entry a column at most, so that it is as bounded as the columns are.
#[derive(Default)]
pub(crate) struct Changed(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    /// Number of the last change.
    last: u64,
    order: BTreeMap<u64, Name>,
    latest: HashMap<Name, u64>,
}

impl Changed {
    /// The valid prefix of a column has changed.
    pub fn note(&self, name: Name) {
        let mut queue = self.0.lock();
        queue.last += 1;
        let number = queue.last;
        if let Some(former) = queue.latest.insert(name, number) {
            queue.order.remove(&former);
        }
        queue.order.insert(number, name);
    }

    /// The `limit` columns that changed first, with the number that stands for these changes.
    pub fn first(&self, limit: usize) -> (u64, Vec<Name>) {
        let queue = self.0.lock();
        let first: Vec<(u64, Name)> =
            queue.order.iter().take(limit).map(|(number, name)| (*number, *name)).collect();
        let sequence = first.last().map_or(queue.last, |(number, _)| *number);
        // Nothing was asked for: nothing may count as told.
        let sequence = if limit == 0 { 0 } else { sequence };
        (sequence, first.into_iter().map(|(_, name)| name).collect())
    }

    /// Control knows all changes up to this one; what has changed again since stays.
    pub fn told(&self, sequence: u64) {
        let mut queue = self.0.lock();
        while let Some((number, name)) = queue.order.first_key_value().map(|(number, name)| (*number, *name))
            && number <= sequence
        {
            queue.order.remove(&number);
            queue.latest.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_told_until_it_is_known_and_again_when_it_changes() {
        let changed = Changed::default();
        assert_eq!(changed.first(9), (0, vec![]));
        for column in [0, 1, 2, 0] {
            changed.note((7, column));
        }
        assert_eq!(changed.first(2), (3, vec![(7, 1), (7, 2)]));
        assert_eq!(changed.first(2), (3, vec![(7, 1), (7, 2)]), "nobody has said that it is known");
        changed.note((7, 1));
        changed.told(3);
        assert_eq!(changed.first(9), (5, vec![(7, 0), (7, 1)]), "what changed meanwhile stays");
        assert_eq!(changed.first(0), (0, vec![]));
        changed.told(5);
        changed.told(1);
        assert_eq!(changed.first(9), (5, vec![]));
    }
}
