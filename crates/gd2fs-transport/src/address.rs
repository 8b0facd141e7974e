//! Where a node can be reached: what control keeps and layouts list.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use tokio::net::UnixStream;

/// Port of a data address that names none.
pub const DATA_PORT: u16 = 7528;

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

/// The socket's name as the system knows it: an abstract one begins with a zero byte.
pub fn socket_path(name: &str) -> String {
    name.strip_prefix('@').map_or_else(|| name.to_owned(), |name| format!("\0{name}"))
}

pub async fn connect_local(name: &str) -> std::io::Result<UnixStream> {
    UnixStream::connect(socket_path(name)).await
}

#[cfg(test)]
mod tests {
    use super::*;

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
