//! What a log asks of the store.

use std::sync::Arc;

use gd2fs_log::{ColumnEntry, Entries, Key, Owner, Place};

use crate::columns::Columns;
use crate::tier::Tier;

/// The store towards one of its logs.
pub(crate) struct TierOwner {
    pub tier: Arc<Tier>,
    pub columns: Arc<Columns>,
}

impl Owner for TierOwner {
    fn appended(&self, key: Key, version: u64, place: Place) -> bool {
        let column = self.columns.get((key.file, key.column));
        column.is_some_and(|column| column.appended(&self.tier, key.chunk, version, place))
    }

    fn moved(&self, key: Key, version: u64, from: Place, to: Place) -> bool {
        let column = self.columns.get((key.file, key.column));
        column.is_some_and(|column| column.moved(key.chunk, version, from, to))
    }

    fn damaged(&self, key: Key, version: u64, _place: Place) {
        if let Some(column) = self.columns.get((key.file, key.column)) {
            column.damaged(key.chunk, version);
        }
    }

    fn live(&self, entries: &mut dyn Entries) {
        for column in self.columns.all() {
            let state = column.state.lock();
            if state.deleted || !state.logged {
                continue;
            }
            entries.column(&ColumnEntry {
                file: column.file,
                column: column.geometry.column,
                version: state.version,
                state: column.log_state(&state),
            });
            for (index, chunk) in &state.chunks {
                if let Some(record) =
                    chunk.record.as_ref().filter(|record| Arc::ptr_eq(&record.tier, &self.tier))
                {
                    let runs = record.runs.as_deref().unwrap_or(chunk.runs().as_slice());
                    entries.chunk(column.key(*index), record.version, runs, record.place);
                }
            }
        }
    }
}
