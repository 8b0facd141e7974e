//! Making a connection: TCP, then HELLO.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gd2fs_transport::address::{connect_local, random_name};
use gd2fs_transport::{Address, Batch, Frame, Receiver, Stream};
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{Header, Opcode, VERSION};
use gd2fs_wire::messages::{Hello, HelloReply};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::completion::Completions;
use crate::trouble::Trouble;

/// A node that does not accept within this time counts as unreachable: a miss for a KV connector, which would rather recompute.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A node that accepts may be busy; the node itself gives HELLO as long.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// A host that vanished acknowledges nothing: the kernel gives the connection up after this long.
const UNACKNOWLEDGED_MS_MAX: libc::c_int = 10_000;
const KEEPALIVE_IDLE_S: libc::c_int = 10;
const KEEPALIVE_INTERVAL_S: libc::c_int = 3;
const KEEPALIVE_PROBES: libc::c_int = 3;

/// Which way bytes may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through shared memory where a node is on this host, else by TCP.
    #[default]
    Auto,
    Tcp,
    Shm,
}

/// Whom to connect to.
#[derive(Clone, Copy)]
pub(crate) struct Whom<'a> {
    /// None: whoever answers.
    pub node: Option<&'a str>,
    pub addresses: &'a [Address],
    pub transport: Transport,
}

/// Who we are, on every connection.
pub(crate) struct Caller {
    pub cluster: String,
    pub token: String,
    /// Where results wait that connections complete.
    completions: Option<Arc<Completions>>,
    /// 128 random bits in hex.
    pub client: String,
    /// One counter for all slots of all nodes: whatever is forgotten in between, the next one is higher.
    generation: AtomicU64,
}

pub(crate) struct Dialed {
    pub stream: Arc<Stream>,
    pub receiver: Receiver,
    pub generation: u64,
    pub incarnation: u32,
    pub completions: Option<Arc<Completions>>,
}

impl Caller {
    pub fn new(cluster: &str, token: &str, completions: Option<Arc<Completions>>) -> std::io::Result<Caller> {
        let client = random_name()?;
        let (cluster, token) = (cluster.into(), token.into());
        Ok(Caller { cluster, token, completions, client, generation: AtomicU64::new(0) })
    }

    /// Connects `slot` to the first address that answers: through shared memory if the node is on this host, else by TCP,
    /// beginning with a different address for each slot.
    pub async fn dial(&self, whom: Whom<'_>, nic: Option<IpAddr>, slot: u32) -> Result<Dialed, Trouble> {
        let Whom { node, addresses, transport } = whom;
        let mut last = "it has no address".to_string();
        let shared = addresses.iter().filter(|address| address.is_on_this_host());
        for address in shared.filter(|_| transport != Transport::Tcp) {
            let Address::Shm { name, .. } = address else { continue };
            match timeout(CONNECT_TIMEOUT, connect_local(name)).await {
                Ok(Ok(stream)) => match self.hello(node, address, stream.into(), slot).await {
                    // Not for this user; TCP may be.
                    Err(Trouble::Unreachable(failure)) => last = failure.message,
                    answered => return answered,
                },
                // In another network namespace, behind another mount, or not the node: TCP may still reach it.
                Ok(Err(error)) => last = format!("{address}: {error}"),
                Err(_) => last = format!("{address}: no answer to a connection within {CONNECT_TIMEOUT:?}"),
            }
        }
        let remote: Vec<(&Address, SocketAddr)> = addresses
            .iter()
            .filter_map(|address| match address {
                Address::Tcp(socket) if transport != Transport::Shm => Some((address, *socket)),
                _ => None,
            })
            .collect();
        for turn in 0..remote.len() {
            let (address, socket) = remote[(slot as usize + turn) % remote.len()];
            // All addresses share the one timeout.
            match timeout(CONNECT_TIMEOUT / remote.len() as u32, connect(socket, nic)).await {
                Ok(Ok(stream)) => return self.hello(node, address, stream.into(), slot).await,
                Ok(Err(error)) => last = format!("{address}: {error}"),
                Err(_) => last = format!("{address}: no answer to a connection within {CONNECT_TIMEOUT:?}"),
            }
        }
        if transport == Transport::Shm && !addresses.iter().any(Address::is_on_this_host) {
            last = "it shares no memory with this host; use transport \"auto\" or \"tcp\"".into();
        }
        // Who calls by address alone has no name for it, and names it itself.
        let who = node.map_or_else(|| "the node".into(), |node| format!("node {node}"));
        Err(Trouble::Unreachable(Failure::new(Code::Disconnected, format!("{who} can't be reached: {last}"))))
    }

