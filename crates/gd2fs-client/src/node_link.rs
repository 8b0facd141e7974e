//! Control's line to the nodes: the operations that only control may ask for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gd2fs_transport::Address;
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{CONTROL_BYTES_MAX, Header, Opcode};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::call::{Call, Outgoing};
use crate::client::{Ticket, builder, closed};
use crate::dial::{Caller, Transport};
use crate::handles::deadline_ms;
use crate::link::{Link, Ways};
use crate::stats::Stats;
use crate::stop::{Stop, Stopper};
use crate::trouble::Trouble;

/// Addresses remembered at once; beyond it an idle one is dropped.
const LINKS_MAX: usize = 256;
/// Every operation here may be repeated: SEAL, DELETE, PIN and UNPIN are idempotent, STAT and LIST only look, and a SCRUB too many
/// changes nothing that is right.
const TRIES_MAX: u32 = 2;

pub struct NodeLink {
    caller: Arc<Caller>,
    links: Mutex<HashMap<Address, Arc<Link>>>,
    timeout: Duration,
    runtime: Mutex<Option<Runtime>>,
    process: u32,
}

/// What a node answered to an operation whose payload is JSON.
pub struct Answer {
    pub incarnation: u32,
    pub json: Vec<u8>,
}

impl NodeLink {
    pub fn new(cluster: &str, token: &str, timeout: Duration) -> Result<NodeLink, Failure> {
        let internal = |error: std::io::Error| Failure::new(Code::Internal, error.to_string());
        Ok(NodeLink {
            caller: Arc::new(Caller::new(cluster, token, None).map_err(internal)?),
            links: Mutex::default(),
            timeout,
            runtime: Mutex::new(Some(builder(1, "gd2fs-link").build().map_err(internal)?)),
            process: std::process::id(),
        })
    }

    /// As for a `Client`: true in a forked child, where nothing else may be called.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    pub fn call(&self, address: &str, opcode: u8, payload: Vec<u8>) -> Result<Ticket<Answer>, Failure> {
        let invalid = |why: String| Failure::new(Code::Invalid, why);
        let opcode = Opcode::from_u8(opcode)
            .filter(|opcode| opcode.is_control())
            .ok_or_else(|| invalid(format!("opcode {opcode} is none that control asks for")))?;
        if payload.len() > CONTROL_BYTES_MAX as usize {
            let why =
                format!("payload of {} bytes is over {CONTROL_BYTES_MAX}; send fewer items", payload.len());
            return Err(Failure::new(Code::TooLarge, why));
        }
        let link = self.link(Address::parse(address).map_err(invalid)?);
        let stopper = Stopper::new(self.timeout);
        let runtime = self.runtime.lock();
        let runtime = runtime.as_ref().ok_or_else(closed)?;
        Ok(Ticket::start(runtime.handle(), async move {
            let out = Outgoing::Json(payload);
            let mut tries = 1;
            loop {
                match exchange(&link, opcode, &out, &mut stopper.stop()).await {
                    Err(Trouble::Lost(_)) if tries < TRIES_MAX => tries += 1,
                    other => return other.map_err(Trouble::into_failure),
                }
            }
        }))
    }

    fn link(&self, address: Address) -> Arc<Link> {
        let mut links = self.links.lock();
        if links.len() >= LINKS_MAX && !links.contains_key(&address) {
            // Calls under way hold their link; any other may go.
            links.retain(|_, link| Arc::strong_count(link) > 1);
        }
        let make = || {
            let ways = Ways { transport: Transport::Auto, nics: Vec::new(), streams: 1 };
            Link::new(None, vec![address.clone()], &ways, self.caller.clone(), Arc::new(Stats::default()))
        };
        links.entry(address.clone()).or_insert_with(|| Arc::new(make())).clone()
    }
}

async fn exchange(
    link: &Arc<Link>,
    opcode: Opcode,
    out: &Outgoing,
    stop: &mut Stop,
) -> Result<Answer, Trouble> {
    let lane = link.lane(0);
    let connection = lane.connection(stop).await?;
    let mut header = Header::request(opcode, 0);
    header.deadline_ms = deadline_ms(stop);
    let reply = connection.call(Call::new(header, out.clone()), stop).await?;
    Ok(Answer { incarnation: reply.frame.header.incarnation, json: reply.json })
}

impl Drop for NodeLink {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.get_mut().take() {
            if self.is_forked() {
                // As in `Client`: neither its threads nor its sockets are ours.
                std::mem::forget(runtime);
                std::mem::forget(std::mem::take(self.links.get_mut()));
            } else {
                runtime.shutdown_timeout(Duration::from_secs(1));
            }
        }
    }
}
