//! The guards whose need is proven by switching them off, one at a time, in a build of its own.

/// What keeps a node from serving wrong bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// Stored bytes are compared with their sums before they are used.
    Checksum,
    /// A request of another epoch than the column's is refused.
    Epoch,
    /// A write under a grant that was taken over is refused.
    Grant,
    /// A write below the seal is refused.
    Seal,
    /// The log's device is synced before anything is called durable.
    Sync,
    /// What has expired is decided by the cluster's time, not by the machine's clock.
    Clock,
}

/// Whether a guard does its work: always, except in a build with the feature `fault-hooks` whose environment names it
/// (`GD2FS_GUARD_OFF`: checksum, epoch, grant, seal, sync or clock).
#[cfg(not(feature = "fault-hooks"))]
#[inline(always)]
pub const fn stands(_: Guard) -> bool {
    true
}

/// See above; this is that build.
#[cfg(feature = "fault-hooks")]
pub fn stands(guard: Guard) -> bool {
    static OFF: std::sync::OnceLock<Option<Guard>> = std::sync::OnceLock::new();
    *OFF.get_or_init(|| named(&std::env::var("GD2FS_GUARD_OFF").ok()?)) != Some(guard)
}

/// The guard of this name.
///
/// # Panics
/// If there is none: a mistyped name would prove nothing.
#[cfg(feature = "fault-hooks")]
fn named(name: &str) -> Option<Guard> {
    let guard = match name {
        "" => return None,
        "checksum" => Guard::Checksum,
        "epoch" => Guard::Epoch,
        "grant" => Guard::Grant,
        "seal" => Guard::Seal,
        "sync" => Guard::Sync,
        "clock" => Guard::Clock,
        _ => {
            panic!("GD2FS_GUARD_OFF: {name:?} is no guard; name checksum, epoch, grant, seal, sync or clock")
        }
    };
    Some(guard)
}