    async fn hello(
        &self,
        node: Option<&str>,
        address: &Address,
        stream: Stream,
        slot: u32,
    ) -> Result<Dialed, Trouble> {
        let stream = Arc::new(stream);
        let mut receiver = Receiver::new(stream.clone());
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let hello = Hello {
            versions: (VERSION, VERSION),
            features: 0,
            cluster: self.cluster.clone(),
            token: self.token.clone(),
            client: self.client.clone(),
            slot,
            generation,
        };
        let exchange = async {
            let mut batch = Batch::default();
            batch.push(Frame::with_message(Header::request(Opcode::Hello, 0), &hello)?);
            // SAFETY: it has no payload.
            unsafe { batch.send(&stream) }.await?;
            receiver.frame().await
        };
        let reply = match timeout(HELLO_TIMEOUT, exchange).await {
            Ok(reply) => reply.map_err(|error| Trouble::Unreachable(named(address, error.into_failure())))?,
            Err(_) => {
                let why = format!("accepted, but no answer to HELLO within {HELLO_TIMEOUT:?}");
                return Err(Trouble::Unreachable(named(address, Failure::new(Code::Disconnected, why))));
            }
        };
        let incarnation =
            check_reply(&reply, &self.cluster, node).map_err(|f| Trouble::Refused(named(address, f)))?;
        let completions = self.completions.clone();
        Ok(Dialed { stream, receiver, generation, incarnation, completions })
    }
}

fn named(address: &Address, failure: Failure) -> Failure {
    // Whatever is wrong with the bytes of a HELLO reply, it means that no GD2FS node answers there.
    let code = if failure.code == Code::BadFrame { Code::Disconnected } else { failure.code };
    Failure::new(code, format!("node at {address}: {}", failure.message))
}

fn check_reply(reply: &Frame, cluster: &str, node: Option<&str>) -> Result<u32, Failure> {
    let header = &reply.header;
    if header.opcode != Opcode::Hello as u8 || !header.is_response() || header.payload_bytes() != 0 {
        return Err(Failure::new(Code::Disconnected, "the answer to HELLO is not one"));
    }
    if header.code() != Code::Ok {
        return Err(reply.failure());
    }
    let said: HelloReply = reply.message()?;
    if said.version != VERSION {
        return Err(Failure::new(
            Code::Version,
            format!("it chose protocol version {}, this client speaks {VERSION}", said.version),
        ));
    }
    if said.cluster != cluster {
        return Err(Failure::new(
            Code::WrongCluster,
            format!("it belongs to cluster {:?}, not {cluster:?}", said.cluster),
        ));
    }
    if node.is_some_and(|node| node != said.node) {
        let why = format!(
            "it is node {:?}, not {:?}; the layout is out of date",
            said.node,
            node.unwrap_or_default()
        );
        return Err(Failure::new(Code::WrongNode, why));
    }
    Ok(said.incarnation)
}

async fn connect(address: SocketAddr, nic: Option<IpAddr>) -> std::io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A NIC of the other address family can't reach this address; the default route may.
    if let Some(nic) = nic.filter(|nic| nic.is_ipv4() == address.is_ipv4()) {
        socket.bind(SocketAddr::new(nic, 0))?;
    }
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    for (level, name, value) in [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, KEEPALIVE_PROBES),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX),
    ] {
        // SAFETY: the descriptor is open and the option is one int.
        let set = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of_val(&value) as u32,
            )
        };
        if set != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(stream)
}
