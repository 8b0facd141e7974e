//! What a log asks of the store.

use std::sync::Arc;

use gd2fs_log::{ColumnEntry, Entries, Key, LogError, Owner, Place};
use tokio::runtime::Handle;

use crate::columns::Columns;
use crate::tier::Tier;

/// The store towards one of its logs.
pub(crate) struct TierOwner {
    pub tier: Arc<Tier>,
    /// The node's other logs.
    pub others: Vec<Arc<Tier>>,
    pub columns: Arc<Columns>,
    pub runtime: Handle,
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

    fn live(&self, entries: &mut dyn Entries) -> Result<(), LogError> {
        let mut moved = false;
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
            moved |= state.owed.has_former();
            for (index, chunk) in &state.chunks {
                if let Some(record) =
                    chunk.record.as_ref().filter(|record| Arc::ptr_eq(&record.tier, &self.tier))
                {
                    let runs = record.runs.as_deref().unwrap_or(chunk.runs().as_slice());
                    entries.chunk(column.key(*index), record.version, runs, record.place);
                }
            }
        }
        // A record may be missing above because its chunk has a newer one in another log. It is dead once the checkpoint counts,
        // and what replaced it must be durable by then; until it is, the former one is what a flush has promised. Where no chunk
        // is on such a way, a log that has failed is nothing to this one.
        for other in &self.others {
            if let Err(error) = self.runtime.block_on(other.log.sync()) {
                let path = other.path.display();
                if moved {
                    let reason = format!("chunks are moving to {path}, which keeps nothing: {error}");
                    return Err(LogError::PutOff(reason));
                }
                tracing::warn!("{path}: {error}");
            }
        }
        Ok(())
    }
}
