//! What the logs held when they were opened becomes columns of cold chunks.

use std::collections::HashMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use gd2fs_log::{ColumnEntry, Recovered};
use tokio::task::JoinSet;

use crate::chunk::Chunk;
use crate::column::{Column, State};
use crate::columns::{Name, Slot};
use crate::ends::End;
use crate::geometry::Geometry;
use crate::store::{Store, bury};
use crate::tier::Record;

/// Columns whose former records are being forgotten: each has at most 64 notes under way, of the 4,096 that a log lets wait.
const FORGETTING_MAX: usize = 32;
/// A log that was full when its node ended frees segments first; the start waits a second for it.
const FORGETTING_ATTEMPTS: u32 = 10;
const FORGETTING_PAUSE: Duration = Duration::from_millis(100);

/// Takes over what each log of the store has found.
pub(crate) fn recover(store: &Store, found: Vec<Recovered>) {
    let shared = &store.shared;
    let newest = found.iter().map(|recovered| recovered.version_max).max().unwrap_or(0);
    shared.version.store(newest, Relaxed);
    let counters = &shared.counters;
    for log in &found {
        counters.log_records_damaged.fetch_add(log.damaged_records, Relaxed);
        counters.log_records_dropped.fetch_add(log.dropped_records, Relaxed);
        counters.logs_given_up.fetch_add(u64::from(log.given_up), Relaxed);
    }
    let mut states: HashMap<Name, State> = HashMap::new();
    let mut shapes: HashMap<Name, Geometry> = HashMap::new();
    for entry in found.iter().flat_map(|recovered| &recovered.columns) {
        let ColumnEntry { file, column, version, state } = *entry;
        let Ok(geometry) = Geometry::new(column, state.width, state.stripe_unit) else {
            tracing::error!(
                "file {file:032x} column {column}: the log has a shape that cannot be: {state:?}"
            );
            continue;
        };
        let known = states.entry((file, column)).or_default();
        if version >= known.version {
            known.epoch = state.epoch.max(shared.data.epochs.highest(file, column));
            (known.born, known.grant, known.sealed) = (state.born, state.grant, state.sealed);
            (known.version, known.logged) = (version, true);
            known.end = if state.exact { End::Kept } else { End::Placed };
            // What a grant wrote beyond the seal counts for nothing, so that nobody misses it.
            known.lost_end = if state.grant == 0 { state.end } else { 0 };
            shapes.insert((file, column), geometry);
        }
    }
    for (tier, recovered) in shared.tiers.iter().zip(found) {
        for entry in recovered.chunks {
            let key = entry.key;
            let version = entry.version;
            let (tier, place) = (Arc::clone(tier), entry.place);
            let held = shared.tenants.nobody.log.hold(u64::from(place.bytes));
            let record = Record { tier, place, version, changed: version, runs: None, held };
            let chunk = Chunk::cold(entry.runs.into(), Some(record));
            // Without a state of its column a record means nothing: dropping it gives its space back.
            let Some(state) = states.get_mut(&(key.file, key.column)) else { continue };
            match state.chunks.entry(key.chunk) {
                Entry::Vacant(entry) => drop(entry.insert(chunk)),
                Entry::Occupied(mut entry) => {
                    let former = match entry.get().changed < version {
                        true => entry.insert(chunk).changed,
                        false => version,
                    };
                    state.owed.forget_former(key.chunk, former);
                }
            }
        }
    }
    for (name, state) in states {
        let Some(geometry) = shapes.get(&name) else { continue };
        let mut shard = store.columns.lock(name);
        if matches!(shard.get(&name), Some(Slot::Deleted)) {
            drop(shard);
            bury(shared, name);
            continue;
        }
        let column = Arc::new(Column::with(name.0, *geometry, Arc::clone(shared), state));
        column.list_log(&mut column.state.lock());
        shard.insert(name, Slot::Live(column));
        shared.changed.note(name);
    }
}

/// Where several logs had a record of a chunk, all but the newest are void for good before anything is served. A log that cannot
/// be told leaves it owed: until it is, no flush of that column succeeds.
pub(crate) async fn forget_former(store: &Store) {
    for _ in 0..FORGETTING_ATTEMPTS {
        let mut columns = store.columns.all();
        columns.retain(|column| column.state.lock().owed.has_former());
        if columns.is_empty() {
            return;
        }
        let (mut settling, mut failed) = (JoinSet::new(), None);
        for column in columns {
            if settling.len() == FORGETTING_MAX
                && let Some(Ok(Err(failure))) = settling.join_next().await
            {
                failed = Some(failure);
            }
            settling.spawn(async move { column.settle().await });
        }
        while let Some(ended) = settling.join_next().await {
            failed = ended.unwrap_or(Ok(())).err().or(failed);
        }
        let Some(failure) = failed else { return };
        tracing::warn!("a log still has bytes that another log has newer: {}", failure.message);
        tokio::time::sleep(FORGETTING_PAUSE).await;
    }
}
