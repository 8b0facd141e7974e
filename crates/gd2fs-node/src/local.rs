//! The socket for clients of this host, which share their memory with the node.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use gd2fs_transport::Address;
use gd2fs_transport::address::{boot_id, listen_local, random_name};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::config::{StartError, wrong};

/// A socket that listens, and its file if it has one, which goes before the socket does.
pub(crate) struct LocalListener<L = UnixListener> {
    _file: Option<SocketFile>,
    pub listener: L,
}

/// The file of a socket of ours. Its number is nobody else's as long as the socket is open.
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl LocalListener {
    /// Listens where `shm` says, if it is to be anywhere.
    pub fn bind(shm: &str) -> Result<Option<(LocalListener, Address)>, StartError> {
        let name = match shm {
            "off" => return Ok(None),
            "auto" => format!("@gd2fs-{}", random_name().map_err(StartError::Runtime)?),
            path if path.starts_with('/') => path.to_owned(),
            other => {
                return Err(wrong(
                    "node.shm",
                    format!("{other:?} is none of auto, off and the path of a socket"),
                ));
            }
        };
        let listening = listen(&name).map_err(|error| StartError::Listen { address: name.clone(), error })?;
        Ok(Some((listening, Address::Shm { host: boot_id(), name })))
    }

    pub fn into_async(self) -> io::Result<LocalListener<tokio::net::UnixListener>> {
        let LocalListener { _file, listener } = self;
        Ok(LocalListener { _file, listener: tokio::net::UnixListener::from_std(listener)? })
    }
}

fn listen(name: &str) -> io::Result<LocalListener> {
    if !name.starts_with('/') {
        return Ok(LocalListener { _file: None, listener: listen_local(name)? });
    }
    check_free(name)?;
    // It listens before it has its name: a node that starts beside this one never finds a socket that nobody listens at.
    let unnamed = format!("{name}.{}", &random_name()?[..8]);
    let listener = listen_local(&unnamed)?;
    let file = SocketFile::new(PathBuf::from(unnamed))?.rename(name)?;
    Ok(LocalListener { _file: Some(file), listener })
}

/// A socket that a killed node has left is in nobody's way; anything else is not ours to replace.
fn check_free(path: &str) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(there) if !there.file_type().is_socket() => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"))
        }
        Ok(_) => match knock(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        },
    }
}

/// Whether somebody listens; one that stands still, and has no room for another connection, would make a plain `connect` wait.
fn knock(path: &str) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)
}

impl SocketFile {
    fn new(path: PathBuf) -> io::Result<SocketFile> {
        let there = std::fs::symlink_metadata(&path)?;
        Ok(SocketFile { path, device: there.dev(), inode: there.ino() })
    }

    fn rename(mut self, name: &str) -> io::Result<SocketFile> {
        std::fs::rename(&self.path, name)?;
        self.path = PathBuf::from(name);
        Ok(self)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it and put something else there.
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (self.device, self.inode));
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the node's socket was not removed");
        }
    }
}
