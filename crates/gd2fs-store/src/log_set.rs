//! Which logs belong to a data directory, and opening all of them.
//!
//! A log that was absent while its node served holds versions that were replaced since, and would bring them back. So the data
//! directory names, by the ids of their devices, the logs of the last life that served; another log that holds anything is
//! refused. Where a log lies, and in which order they are configured, says nothing.

use std::path::PathBuf;
use std::sync::Arc;

use gd2fs_device::Device;
use gd2fs_log::{Identity, Log, LogError, Options, Recovered};

use crate::data_dir::DataDir;
use crate::geometry::STRIPE_UNIT_MAX;
use crate::tier::{LogDevice, STRIPE_UNIT_DEFAULT, Tier, TierError, Tiers};

/// A log has room for so many of its largest records, so that reclaim has something to choose from.
const RECORDS_MIN: u64 = 32;
/// And for so many of those above the default stripe unit: segments are made for the largest, and what is kept free costs the
/// chunks of usual size as much as those.
const LARGE_RECORDS_MIN: u64 = 256;
const RECORD_BYTES_MIN: u64 = 64 << 10;

/// A configured log that was looked at.
enum Looked<'a> {
    /// There is nothing yet.
    Vacant(&'a LogDevice),
    There {
        wanted: &'a LogDevice,
        device: Arc<Device>,
        identity: Option<Identity>,
    },
}

/// Opens the logs of a node, and tells whether those of its last life are among them. From here on `data` belongs to them and they
/// to it.
///
/// # Errors
/// Everything about what exists is refused before anything is changed.
pub(crate) async fn open_all(
    tiers: &Tiers,
    data: &DataDir,
) -> Result<(Vec<(Arc<Tier>, Recovered)>, bool), TierError> {
    tiers.check_places(data.path())?;
    let mut all = Vec::with_capacity(tiers.logs.len());
    for wanted in &tiers.logs {
        all.push(look(wanted, tiers, data).await?);
    }
    refuse_copies(&all)?;
    refuse_substitutes(&all, data)?;
    let (mut opened, mut ids) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
    for looked in all {
        let (tier, recovered, id) = open(looked, tiers, data).await?;
        opened.push((tier, recovered));
        ids.push(id);
    }
    let mut all_there = true;
    for absent in data.logs().iter().filter(|id| !ids.contains(id)) {
        all_there = false;
        tracing::warn!(
            "node.logs: the log {absent} of the node's last life is not named any more. What it held is lost (its clients see LOST: \
             tokens are computed again, files have to be written again), from now on also if it comes back. If that was not meant, \
             it is too late for this log; wipe it (remove the file; of a block device zero the first MiB) before you name it again"
        );
    }
    data.keep_logs(&ids)?;
    Ok((opened, all_there))
}

async fn look<'a>(wanted: &'a LogDevice, tiers: &Tiers, data: &DataDir) -> Result<Looked<'a>, TierError> {
    let path = &wanted.path;
    if wanted.bytes > 0 && Device::is_vacant(path)? {
        return Ok(Looked::Vacant(wanted));
    }
    let device = Arc::new(open_device(wanted)?);
    let identity = gd2fs_log::identify(&device, &options(tiers, &device)).await.map_err(of(path))?;
    check_bytes(wanted, &device)?;
    if let Some(Identity { id, used: true }) = identity
        && !data.logs().contains(&LogId(id))
    {
        return Err(TierError::Stranger { path: path.clone(), data_dir: data.path().into() });
    }
    Ok(Looked::There { wanted, device, identity })
}

/// A copy has the same id, and each of the two would be taken for the other.
fn refuse_copies(all: &[Looked]) -> Result<(), TierError> {
    let ids = all.iter().filter_map(|looked| match looked {
        Looked::There { wanted, identity: Some(identity), .. } => Some((identity.id, &wanted.path)),
        _ => None,
    });
    let mut seen = std::collections::HashMap::new();
    for (id, path) in ids {
        if let Some(original) = seen.insert(id, path) {
            return Err(TierError::Copy { path: path.clone(), original: original.clone() });
        }
    }
    Ok(())
}

/// A log that is absent, while there is a place where one is still to be made, most likely lies there: on a drive that is not
/// mounted. To make a new one would let the absent one miss a life.
fn refuse_substitutes(all: &[Looked], data: &DataDir) -> Result<(), TierError> {
    let listed = |identity: &Identity| data.logs().contains(&LogId(identity.id));
    let mut absent = data.logs().to_vec();
    let mut blank = None;
    for looked in all {
        match looked {
            Looked::There { identity: Some(identity), .. } if listed(identity) => {
                absent.retain(|id| id.0 != identity.id);
            }
            Looked::There { wanted, .. } | Looked::Vacant(wanted) => blank = blank.or(Some(&wanted.path)),
        }
    }
    match (blank, absent.first()) {
        (Some(path), Some(id)) => {
            let found = if path.exists() { "it holds nothing" } else { "nothing is there" };
            Err(TierError::Absent { path: path.clone(), found, id: id.to_string() })
        }
        _ => Ok(()),
    }
}

async fn open(
    looked: Looked<'_>,
    tiers: &Tiers,
    data: &DataDir,
) -> Result<(Arc<Tier>, Recovered, LogId), TierError> {
    let (wanted, device, identity) = match looked {
        Looked::There { wanted, device, identity } => (wanted, device, identity),
        Looked::Vacant(wanted) => {
            let device = Arc::new(open_device(wanted)?);
            check_bytes(wanted, &device)?;
            (wanted, device, None)
        }
    };
    if wanted.bytes > 0 {
        device.allocate()?;
    }
    let path = &wanted.path;
    let mut options = options(tiers, &device);
    let id = match identity {
        Some(identity) => identity.id,
        None => gd2fs_log::format(&device, &options).await.map_err(of(path))?,
    };
    // By the id: where the log lies, and under which name, changes nothing.
    options.checkpoint = data.checkpoint(&LogId(id));
    let (log, recovered) = Log::open(device, options).await.map_err(of(path))?;
    Ok((Arc::new(Tier::new(path.clone(), log)), recovered, LogId(id)))
}

fn open_device(wanted: &LogDevice) -> Result<Device, TierError> {
    Ok(match wanted.bytes {
        0 => Device::open(&wanted.path, &wanted.options)?,
        bytes => Device::create(&wanted.path, bytes, &wanted.options)?,
    })
}

fn check_bytes(wanted: &LogDevice, device: &Device) -> Result<(), TierError> {
    let (path, asked, found) = (wanted.path.clone(), wanted.bytes, device.bytes());
    // The size of a block device is nobody's choice, and that it is large enough is known.
    if asked == 0 || asked == found || device.is_block() {
        return Ok(());
    }
    Err(TierError::Bytes { path, asked, found })
}

/// Without the checkpoint's place, which follows from the id.
fn options(tiers: &Tiers, device: &Device) -> Options {
    let usual = (device.bytes() / RECORDS_MIN).min(u64::from(STRIPE_UNIT_DEFAULT));
    let largest = usual.max(device.bytes() / LARGE_RECORDS_MIN);
    let largest = largest.clamp(RECORD_BYTES_MIN, u64::from(STRIPE_UNIT_MAX));
    let mut options = Options::new(&tiers.cluster, &tiers.node, PathBuf::new());
    options.payload_bytes_max = 1 << largest.ilog2();
    options
}

fn of(path: &std::path::Path) -> impl FnOnce(LogError) -> TierError {
    move |error| TierError::Log { path: path.into(), error }
}

/// The id that a log was given when it was formatted; shown in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogId(pub [u8; 16]);

impl std::fmt::Display for LogId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}
