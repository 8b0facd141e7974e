//! Where a node can be reached: what control keeps and layouts list.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixStream;

/// Port of a data address that names none.
pub const DATA_PORT: u16 = 7528;

/// Clients that connect at once; one that finds no room uses TCP.
const BACKLOG: i32 = 1024;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `tcp://IP[:PORT]`
    Tcp(SocketAddr),
    /// `shm://HOST/NAME`: a local socket on the host with this boot id; `NAME` begins with `@` (abstract) or is a path.
    Shm { host: String, name: String },
}

impl Address {
    /// Without a scheme it is `tcp`.
    pub fn parse(text: &str) -> Result<Address, String> {
        if let Some(rest) = text.strip_prefix("shm://") {
            return match rest.split_once('/') {
                Some((host, name)) if !host.is_empty() && name.starts_with('@') => {
                    Ok(Address::Shm { host: host.into(), name: name.into() })
                }
                Some((host, name)) if !host.is_empty() && !name.is_empty() => {
                    Ok(Address::Shm { host: host.into(), name: format!("/{name}") })
                }
                _ => Err(format!("data address {text:?} is not shm://HOST/NAME")),
            };
        }
        let rest = text.strip_prefix("tcp://").unwrap_or(text);
        let bare = rest.trim_start_matches('[').trim_end_matches(']');
        rest.parse::<SocketAddr>()
            .ok()
            .or_else(|| bare.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, DATA_PORT)))
            .map(Address::Tcp)
            .ok_or_else(|| format!("data address {text:?} is not tcp://IP[:PORT]"))
    }

    /// Whether memory can be shared with a node there.
    pub fn is_on_this_host(&self) -> bool {
        matches!(self, Address::Shm { host, .. } if *host == boot_id())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "tcp://{address}"),
            Address::Shm { host, name } => write!(f, "shm://{host}/{}", name.trim_start_matches('/')),
        }
    }
}

/// Names this host from its start to its end, in every container on it.
pub fn boot_id() -> String {
    // Where it can't be read no address has this name, and nothing is shared.
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// 128 random bits in hex, as a name: nobody can guess it, so nobody can take it before its owner does.
pub fn random_name() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Listens for clients of this host.
pub fn listen_local(name: &str) -> io::Result<UnixListener> {
    let socket = local_socket()?;
    net::bind(&socket, &socket_address(name)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Connects to whoever listens there, if that is one to speak to.
pub async fn connect_local(name: &str) -> io::Result<UnixStream> {
    let socket = local_socket()?;
    net::connect(&socket, &socket_address(name)?)?;
    let stream = UnixStream::from_std(socket.into())?;
    check_peer(&stream)?;
    Ok(stream)
}

/// Both ends ask this before they say anything. Who shares a client's memory reads and writes it, and gets its token: when a node is
/// gone, anybody may listen in its place. A descriptor that a node drops can make it wait: who sends one must be able to stop it
/// anyway.
pub fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let (peer, own) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if is_trusted(peer, own) {
        return Ok(());
    }
    let why = format!(
        "the other end runs as user {peer}; this one, as user {own}, shares memory with its own user and root only"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn is_trusted(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

fn local_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn socket_address(name: &str) -> io::Result<SocketAddrUnix> {
    Ok(match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(name)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_spoken_to() {
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000) && is_trusted(0, 0));
        assert!(!is_trusted(1001, 1000) && !is_trusted(1000, 0));
    }

    #[tokio::test]
    async fn local_sockets_by_name_and_by_path() {
        let directory = std::env::temp_dir().join(random_name().unwrap());
        std::fs::create_dir(&directory).unwrap();
        for name in [format!("@{}", random_name().unwrap()), format!("{}/socket", directory.display())] {
            assert!(connect_local(&name).await.is_err(), "nobody listens");
            let listener = listen_local(&name).unwrap();
            connect_local(&name).await.unwrap();
            listener.accept().unwrap();
            assert!(listen_local(&name).is_err(), "it is taken");
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn addresses_read_as_they_are_written() {
        for text in ["tcp://127.0.0.1:9", "tcp://[::1]:9", "shm://h/@gd2fs-1", "shm://h/run/gd2fs.sock"] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Address::parse("[::1]").unwrap().to_string(), "tcp://[::1]:7528");
        assert_eq!(Address::parse("10.0.0.1").unwrap().to_string(), "tcp://10.0.0.1:7528");
        for text in ["shm://", "shm://h", "shm:///@x", "tcp://host:1", "rdma://10.0.0.1"] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
        assert!(!Address::parse("shm://another/@x").unwrap().is_on_this_host());
        assert!(Address::parse(&format!("shm://{}/@x", boot_id())).unwrap().is_on_this_host());
    }
}
