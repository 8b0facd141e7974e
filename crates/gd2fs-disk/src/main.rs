//! A disk of its own process, for tests: an unmodified node uses it as its log, and its power can be cut.
//!
//! It is a FUSE file system with the file `disk` and the directory `data` ([`files`]). What is written to `disk` stays in this process's memory, visible to reads, until a sync
//! or a durable write (`O_DSYNC`, `RWF_DSYNC`) brings it to the backing file; a power cut brings any subset of the rest
//! there, torn at sectors of 512 bytes. To kill this process is the cut that loses everything that was not synced.
//! [`gd2fs_device::fault`] does all of this: here are only the file system before it, the socket and `data` beside it.

mod arguments;
mod commands;
mod disk;
mod files;
mod filesystem;

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use fuser::{Config, MountOption, Session};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, PidfdFlags, getppid, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::{Arguments, USAGE};
use crate::disk::Disk;
use crate::filesystem::{DATA_NAME, NAME, Volume};

/// Threads that take the kernel's requests; they only copy and hand on.
const THREADS: usize = 2;
/// So many dead disks may be mounted on one another at a directory before it is no accident.
const STALE_MAX: usize = 16;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let arguments = match Arguments::parse(words) {
        Ok(arguments) => arguments,
        Err(mistake) => {
            eprintln!("{mistake}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map_err(|error| error.to_string()).and_then(|runtime| runtime.block_on(run(&arguments))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<(), String> {
    // Before anything is mounted: what ends the process must find it listening.
    let mut terminated = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    let parent = match arguments.parent {
        Some(pid) => Pid::from_raw(pid).ok_or("--parent: no process has this number")?,
        None => getppid().ok_or("--parent: needed, the process has none of its own")?,
    };
    let parent = pidfd_open(parent, PidfdFlags::empty()).map_err(io::Error::from);
    // SAFETY: an owned descriptor names the same process until it is dropped, together with its registration.
    let parent = parent.and_then(|fd| unsafe { AsyncFd::register(fd) }.map_err(io::Error::other));
    let parent = parent.map_err(|error| format!("--parent: cannot be watched: {error}"))?;

    let disk = Disk::open(&arguments.backing, arguments.bytes, arguments.seed);
    let disk = Arc::new(disk.map_err(|error| error.to_string())?);
    let listener = commands::listen(&arguments.socket).map_err(|error| format!("--socket: {error}"))?;
    mount(&arguments.mount, &disk).map_err(|error| format!("{}: {error}", arguments.mount.display()))?;
    println!(
        "{}",
        serde_json::json!({ "disk": arguments.mount.join(NAME), "bytes": disk.bytes, "data": arguments.mount.join(DATA_NAME) })
    );

    let served = tokio::select! {
        error = commands::serve(listener, Arc::clone(&disk)) => Err(format!("--socket: {error}")),
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
        _ = parent.readable() => Ok(()),
    };
    // Whoever has the file open gets errors as soon as this process is gone.
    let unmounted = unmount(&arguments.mount, UnmountFlags::DETACH);
    let _ = std::fs::remove_file(&arguments.socket);
    disk.close();
    unmounted.map_err(|error| format!("{}: cannot be unmounted: {error}", arguments.mount.display()))?;
    served
}

/// Mounts the file system at `directory`, in the place of those of disks that were killed, and serves it on threads of its
/// own until the process ends.
fn mount(directory: &Path, disk: &Arc<Disk>) -> io::Result<()> {
    for _ in 0..STALE_MAX {
        // A file system whose process is gone answers so.
        match rustix::fs::stat(directory) {
            Err(Errno::NOTCONN) => unmount(directory, UnmountFlags::DETACH)?,
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    if directory.join(NAME).exists() {
        return Err(io::Error::other(
            "a file named disk is there: another disk runs, or it is the wrong place",
        ));
    }
    let mut config = Config::default();
    let name = MountOption::FSName("gd2fs-disk".into());
    config.mount_options = vec![name, MountOption::RW, MountOption::NoAtime, MountOption::NoExec];
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = Session::new(Volume(Arc::clone(disk)), directory, &config)?.spawn()?;
    // The threads outlive this function, and the kernel ends the connection with the process.
    std::mem::forget(session);
    Ok(())
}
