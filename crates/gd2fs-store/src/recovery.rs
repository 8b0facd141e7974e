//! What the logs held when they were opened becomes columns of cold chunks.

use std::collections::HashMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gd2fs_log::{ColumnEntry, Recovered};
use tokio::task::JoinSet;

use crate::chunk::Chunk;
use crate::column::{Column, State};
use crate::columns::{Name, Slot};
use crate::ends::End;
use crate::geometry::Geometry;
use crate::store::{Store, bury};
use crate::tier::Record;

/// Columns whose void records are being forgotten: each has at most 64 notes under way, of the 4,096 that a log lets wait.
const SETTLING_MAX: usize = 32;
/// A log that was full when its node ended frees segments first; the start waits a second for it.
const SETTLING_ATTEMPTS: u32 = 10;
const SETTLING_PAUSE: Duration = Duration::from_millis(100);
/// Each column that goes is a sync: at 1 ms, as many as files of 4 MiB are in the surplus of a log of 100 GB.
const SURPLUS_TIME_MAX: Duration = Duration::from_secs(5);

/// Takes over what each log of the store has found. `all_there`: the logs of the last life are among them.
pub(crate) fn recover(store: &Store, found: Vec<Recovered>, all_there: bool) {
    let shared = &store.shared;
    let in_order = all_there && shared.data.stopped_in_order() && found.iter().all(is_complete);
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
            known.reached = if state.grant == 0 { state.end } else { 0 };
            known.lost_end = if in_order && state.whole { 0 } else { known.reached };
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

/// Whether a log has all that the checkpoint of a stop in order said, and what came after it. One that is new has nothing to say.
fn is_complete(log: &Recovered) -> bool {
    let missing = log.damaged_records + log.dropped_records;
    missing == 0 && !log.given_up && (log.from_checkpoint || log.columns.is_empty())
}

/// What a life that was killed has left beyond the share of a log goes before anything is served or told, rather than all at once
/// with the first write. What does not go in the time goes then.
pub(crate) async fn evict_surplus(store: &Store) {
    let (shared, began) = (&store.shared, Instant::now());
    for tier in &shared.tiers {
        while tier.surplus().is_some() && began.elapsed() < SURPLUS_TIME_MAX {
            // The least that is given up at once, so that the clock is looked at in between.
            match shared.evict_log(tier, 1, &shared.tenants.nobody).await {
                Ok(freed) if freed > 0 => {}
                Ok(_) => break,
                Err(failure) => {
                    // The notes are owed, see `settle_all`.
                    tracing::warn!("{}: {failure}", tier.path.display());
                    tokio::time::sleep(SETTLING_PAUSE).await;
                }
            }
        }
    }
}

/// What was given up is void for good before anything is served, and where several logs had a record of a chunk, so are all but the
/// newest. A log that cannot be told leaves it owed: until it is, no flush of that column succeeds.
pub(crate) async fn settle_all(store: &Store) {
    for _ in 0..SETTLING_ATTEMPTS {
        let mut columns = store.columns.all();
        columns.retain(|column| !column.state.lock().owed.is_empty());
        if columns.is_empty() {
            return;
        }
        let (mut settling, mut failed) = (JoinSet::new(), None);
        for column in columns {
            if settling.len() == SETTLING_MAX
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
        tracing::warn!("a log still has bytes that are void: {}", failure.message);
        tokio::time::sleep(SETTLING_PAUSE).await;
    }
}
